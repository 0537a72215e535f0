"""Compile, or find that it was done before."""

from bitsmith.compile.job import CompileJob, compile_engine, plan_compile
from bitsmith.core.artifact import find_finished
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter


def finished_or_compiled(job: CompileJob, reporter: Reporter) -> Manifest:
    """The engine at `job.out` if it was made from the same things, else a new one."""
    plan = plan_compile(job)
    manifest = find_finished(job.out, plan.stage_key)
    if manifest is not None:
        reporter.say(f"compile: {job.out} is finished already; nothing redone")
        return manifest
    manifest = compile_engine(job, plan, reporter)
    reporter.say(f"compile: wrote {job.out}")
    return manifest
