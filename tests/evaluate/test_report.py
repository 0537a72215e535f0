"""The written report: escaped, self-contained, and saying what it must say."""

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from bitsmith.core.quality import QualityReport
from bitsmith.evaluate.gate import Gate, GateRule
from bitsmith.evaluate.intervals import PairedLoss, mean_estimate
from bitsmith.evaluate.measurement import MetricKind, measure, measurement_from_json
from bitsmith.evaluate.quick_suite import SuiteResult
from bitsmith.evaluate.report import apply_gate, build_report, report_from_json, report_to_json
from bitsmith.evaluate.report_markdown import render_markdown
from bitsmith.evaluate.report_page import render_page
from bitsmith.evaluate.svg import Drawing, nice_ticks

EVIL = "<script>alert(1)</script> | **bold** [x](javascript:x)"
KINDS = (
    MetricKind("kl_mean", "KL divergence, mean", "nats/token", False, "window"),
    MetricKind("cloze_accuracy_loss", "Cloze accuracy, paired loss", "", False, "item"),
    MetricKind("cloze_accuracy", "Cloze accuracy", "", True, "item"),
)


def _report(name: str = "engine", gate: Gate | None = None) -> QualityReport:
    changed = {
        "item": 3,
        "prompt_end": name,
        "target": name,
        "baseline": "a",
        "candidate": "b",
        "baseline_margin": 0.5,
        "candidate_margin": 0.25,
    }
    result = SuiteResult(
        [
            measure(KINDS[0], mean_estimate([0.1, 0.2, 0.15])),
            measure(KINDS[1], PairedLoss(60, 9, 2), 60),
        ],
        {"cloze_accuracy": f"void, {name}"},
        {"cloze": {"num_items": 60, "changed": [changed]}},
    )
    provenance: dict[str, Any] = {
        "candidate": {"title": name, "name": name, "content_digest": "c" * 64, "arithmetic": name},
        "baseline": {"title": name, "name": name, "content_digest": "b" * 64},
        "versions": {"bitsmith": "0.1.0", "torch": "2.13.0"},
        "text": {"name": name, "is_fallback": True},
        "first_prompt": {"ids": [1, 2, 3], "text": name},
        "error_bars": "Errors are over windows.",
    }
    report = build_report(KINDS, [result], provenance)
    return report if gate is None else apply_gate(report, gate)


GATE = Gate((GateRule("kl_mean", 0.25, None, reason=EVIL), GateRule("cloze_accuracy", None, 0.2)), EVIL)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "line", "rect", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, (tag, self.open)


def test_names_and_texts_cannot_become_markup() -> None:
    page = render_page(_report(EVIL, GATE))
    parsed = _Tags()
    parsed.feed(page)
    assert not parsed.open
    assert "script" not in parsed.tags
    assert "&lt;script&gt;alert(1)" in page
    markdown = render_markdown(_report(EVIL, GATE))
    assert "<script>" not in markdown
    assert "\\| \\*\\*bold\\*\\*" in markdown


def test_the_page_loads_nothing() -> None:
    page = render_page(_report("engine", GATE))
    parsed = _Tags()
    parsed.feed(page)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(parsed.tags)
    names = {name for name, _ in parsed.attributes}
    assert not {"src", "href", "srcset", "action"} & names
    assert not re.search(r"url\(|@import", page)
    assert "default-src 'none'" in page


def test_what_a_reader_must_find_is_there() -> None:
    page = render_page(_report("engine of mine", GATE))
    for text in (
        "engine of mine",
        "FAIL",
        "not measured",
        "void, engine of mine",
        "is a fallback",
        "[1, 2, 3]",
        "c" * 64,
        "2.13.0",
        "Errors are over windows.",
        "kl_mean",
        "≤ 0.25",
        "1 changed answers",
    ):
        assert text in page, text


def test_without_a_gate_nothing_is_claimed() -> None:
    page = render_page(_report())
    assert "NO GATE" in page
    assert "without a verdict" in page


@pytest.mark.parametrize("gate", [None, GATE])
def test_json_round_trip(gate: Gate | None) -> None:
    report = _report(EVIL, gate)
    assert report_from_json(report_to_json(report)) == report


def test_estimates_survive_the_report() -> None:
    report = _report()
    loss = measurement_from_json(report.details["measurements"][1])
    assert loss.estimate.bounds(0.99) == PairedLoss(60, 9, 2).bounds(0.99)


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0.0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(-0.013, 0.029, 4) == pytest.approx([0.0, 0.02])
    assert nice_ticks(3.0, 3.0) == [3.0]
    assert nice_ticks(math.nan, 1.0) != []


def test_svg_text_is_escaped() -> None:
    drawing = Drawing(10, 10, EVIL)
    drawing.text(1, 1, EVIL)
    drawing.box(1, 1, 1, 1, "column", EVIL)
    assert "<script>" not in drawing.render()
