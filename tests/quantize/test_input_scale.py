"""The static scale of a shared input, for every kind of number."""

import pytest

from bitsmith.core.errors import WorkFailed
from bitsmith.quantize.input_scale import static_input_scale


def test_the_largest_magnitude_fills_the_grid() -> None:
    assert static_input_scale(["q", "k"], 896.0, 448.0) == (2.0, [])


def test_an_input_that_was_never_seen_is_reported_for_each_module() -> None:
    scale, fallbacks = static_input_scale(["q", "k"], 0.0, 127.0)
    assert scale == 1.0 and [(f.where, f.done) for f in fallbacks] == [("q", "scale 1"), ("k", "scale 1")]


@pytest.mark.parametrize("amax", [float("inf"), float("nan")])
def test_an_input_that_overflows_ends_the_work(amax: float) -> None:
    with pytest.raises(WorkFailed, match="not finite"):
        static_input_scale(["q"], amax, 127.0)
