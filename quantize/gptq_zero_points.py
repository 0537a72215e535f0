"""Which zero-point convention a GPTQ checkpoint follows: what its label says, held against its values.

Labels are missing from older files and wrong in some. A symmetric grid decides by itself: its zero points are
all the middle of the range, or all one less. Else, up to four bits, the mean weight tells: weights of a
trained model lie about zero, and the wrong convention moves all of them by one step, two fifths of their
deviation.
At eight bits a step is too small against a true mean to tell.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.quantize.gptq_layout import ZeroPointLabel, unpack_values, unpack_zero_points

_TOLERANCE = 0.3  # steps of the grid by which the mean weight may lie beside zero
_NUM_DEVIATIONS = 4.0
_MAX_SCATTER = 2.0  # of group means, in deviations of a mean of independent weights; else they are not random
_TELLING_BITS = 4
_LABELS: tuple[ZeroPointLabel, ...] = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class ZeroPointSample:
    """A piece of a module. qweight: [words, out]. qzeros: [num_groups, words]. groups: [in], of columns."""

    qweight: Tensor
    qzeros: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True)
class ZeroPointChoice:
    """note: what the user should know, "" for nothing."""

    label: ZeroPointLabel
    note: str = ""


def choose_label(
    declared: str | None, samples: Iterable[ZeroPointSample], num_bits: int, *, strict: bool, where: str
) -> ZeroPointChoice:
    """declared: the file's label, None where it has none. Raises Refused where nothing decides.

    strict: a label that the values do not confirm is refused, and so is one that they contradict.
    """
    known = next((label for label in _LABELS if label == declared), None)
    if declared is not None and known is None:
        raise Refused(f"{where} has checkpoint_format {declared!r}; {' and '.join(_LABELS)} can be read.")
    found = label_of_values(samples, num_bits)
    if known is None and found is None:
        raise Refused(
            f"{where} has no checkpoint_format, and its values do not tell whether zero points are stored "
            "less one (gptq) or as they are (gptq_v2). Add the label to its quantization_config."
        )
    if known is None:
        assert found is not None
        return ZeroPointChoice(found, f"{where} has no checkpoint_format; its values are those of {found!r}.")
    if found is not None and found != known:
        text = f"{where} is labelled {known!r}, but its values are those of {found!r}"
        if strict:
            raise Refused(f"{text}. Correct checkpoint_format in its quantization_config.")
        return ZeroPointChoice(found, f"{text}, which is believed.")
    if found is None and strict:
        raise Refused(f"{where} is labelled {known!r}, which its values do not confirm. Leave out --strict.")
    return ZeroPointChoice(known)


def label_of_values(samples: Iterable[ZeroPointSample], num_bits: int) -> ZeroPointLabel | None:
    """None where the values do not decide."""
    stored: list[Tensor] = []
    offsets: list[Tensor] = []
    variances: list[Tensor] = []
    for sample in samples:
        zero_point = unpack_zero_points(sample.qzeros, num_bits, "gptq_v2")
        mean, variance = _group_moments(sample, num_bits)
        stored.append(zero_point.flatten())
        offsets.append((mean - zero_point).flatten())
        variances.append(variance.flatten())
    if not stored:
        return None
    lowest, highest = (int(end) for end in torch.cat(stored).aminmax())
    if lowest == highest and lowest in (-1, 0):
        return "gptq" if lowest == -1 else "gptq_v2"
    offset, expected_deviation = torch.cat(offsets), float(torch.cat(variances).mean().sqrt())
    if (
        num_bits > _TELLING_BITS
        or offset.numel() < 2
        or float(offset.std()) > _MAX_SCATTER * expected_deviation
    ):
        return None
    error = _NUM_DEVIATIONS * float(offset.std()) / math.sqrt(offset.numel())
    expected: dict[ZeroPointLabel, float] = {"gptq_v2": 0.0, "gptq": 1.0}
    mean_offset = float(offset.mean())
    near = (label for label, mean in expected.items() if abs(mean_offset - mean) + error < _TOLERANCE)
    return next(near, None)


def _group_moments(sample: ZeroPointSample, num_bits: int) -> tuple[Tensor, Tensor]:
    """[out, num_groups]: mean stored integer of each group, and the variance of that mean."""
    values = unpack_values(sample.qweight, num_bits).double()
    num_groups = sample.qzeros.shape[0]
    sums = torch.zeros(values.shape[0], num_groups, dtype=torch.float64)
    counts = torch.bincount(sample.groups, minlength=num_groups).clamp(min=1)
    mean = sums.index_add(1, sample.groups, values) / counts
    square = sums.index_add(1, sample.groups, values.square()) / counts
    return mean, (square - mean.square()) / counts
