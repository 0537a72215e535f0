"""What the two generation routes have in common in the shape of their answers."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bitsmith.serve.choice_plan import PlannedChoice
from bitsmith.serve.generation import Usage
from bitsmith.serve.text_collector import TextDelta
from bitsmith.serve.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every part of one answer repeats."""

    model: str
    id_prefix: str
    object_name: str
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Sequence[dict[str, Any]], object_suffix: str = "") -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.answer_id}",
            "object": self.object_name + object_suffix,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


class AnswerFormat(Protocol):
    """How one route writes choices."""

    @property
    def head(self) -> AnswerHead: ...

    @property
    def chunk_suffix(self) -> str:
        """What a streamed part's object name adds."""
        ...

    def opening(self, choice: PlannedChoice) -> dict[str, Any] | None:
        """A streamed part that comes before any text, or None."""
        ...

    def part(self, choice: PlannedChoice, delta: TextDelta) -> dict[str, Any] | None:
        """A streamed part; None when there is nothing to tell yet."""
        ...

    def whole(self, choice: PlannedChoice, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """The finished choice."""
        ...


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def token_text(token_bytes: TokenBytes, token_id: int) -> str:
    """A token by itself: its text, or "bytes:\\x.." where it is not whole characters."""
    data = token_bytes.with_specials(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """All that came, as if it had come at once."""
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        finish_reason=deltas[-1].finish_reason,
        num_cached_tokens=deltas[0].num_cached_tokens,
    )
