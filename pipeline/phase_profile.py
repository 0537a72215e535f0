"""Where a phase's time goes: measured times beside the work that the plan says, and what class it is in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bitsmith.compile.step_work import Arithmetic, OperatorCall, StepWork
from bitsmith.ops.ceilings import Ceilings
from bitsmith.pipeline.profile_measurement import PhaseMeasurement, operator_seconds
from bitsmith.pipeline.profile_workload import Phase

Bound = Literal["memory-bound", "compute-bound", "overhead-bound"]
_MUCH_OVERHEAD = 0.5  # share of the time outside operators: beyond it, nothing else matters


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One part of a phase, all steps together. floor_s: the least time that the ceilings allow its work."""

    name: str
    is_operator: bool
    num_calls: int
    seconds: float
    num_bytes: int = 0
    num_operations: int = 0
    floor_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """rows: add up to `seconds`. memory_s, compute_s: all bytes, and all operations, at the ceilings.

    slowdown: how many times as long the engine took while the profiler watched.
    """

    name: str
    num_steps: int
    num_tokens: int
    seconds: float
    rows: tuple[ProfileRow, ...]
    memory_s: float
    compute_s: float
    slowdown: float

    @property
    def floor_s(self) -> float:
        return sum(row.floor_s for row in self.rows)

    @property
    def overhead_s(self) -> float:
        """Outside the operators: generated code between them, batches, sampling."""
        return sum(row.seconds for row in self.rows if not row.is_operator)

    @property
    def bound(self) -> Bound:
        if self.overhead_s > _MUCH_OVERHEAD * self.seconds:
            return "overhead-bound"
        return "memory-bound" if self.memory_s >= self.compute_s else "compute-bound"


def profile_phase(
    phase: Phase, work: Sequence[StepWork], measured: PhaseMeasurement, ceilings: Ceilings
) -> PhaseProfile:
    """work: of each of the phase's steps."""
    calls = [call for step in work for call in step.calls]
    profiled = operator_seconds(calls, measured.events)
    slowdown = measured.profiled_execute_s / measured.times.execute_s
    seconds = [value / slowdown for value in profiled]
    rows = _operator_rows(calls, seconds, ceilings)
    generated_bytes = sum(step.generated_bytes for step in work)
    rest = (
        ProfileRow(
            "generated_code",
            False,
            len(work),
            max(measured.times.execute_s - sum(seconds), 0.0),
            num_bytes=generated_bytes,
            floor_s=generated_bytes / ceilings.read_bytes_per_s,
        ),
        ProfileRow("batch_building", False, len(work), measured.times.batch_building_s),
        ProfileRow("sampling", False, len(work), measured.times.sampling_s),
    )
    return PhaseProfile(
        name=phase.name,
        num_steps=len(phase.steps),
        num_tokens=phase.num_tokens,
        seconds=measured.times.total_s,
        rows=(*rows, *rest),
        memory_s=(generated_bytes + sum(call.num_bytes for call in calls)) / ceilings.read_bytes_per_s,
        compute_s=sum(call.num_operations / _rate(ceilings, call.arithmetic) for call in calls),
        slowdown=slowdown,
    )


def _operator_rows(
    calls: Sequence[OperatorCall], seconds: Sequence[float], ceilings: Ceilings
) -> list[ProfileRow]:
    """One row for each role, in the order in which a step meets them."""
    rows = []
    for role in dict.fromkeys(call.role for call in calls):
        own = [index for index, call in enumerate(calls) if call.role == role]
        rows.append(
            ProfileRow(
                name=role,
                is_operator=True,
                num_calls=len(own),
                seconds=sum(seconds[index] for index in own),
                num_bytes=sum(calls[index].num_bytes for index in own),
                num_operations=sum(calls[index].num_operations for index in own),
                floor_s=sum(_floor_s(calls[index], ceilings) for index in own),
            )
        )
    return rows


def _floor_s(call: OperatorCall, ceilings: Ceilings) -> float:
    """A processor reads and computes at once: the slower of the two decides (the roofline model)."""
    return max(
        call.num_bytes / ceilings.read_bytes_per_s, call.num_operations / _rate(ceilings, call.arithmetic)
    )


def _rate(ceilings: Ceilings, arithmetic: Arithmetic) -> float:
    return ceilings.int8_operations_per_s if arithmetic == "int8" else ceilings.fp32_operations_per_s
