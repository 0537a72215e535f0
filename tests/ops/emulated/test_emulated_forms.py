"""The forms with VNNI, their instructions emulated in plain C++: the portable form's results bit for bit.

Nothing here runs the instructions themselves.
"""

import ctypes
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitsmith.ops import reference
from bitsmith.ops.packing import PackedLinear, pack_quantized

FORMS = ("avx512_vnni", "avx_vnni")
Linear = Callable[..., torch.Tensor]


def random_shapes(seed: int) -> list[tuple[int, int, int, int]]:
    """(num_tokens, in_features, out_features, group_size): every number of tokens that makes other tiles."""
    choose = random.Random(seed)
    shapes = []
    for num_tokens in (*range(10), 15, 17):
        group_size = choose.choice([8, 16, 24, 32, 40, 64, 96, 128])
        in_features = group_size * choose.randint(1, 4)
        shapes.append((num_tokens, in_features, choose.randint(1, 50), group_size))
    return [*shapes, (30, 3072, 16, 1536)]  # more activations than one pass over the row blocks takes


def random_packed(
    num_bits: int, shape: tuple[int, int, int, int], *, asymmetric: bool, dtype: torch.dtype
) -> PackedLinear:
    _, in_features, out_features, group_size = shape
    low, high = -(1 << (num_bits - 1)), 1 << (num_bits - 1)
    of_groups = (out_features, in_features // group_size)
    values = torch.randint(low, high, (out_features, in_features), dtype=torch.int8)
    scale = (torch.rand(of_groups) * 0.01).to(dtype)
    zero_point = torch.randint(low, high, of_groups, dtype=torch.int8) if asymmetric else None
    return pack_quantized(values, scale, zero_point, group_size, num_bits)


def portable(ops: Any, x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None) -> torch.Tensor:
    usual = ops.active_form()
    ops.select_form("portable")
    sizes = (packed.in_features, packed.out_features, packed.group_size, packed.num_bits)
    y: torch.Tensor = ops.linear_quantized(
        x, packed.weight, packed.scale, packed.zero_point, bias, *sizes, reference.ACTIVATIONS_INT8
    )
    ops.select_form(usual)
    return y


def test_the_fastest_form_of_the_build_is_taken(emulated: ctypes.CDLL) -> None:
    assert emulated.fastest_form().decode() == "avx512_vnni"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_the_bits_are_those_of_the_portable_form(
    linear_quantized: Linear, ops: Any, num_bits: int, asymmetric: bool, dtype: torch.dtype, form: str
) -> None:
    seed = num_bits + asymmetric + 2 * (dtype == torch.bfloat16)
    torch.manual_seed(seed)
    for shape in random_shapes(seed):
        packed = random_packed(num_bits, shape, asymmetric=asymmetric, dtype=dtype)
        x = torch.randn(shape[:2]) * 3
        for bias in (None, torch.randn(shape[2])):
            y = linear_quantized(form, x, packed, bias)
            assert torch.equal(y, portable(ops, x, packed, bias)), shape
        if shape[0] > 0:
            expected = reference.linear_quantized(x, packed, bias, reference.ACTIVATIONS_INT8)
            assert (y - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_bits_are_those_of_the_portable_form(
    linear_dense: Linear, ops: Any, dtype: torch.dtype, form: str
) -> None:
    """Rows and inputs that no tile divides; more tokens and wider rows than one pass takes."""
    torch.manual_seed(1)
    usual = ops.active_form()
    ops.select_form("portable")
    shapes = [(t, 5 * t + 1, 4 * t + 3) for t in range(18)] + [(3, 4000, 25), (33, 1600, 27)]
    for num_tokens, in_features, out_features in shapes:
        weight = torch.randn(out_features, in_features).to(dtype)
        x = torch.randn(num_tokens, in_features)
        for bias in (None, torch.randn(out_features)):
            y = linear_dense(form, x, weight, bias)
            assert torch.equal(y, ops.linear_dense(x, weight, bias, 0)), (num_tokens, in_features)
    ops.select_form(usual)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", [8, 32, 65536])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_sums_at_the_extremes_are_exact(
    linear_quantized: Linear, num_bits: int, group_size: int, form: str
) -> None:
    """Zero points as far from the values as they can be; 65536 is the largest group that is taken."""
    low, high = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    columns = max(group_size, 64)
    of_groups = (16, columns // group_size)
    signs = (torch.tensor(1), torch.tensor(-1), torch.tensor([1, -1]).repeat(columns // 2))
    for value, zero, sign in itertools.product((low, high), (None, low, high), signs):
        values = torch.full((16, columns), value, dtype=torch.int8)
        zero_point = None if zero is None else torch.full(of_groups, zero, dtype=torch.int8)
        packed = pack_quantized(values, torch.ones(of_groups), zero_point, group_size, num_bits)
        x = torch.full((3, columns), 127) * sign
        sums = (x * (value - (zero or 0))).reshape(3, -1, group_size).sum(dim=2)
        expected = torch.zeros(3)
        for group in sums.unbind(dim=1):
            expected = expected + group.float()
        y = linear_quantized(form, x.float().contiguous(), packed, None)
        assert torch.equal(y, expected[:, None].expand(3, 16))


@pytest.mark.parametrize("form", FORMS)
def test_not_a_number_stays_one(linear_quantized: Linear, form: str) -> None:
    packed = random_packed(8, (3, 64, 16, 32), asymmetric=False, dtype=torch.float32)
    x = torch.randn(3, 64)
    x[1, 40] = float("nan")
    y = linear_quantized(form, x, packed, None)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_ceilings_count_their_operations(emulated: ctypes.CDLL, is_int8: bool, form: str) -> None:
    counts = [
        emulated.multiply_add(form.encode(), ctypes.c_int64(n), ctypes.c_bool(is_int8)) for n in (1, 30)
    ]
    assert counts[1] == 30 * counts[0] > 0
