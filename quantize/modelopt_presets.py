"""Which schemes nvidia-modelopt does here, and by which of its presets. Not known here: how it is run."""

from collections.abc import Mapping
from dataclasses import dataclass

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import QuantizationScheme

_KV_PRESET = "FP8_KV_CFG"


@dataclass(frozen=True, slots=True)
class Preset:
    """name: in modelopt.torch.quantization. algo: what ModelOpt's export calls the result."""

    name: str
    algo: str


PRESETS: Mapping[str, Preset] = {
    "w8a8-fp8": Preset("FP8_DEFAULT_CFG", "FP8"),
    "w8a8-fp8-dynamic": Preset("FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN"),
    "w8a16-rtn": Preset("INT8_WEIGHT_ONLY_CFG", "W8A16"),
    "w4a16-awq": Preset("INT4_AWQ_CFG", "W4A16_AWQ"),
}
_WHAT_IT_DOES = (
    f"It does {', '.join(PRESETS)}, each with --kv-cache none or fp8, and none with --kv-cache fp8."
)


def check_preset(scheme: QuantizationScheme) -> None:
    """Raises Refused, with the list of what ModelOpt does here, for a scheme or setting outside of it."""
    has_fp8_cache = scheme.kv_cache == "fp8"
    if scheme.name not in PRESETS and not (scheme.name == "none" and has_fp8_cache):
        cache = f" with --kv-cache {scheme.kv_cache}" if scheme.name == "none" else ""
        raise Refused(f"--backend modelopt does not do scheme {scheme.name!r}{cache}. {_WHAT_IT_DOES}")
    if scheme.kv_cache not in ("none", "fp8"):
        raise Refused(f"--backend modelopt does not do --kv-cache {scheme.kv_cache}. {_WHAT_IT_DOES}")
    if not scheme.symmetric:
        raise Refused("--backend modelopt with --asymmetric: its grids here are symmetric. Leave it out.")
    if scheme.refine_steps:
        raise Refused(
            "--backend modelopt with --refine: learned rounding is --backend bitsmith's. Leave it out."
        )
    if scheme.act_order:
        raise Refused("--backend modelopt with --act-order: that orders the columns of GPTQ. Leave it out.")
    if scheme.name == "w8a16-rtn" and scheme.group_size not in ("auto", "channel"):
        raise Refused(
            f"--backend modelopt with w8a16-rtn has one scale per output channel, not per "
            f"{scheme.group_size} columns. Use --group-size channel."
        )
    if scheme.name == "w4a16-awq" and scheme.group_size == "channel":
        raise Refused("--backend modelopt with w4a16-awq has groups of columns. Use --group-size 64 or 128.")


def preset_names(scheme: QuantizationScheme) -> tuple[str, ...]:
    """The weights' preset first: its algorithm is the one that is run."""
    weights = (PRESETS[scheme.name].name,) if scheme.name in PRESETS else ()
    return (*weights, _KV_PRESET) if scheme.kv_cache == "fp8" else weights


def expected_algo(scheme: QuantizationScheme) -> str | None:
    preset = PRESETS.get(scheme.name)
    return None if preset is None else preset.algo
