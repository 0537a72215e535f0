"""The operator before a stage, whose outputs can be divided by what the stage's columns are multiplied with.

Found by structure, never by name: a norm hands its output on as it is; a linear module comes before through
something that is linear in it (the gated activation, attention's weighted sum). Which of its rows feeds
which column is seen by scaling rows by powers of two and looking at what reaches the stage. Not known here:
which scales are good.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bitsmith.quantize.layer_stages import Stage

_DIGIT_BITS = 4  # rows are numbered by factors 2^1..2^16, one hexadecimal digit for each run of the layer
_TOLERANCE = 1e-4


class PreviousOperator(Protocol):
    @property
    def name(self) -> str:
        """In the layer."""

    @property
    def rows(self) -> Tensor:
        """[in], for each column of the stage the output of this operator that feeds it."""

    @property
    def num_rows(self) -> int:
        """Outputs that may be divided."""

    def representable(self, scale: Tensor) -> Tensor:
        """The nearest scales whose division the stored parameters express without error. [num_rows]"""

    def divide(self, scale: Tensor) -> dict[str, Tensor]:
        """Divide the outputs in place, [num_rows]. Parameters that change and are not quantized later, by
        name in the layer and in the dtype that they are stored in."""


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """A call of the layer with a few tokens. hidden_states: [batch, seq, hidden]."""

    layer: nn.Module
    hidden_states: Tensor
    keywords: Mapping[str, Any]

    def output(self) -> Tensor:
        with torch.no_grad():
            output = self.layer(self.hidden_states, **self.keywords)
        result = output[0] if isinstance(output, tuple) else output
        assert isinstance(result, Tensor)
        return result


@dataclass(frozen=True, slots=True)
class NormGain:
    """A norm whose output is proportional to offset + weight (offset 1: Gemma's)."""

    name: str
    rows: Tensor
    num_rows: int
    weight: Tensor
    offset: float
    dtype: torch.dtype

    def representable(self, scale: Tensor) -> Tensor:
        gain, divided = self.weight + self.offset, self._divided(scale) + self.offset
        usable = torch.isfinite(divided) & (divided != 0) & (gain != 0)
        return torch.where(usable, gain / divided, 1.0)

    def divide(self, scale: Tensor) -> dict[str, Tensor]:
        # A scale of one keeps the gain, also where it is zero.
        self.weight.copy_(torch.where(scale == 1, self.weight, self._divided(scale)))
        return {f"{self.name}.weight": self.weight.to(self.dtype)}

    def _divided(self, scale: Tensor) -> Tensor:
        """As it will be stored."""
        return ((self.weight + self.offset) / scale - self.offset).to(self.dtype).float()


@dataclass(frozen=True, slots=True)
class LinearRows:
    """The last `num_rows` outputs of a linear module that is quantized itself. bias: theirs, with dtype."""

    name: str
    rows: Tensor
    num_rows: int
    weight: Tensor
    bias: tuple[Tensor, torch.dtype] | None

    def representable(self, scale: Tensor) -> Tensor:
        """The weight is rounded later, with scales; a bias is stored as it is, so only powers of two do."""
        return scale if self.bias is None else torch.exp2(torch.log2(scale).round())

    def divide(self, scale: Tensor) -> dict[str, Tensor]:
        self.weight[-self.num_rows :] /= scale.unsqueeze(1)
        if self.bias is None:
            return {}
        bias, dtype = self.bias
        bias[-self.num_rows :] /= scale
        return {f"{self.name}.bias": bias.to(dtype)}


def find_previous(
    probe: LayerProbe,
    stage: Stage,
    earlier: Sequence[str],
    stored_dtype: Callable[[str], torch.dtype],
) -> PreviousOperator | None:
    """earlier: linear modules that are quantized and run before the stage, in order of execution.
    stored_dtype: of a parameter by its name in the layer."""
    target = probe.layer.get_submodule(stage.modules[0])
    assert isinstance(target, nn.Linear)
    if stage.producer is not None and stage.producer not in earlier:
        return _norm_gain(probe.layer, stage.producer, target.in_features, stored_dtype)
    for name in reversed(earlier):
        module = probe.layer.get_submodule(name)
        assert isinstance(module, nn.Linear)
        rows = _rows_feeding(probe, module, target)
        if rows is not None:
            bias = None if module.bias is None else (module.bias.data, stored_dtype(f"{name}.bias"))
            return LinearRows(name, rows[0], rows[1], module.weight.data, bias)
    return None


def _norm_gain(
    layer: nn.Module, name: str, num_columns: int, stored_dtype: Callable[[str], torch.dtype]
) -> NormGain | None:
    """None where the module is something else than a gain: its output must vanish with offset + weight."""
    module = layer.get_submodule(name)
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or parameters["weight"].shape != (num_columns,):
        return None
    weight = parameters["weight"].data
    kept, example = weight.clone(), torch.linspace(0.5, 1.5, num_columns).view(1, 1, -1)
    offsets = []
    for offset in (0.0, 1.0):
        weight.fill_(-offset)
        with torch.no_grad():
            if not bool(module(example).any()):
                offsets.append(offset)
    weight.copy_(kept)
    if len(offsets) != 1:
        return None
    dtype = stored_dtype(f"{name}.weight")
    return NormGain(name, torch.arange(num_columns), num_columns, weight, offsets[0], dtype)


def _rows_feeding(probe: LayerProbe, source: nn.Linear, target: nn.Linear) -> tuple[Tensor, int] | None:
    """(row for each column of `target`, counted among the last n rows of `source`; n), if every column is
    proportional to one of them. n: `target`'s columns, or a fraction of them where rows are repeated."""
    base = _input_of(probe, target, source, None)
    num_columns = target.in_features
    for repeats in range(1, num_columns + 1):
        num_rows = num_columns // repeats
        if num_columns % repeats or num_rows > source.out_features:
            continue
        rows = _numbered(probe, base, (source, target), num_rows)
        if rows is not None:
            return rows, num_rows
    return None


def _numbered(
    probe: LayerProbe, base: Tensor, modules: tuple[nn.Linear, nn.Linear], num_rows: int
) -> Tensor | None:
    source, target = modules
    rows = torch.zeros(target.in_features, dtype=torch.int64)
    for shift in range(0, max(num_rows - 1, 1).bit_length(), _DIGIT_BITS):
        digits = (torch.arange(num_rows) >> shift) % (1 << _DIGIT_BITS)
        factors = torch.ones(source.out_features)
        factors[-num_rows:] = torch.exp2(digits + 1.0)
        found = _powers_of_two(base, _input_of(probe, target, source, factors))
        if found is None or bool((found < 1).any()) or bool((found > 1 << _DIGIT_BITS).any()):
            return None
        rows += (found - 1) << shift
    return rows if int(rows.max()) < num_rows else None


def _powers_of_two(base: Tensor, scaled: Tensor) -> Tensor | None:
    """Exponent by which each column grew, [in]; None where one grew by something else, or is all zero."""
    largest, token = base.abs().max(dim=0)
    if bool((largest == 0).any()):
        return None
    grown = scaled.gather(0, token.unsqueeze(0))[0] / base.gather(0, token.unsqueeze(0))[0]
    if not bool((grown > 0).all()) or not bool(torch.isfinite(grown).all()):
        return None
    exponents = torch.log2(grown).round()
    expected = base * torch.exp2(exponents)
    if bool(((scaled - expected).abs() > _TOLERANCE * largest * torch.exp2(exponents)).any()):
        return None
    return exponents.long()


class _Stop(Exception):
    """The wanted input was seen."""


def _input_of(probe: LayerProbe, target: nn.Linear, source: nn.Linear, factors: Tensor | None) -> Tensor:
    """[tokens, in] of `target` with the outputs of `source` multiplied by `factors`, [out]."""
    seen: list[Tensor] = []

    def scale(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output if factors is None else output * factors

    def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise _Stop

    handles = [source.register_forward_hook(scale), target.register_forward_pre_hook(stop)]
    try:
        probe.output()
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 1, "the stage's module was not reached"
    return seen[0].flatten(0, -2)
