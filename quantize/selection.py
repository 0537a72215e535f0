"""Which modules a scheme quantizes, with what group size, and which it leaves, with the reason."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.records import UnquantizedModule

AUTO_GROUP_SIZES = (128, 64, 32)
_GROUP_MULTIPLE = 8  # what kernels and formats that pack into 32-bit words have in common


@dataclass(frozen=True, slots=True)
class Selection:
    """shapes: full name of each module to quantize -> (out, in)."""

    shapes: Mapping[str, tuple[int, int]]
    unquantized: Sequence[UnquantizedModule]


def select_modules(stack: DecoderStack, reader: CheckpointReader, scheme: QuantizationScheme) -> Selection:
    """Every linear module of every layer, unless the scheme is `none`."""
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(stack.num_layers):
        prefix = stack.layer_name(index)
        shapes |= {f"{prefix}.{name}": shape for name, shape in stack.linear_shapes(index).items()}
    left = [
        UnquantizedModule(name, f"{kind} outside the decoder layers is kept", _num_bytes(reader, name))
        for name, kind in stack.unquantized_modules().items()
        if _num_bytes(reader, name)  # a tied head has no bytes of its own
    ]
    if scheme.method is None:
        kept = [
            UnquantizedModule(n, "the scheme `none` keeps weights", _num_bytes(reader, n)) for n in shapes
        ]
        return Selection({}, left + kept)
    return Selection(shapes, left)


def resolve_group_size(
    scheme: QuantizationScheme, shapes: Mapping[str, tuple[int, int]]
) -> QuantizationScheme:
    """A scheme without "auto". Raises Refused when the group size does not divide every selected module."""
    if scheme.method is None:
        return replace(scheme, group_size="channel")
    if scheme.method == "fp8":
        return replace(scheme, group_size="tensor" if scheme.activation_scale == "tensor" else "channel")
    if scheme.method == "smoothquant":
        return replace(scheme, group_size="channel")
    if scheme.group_size == "channel":
        return scheme
    widths = {columns for _, columns in shapes.values()}
    if scheme.group_size == "auto":
        fitting = [size for size in AUTO_GROUP_SIZES if all(width % size == 0 for width in widths)]
        if not fitting:
            tried = ", ".join(map(str, AUTO_GROUP_SIZES))
            raise Refused(f"No automatic group size ({tried}) divides every module. {_what_fits(shapes)}")
        return replace(scheme, group_size=fitting[0])
    size = scheme.group_size
    assert size != "tensor", "only FP8 has it"
    if size < _GROUP_MULTIPLE or size % _GROUP_MULTIPLE:
        raise Refused(f"group_size {size} is not a multiple of {_GROUP_MULTIPLE}. {_what_fits(shapes)}")
    failing = {name: shape for name, shape in shapes.items() if shape[1] % size}
    if failing:
        passing = {name: shape for name, shape in shapes.items() if name not in failing}
        fits = f" It does divide {_by_width(passing)}." if passing else ""
        raise Refused(f"group_size {size} does not divide {_by_width(failing)}.{fits} {_what_fits(shapes)}")
    return scheme


def _by_width(shapes: Mapping[str, tuple[int, int]]) -> str:
    """Kinds of modules and how many, by column count: "q_proj, k_proj (60 modules of 576 columns)"."""
    kinds: dict[int, dict[str, int]] = {}
    for name, (_, columns) in shapes.items():
        by_kind = kinds.setdefault(columns, {})
        kind = name.rpartition(".")[2]
        by_kind[kind] = by_kind.get(kind, 0) + 1
    return "; ".join(
        f"{', '.join(by_kind)} ({sum(by_kind.values())} modules of {columns} columns)"
        for columns, by_kind in sorted(kinds.items())
    )


def _what_fits(shapes: Mapping[str, tuple[int, int]]) -> str:
    common = math.gcd(*(columns for _, columns in shapes.values()))
    sizes = [size for size in range(_GROUP_MULTIPLE, common + 1, _GROUP_MULTIPLE) if common % size == 0]
    listed = ", ".join(map(str, sizes))
    per_channel = "`channel` (one scale for each output channel) always fits"
    return (
        f"Sizes that fit every module: {listed}; {per_channel}."
        if sizes
        else f"{per_channel[0].upper()}{per_channel[1:]}."
    )


def _num_bytes(reader: CheckpointReader, module_name: str) -> int:
    names = (f"{module_name}.weight", f"{module_name}.bias")
    return sum(math.prod(reader.shape(n)) * reader.dtype(n).itemsize for n in names if n in reader)
