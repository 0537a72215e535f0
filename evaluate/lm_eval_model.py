"""lm-evaluation-harness's model interface over our LogitsModel and TextGenerator.

The numbers are those of lm-eval's own Hugging Face backend on the same weights: the same ids, the same
windows, the same truncation. Deliberate differences: one BOS where that backend may add two to rolling
windows, and a continuation without tokens of its own is encoded alone instead of ending the run.
Knows nothing of tasks' content, of pairing or of gates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel, TextGenerator
from bitsmith.core.sampling import SamplingParams
from bitsmith.evaluate.continuations import Continuation, ContinuationScore, score_continuations
from bitsmith.evaluate.encoding import TextEncoder

_MAX_GEN_TOKENS = 256  # lm-eval's own default where a task names none
_GENERATION_KEYS = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"})

_TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]  # (cache key, context, continuation)


@dataclass(slots=True)
class AnswerNotes:
    """What scores do not show. All counts are of requests.

    num_cut_off: generations that ran into their token limit. num_empty: generations without text.
    num_truncated: prompts that lost tokens on the left because they did not fit.
    first_prompt: ids of the first prompt that was fed.
    """

    num_cut_off: int = 0
    num_empty: int = 0
    num_truncated: int = 0
    first_prompt: tuple[int, ...] = field(default=())

    def note_prompt(self, token_ids: Sequence[int]) -> None:
        if not self.first_prompt:
            self.first_prompt = tuple(token_ids)


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval is untyped
    """One model as lm-eval sees it. `notes` collects what happened over all requests so far.

    context_len: most tokens that it is given. Two models that are compared get the same, or the longer
    prompts would differ.
    """

    def __init__(
        self,
        logits_model: LogitsModel,
        encoder: TextEncoder,
        context_len: int,
        reporter: Reporter,
        generator: TextGenerator | None = None,
    ) -> None:
        assert context_len <= logits_model.max_model_len, (context_len, logits_model.max_model_len)
        super().__init__()
        self.tokenizer = encoder.tokenizer
        self.notes = AnswerNotes()
        self._model = logits_model
        self._encoder = encoder
        self._generator = generator
        self._context_len = context_len
        self._reporter = reporter

    @property
    def eot_token_id(self) -> int:
        token_id = self._encoder.end_token_id
        return self._encoder.prefix_token_id if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        return self._encoder.prefix_token_id

    @property
    def max_length(self) -> int:
        return self._context_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encoder.encode(string, add_special_tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return self._encoder.encode_pair(context, continuation)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Raises Refused when the template cannot express the messages: a role is never dropped silently."""
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in chat_history)
            raise Refused(f"The chat template refuses messages of the roles {roles}: {error}.") from error
        return str(text)

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[_TokenRequest], **_: Any) -> list[tuple[float, bool]]:
        items = [Continuation(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        results = []
        for (key, _context, _continuation), score in zip(requests, self._score(items), strict=True):
            answer = (score.logprob, score.is_greedy)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
            results.append(answer)
        return results

    def _score(self, items: Sequence[Continuation]) -> list[ContinuationScore]:
        if items:
            self.notes.note_prompt(items[0].context)
        scores = score_continuations(
            self._model, items, self._context_len, self._reporter, f"requests, {self._model.name}"
        )
        self.notes.num_truncated += sum(score.num_truncated > 0 for score in scores)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln P of each whole text: windows as long as the context, every token predicted exactly once."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            for window in self._rolling_windows(request.args[0]):
                windows.append(window)
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._score(windows), strict=True):
            totals[owner] += score.logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _rolling_windows(self, text: str) -> list[Continuation]:
        windows = get_rolling_token_windows(
            token_list=self._encoder.encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        disjoint = (make_disjoint_window(window) for window in windows)
        return [Continuation(tuple(context), tuple(predicted)) for context, predicted in disjoint]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        if self._generator is None:
            raise Refused(f"{self._model.name} can score text but not generate it; leave such tasks out.")
        params = [self._sampling(request.args[1], seed) for seed, request in enumerate(requests)]
        prompts = [
            self._prompt(request.args[0], wanted.max_tokens)
            for request, wanted in zip(requests, params, strict=True)
        ]
        texts = []
        results = zip(requests, self._generator.generate(prompts, params), strict=True)
        label = f"generations, {self._model.name}"
        for request, generated in self._reporter.track(results, total=len(prompts), label=label):
            self.notes.num_cut_off += generated.finish_reason == "length"
            self.notes.num_empty += not generated.text.strip()
            self.cache_hook.add_partial("generate_until", request.args, generated.text)
            texts.append(generated.text)
        return texts

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        token_ids = self._encoder.encode(context) or [self.prefix_token_id]
        room = self.max_length - max_tokens
        if room < 1:
            raise Refused(
                f"A task generates up to {max_tokens} tokens, the context is {self.max_length}: "
                "no room for the prompt. Compile with a larger --max-model-len."
            )
        self.notes.num_truncated += len(token_ids) > room
        self.notes.note_prompt(token_ids)
        return token_ids[-room:]

    def _sampling(self, generation_kwargs: Mapping[str, Any], seed: int) -> SamplingParams:
        """Raises Refused for a setting that our generator would ignore."""
        settings = normalize_gen_kwargs(dict(generation_kwargs), _MAX_GEN_TOKENS)
        for key in settings:
            if key not in _GENERATION_KEYS:
                known = ", ".join(sorted(_GENERATION_KEYS))
                raise Refused(f"The task's generation setting {key!r} is not supported. Supported: {known}.")
        end_token = self._encoder.end_token_id
        is_sampled = bool(settings.get("do_sample", False))
        until = settings["until"]
        return SamplingParams(
            max_tokens=settings["max_gen_toks"],
            temperature=float(settings.get("temperature", 1.0)) if is_sampled else 0.0,
            top_p=float(settings.get("top_p", 1.0)) if is_sampled else 1.0,
            top_k=int(settings.get("top_k", 0)) if is_sampled else 0,
            seed=seed if is_sampled else None,
            stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
            stop_token_ids=() if end_token is None else (end_token,),
        )
