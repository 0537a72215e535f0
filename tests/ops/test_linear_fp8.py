"""The operator with FP8 weights, every form, against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bitsmith.ops import reference
from bitsmith.ops.fp8 import PackedFp8, pack_fp8, unpack_fp8

FP32, BF16, E4M3 = 0, 1, 3
# (activations, static input scale; 0: one for each token)
MODES = [(FP32, 0.0), (BF16, 0.0), (E4M3, 0.0), (E4M3, 0.013)]


def random_packed(out_features: int, in_features: int, *, is_per_tensor: bool = False) -> PackedFp8:
    values = (torch.randn(out_features, in_features) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    return pack_fp8(values, torch.rand(1 if is_per_tensor else out_features, 1) * 0.01 + 1e-4)


def run(ops: Any, x: Tensor, packed: PackedFp8, bias: Tensor | None, mode: tuple[int, float]) -> Tensor:
    activations, input_scale = mode
    y: Tensor = ops.linear_fp8(
        x, packed.weight, packed.scale, bias, packed.in_features, input_scale, activations
    )
    return y


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    return 0.0 if expected.numel() == 0 else float((actual - expected).abs().max() / expected.abs().max())


SHAPES = [
    (0, 16, 5),
    (1, 1, 1),
    (1, 576, 37),
    (2, 37, 9),
    (3, 40, 13),
    (4, 8, 25),
    (7, 100, 30),
    (66, 250, 25),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("is_per_tensor", [False, True])
def test_equals_reference(
    form: Any, is_per_tensor: bool, mode: tuple[int, float], shape: tuple[int, int, int]
) -> None:
    num_tokens, in_features, out_features = shape
    torch.manual_seed(num_tokens)
    packed = random_packed(out_features, in_features, is_per_tensor=is_per_tensor)
    x = torch.randn(num_tokens, in_features) * 3
    for bias in (None, torch.randn(out_features)):
        expected = reference.linear_fp8(x, packed, bias, mode[1], mode[0])
        assert relative_error(run(form, x, packed, bias, mode), expected) < 2e-6


def test_inputs_are_rounded_as_torch_rounds(form: Any) -> None:
    """Every e4m3 value, every middle between two, and what lies just beside: through a weight of one."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = codes[codes.isfinite()].sort().values
    middles = (grid[1:] + grid[:-1]) / 2
    exact = torch.cat((grid, middles, torch.tensor([449.0, 464.0, 480.0, 1e30, 1e-12, -1e30])))
    x = torch.cat((exact, exact * (1 + 2e-7), exact * (1 - 2e-7)))[:, None]
    one = pack_fp8(torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(run(form, x, one, None, (E4M3, 1.0)), expected)


def test_every_weight_value_is_decoded_exactly(form: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[codes.float().isfinite()].view(torch.uint8).view(torch.float8_e4m3fn)[:, None]
    packed = pack_fp8(finite, torch.ones(1))
    for num_tokens in (1, 5):  # decoded on the way, and decoded before
        y = run(form, torch.ones(num_tokens, 1), packed, None, (FP32, 0.0))
        assert torch.equal(y, finite.float().T.expand(num_tokens, -1))
    assert torch.equal(unpack_fp8(packed), finite.double())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_forms_agree_bit_for_bit(ops: Any, mode: tuple[int, float]) -> None:
    packed, x = random_packed(45, 190), torch.randn(11, 190)
    usual, results = ops.active_form(), []
    for name in {"portable", usual}:
        ops.select_form(name)
        results.append(run(ops, x, packed, None, mode))
    ops.select_form(usual)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_row_does_not_depend_on_the_others(form: Any, two_threads: None, mode: tuple[int, float]) -> None:
    torch.manual_seed(7)
    packed, x = random_packed(77, 576), torch.randn(45, 576)
    whole = run(form, x, packed, None, mode)
    for size in (1, 2, 3, 4, 7, 16, 31):
        chunks = [run(form, x[t : t + size], packed, None, mode) for t in range(0, 45, size)]
        assert torch.equal(torch.cat(chunks), whole)
    order = torch.randperm(45)
    assert torch.equal(run(form, x[order], packed, None, mode), whole[order])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_zeros_not_numbers_and_strides(form: Any, mode: tuple[int, float]) -> None:
    packed, wide = random_packed(16, 64), torch.randn(6, 200)
    assert torch.equal(
        run(form, wide[::2, 30:94], packed, None, mode),
        run(form, wide[::2, 30:94].contiguous(), packed, None, mode),
    )
    x = torch.randn(3, 64)
    x[0] = 0.0
    x[1, 40] = float("nan")
    y = run(form, x, packed, None, mode)
    assert bool((y[0] == 0).all()) and bool(y[1].isnan().all()) and bool(y[2].isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activations": 2}, "activations must be 0"),
        ({"input_scale": -1.0}, "input_scale must be finite"),
        ({"input_scale": float("nan")}, "input_scale must be finite"),
        ({"in_features": 57}, "x has 64 columns, the weight 57"),
        ({"in_features": 80}, "weight must be contiguous uint8"),
        ({"scale": torch.ones(3)}, "scale must be contiguous float32"),
        ({"bias": torch.ones(3)}, "bias must be contiguous float32"),
        ({"x": torch.randn(2, 64).double()}, "x must be float32"),
    ],
)
def test_wrong_arguments_are_named(ops: Any, change: dict[str, Any], message: str) -> None:
    packed = random_packed(16, 64)
    arguments: dict[str, Any] = {
        "x": torch.randn(2, 64),
        "weight": packed.weight,
        "scale": packed.scale,
        "bias": None,
        "in_features": 64,
        "input_scale": 0.0,
        "activations": E4M3,
    }
    with pytest.raises(ValueError, match=message):
        ops.linear_fp8(**(arguments | change))
