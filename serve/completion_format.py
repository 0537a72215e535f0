"""Answers of /v1/completions, echo and log-probabilities of the prompt included."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitsmith.serve.answer_format import AnswerHead, join_deltas, token_text
from bitsmith.serve.api_bodies import CompletionBody
from bitsmith.serve.choice_plan import PlannedChoice
from bitsmith.serve.request import TokenLogprob
from bitsmith.serve.text_collector import TextDelta
from bitsmith.serve.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """logprob None: the prompt's first token, before which there is nothing to predict it from."""

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int


class CompletionFormat:
    """AnswerFormat of completions.

    With echo the prompt comes first: as the client wrote it, or decoded with its special tokens. The arrays
    of `logprobs` then have an entry for every prompt token and every generated one.
    """

    chunk_suffix = ""

    def __init__(self, body: CompletionBody, token_bytes: TokenBytes) -> None:
        self.head = AnswerHead(body.model, "cmpl", "text_completion")
        self._body = body
        self._token_bytes = token_bytes
        self._has_echoed: set[int] = set()

    def opening(self, choice: PlannedChoice) -> dict[str, Any] | None:
        return None

    def part(self, choice: PlannedChoice, delta: TextDelta) -> dict[str, Any] | None:
        is_first = self._body.echo and choice.index not in self._has_echoed
        if not delta.text and not delta.logprobs and delta.finish_reason is None and not is_first:
            return None
        self._has_echoed.add(choice.index)
        return self._choice(choice, delta, with_prompt=is_first)

    def whole(self, choice: PlannedChoice, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        return self._choice(choice, join_deltas(deltas), with_prompt=self._body.echo)

    def _choice(self, choice: PlannedChoice, delta: TextDelta, *, with_prompt: bool) -> dict[str, Any]:
        prompt_text = self._prompt_text(choice) if self._body.echo else ""
        logprobs = None
        if self._body.logprobs is not None:
            entries = self._prompt_entries(choice, delta) if with_prompt else []
            entries += [
                _Entry(placed.entry.token_id, placed.entry, len(prompt_text) + placed.text_offset)
                for placed in delta.logprobs
            ]
            logprobs = self._logprob_fields(entries)
        return {
            "index": choice.index,
            "text": prompt_text + delta.text if with_prompt else delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _prompt_text(self, choice: PlannedChoice) -> str:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        part = prompt[choice.prompt_index]
        if isinstance(part, str):
            return part
        token_ids = choice.request.prompt_token_ids
        return b"".join(map(self._token_bytes.with_specials, token_ids)).decode("utf-8", "replace")

    def _prompt_entries(self, choice: PlannedChoice, delta: TextDelta) -> list[_Entry]:
        token_ids = choice.request.prompt_token_ids
        assert len(delta.prompt_logprobs) == len(token_ids) - 1, (len(delta.prompt_logprobs), len(token_ids))
        entries: list[_Entry] = []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text_offset = 0
        for token_id, logprob in zip(token_ids, (None, *delta.prompt_logprobs), strict=True):
            entries.append(_Entry(token_id, logprob, text_offset))
            text_offset += len(decoder.decode(self._token_bytes.with_specials(token_id)))
        return entries

    def _logprob_fields(self, entries: Sequence[_Entry]) -> dict[str, Any]:
        return {
            "tokens": [token_text(self._token_bytes, entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob.logprob if entry.logprob else None for entry in entries],
            "top_logprobs": [self._top(entry.logprob) if entry.logprob else None for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The most likely ones and the token itself. Of ids with equal text the likeliest stands for them."""
        top: dict[str, float] = {}
        asked = logprob.top[: self._body.logprobs or 0]
        for token_id, value in (*asked, (logprob.token_id, logprob.logprob)):
            text = token_text(self._token_bytes, token_id)
            top[text] = max(value, top.get(text, value))
        return top
