"""A few drawing primitives that write SVG text. Every text is escaped; nothing is fetched.

Knows nothing of metrics: `plots` decides what is drawn.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """A linear map from values [low, high] to pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(slots=True)
class Drawing:
    """Elements in drawing order. `label` is read to those who do not see the picture."""

    width: int
    height: int
    label: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>')

    def box(self, x: float, y: float, width: float, height: float, css: str, title: str = "") -> None:
        tip = f"<title>{html.escape(title)}</title>" if title else ""
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
        self.parts.append(f'<rect {shape} class="{css}">{tip}</rect>')

    def dot(self, x: float, y: float, radius: float, css: str, title: str = "") -> None:
        tip = f"<title>{html.escape(title)}</title>" if title else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{css}">{tip}</circle>')

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{text}" class="{css}"/>')

    def text(self, x: float, y: float, text: str, css: str = "tick", anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{html.escape(text)}</text>'
        )

    def render(self) -> str:
        head = (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" '
            f'role="img" aria-label="{html.escape(self.label)}">'
        )
        return head + "".join(self.parts) + "</svg>"


def nice_ticks(low: float, high: float, num_wanted: int = 5) -> list[float]:
    """Round values inside [low, high], a step of 1, 2 or 5 times a power of ten apart."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / num_wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
