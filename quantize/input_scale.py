"""The static scale of an input that the modules of a stage share."""

import math
from collections.abc import Iterable

from bitsmith.core.errors import WorkFailed
from bitsmith.core.manifest import Fallback


def static_input_scale(names: Iterable[str], amax: float, grid_end: float) -> tuple[float, list[Fallback]]:
    """amax: largest magnitude of the input; 0 where calibration showed nothing, which is reported for each of
    the modules. grid_end: largest number of the grid. Raises WorkFailed when amax is not finite."""
    if not math.isfinite(amax):
        raise WorkFailed(
            "The calibration activations are not finite: the model overflows on the calibration data. "
            "Check its weights, or calibrate on other text."
        )
    if amax > 0:
        return amax / grid_end, []
    reason = "calibration gave this module no input, or nothing but zeros"
    return 1.0, [Fallback(name, "calibrated input scale", "scale 1", reason) for name in names]
