"""Read a gate: from a YAML file or from the mapping of a recipe. Whatever is wrong with it is refused.

A gate that cannot be understood must never look like one that passes, so nothing is guessed: text where a
number belongs, an unknown key, a misspelt metric and an empty file are errors that name the line.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bitsmith.core.errors import Refused
from bitsmith.evaluate.gate import DEFAULT_CONFIDENCE, Gate, GateRule

_RULE_KEYS = ("max", "min", "confidence", "blocking", "reason")
_KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a key stands: a line of the file, or its path in a recipe."""

    source: str
    lines: Mapping[_KeyPath, int] = field(default_factory=dict)

    def of(self, *path: str) -> str:
        line = self.lines.get(path)
        where = ".".join(path)
        if line is None:
            return f"{self.source}: {where}" if where else self.source
        return f"{self.source}, line {line} ({where})"


def load_gate(
    source: Path | Mapping[str, Any], known_metrics: Collection[str], *, name: str | None = None
) -> Gate:
    """The gate in a file or a mapping. Raises Refused for anything that is not a complete gate.

    known_metrics: what the evaluation will measure, or what a report knows.
    name: what a mapping is called in messages and reports.
    """
    if isinstance(source, Path):
        body, places = _read(source)
    else:
        body, places = source, _Places(name or "gate")
    if not isinstance(body, Mapping) or not body:
        raise Refused(f"{places.source} holds no rules. Write lines such as kl_mean: {{max: 0.25}}.")
    rules = tuple(_rule(metric, fields, known_metrics, places) for metric, fields in body.items())
    if not any(rule.blocking for rule in rules):
        raise Refused(f"{places.source} has no blocking rule, so it could never fail. Make one blocking.")
    return Gate(rules, places.source)


def check_directions(gate: Gate, higher_is_better: Mapping[str, bool]) -> None:
    """Refuse a rule that bounds a metric only on its good side: it would never catch a loss."""
    for rule in gate.rules:
        if rule.metric not in higher_is_better:
            continue
        wanted = "min" if higher_is_better[rule.metric] else "max"
        given = rule.minimum if higher_is_better[rule.metric] else rule.maximum
        if given is None:
            better = "higher" if higher_is_better[rule.metric] else "lower"
            raise Refused(
                f"{gate.source}: {rule.metric} {rule.limit} catches no loss, since {better} is better. "
                f"Give {wanted}."
            )


def _read(path: Path) -> tuple[Any, _Places]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"The gate file {path} cannot be read: {error}.") from error
    try:
        body = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise Refused(f"The gate file {path} is not valid YAML: {error}") from error
    lines: dict[_KeyPath, int] = {}
    if root is not None:
        _collect_lines(root, (), lines, path)
    return body, _Places(str(path), lines)


def _collect_lines(node: yaml.Node, prefix: _KeyPath, lines: dict[_KeyPath, int], path: Path) -> None:
    """Line of every key. A key given twice is refused: YAML would silently keep the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        key_path = (*prefix, str(key.value))
        line = key.start_mark.line + 1
        if key_path in lines:
            name = ".".join(key_path)
            raise Refused(f"{path}, line {line}: {name} is given twice (first in line {lines[key_path]}).")
        lines[key_path] = line
        _collect_lines(value, key_path, lines, path)


def _rule(metric: Any, fields: Any, known_metrics: Collection[str], places: _Places) -> GateRule:
    if metric not in known_metrics:
        near = difflib.get_close_matches(str(metric), known_metrics, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise Refused(
            f"{places.of(str(metric))}: unknown metric {metric!r}.{hint} "
            f"Valid metrics: {', '.join(sorted(known_metrics))}."
        )
    if not isinstance(fields, Mapping):
        raise Refused(f"{places.of(metric)}: expected {{max: x}} or {{min: x}}, found {fields!r}.")
    for key in fields:
        if key not in _RULE_KEYS:
            valid = ", ".join(_RULE_KEYS)
            raise Refused(f"{places.of(metric, str(key))}: unknown key {key!r}. Valid keys: {valid}.")
    maximum = _number(fields, metric, "max", places)
    minimum = _number(fields, metric, "min", places)
    if maximum is None and minimum is None:
        raise Refused(f"{places.of(metric)}: neither max nor min is given.")
    if maximum is not None and minimum is not None and minimum > maximum:
        raise Refused(f"{places.of(metric)}: min {minimum:g} lies above max {maximum:g}.")
    return GateRule(
        metric,
        maximum,
        minimum,
        _confidence(fields, metric, places),
        _blocking(fields, metric, places),
        _reason(fields, metric, places),
    )


def _number(fields: Mapping[str, Any], metric: str, key: str, places: _Places) -> float | None:
    if key not in fields:
        return None
    value = fields[key]
    # bool is an int in Python and `max: yes` is a bool in YAML: neither is a threshold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{places.of(metric, key)}: {key} must be a finite number, found {value!r}.")
    return float(value)


def _confidence(fields: Mapping[str, Any], metric: str, places: _Places) -> float:
    value = _number(fields, metric, "confidence", places)
    if value is None:
        return DEFAULT_CONFIDENCE
    if not 0.5 < value < 1.0:
        where = places.of(metric, "confidence")
        raise Refused(f"{where}: confidence must lie between 0.5 and 1, found {value:g}.")
    return value


def _blocking(fields: Mapping[str, Any], metric: str, places: _Places) -> bool:
    value = fields.get("blocking", True)
    if not isinstance(value, bool):
        raise Refused(f"{places.of(metric, 'blocking')}: blocking must be true or false, found {value!r}.")
    return value


def _reason(fields: Mapping[str, Any], metric: str, places: _Places) -> str:
    value = fields.get("reason", "")
    if not isinstance(value, str):
        raise Refused(f"{places.of(metric, 'reason')}: reason must be text, found {value!r}.")
    return value
