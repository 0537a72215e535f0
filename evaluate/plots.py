"""The pictures of a quality report, as inline SVG. Colours are classes of the page's style sheet.

Each function takes plain numbers and returns an `<svg>` element; knows nothing of the report's structure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bitsmith.evaluate.report_text import limit_number
from bitsmith.evaluate.svg import Drawing, Span, nice_ticks

_NEGLIGIBLE = 1e-12


def interval_strip(judgement: Mapping[str, Any]) -> str:
    """Value and bounds of one rule against its limit; the shaded side is where the rule holds."""
    value, lower, upper = judgement["value"], judgement["lower"], judgement["upper"]
    limits = [limit for limit in (judgement["max"], judgement["min"]) if limit is not None]
    if value is None or lower is None or upper is None:
        return ""
    points = [value, lower, upper, *limits]
    spread = max(max(points) - min(points), abs(max(points, key=abs)) * 1e-3, _NEGLIGIBLE)
    low, high = min(points) - 0.18 * spread, max(points) + 0.18 * spread
    drawing = Drawing(230, 34, f"{value:.4g}, bounds {lower:.4g} to {upper:.4g}")
    x = Span(low, high, 4, 226)
    left = x(judgement["min"]) if judgement["min"] is not None else 4
    right = x(judgement["max"]) if judgement["max"] is not None else 226
    drawing.box(left, 4, right - left, 16, "allowed")
    drawing.line(4, 12, 226, 12, "rail")
    for limit in limits:
        drawing.line(x(limit), 2, x(limit), 22, "limit")
        drawing.text(_inside(x(limit), 230, 18), 32, limit_number(limit, judgement["metric"]), "tick")
    css = str(judgement["verdict"]).lower()
    drawing.line(x(lower), 12, x(upper), 12, f"bar {css}")
    for bound in (lower, upper):
        drawing.line(x(bound), 8, x(bound), 16, f"cap {css}")
    drawing.dot(x(value), 12, 3.5, f"dot {css}", f"{value:.6g}")
    return drawing.render()


def window_differences(differences: Sequence[float | None], mean: float, bounds: tuple[float, float]) -> str:
    """ln perplexity difference of each window, their mean, and its bounds as a band."""
    values = [value for value in differences if value is not None]
    drawing = Drawing(860, 230, "Difference in ln perplexity for each window")
    points = [0.0, *values, *(bound for bound in bounds if math.isfinite(bound))]
    pad = 0.08 * max(max(points) - min(points), _NEGLIGIBLE)
    y = Span(min(points) - pad, max(points) + pad, 196, 12)
    _horizontal_grid(drawing, y, 52, 850)
    x = Span(0, len(differences), 58, 846)
    width = max(1.0, (846 - 58) / len(differences) * 0.72)
    if all(map(math.isfinite, bounds)):
        drawing.box(52, y(bounds[1]), 798, y(bounds[0]) - y(bounds[1]), "band")
    for index, value in enumerate(differences):
        if value is None:
            continue
        top, bottom = y(max(value, 0.0)), y(min(value, 0.0))
        css = "worse" if value > 0 else "better"
        middle = x(index + 0.5)
        drawing.box(
            middle - width / 2, top, width, max(bottom - top, 0.8), css, f"window {index}: {value:+.4f}"
        )
    if math.isfinite(mean):
        drawing.line(52, y(mean), 850, y(mean), "mean")
    drawing.line(52, y(0.0), 850, y(0.0), "axis")
    for tick in _index_ticks(len(differences)):
        drawing.text(x(tick + 0.5), 211, f"{tick}")
    drawing.text(451, 226, "window of text", "label")
    return drawing.render()


def kl_histogram(
    log10_edges: Sequence[float], counts: Sequence[int], percentiles: Mapping[str, float]
) -> str:
    """How many tokens diverge by how much, on a logarithmic axis, with percentiles marked."""
    drawing = Drawing(420, 250, "Histogram of KL divergence by token")
    first, last = _occupied(counts)
    edges, shown = log10_edges[first : last + 2], counts[first : last + 1]
    x = Span(edges[0], edges[-1], 52, 410)
    y = Span(0, max([1, *shown]) * 1.14, 200, 14)
    _horizontal_grid(drawing, y, 48, 412)
    for index, count in enumerate(shown):
        left, right = x(edges[index]), x(edges[index + 1])
        title = f"10^{edges[index]:g} to 10^{edges[index + 1]:g}: {count} tokens"
        drawing.box(left + 0.5, y(count), right - left - 1, 200 - y(count), "column", title)
    for name in ("50", "90", "99"):
        if percentiles.get(name, 0.0) > 10 ** edges[0]:
            place = x(min(edges[-1], math.log10(percentiles[name])))
            drawing.line(place, 14, place, 200, "mark")
            drawing.text(place, 10, f"p{name}", "marklabel")
    for power in range(math.ceil(edges[0]), math.floor(edges[-1]) + 1):
        drawing.text(x(power), 215, _power_of_ten(power))
    drawing.line(48, 200, 412, 200, "axis")
    drawing.text(231, 240, "KL divergence of one token, nats", "label")
    return drawing.render()


def position_profile(bins: Sequence[Mapping[str, Any]]) -> str:
    """Share of tokens with the same most likely next token, along the window."""
    drawing = Drawing(420, 250, "Top-1 agreement along the window")
    bins = [entry for entry in bins if entry["top1_agreement"] is not None]
    if not bins:
        return drawing.render()
    values = [float(entry["top1_agreement"]) for entry in bins]
    low = max(0.0, min(values) - 0.06)
    high = min(1.0, max(values) + 0.04)
    y = Span(low, max(high, low + 0.02), 200, 14)
    x = Span(int(bins[0]["first"]), int(bins[-1]["last"]), 58, 404)
    _horizontal_grid(drawing, y, 48, 412, percent=True)
    middles = [(int(entry["first"]) + int(entry["last"])) / 2 for entry in bins]
    places = [(x(middle), y(value)) for middle, value in zip(middles, values, strict=True)]
    drawing.path(places, "curve")
    for (px, py), entry, value in zip(places, bins, values, strict=True):
        drawing.dot(px, py, 3, "point", f"tokens {entry['first']} to {entry['last']}: {value:.1%}")
    for tick in nice_ticks(x.low, x.high, 5):
        drawing.text(x(tick), 215, f"{tick:g}")
    drawing.line(48, 200, 412, 200, "axis")
    drawing.text(231, 240, "position in the window, tokens", "label")
    return drawing.render()


def _horizontal_grid(drawing: Drawing, y: Span, left: float, right: float, *, percent: bool = False) -> None:
    for tick in nice_ticks(y.low, y.high):
        drawing.line(left, y(tick), right, y(tick), "grid")
        drawing.text(left - 6, y(tick) + 3.5, f"{tick * 100:g} %" if percent else f"{tick:g}", anchor="end")


def _index_ticks(num_values: int) -> list[int]:
    return [int(tick) for tick in nice_ticks(0, num_values - 1, 8) if tick == int(tick)]


def _occupied(counts: Sequence[int]) -> tuple[int, int]:
    """First and last bin that hold anything; all of them when none does."""
    filled = [index for index, count in enumerate(counts) if count]
    return (filled[0], filled[-1]) if filled else (0, len(counts) - 1)


def _power_of_ten(power: int) -> str:
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return f"10{str(power).translate(digits)}"


def _inside(x: float, width: float, margin: float) -> float:
    """A label's middle, moved so that the label stays in the picture."""
    return min(max(x, margin), width - margin)
