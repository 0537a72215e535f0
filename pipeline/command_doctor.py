"""`bitsmith doctor`: what this machine can do, and what it lacks."""

import argparse
import dataclasses
import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from bitsmith.core.cache import cache_dir
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.versions import TESTED_TORCH
from bitsmith.ops.isa import cpu_flags, fastest_form
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.gpu_check import exit_code, run_steps
from bitsmith.pipeline.gpu_steps import gpu_steps

Status = Literal["ok", "note", "missing"]
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
_GPU_CHECK_OUT = Path("runs/gpu-check")
_MIN_FREE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `remedy` is empty when there is nothing to do."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="store_true", help="build, compare, serve and measure on an NVIDIA GPU; resumable"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"with --gpu: its reports ({_GPU_CHECK_OUT})")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    if args.gpu:
        return _check_gpu(args.out or _GPU_CHECK_OUT, reporter)
    if args.out is not None:
        raise Refused("--out belongs to --gpu, which is not given.")
    findings = [_system(), _processor(), _memory(), _disk(), _compiler(), _torch(), _gpu(), _tensorrt_llm()]
    for finding in findings:
        remedy = f"  -> {finding.remedy}" if finding.remedy else ""
        reporter.say(f"{finding.status:8}{finding.subject:16}{finding.found}{remedy}")
    return CommandResult({"findings": [dataclasses.asdict(finding) for finding in findings]})


def _check_gpu(out: Path, reporter: Reporter) -> CommandResult:
    machine = f"{platform.node()} {platform.machine()} {version('bitsmith')}"
    results = run_steps(gpu_steps(out), out, machine, reporter)
    reporter.say(f"wrote {out / 'gpu-check.json'} and {out / 'gpu-check.md'}")
    return CommandResult({"steps": [dataclasses.asdict(result) for result in results]}, exit_code(results))


def _system() -> Finding:
    found = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("system", "ok", found)
    return Finding("system", "note", found, "the native engine is tested on Linux x86_64 only")


def _processor() -> Finding:
    flags = cpu_flags()
    present = [flag for flag in _ISA_FLAGS if flag in flags]
    form = fastest_form(flags)
    found = f"{os.cpu_count()} cores; {', '.join(present) or 'no vector extensions that matter here'}"
    found += f"; operators in their {form} form"
    if form != "portable":
        return Finding("processor", "ok", found)
    return Finding("processor", "note", found, "the native engine falls back to its portable operators: slow")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding("memory", "ok", f"{total / 2**30:.1f} GiB")


def _disk() -> Finding:
    cache = cache_dir()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / 1e9:.1f} GB free for the cache {cache}"
    if free >= _MIN_FREE_BYTES:
        return Finding("disk", "ok", found)
    return Finding("disk", "note", found, "a demo run needs about 5 GB")


def _compiler() -> Finding:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding("C++ compiler", "ok", path)
    return Finding("C++ compiler", "missing", "none on PATH", "install g++: `bitsmith compile` needs it")


def _torch() -> Finding:
    found = version("torch")
    if found.split("+")[0] == TESTED_TORCH:
        return Finding("torch", "ok", found)
    return Finding("torch", "note", found, f"untested: this release was tested with torch {TESTED_TORCH}")


def _gpu() -> Finding:
    path = shutil.which("nvidia-smi")
    return Finding("NVIDIA GPU", "note", path or "none seen; the native engine runs on the processor")


def _tensorrt_llm() -> Finding:
    try:
        return Finding("tensorrt_llm", "note", version("tensorrt_llm"))
    except PackageNotFoundError:
        return Finding("tensorrt_llm", "note", "not installed; it needs an NVIDIA GPU")
