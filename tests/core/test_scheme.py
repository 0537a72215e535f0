"""Settings of schemes that are resolved before any stage sees them."""

import pytest

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import (
    DEFAULT_REFINE_STEPS,
    SCHEME_NAMES,
    parse_scheme_name,
    resolve_int8_inputs,
    resolve_refine_steps,
)


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


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq-gptq"])
def test_integer_weights_have_every_width_by_every_method(num_bits: int, method: str) -> None:
    name = f"w{num_bits}a16-{method}"
    assert name in SCHEME_NAMES and parse_scheme_name(name) == (num_bits, method)


@pytest.mark.parametrize("name", ["w5a16-rtn", "w1a16-gptq", "w16a16-rtn", "w4a16-smoothquant"])
def test_other_names_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(Refused, match="Valid schemes: w2a16-gptq"):
        parse_scheme_name(name)
