"""The door: what one HTTP body asks of the engine, choice by choice, checked against the engine's limits."""

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.api_bodies import MAX_CHOICES, ChatCompletionBody, CompletionBody, GenerationBody
from bitsmith.serve.api_errors import ApiError, bad_field
from bitsmith.serve.engine_messages import AddRequest, EngineReady
from bitsmith.serve.request import Vocabulary
from bitsmith.serve.token_bytes import TokenBytes

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """One answer to come. index: as the client sees it, prompt_index * n + number of the choice."""

    index: int
    prompt_index: int
    is_first_of_prompt: bool
    request: AddRequest


@dataclass(frozen=True, slots=True)
class _OutputLimit:
    """field: the name the client used. num_tokens None: whatever the context holds."""

    field: str
    num_tokens: int | None


class ChoicePlanner:
    """Builds requests that the engine can trust; everything else is an ApiError 400 naming the field."""

    def __init__(self, ready: EngineReady, vocabulary: Vocabulary, token_bytes: TokenBytes) -> None:
        self._limits = ready.limits
        self._refused_fields = ready.refused_fields
        self._vocabulary = vocabulary
        self._token_bytes = token_bytes

    def plan(self, body: GenerationBody, prompts: Sequence[Sequence[int]]) -> list[PlannedChoice]:
        if len(prompts) * body.n > MAX_CHOICES:
            raise bad_field(
                "n", f"{len(prompts)} prompts × n {body.n} is more than {MAX_CHOICES} choices in one request."
            )
        self._check_fields(body)
        limit = _output_limit(body)
        self._check_limit(body, limit)
        sampling = self._sampling(body)
        choices = []
        for prompt_index, prompt in enumerate(prompts):
            max_output_tokens = self._fit(body, prompt, limit)
            for number in range(body.n):
                request = AddRequest(
                    request_id=uuid.uuid4().hex,
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                    vocabulary=self._vocabulary,
                    max_output_tokens=max_output_tokens,
                    seed=_choice_seed(body.seed, number),
                    wants_prompt_logprobs=isinstance(body, CompletionBody)
                    and body.echo
                    and body.logprobs is not None,
                )
                choices.append(
                    PlannedChoice(prompt_index * body.n + number, prompt_index, number == 0, request)
                )
        return choices

    def _check_fields(self, body: GenerationBody) -> None:
        """What this engine cannot honour, if it is asked for."""
        for name, reason in self._refused_fields.items():
            value = getattr(body, name, None)
            if value is not None and value is not False and value != {}:
                raise bad_field(name, reason)

    def _check_limit(self, body: GenerationBody, limit: _OutputLimit) -> None:
        """A limit that no prompt could use up is a mistake; one that this prompt cannot is cut (_fit)."""
        if limit.num_tokens is None:
            return
        minimum = 0 if isinstance(body, CompletionBody) and body.echo else 1
        if not minimum <= limit.num_tokens <= self._limits.max_model_len:
            raise bad_field(
                limit.field,
                f"{limit.num_tokens} is not between {minimum} and {self._limits.max_model_len}, the context "
                "length of this server.",
            )

    def _fit(self, body: GenerationBody, prompt: Sequence[int], limit: _OutputLimit) -> int:
        """Tokens that may be generated: the limit, or less where the context ends first (reason "length")."""
        field = "messages" if isinstance(body, ChatCompletionBody) else "prompt"
        if not prompt:
            raise bad_field(field, "it has no tokens.")
        if max(prompt) >= self._vocabulary.num_token_ids:
            raise bad_field(field, f"token ids must be below {self._vocabulary.num_token_ids}.")
        longest = self._limits.max_prompt_len
        if longest is not None and len(prompt) > longest:
            text = f"it has {len(prompt)} tokens; this engine takes prompts of at most {longest}."
            raise ApiError(400, f"{field}: {text}", param=field, code="context_length_exceeded")
        num_needed = 0 if limit.num_tokens == 0 else 1
        room = self._limits.max_model_len - len(prompt)
        if room < num_needed:
            raise ApiError(
                400,
                f"{field}: it has {len(prompt)} tokens, and at least {num_needed} of output "
                f"({limit.field}: {limit.num_tokens}) must fit too; the context length of this server is "
                f"{self._limits.max_model_len}.",
                param=field,
                code="context_length_exceeded",
            )
        return room if limit.num_tokens is None else min(limit.num_tokens, room)

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        stops = tuple(body.stop)
        num_ids = self._vocabulary.num_token_ids
        if any(token_id >= num_ids for token_id in body.stop_token_ids):
            raise bad_field("stop_token_ids", f"token ids must be below {num_ids}.")
        biases = tuple(sorted((int(key), bias) for key, bias in body.logit_bias.items()))
        if any(token_id >= num_ids for token_id, _ in biases):
            raise bad_field("logit_bias", f"token ids must be below {num_ids}.")
        if len({token_id for token_id, _ in biases}) < len(biases):
            raise bad_field("logit_bias", "a token id is given twice.")
        # Special tokens have no text, so a stop string that spells one has to stop by its id.
        spelled = self._token_bytes.special_ids_spelled(stops)
        return SamplingParams(
            max_tokens=_output_limit(body).num_tokens or self._limits.max_model_len,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=body.seed,
            stop=stops,
            stop_token_ids=(*body.stop_token_ids, *spelled),
            ignore_eos=body.ignore_eos,
            logit_bias=biases,
            num_logprobs=_num_logprobs(body),
        )


def _output_limit(body: GenerationBody) -> _OutputLimit:
    if isinstance(body, ChatCompletionBody):
        if body.max_tokens is not None and body.max_completion_tokens is None:
            return _OutputLimit("max_tokens", body.max_tokens)
        return _OutputLimit("max_completion_tokens", body.max_completion_tokens)
    given = body.max_tokens
    return _OutputLimit("max_tokens", _DEFAULT_COMPLETION_TOKENS if given is None else given)


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatCompletionBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _choice_seed(seed: int | None, number: int) -> int:
    """Choice 0 takes the seed itself, so that n does not alter it; further ones take one derived from it."""
    if seed is None:
        return secrets.randbits(63)
    if number == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
