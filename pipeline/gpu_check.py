"""The check of a machine with an NVIDIA GPU: steps that run once each, a time limit, a report of all.

Knows no step's content: those are in gpu_steps.py. State is written after every step, so that a killed or
timed-out check goes on where it was; a step that passed is not repeated, one that failed is.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bitsmith.core.digest import sha256_bytes
from bitsmith.core.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WORK_FAILED, BitsmithError, Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.whole_file import whole_file

Status = Literal["passed", "failed", "not run"]
TIME_LIMIT_S = 570.0  # under ten minutes, the report included
_STATE_NAME = "gpu-check.json"


@dataclass(frozen=True, slots=True)
class StepResult:
    """reason: why it was not run, or how it failed. found: what was measured or seen."""

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    found: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """needs: names of steps that must have passed. run: takes the seconds left and what was found by others.

    `run` raises Refused for what this machine lacks (not run), and any other error for a failure.
    """

    name: str
    needs: tuple[str, ...]
    run: Callable[[float, Mapping[str, Mapping[str, Any]]], Mapping[str, Any]]


def run_steps(
    steps: Sequence[Step], out: Path, machine: str, reporter: Reporter, limit_s: float = TIME_LIMIT_S
) -> list[StepResult]:
    """Run what has not passed yet. machine: what identifies it; results of another one are not taken over."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results = _passed_before(steps, out, machine)
    for step in steps:
        if step.name in results:
            reporter.say(f"{step.name}: passed before")
            continue
        results[step.name] = _run_step(step, results, limit_s - (time.monotonic() - start))
        reporter.say(f"{step.name}: {results[step.name].status}  {results[step.name].reason}".rstrip())
        _write(out, machine, [results[known.name] for known in steps if known.name in results])
    final = [results[step.name] for step in steps]
    _write(out, machine, final)
    return final


def exit_code(results: Sequence[StepResult]) -> int:
    """0: everything ran and passed. 4: a step failed. 2: something could not be run here."""
    statuses = {result.status for result in results}
    if "failed" in statuses:
        return EXIT_WORK_FAILED
    return EXIT_REFUSED if "not run" in statuses else EXIT_DONE


def _run_step(step: Step, results: Mapping[str, StepResult], left_s: float) -> StepResult:
    lacking = [name for name in step.needs if results[name].status != "passed"]
    if lacking:
        return StepResult(step.name, "not run", f"needs {', '.join(lacking)}, which did not pass")
    if left_s <= 0:
        return StepResult(step.name, "not run", "the time limit was reached; run the check again to go on")
    start = time.monotonic()
    found: Mapping[str, Any] = {}
    status: Status = "passed"
    reason = ""
    try:
        found = step.run(left_s, {name: result.found for name, result in results.items()})
    except Refused as error:
        status, reason = "not run", str(error)
    except BitsmithError as error:
        status, reason = "failed", str(error)
    return StepResult(step.name, status, reason, round(time.monotonic() - start, 1), found)


def _passed_before(steps: Sequence[Step], out: Path, machine: str) -> dict[str, StepResult]:
    """Passed steps of an earlier run on this machine, as long as what they need had passed too."""
    try:
        body = json.loads((out / _STATE_NAME).read_bytes())
        known = {entry["name"]: StepResult(**entry) for entry in body["steps"]}
        if body["machine"] != _machine_id(machine):
            return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    passed: dict[str, StepResult] = {}
    for step in steps:
        result = known.get(step.name)
        if result is not None and result.status == "passed" and all(name in passed for name in step.needs):
            passed[step.name] = result
    return passed


def _machine_id(machine: str) -> str:
    return sha256_bytes(machine.encode())


def _write(out: Path, machine: str, results: Sequence[StepResult]) -> None:
    """Both reports; each replaces the older one whole."""
    body = {"machine": _machine_id(machine), "steps": [asdict(result) for result in results]}
    rows = [
        f"| {result.name} | {result.status} | {result.seconds:.1f} | {_cell(result)} |" for result in results
    ]
    head = [
        "# GPU check",
        "",
        "| step | status | seconds | what was found, or why not |",
        "|---|---|---|---|",
    ]
    for name, text in (
        (_STATE_NAME, json.dumps(body, indent=2)),
        ("gpu-check.md", "\n".join(head + rows)),
    ):
        with whole_file(out / name) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


def _cell(result: StepResult) -> str:
    text = result.reason or ", ".join(f"{key} {value}" for key, value in result.found.items())
    return " ".join(text.split()).replace("|", "/")
