"""What can be said of a scheme before a model is looked at: do its settings go together, what it needs."""

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import QuantizationScheme, parse_scheme_name


def needs_calibration(scheme: QuantizationScheme) -> bool:
    if scheme.uses_gptq or scheme.moves_scales or scheme.activation_scale == "tensor":
        return True
    return scheme.kv_cache != "none" or scheme.refine_steps > 0


def check_scheme(scheme: QuantizationScheme) -> None:
    num_bits, method = parse_scheme_name(scheme.name)
    assert (num_bits, method) == (scheme.num_bits, scheme.method), scheme
    if scheme.act_order and not scheme.uses_gptq:
        raise Refused(f"act_order orders the columns of GPTQ; scheme {scheme.name!r} has none. Leave it out.")
    if method is None and (scheme.group_size != "auto" or not scheme.symmetric):
        raise Refused(
            "Scheme 'none' keeps weights as they are: group_size and asymmetric do not apply to it."
        )
    if scheme.refine_steps and not scheme.rounds_to_integers:
        raise Refused(
            f"refine is on; it learns how weights round to integers, and scheme {scheme.name!r} has none. "
            "Turn it off."
        )
    assert (scheme.int8_inputs is not None) == (method == "smoothquant"), scheme
    if method in ("fp8", "smoothquant"):
        _check_eight_bit_inputs(scheme)


def _check_eight_bit_inputs(scheme: QuantizationScheme) -> None:
    is_fp8 = scheme.method == "fp8"
    reach = "tensor" if is_fp8 and scheme.activation_scale == "tensor" else "output channel"
    if scheme.group_size != "auto":
        raise Refused(
            f"group_size is {scheme.group_size!r}; scheme {scheme.name!r} has one weight scale per {reach}. "
            "Leave group_size out."
        )
    if not scheme.symmetric:
        raise Refused(
            f"symmetric is false; {'FP8' if is_fp8 else 'its INT8'} has no zero points, so scheme "
            f"{scheme.name!r} cannot be asymmetric. Leave it out."
        )
