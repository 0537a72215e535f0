"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from bitsmith.serve.answer_format import AnswerHead, join_deltas, token_text
from bitsmith.serve.api_bodies import ChatCompletionBody
from bitsmith.serve.choice_plan import PlannedChoice
from bitsmith.serve.text_collector import PlacedLogprob, TextDelta
from bitsmith.serve.token_bytes import TokenBytes


class ChatFormat:
    """AnswerFormat of chat."""

    chunk_suffix = ".chunk"

    def __init__(self, body: ChatCompletionBody, token_bytes: TokenBytes) -> None:
        self.head = AnswerHead(body.model, "chatcmpl", "chat.completion")
        self._body = body
        self._token_bytes = token_bytes

    def opening(self, choice: PlannedChoice) -> dict[str, Any] | None:
        return self._choice(choice, "delta", {"role": "assistant", "content": ""}, None, None)

    def part(self, choice: PlannedChoice, delta: TextDelta) -> dict[str, Any] | None:
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return None
        content = {"content": delta.text} if delta.text else {}
        return self._choice(choice, "delta", content, delta.logprobs, delta.finish_reason)

    def whole(self, choice: PlannedChoice, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        all_of_it = join_deltas(deltas)
        message = {"role": "assistant", "content": all_of_it.text, "refusal": None}
        return self._choice(choice, "message", message, all_of_it.logprobs, all_of_it.finish_reason)

    def _choice(
        self,
        choice: PlannedChoice,
        content_name: str,
        content: dict[str, Any],
        logprobs: Sequence[PlacedLogprob] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        entries = None
        if self._body.logprobs and logprobs is not None:
            entries = {"content": [self._entry(placed) for placed in logprobs], "refusal": None}
        return {
            "index": choice.index,
            content_name: content,
            "logprobs": entries,
            "finish_reason": finish_reason,
        }

    def _entry(self, placed: PlacedLogprob) -> dict[str, Any]:
        top = placed.entry.top[: self._body.top_logprobs or 0]
        return self._token(placed.entry.token_id, placed.entry.logprob) | {
            "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in top]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._token_bytes, token_id),
            "logprob": logprob,
            "bytes": list(self._token_bytes.with_specials(token_id)),
        }
