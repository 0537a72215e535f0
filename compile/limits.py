"""Sizes that an engine is made for, and the table that says which limit decided each of them."""

from dataclasses import dataclass

from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.core.errors import Refused


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_batch_size: requests of a step. max_num_tokens: tokens of a step, all requests together.
    max_model_len: tokens of one request, prompt and output.
    """

    max_batch_size: int
    max_num_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One line of the table: what the model allows, what was asked for, what it came to and why."""

    name: str
    model: int | None
    asked: int | None
    resolved: int
    decided_by: str


def resolve_limits(
    config: DecoderConfig, max_batch_size: int, max_num_tokens: int, max_model_len: int | None
) -> tuple[EngineLimits, tuple[LimitRow, ...]]:
    """Raises Refused for a limit below 1, or a length beyond what the model was made for."""
    asked = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_model_len": max_model_len,
    }
    for name, value in asked.items():
        if value is not None and value < 1:
            raise Refused(f"{name} is {value}; it must be at least 1.")
    if max_num_tokens < max_batch_size:
        raise Refused(
            f"max_num_tokens {max_num_tokens} is less than max_batch_size {max_batch_size}: "
            "a step could not decode one token of each request."
        )
    if max_model_len is not None and max_model_len > config.max_context:
        raise Refused(
            f"max_model_len {max_model_len} is beyond the model's context of {config.max_context} "
            f"({config.context_reason})."
        )
    length = config.max_context if max_model_len is None else max_model_len
    reason = config.context_reason if max_model_len is None else "build"
    rows = (
        LimitRow("max_batch_size", None, max_batch_size, max_batch_size, "build"),
        LimitRow("max_num_tokens", None, max_num_tokens, max_num_tokens, "build"),
        LimitRow("max_model_len", config.max_context, max_model_len, length, reason),
    )
    return EngineLimits(max_batch_size, max_num_tokens, length), rows
