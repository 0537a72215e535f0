"""Builds a ModelInput from what each request adds in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from bitsmith.core.model_input import BLOCK_SIZE, ModelInput, ModelInputBuilder


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step: its tokens `start : start + len(token_ids)` are computed.

    block_ids: its cache blocks in order, enough for all tokens so far. num_logits: logits are wanted for
    the last so many of this step's tokens.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def build_model_input(steps: Sequence[RequestStep]) -> ModelInput:
    """The flat batch of these requests, in their order; logits come request after request."""
    builder = ModelInputBuilder()
    for step in steps:
        num_tokens = len(step.token_ids)
        assert num_blocks_for(step.start + num_tokens) <= len(step.block_ids), (step.start, num_tokens)
        wanted = range(num_tokens - step.num_logits, num_tokens)
        builder.add(step.token_ids, step.start, step.block_ids, wanted)
    return builder.build()
