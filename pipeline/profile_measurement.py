"""Running a workload on an engine with a clock, and once more under torch's profiler.

The times of steps are those without the profiler, which slows them down; from the profiled round comes how a
step's time divides among its operators. With a GPU the parts of a step are NVTX ranges too (not run on one).
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bitsmith.compile.batch import build_model_input
from bitsmith.compile.engine import Engine
from bitsmith.compile.step_work import OperatorCall
from bitsmith.core.errors import WorkFailed
from bitsmith.core.whole_file import whole_file
from bitsmith.pipeline.profile_workload import Phase, Step

_NUM_ROUNDS = 3
_EXECUTE = "execute"
_OPERATORS = "bitsmith::"

Span = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the three parts of a step, or of all steps of a phase together."""

    batch_building_s: float
    execute_s: float
    sampling_s: float

    @property
    def total_s(self) -> float:
        return self.batch_building_s + self.execute_s + self.sampling_s


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Something that the profiler saw, in its clock's microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class PhaseMeasurement:
    """times: the median round without the profiler. profiled_execute_s: under it. events: in order."""

    times: StepTimes
    profiled_execute_s: float
    events: tuple[TimedEvent, ...]


def measure_phases(engine: Engine, phases: Sequence[Phase], trace: Path | None) -> list[PhaseMeasurement]:
    """Every phase in turn, first a round that is not counted. trace: where the Chrome trace goes."""
    rounds = [[run_phase(engine, phase, _no_span) for phase in phases] for _ in range(1 + _NUM_ROUNDS)]
    profiled, events = _profile(engine, phases, trace)
    return [
        PhaseMeasurement(
            times=sorted((round_[index] for round_ in rounds[1:]), key=lambda times: times.total_s)[
                _NUM_ROUNDS // 2
            ],
            profiled_execute_s=profiled[index].execute_s,
            events=_within(events, phase.name),
        )
        for index, phase in enumerate(phases)
    ]


def run_phase(engine: Engine, phase: Phase, span: Span) -> StepTimes:
    with span(phase.name):
        steps = [_run_step(engine, step, span) for step in phase.steps]
    return StepTimes(
        sum(times.batch_building_s for times in steps),
        sum(times.execute_s for times in steps),
        sum(times.sampling_s for times in steps),
    )


def operator_seconds(calls: Sequence[OperatorCall], events: Iterable[TimedEvent]) -> list[float]:
    """Seconds of each call, which are the operators' events in order.

    Raises WorkFailed where what was seen is not what the plan says: nothing would be told of it rightly.
    """
    seen = sorted(
        (event for event in events if event.name.startswith(_OPERATORS)), key=lambda event: event.start_us
    )
    expected = [_kind(call.operator) for call in calls]
    found = [_kind(event.name.removeprefix(_OPERATORS)) for event in seen]
    if found != expected:
        raise WorkFailed(
            f"The profiler saw {len(found)} calls of operators where the engine's plan has {len(expected)}, "
            "or another order. Compile the engine again."
        )
    return [(event.end_us - event.start_us) * 1e-6 for event in seen]


def _kind(operator: str) -> str:
    """Products of one joined module may come in any order, whatever their types."""
    return "linear" if operator.startswith("linear_") else operator


def _run_step(engine: Engine, step: Step, span: Span) -> StepTimes:
    start = time.perf_counter()
    with span("batch_building"):
        model_input = build_model_input(step)
    built = time.perf_counter()
    with span(_EXECUTE):
        logits = engine.execute(model_input)
    executed = time.perf_counter()
    with span("sampling"):
        logits.argmax(dim=-1).tolist()
    return StepTimes(built - start, executed - built, time.perf_counter() - executed)


def _no_span(name: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _profiler_span(name: str) -> Iterator[None]:
    with record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def _profile(
    engine: Engine, phases: Sequence[Phase], trace: Path | None
) -> tuple[list[StepTimes], tuple[TimedEvent, ...]]:
    # It would announce itself on the terminal; who has chosen what it says keeps that.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        times = [run_phase(engine, phase, _profiler_span) for phase in phases]
    if trace is not None:
        with whole_file(trace) as partial:
            profiler.export_chrome_trace(str(partial))
    return times, tuple(
        TimedEvent(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()
    )


def _within(events: Sequence[TimedEvent], phase: str) -> tuple[TimedEvent, ...]:
    """Events between the beginning and the end of the phase's own."""
    (whole,) = (event for event in events if event.name == phase)
    return tuple(event for event in events if whole.start_us <= event.start_us < whole.end_us)
