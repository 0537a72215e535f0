"""Both linear operators, every form, against the reference."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from bitsmith.ops import reference
from bitsmith.ops.packing import PackedLinear, pack_quantized


def run(
    ops: Any, x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None, activations: int
) -> torch.Tensor:
    result: torch.Tensor = ops.linear_quantized(
        x,
        packed.weight,
        packed.scale,
        packed.zero_point,
        bias,
        packed.in_features,
        packed.out_features,
        packed.group_size,
        packed.num_bits,
        activations,
    )
    return result


def random_packed(
    num_bits: int, out_features: int, in_features: int, group_size: int, asymmetric: bool
) -> PackedLinear:
    low, high = -(1 << (num_bits - 1)), 1 << (num_bits - 1)
    groups = in_features // group_size
    values = torch.randint(low, high, (out_features, in_features), dtype=torch.int8)
    scale = torch.rand(out_features, groups) * 0.01
    zero_point = torch.randint(low, high, (out_features, groups), dtype=torch.int8) if asymmetric else None
    return pack_quantized(values, scale, zero_point, group_size, num_bits)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    if expected.numel() == 0:
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max())


SHAPES = [
    # num_tokens, in_features, out_features, group_size
    (0, 64, 16, 32),
    (1, 8, 1, 8),
    (1, 576, 37, 64),
    (2, 96, 48, 96),
    (3, 160, 31, 40),
    (5, 192, 17, 24),
    (9, 1536, 33, 1536),
    (70, 320, 50, 64),
]

DENSE_SHAPES = [(0, 16, 5), (1, 1, 1), (1, 576, 37), (2, 37, 9), (7, 100, 30), (66, 250, 25)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activations", [0, 1, 2])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_quantized_equals_reference(
    form: Any, num_bits: int, asymmetric: bool, activations: int, shape: tuple[int, int, int, int]
) -> None:
    num_tokens, in_features, out_features, group_size = shape
    torch.manual_seed(num_tokens + num_bits)
    packed = random_packed(num_bits, out_features, in_features, group_size, asymmetric)
    x, bias = torch.randn(num_tokens, in_features) * 3, torch.randn(out_features)
    expected = reference.linear_quantized(x, packed, bias, activations)
    assert relative_error(run(form, x, packed, bias, activations), expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", [0, 1])
@pytest.mark.parametrize("shape", DENSE_SHAPES, ids=str)
def test_dense_equals_reference(
    form: Any, shape: tuple[int, int, int], activations: int, dtype: torch.dtype
) -> None:
    num_tokens, in_features, out_features = shape
    torch.manual_seed(num_tokens)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    x = torch.randn(num_tokens, in_features)
    for given_bias in (None, bias):
        expected = reference.linear_dense(x, weight, given_bias, activations)
        assert relative_error(form.linear_dense(x, weight, given_bias, activations), expected) < 1e-6


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_size", [8, 32, 4096])
def test_integer_sums_do_not_saturate_at_the_extremes(form: Any, num_bits: int, group_size: int) -> None:
    low, high = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    signs = torch.tensor([1.0, -1.0]).repeat(2048)
    for value, x in ((low, 1.0), (low, -1.0), (high, 1.0), (low, signs), (high, signs)):
        values = torch.full((16, 4096), value, dtype=torch.int8)
        packed = pack_quantized(values, torch.ones(16, 4096 // group_size), None, group_size, num_bits)
        rows = torch.full((5, 4096), 1.0) * x * 127
        expected = (rows @ values.float().T).contiguous()
        assert torch.equal(run(form, rows, packed, None, 2), expected)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("activations", [0, 1, 2])
def test_forms_agree_bit_for_bit(ops: Any, num_bits: int, activations: int) -> None:
    packed = random_packed(num_bits, 45, 192, 32, True)
    x, weight = torch.randn(11, 192), torch.randn(45, 192).bfloat16()
    usual, results = ops.active_form(), []
    for name in {"portable", usual}:
        ops.select_form(name)
        dense = ops.linear_dense(x, weight, None, min(activations, 1))
        results.append((run(ops, x, packed, None, activations), dense))
    ops.select_form(usual)
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])


@pytest.mark.parametrize(
    ("num_bits", "activations"), [(4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (16, 0), (16, 1)]
)
def test_a_row_does_not_depend_on_the_others(
    form: Any, two_threads: None, num_bits: int, activations: int
) -> None:
    """One row, any chunk, any order: the same bits."""
    torch.manual_seed(7)
    in_features, out_features = 576, 77
    x = torch.randn(45, in_features)
    calls: list[Callable[..., torch.Tensor]]
    if num_bits == 16:
        weights = [torch.randn(out_features, in_features), torch.randn(out_features, in_features).bfloat16()]
        calls = [partial(form.linear_dense, weight=w, bias=None, activations=activations) for w in weights]
    else:
        packed = random_packed(num_bits, out_features, in_features, 64, True)
        calls = [partial(run, form, packed=packed, bias=None, activations=activations)]
    for call in calls:
        whole = call(x=x)
        for size in (1, 2, 3, 4, 7, 16, 31):
            chunks = [call(x=x[t : t + size]) for t in range(0, 45, size)]
            assert torch.equal(torch.cat(chunks), whole)
        order = torch.randperm(45)
        assert torch.equal(call(x=x[order]), whole[order])


def test_non_contiguous_rows(form: Any) -> None:
    packed = random_packed(4, 24, 64, 32, False)
    wide = torch.randn(6, 200)
    weight = torch.randn(24, 64)
    for x in (wide[:, 30:94], torch.randn(64, 6).T, wide[::2, :64]):
        assert torch.equal(run(form, x, packed, None, 2), run(form, x.contiguous(), packed, None, 2))
        assert torch.equal(
            form.linear_dense(x, weight, None, 0), form.linear_dense(x.contiguous(), weight, None, 0)
        )


def test_not_a_number_stays_one(form: Any) -> None:
    packed = random_packed(4, 16, 64, 32, False)
    x = torch.randn(3, 64)
    x[1, 40] = float("nan")
    for activations in (0, 1, 2):
        y = run(form, x, packed, None, activations)
        assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_weights_need_no_alignment(form: Any) -> None:
    packed = random_packed(4, 40, 64, 32, False)
    x = torch.randn(3, 64)
    shifted = torch.empty(packed.weight.numel() + 1, dtype=torch.uint8)[1:]
    shifted.copy_(packed.weight.flatten())
    y = form.linear_quantized(x, shifted, packed.scale, None, None, 64, 40, 32, 4, 2)
    assert torch.equal(y, run(form, x, packed, None, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 128}, "packed weight must be"),
        ({"group_size": 12}, "group_size 12 must be a multiple of 8 that divides in_features 64"),
        ({"num_bits": 3}, "num_bits must be 4 or 8, got 3"),
        ({"activations": 3}, "activations must be"),
        ({"x": torch.randn(2, 63)}, "x has 63 columns, the weight 64"),
        ({"x": torch.randn(2, 64).double()}, "x must be float32"),
        ({"bias": torch.randn(15)}, "bias must be contiguous float32"),
        ({"scale": torch.ones(1)}, "packed scale must be"),
        ({"zero_point": torch.zeros(1, dtype=torch.int8)}, "packed zero_point must be"),
    ],
)
def test_wrong_arguments_are_named(ops: Any, change: dict[str, Any], message: str) -> None:
    packed = random_packed(4, 16, 64, 32, False)
    arguments: dict[str, Any] = {
        "x": torch.randn(2, 64),
        "weight": packed.weight,
        "scale": packed.scale,
        "zero_point": None,
        "bias": None,
        "in_features": 64,
        "out_features": 16,
        "group_size": 32,
        "num_bits": 4,
        "activations": 2,
    }
    with pytest.raises(ValueError, match=message):
        ops.linear_quantized(**(arguments | change))


def test_dense_refuses_int8_activations(ops: Any) -> None:
    with pytest.raises(ValueError, match="int8 activations need a quantized weight"):
        ops.linear_dense(torch.randn(1, 8), torch.randn(4, 8), None, 2)
