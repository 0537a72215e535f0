"""A budget for a whole model, in bits or in bytes, and what it leaves for the integers.

Counted in bits it is the average over the weights of quantized modules, of everything that is stored for
them: integers, scales, zero points. Counted in bytes it is the size of the checkpoint's weight files, with
what is not quantized and the headers.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import INTEGER_BITS, QuantizationScheme
from bitsmith.quantize.bit_choice import SHAPE_BYTES, BitChoice, packed_bytes, scheme_choice
from bitsmith.quantize.deployment import KERNEL_BITS, Deployment
from bitsmith.quantize.packed_format import FormatName
from bitsmith.quantize.selection import AUTO_GROUP_SIZES

_SIZE = re.compile(r"^(?P<number>\d+(\.\d+)?) ?(?P<unit>|kB|KB|MB|GB|KiB|MiB|GiB|B)$")
_UNITS = {
    "": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
}  # fmt: skip
_TENSORS_PER_MODULE = 4
_HEADER_BYTES = 128  # of one tensor's entry in a safetensors header, its name and alignment aside; at most
_FILE_BYTES = 1 << 10  # of a file's own header and metadata; at most

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Budget:
    """One of both. bits: average stored bits per weight of quantized modules. num_bytes: of weight files."""

    bits: float | None = None
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        assert (self.bits is None) != (self.num_bytes is None), self

    def __str__(self) -> str:
        if self.num_bytes is not None:
            return f"size_budget {self.num_bytes / 1e6:g} MB"
        return f"bits_budget {self.bits:g}"


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """choices: what is tried for each module that they fit. limit_bytes: for the tensors of all quantized
    modules. other_bytes: of everything else in the weight files, at most. smallest_bytes, largest_bytes: that
    the quantized modules can take."""

    budget: Budget
    choices: tuple[BitChoice, ...]
    limit_bytes: int
    other_bytes: int
    num_weights: int
    smallest_bytes: int
    largest_bytes: int

    def describe(self) -> str:
        """In one line: what is asked for, of what is possible. Scales are counted."""
        sizes = (self.smallest_bytes, self.limit_bytes, self.largest_bytes)
        low, asked, high = (8 * size / self.num_weights for size in sizes)
        return (
            f"{self.budget}: {asked:.3f} bits a weight, scales counted, of {low:.3f} to {high:.3f} that are "
            f"possible; weight files of at most {(self.other_bytes + self.limit_bytes) / 1e6:.2f} MB"
        )

    def config(self) -> dict[str, Any]:
        """What enters the stage key."""
        return asdict(self.budget) | {"choices": [str(choice) for choice in self.choices]}


def read_budget(bits: float | None, size: str | None) -> Budget | None:
    """Raises Refused for both at once, for a size that is not understood, and for what is not positive."""
    if bits is not None and size is not None:
        raise Refused(f"bits_budget is {bits:g} and size_budget is {size!r}; give one of them.")
    if bits is not None:
        if not 0 < bits < 1e6:
            raise Refused(f"bits_budget is {bits:g}; it must be a positive number of bits per weight.")
        return Budget(bits=bits)
    if size is None:
        return None
    match = _SIZE.match(size.strip())
    num_bytes = 0 if match is None else int(float(match["number"]) * _UNITS[match["unit"]])
    if num_bytes < 1:
        raise Refused(f"size_budget is {size!r}; give a number of bytes with a unit, such as 90MB or 4.2GB.")
    return Budget(num_bytes=num_bytes)


def check_budget(
    budget: Budget, scheme: QuantizationScheme, form: FormatName, deployment: Deployment | None
) -> None:
    """Before a model is looked at. Raises Refused for what has no place for modules of several widths."""
    if not scheme.rounds_to_integers:
        raise Refused(
            f"{budget}: modules get different widths of integers, and scheme {scheme.name!r} has none to "
            "choose from. Use a scheme such as w4a16-gptq, or leave the budget out."
        )
    if form != "compressed-tensors":
        raise Refused(
            f"{budget} with format {form}: this format is written with one width for all modules. Use "
            "compressed-tensors, which declares groups of modules."
        )
    if deployment is not None and deployment.target.startswith("tensorrt-llm"):
        raise Refused(
            f"{budget} with --for {deployment.target}: exports to it have one width for all modules. Leave "
            "the budget out, or choose another --for."
        )


def candidate_choices(
    asked: QuantizationScheme, resolved: QuantizationScheme, deployment: Deployment | None
) -> tuple[BitChoice, ...]:
    """Every width that the target has. An explicit group size is kept; under "auto" the one that fits all
    modules, and the smallest."""
    is_elsewhere = deployment is not None and deployment.target != "cpu"
    widths = KERNEL_BITS if is_elsewhere else INTEGER_BITS
    uniform = scheme_choice(resolved).group_size
    sizes = [uniform, min(AUTO_GROUP_SIZES)] if asked.group_size == "auto" else [uniform]
    return tuple(BitChoice(width, size) for width in widths for size in dict.fromkeys(sizes))


def plan_budget(
    budget: Budget,
    choices: Sequence[BitChoice],
    reader: CheckpointReader,
    shapes: Shapes,
    scheme: QuantizationScheme,
    scale_dtype: torch.dtype,
) -> BudgetPlan:
    """shapes: of what is quantized. Raises Refused with the range that is possible."""
    sizes = [
        [
            packed_bytes(shape, choice, scale_dtype.itemsize, symmetric=scheme.symmetric)
            for choice in choices
            if choice.fits(shape[1])
        ]
        for shape in shapes.values()
    ]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    num_weights = sum(rows * columns for rows, columns in shapes.values())
    others = _other_bytes(reader, shapes, scheme)
    if budget.num_bytes is not None:
        limit = budget.num_bytes - others
    else:
        assert budget.bits is not None
        limit = int(budget.bits * num_weights / 8)
    if limit < least:
        tried = "; ".join(map(str, choices))
        low, high = 8 * least / num_weights, 8 * most / num_weights
        raise Refused(
            f"{budget} cannot be met: with {tried}, scales counted, this model's quantized modules take "
            f"{low:.3f} to {high:.3f} bits a weight, and its weight files {(least + others) / 1e6:.2f} to "
            f"{(most + others) / 1e6:.2f} MB. Give a larger budget, or larger groups."
        )
    return BudgetPlan(budget, tuple(choices), limit, others, num_weights, least, most)


def _other_bytes(reader: CheckpointReader, shapes: Shapes, scheme: QuantizationScheme) -> int:
    """Of the weight files without the quantized modules' tensors: at most what they will be."""
    kept = [name for name in reader.names if name.removesuffix(".weight") not in shapes]
    tensors = sum(math.prod(reader.shape(name)) * reader.dtype(name).itemsize for name in kept)
    num_layers = max(Counter(name.rpartition(".")[2] for name in shapes).values())
    scales = 0 if scheme.kv_cache == "none" else 2 * num_layers
    headers = sum(_HEADER_BYTES + len(name) for name in kept)
    headers += sum(_TENSORS_PER_MODULE * (_HEADER_BYTES + len(name)) for name in shapes)
    tensors += SHAPE_BYTES * len(shapes)
    return tensors + headers + scales * (4 + _HEADER_BYTES) + _FILE_BYTES
