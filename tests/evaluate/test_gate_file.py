"""Gate files: what is well formed is read, what is not is refused with the line or key."""

from pathlib import Path
from typing import Any

import pytest

from bitsmith.core.errors import Refused
from bitsmith.evaluate.gate import GateRule
from bitsmith.evaluate.gate_file import check_directions, load_gate

KNOWN = ("perplexity_ratio", "kl_mean", "top1_agreement")


def _write(folder: Path, text: str) -> Path:
    path = folder / "gate.yaml"
    path.write_text(text)
    return path


def test_a_whole_gate(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "perplexity_ratio: {max: 1.2, reason: peers reach 1.11}\n"
        "kl_mean: {max: 0.25, confidence: 0.99}\n"
        "top1_agreement:\n  min: 0.75\n  blocking: false\n",
    )
    gate = load_gate(path, KNOWN)
    assert gate.rules == (
        GateRule("perplexity_ratio", 1.2, None, reason="peers reach 1.11"),
        GateRule("kl_mean", 0.25, None, confidence=0.99),
        GateRule("top1_agreement", None, 0.75, blocking=False),
    )
    assert gate.source == str(path)


BROKEN = [
    ("threshold as text", "kl_mean: {max: '0.25'}\n", r"line 1 \(kl_mean.max\): max must be a finite number"),
    ("threshold as yes", "kl_mean:\n  max: yes\n", r"line 2 \(kl_mean.max\).*True"),
    ("not a number", "kl_mean:\n  max: .nan\n", r"line 2 .*finite"),
    ("misspelt metric", "# gate\nkl_meen: {max: 0.2}\n", r"line 2 .*Did you mean kl_mean\?.*top1_agreement"),
    ("misspelt key", "kl_mean: {maximum: 0.2}\n", r"unknown key 'maximum'.*max, min, confidence"),
    ("empty file", "", "holds no rules"),
    ("comment only", "# later\n", "holds no rules"),
    ("a list", "- kl_mean\n", "holds no rules"),
    ("no limit", "kl_mean: {blocking: true}\n", "neither max nor min"),
    ("bare number", "kl_mean: 0.2\n", "expected {max: x}"),
    ("confidence as per cent", "kl_mean: {max: 0.2, confidence: 95}\n", "between 0.5 and 1"),
    ("confidence one half", "kl_mean: {max: 0.2, confidence: 0.5}\n", "between 0.5 and 1"),
    ("no blocking rule", "kl_mean: {max: 0.2, blocking: false}\n", "no blocking rule"),
    ("blocking as text", "kl_mean: {max: 0.2, blocking: 'no'}\n", "must be true or false"),
    ("given twice", "kl_mean: {max: 0.2}\nkl_mean: {max: 9}\n", "line 2: kl_mean is given twice"),
    ("crossed limits", "kl_mean: {max: 0.2, min: 0.3}\n", "lies above max"),
    ("python tag", "kl_mean: {max: !!python/object/apply:os.getpid []}\n", "not valid YAML"),
    ("broken YAML", "kl_mean: {max: 0.2\n", "not valid YAML"),
    ("number as key", "7: {max: 0.2}\n", "unknown metric 7"),
]


@pytest.mark.parametrize(("text", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_gate_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        load_gate(_write(tmp_path, text), KNOWN)
    assert "gate.yaml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        load_gate(tmp_path / "none.yaml", KNOWN)


@pytest.mark.parametrize("body", [{}, {"kl_mean": {"max": "0.2"}}, {"kl_mean": None}])
def test_a_recipe_s_gate_is_checked_alike(body: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="recipe gate"):
        load_gate(body, KNOWN, name="recipe gate")


def test_a_rule_that_catches_no_loss_is_refused() -> None:
    directions = {"kl_mean": False, "top1_agreement": True}
    for fields, wanted in (
        ({"kl_mean": {"min": 0.0}}, "Give max"),
        ({"top1_agreement": {"max": 1.0}}, "Give min"),
    ):
        with pytest.raises(Refused, match=wanted):
            check_directions(load_gate(fields, directions), directions)
    both = {"kl_mean": {"max": 0.2, "min": 0.0}, "top1_agreement": {"min": 0.7}}
    check_directions(load_gate(both, directions), directions)
