"""The engine and the engine that its speed is compared with, compiled side by side.

Compiling keeps about one core busy, so two at once take little longer than one. The second runs in a process
of its own, quietly, and ends with the first process, however that ends.
"""

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path

from bitsmith.compile.job import CompileJob, CompilePlan, compile_engine, plan_compile
from bitsmith.core.artifact import find_finished
from bitsmith.core.progress import Reporter
from bitsmith.ops.library import build_operators


def compile_pair(engine_job: CompileJob, baseline_job: CompileJob, reporter: Reporter) -> None:
    """Write both engines, or find them finished. Raises what `compile_engine` raises for either."""
    engine_plan, baseline_plan = plan_compile(engine_job), plan_compile(baseline_job)
    if _is_finished(engine_job.out, engine_plan) or _is_finished(baseline_job.out, baseline_plan):
        compile_engine(engine_job, engine_plan, reporter)
        compile_engine(baseline_job, baseline_plan, reporter)
        return
    build_operators(reporter)
    reporter.say(f"Compiling {baseline_job.out} beside {engine_job.out} ...")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent) as other_process:
        baseline = other_process.submit(_compile_quietly, baseline_job)
        compile_engine(engine_job, engine_plan, reporter)
        baseline.result()
    reporter.say(f"compile: wrote {engine_job.out} and {baseline_job.out}")


def _is_finished(path: Path, plan: CompilePlan) -> bool:
    return find_finished(path, plan.stage_key) is not None


def _compile_quietly(job: CompileJob) -> None:
    compile_engine(job, plan_compile(job), Reporter(quiet=True))


def _end_with_parent() -> None:
    """A run that was killed leaves no process behind that holds the lock of an unfinished engine."""
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = parent_process()
    assert parent is not None, "runs in a child only"
    parent.join()
    os._exit(1)
