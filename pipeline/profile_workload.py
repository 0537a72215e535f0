"""The workload of a profile: prompts of one length, prefilled, and then as many decode steps as asked for.

Token ids are drawn at random: they do not change what a step costs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bitsmith.compile.batch import RequestStep, num_blocks_for
from bitsmith.compile.limits import EngineLimits
from bitsmith.core.errors import Refused

PhaseName = Literal["prefill", "decode"]
Step = tuple[RequestStep, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """batch_size: requests that run together."""

    num_prompt_tokens: int = 256
    num_new_tokens: int = 64
    batch_size: int = 1

    @property
    def num_blocks_each(self) -> int:
        """Cache blocks of one request."""
        return num_blocks_for(self.num_prompt_tokens + self.num_new_tokens)


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that are run one after another; each is the requests' parts of it."""

    name: PhaseName
    steps: tuple[Step, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for step in self.steps for request in step)


def check_workload(workload: Workload, limits: EngineLimits) -> None:
    """Raises Refused for a workload that the engine was not compiled for."""
    for option, value in (
        ("--prompt-tokens", workload.num_prompt_tokens),
        ("--new-tokens", workload.num_new_tokens),
        ("--batch-size", workload.batch_size),
    ):
        if value < 1:
            raise Refused(f"{option} is {value}; it must be at least 1.")
    num_tokens = workload.num_prompt_tokens + workload.num_new_tokens
    if num_tokens > limits.max_model_len:
        raise Refused(
            f"--prompt-tokens {workload.num_prompt_tokens} and --new-tokens {workload.num_new_tokens} come "
            f"to {num_tokens}; the engine's max_model_len is {limits.max_model_len}. Ask for fewer."
        )
    largest = min(limits.max_batch_size, limits.max_num_tokens)
    if workload.batch_size > largest:
        raise Refused(
            f"--batch-size is {workload.batch_size}; the engine was compiled for at most {largest} "
            "(max_batch_size, max_num_tokens). Ask for fewer, or compile with a larger --max-batch-size."
        )


def plan_phases(workload: Workload, max_num_tokens: int, vocab_size: int) -> tuple[Phase, Phase]:
    """Prefill, in steps of at most max_num_tokens tokens filled request after request; then decode."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(vocab_size) for _ in range(workload.num_prompt_tokens)]
        for _ in range(workload.batch_size)
    ]
    blocks = [
        range(index * workload.num_blocks_each, (index + 1) * workload.num_blocks_each)
        for index in range(workload.batch_size)
    ]
    decode = tuple(
        tuple(
            RequestStep([draw.randrange(vocab_size)], workload.num_prompt_tokens + index, block_ids, 1)
            for block_ids in blocks
        )
        for index in range(workload.num_new_tokens)
    )
    return Phase("prefill", _prefill_steps(prompts, blocks, max_num_tokens)), Phase("decode", decode)


def _prefill_steps(
    prompts: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]], max_num_tokens: int
) -> tuple[Step, ...]:
    """Logits are wanted where a prompt ends."""
    steps: list[list[RequestStep]] = [[]]
    room = max_num_tokens
    for prompt, block_ids in zip(prompts, blocks, strict=True):
        start = 0
        while start < len(prompt):
            if room == 0:
                steps.append([])
                room = max_num_tokens
            chunk = prompt[start : start + room]
            is_last = start + len(chunk) == len(prompt)
            steps[-1].append(RequestStep(chunk, start, block_ids, int(is_last)))
            start += len(chunk)
            room -= len(chunk)
    return tuple(tuple(step) for step in steps)
