"""Settings of schemes that are resolved before any stage sees them."""

import pytest

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import DEFAULT_REFINE_STEPS, resolve_int8_inputs, resolve_refine_steps


def test_refinement_has_a_default_and_takes_a_number() -> None:
    assert resolve_refine_steps(False, None) == 0
    assert resolve_refine_steps(True, None) == DEFAULT_REFINE_STEPS
    assert resolve_refine_steps(True, 7) == 7


@pytest.mark.parametrize(("refine", "steps"), [(False, 50), (True, 0), (True, -1)])
def test_steps_without_refinement_or_below_one_are_refused(refine: bool, steps: int) -> None:
    with pytest.raises(Refused, match=f"refine_steps is {steps}"):
        resolve_refine_steps(refine, steps)


def test_only_int8_leaves_a_choice_of_input_scales() -> None:
    assert resolve_int8_inputs("w8a8-int8", None) == "token"
    assert resolve_int8_inputs("w8a8-int8", "tensor") == "tensor"
    assert resolve_int8_inputs("w4a16-gptq", None) is None
    for name in ("w4a16-gptq", "w8a8-fp8"):
        with pytest.raises(Refused, match=f"activation_scale is 'token'.*not '{name}'"):
            resolve_int8_inputs(name, "token")
