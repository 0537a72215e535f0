"""The gate of an MLP: against torch in fp64, alike in every form, a row alone as in company."""

from typing import Any

import pytest
import torch

from bitsmith.ops import reference


def rows(num_tokens: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(num_tokens, 2 * size, generator=generator) * 6


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 7, 8, 48, 1001])
def test_equals_reference(form: Any, size: int, is_gelu: bool) -> None:
    for num_tokens in (0, 1, 5):
        gate_up = rows(num_tokens, size)
        expected = reference.gated_activation(gate_up, is_gelu)
        # Absolute too: gelu's 1 + tanh cancels where the gate is far below 0.
        torch.testing.assert_close(form.gated_activation(gate_up, is_gelu), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu_tanh"])
def test_forms_agree_bit_for_bit(ops: Any, is_gelu: bool) -> None:
    gate_up = rows(9, 100)
    usual = ops.active_form()
    chosen = ops.gated_activation(gate_up, is_gelu)
    try:
        ops.select_form("portable")
        assert torch.equal(ops.gated_activation(gate_up, is_gelu), chosen)
    finally:
        ops.select_form(usual)


@pytest.mark.usefixtures("two_threads")
def test_a_row_is_the_same_in_any_company_and_layout(ops: Any) -> None:
    wide = torch.randn(70, 2 * 600 + 3)
    gate_up = wide[:, 1:-2]  # rows further apart than they are long
    together = ops.gated_activation(gate_up, False)
    for t in (0, 34, 69):
        assert torch.equal(ops.gated_activation(gate_up[t : t + 1].contiguous(), False)[0], together[t])
    assert torch.equal(ops.gated_activation(gate_up.t().contiguous().t(), False), together)


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu_tanh"])
def test_far_gates_saturate_and_nan_stays(form: Any, is_gelu: bool) -> None:
    gate = torch.tensor([[1e4, -1e4, 0.0, float("nan"), 200.0, -200.0]])
    up = torch.full_like(gate, 2.0)
    result = form.gated_activation(torch.cat((gate, up), dim=1), is_gelu)[0]
    assert result[3].isnan()
    expected = torch.tensor([2e4, 0.0, 0.0, 400.0, 0.0])
    torch.testing.assert_close(result[[0, 1, 2, 4, 5]], expected, rtol=1e-6, atol=1e-30)


def test_other_shapes_and_types_are_refused(ops: Any) -> None:
    for wrong in (torch.zeros(2, 3), torch.zeros(4), torch.zeros(2, 4).double()):
        with pytest.raises(ValueError, match="gate_up must be float32"):
            ops.gated_activation(wrong, False)
