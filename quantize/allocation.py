"""Which option each unit of a model gets, so that the sum of errors is least within a number of bytes.

A multiple-choice knapsack, solved exactly by dynamic programming over bytes: a larger budget or one more
option can then never give a worse plan, which no greedy order promises. Pure numbers; nothing of models.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.quantize.bit_choice import BitChoice

# Sizes are counted in their common divisor. Where that leaves more steps than this, in a multiple of it, and
# sizes are rounded up: the budget is met, and what may be lost is a step for each unit.
_MAX_STEPS = 1 << 18


@dataclass(frozen=True, slots=True)
class Option:
    """num_bytes: of the whole unit. error: what this choice costs; errors of all units are added."""

    choice: BitChoice
    num_bytes: int
    error: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules that are stored alike. options: at least one."""

    modules: tuple[str, ...]
    num_weights: int
    options: tuple[Option, ...]


def smallest_bytes(units: Sequence[Unit]) -> int:
    return sum(min(option.num_bytes for option in unit.options) for unit in units)


def largest_bytes(units: Sequence[Unit]) -> int:
    return sum(max(option.num_bytes for option in unit.options) for unit in units)


def allocate(units: Sequence[Unit], limit_bytes: int) -> list[Option]:
    """One option for each unit: the least total error of at most limit_bytes; among equals, fewer bytes."""
    least = smallest_bytes(units)
    assert least <= limit_bytes, (least, limit_bytes)
    room = min(limit_bytes, largest_bytes(units)) - least
    extras = [_extras(unit) for unit in units]
    step = _step(extras, room)
    # errors[s]: least sum of errors so far with at most s steps beyond the smallest sizes.
    errors = torch.zeros(room // step + 1, dtype=torch.float64)
    chosen = []
    for unit, extra in zip(units, extras, strict=True):
        errors, picks = _extended(errors, unit, [-(-size // step) for size in extra])
        chosen.append(picks)
    left = int(torch.argmin(errors))  # the first of equals: the fewest bytes
    result = []
    for unit, extra, picks in reversed(list(zip(units, extras, chosen, strict=True))):
        pick = int(picks[left])
        left -= -(-extra[pick] // step)
        result.append(unit.options[pick])
    return result[::-1]


def _extras(unit: Unit) -> list[int]:
    least = min(option.num_bytes for option in unit.options)
    return [option.num_bytes - least for option in unit.options]


def _step(extras: Sequence[Sequence[int]], room: int) -> int:
    """Bytes in which sizes are counted."""
    divisor = math.gcd(*(size for extra in extras for size in extra)) or 1
    return divisor * max(1, -(-room // (divisor * _MAX_STEPS)))


def _extended(errors: Tensor, unit: Unit, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(least errors with one unit more, which option gives them), by steps."""
    best = torch.full_like(errors, math.inf)
    picks = torch.zeros(len(errors), dtype=torch.uint8)
    for index in sorted(range(len(steps)), key=lambda option: steps[option]):
        taken = steps[index]
        if taken >= len(errors):
            continue
        candidate = errors[: len(errors) - taken] + unit.options[index].error
        is_better = candidate < best[taken:]
        best[taken:] = torch.where(is_better, candidate, best[taken:])
        picks[taken:][is_better] = index
    return best, picks
