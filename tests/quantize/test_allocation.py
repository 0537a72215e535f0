"""The plan of a budget: it meets the budget, it is the best there is, and more room or choice never hurts."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsmith.quantize.allocation import Option, Unit, allocate, largest_bytes, smallest_bytes
from bitsmith.quantize.bit_choice import SHAPE_BYTES, BitChoice, packed_bytes
from bitsmith.quantize.compressed_tensors import pack_weight
from bitsmith.quantize.qparams import Grid
from bitsmith.quantize.rtn import rtn_quantize

options = st.builds(
    Option,
    st.just(BitChoice(4, 32)),
    st.integers(1, 400).map(lambda size: 48 * size),
    st.floats(0, 10, allow_nan=False),
)
unit_lists = st.lists(
    st.lists(options, min_size=1, max_size=4).map(lambda found: Unit(("m",), 1, tuple(found))),
    min_size=1,
    max_size=5,
)
shares = st.floats(0, 1)


def error_of(units: list[Unit], limit: int) -> float:
    chosen = allocate(units, limit)
    assert all(option in unit.options for option, unit in zip(chosen, units, strict=True))
    assert sum(option.num_bytes for option in chosen) <= limit
    return math.fsum(option.error for option in chosen)


def limit_at(units: list[Unit], share: float) -> int:
    least, most = smallest_bytes(units), largest_bytes(units)
    return least + int(share * (most - least))


@settings(max_examples=100, deadline=None)
@given(unit_lists, shares)
def test_no_other_plan_within_the_budget_is_better(units: list[Unit], share: float) -> None:
    limit = limit_at(units, share)
    plans = itertools.product(*(unit.options for unit in units))
    best = min(
        math.fsum(option.error for option in plan)
        for plan in plans
        if sum(option.num_bytes for option in plan) <= limit
    )
    assert error_of(units, limit) <= best + 1e-9


@settings(max_examples=100, deadline=None)
@given(unit_lists, shares, shares)
def test_a_larger_budget_never_gives_a_larger_error(units: list[Unit], first: float, second: float) -> None:
    small, large = sorted((limit_at(units, first), limit_at(units, second)))
    assert error_of(units, large) <= error_of(units, small) + 1e-12


@settings(max_examples=100, deadline=None)
@given(unit_lists, shares, options, st.integers(0, 4))
def test_one_more_candidate_never_gives_a_larger_error(
    units: list[Unit], share: float, extra: Option, index: int
) -> None:
    limit, index = limit_at(units, share), index % len(units)
    unit = units[index]
    richer = Unit(unit.modules, unit.num_weights, (*unit.options, extra))
    before = error_of(units, limit)
    assert error_of([*units[:index], richer, *units[index + 1 :]], limit) <= before + 1e-12


def test_among_plans_of_equal_error_the_smallest_is_taken() -> None:
    unit = Unit(("m",), 1, (Option(BitChoice(8, 32), 80, 0.0), Option(BitChoice(4, 32), 40, 0.0)))
    assert [option.choice.num_bits for option in allocate([unit, unit], 160)] == [4, 4]


def test_sizes_without_a_common_divisor_still_meet_the_budget() -> None:
    choice = BitChoice(4, 32)
    units = [
        Unit(
            ("m",),
            1,
            tuple(Option(choice, 10**9 + 1_000_003 * n * (number + 1), 1 / (1 + n)) for n in range(4)),
        )
        for number in range(5)
    ]
    limit = limit_at(units, 0.4)
    assert 0 < error_of(units, limit) < error_of(units, smallest_bytes(units))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([8, 32, "channel"]),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from([32, 96]),
)
def test_bytes_are_those_that_packing_gives(
    num_bits: int, group_size: int, symmetric: bool, rows: int, columns: int
) -> None:
    choice = BitChoice(num_bits, group_size)
    grid = Grid(num_bits, choice.columns_per_scale(columns), symmetric, torch.bfloat16)
    tensors = pack_weight("m", rtn_quantize(torch.randn(rows, columns), grid))
    written = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert packed_bytes((rows, columns), choice, 2, symmetric=symmetric) + SHAPE_BYTES == written
