"""A profile for people, as lines of a table, and for programs, as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bitsmith.ops.ceilings import Ceilings
from bitsmith.pipeline.phase_profile import PhaseProfile, ProfileRow
from bitsmith.pipeline.profile_workload import Workload

_VERSION = 1
_HEADER = ("part", "calls", "ms a step", "of step", "MB", "GB/s", "MFLOP", "GFLOP/s", "of ceiling")
_WIDTHS = (15, 6, 10, 8, 9, 7, 10, 8, 11)
_DISTURBED = 1.05  # so far above its ceiling a part is measured wrongly, or the ceiling was


def profile_lines(phases: Sequence[PhaseProfile]) -> Iterator[str]:
    """Every phase's table, and what follows from it."""
    for phase in phases:
        yield ""
        yield (
            f"{phase.name}: {phase.num_tokens} tokens in {phase.num_steps} steps, "
            f"{_step_ms(phase, phase.seconds):.3f} ms a step, {phase.num_tokens / phase.seconds:.1f} tokens/s"
        )
        yield _line(_HEADER)
        yield from (_line(_cells(phase, row)) for row in phase.rows)
        yield _line(_cells(phase, _total(phase)))
        yield from _conclusion(phase)


def profile_document(
    engine: dict[str, Any], workload: Workload, ceilings: Ceilings, phases: Sequence[PhaseProfile]
) -> dict[str, Any]:
    """What --json prints. engine: what names it. Times in seconds and work over all steps of a phase."""
    return {
        "version": _VERSION,
        "engine": engine,
        "workload": asdict(workload),
        "ceilings": asdict(ceilings),
        "phases": [_phase_document(phase) for phase in phases],
    }


def above_ceiling(phases: Sequence[PhaseProfile]) -> list[str]:
    """Parts that seem faster than this machine can be: "prefill: down"."""
    return [
        f"{phase.name}: {row.name}"
        for phase in phases
        for row in phase.rows
        if row.is_operator and row.floor_s > _DISTURBED * row.seconds
    ]


def _phase_document(phase: PhaseProfile) -> dict[str, Any]:
    return {
        "name": phase.name,
        "class": phase.bound,
        "num_steps": phase.num_steps,
        "num_tokens": phase.num_tokens,
        "tokens_per_s": phase.num_tokens / phase.seconds,
        "memory_at_ceiling_s": phase.memory_s,
        "compute_at_ceiling_s": phase.compute_s,
        "overhead_s": phase.overhead_s,
        "profiler_slowdown": phase.slowdown,
        "total": _row_document(phase, _total(phase)),
        "parts": [_row_document(phase, row) for row in phase.rows],
    }


def _row_document(phase: PhaseProfile, row: ProfileRow) -> dict[str, Any]:
    """Rates are None where there is no time, the share of the ceiling where there is no work either."""
    seconds = row.seconds or None
    return {
        "name": row.name,
        "num_calls": row.num_calls,
        "seconds": row.seconds,
        "share_of_phase": row.seconds / phase.seconds,
        "num_bytes": row.num_bytes,
        "bytes_per_s": row.num_bytes / seconds if seconds else None,
        "num_operations": row.num_operations,
        "operations_per_s": row.num_operations / seconds if seconds else None,
        "share_of_ceiling": row.floor_s / seconds if seconds and row.floor_s else None,
    }


def _total(phase: PhaseProfile) -> ProfileRow:
    rows = phase.rows
    return ProfileRow(
        name="whole step",
        is_operator=False,
        num_calls=sum(row.num_calls for row in rows if row.is_operator),
        seconds=phase.seconds,
        num_bytes=sum(row.num_bytes for row in rows),
        num_operations=sum(row.num_operations for row in rows),
        floor_s=phase.floor_s,
    )


def _step_ms(phase: PhaseProfile, seconds: float) -> float:
    return seconds / phase.num_steps * 1e3


def _cells(phase: PhaseProfile, row: ProfileRow) -> tuple[str, ...]:
    """Work and calls of one step, as the time is; "-" where nothing is counted."""
    document = _row_document(phase, row)
    bytes_per_s, operations_per_s = document["bytes_per_s"], document["operations_per_s"]
    share = document["share_of_ceiling"]
    return (
        row.name.replace("_", " "),
        f"{row.num_calls / phase.num_steps:g}",
        f"{_step_ms(phase, row.seconds):.3f}",
        f"{document['share_of_phase']:.1%}",
        f"{row.num_bytes / phase.num_steps / 1e6:.3f}" if row.num_bytes else "-",
        f"{bytes_per_s / 1e9:.1f}" if bytes_per_s else "-",
        f"{row.num_operations / phase.num_steps / 1e6:.2f}" if row.num_operations else "-",
        f"{operations_per_s / 1e9:.1f}" if operations_per_s else "-",
        f"{share:.0%}" if share else "-",
    )


def _line(cells: Sequence[str]) -> str:
    first, *others = zip(cells, _WIDTHS, strict=True)
    return "".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)])


def _conclusion(phase: PhaseProfile) -> Iterator[str]:
    yield (
        f"{phase.bound}: of {_step_ms(phase, phase.seconds):.3f} ms, the bytes alone take "
        f"{_step_ms(phase, phase.memory_s):.3f} ms at the ceiling and the operations "
        f"{_step_ms(phase, phase.compute_s):.3f} ms; {phase.overhead_s / phase.seconds:.0%} of the time is "
        "outside the operators."
    )
    yield (
        f"The profiler made it {phase.slowdown:.2f} times as long; times are those without it, divided among "
        "the operators as it saw them."
    )
