"""`compile --target tensorrt-llm` and `tensorrt-llm-pytorch`: what to do, and the plan that refuses it early.

The work itself is in tensorrt_engine_output.py and tensorrt_pytorch_output.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bitsmith.compile.tensorrt_build import BuildPlan, BuildSettings, plan_build
from bitsmith.compile.tensorrt_builder import BuildTool, check_memory, find_tool
from bitsmith.compile.tensorrt_kv_plan import KvCacheChoice, KvScaleChoice
from bitsmith.compile.tensorrt_llm_args import RunLimits, RunSettings, llm_arguments
from bitsmith.compile.tensorrt_plan import ExportPlan, ExportSettings, plan_export
from bitsmith.compile.tensorrt_release import (
    DEFAULT_RELEASE,
    Release,
    require_engine_release,
    require_pytorch_release,
)
from bitsmith.compile.tensorrt_source import ExportSource, open_source
from bitsmith.compile.tensorrt_speculation import Speculation
from bitsmith.compile.tensorrt_triton import check_repository_path
from bitsmith.compile.tensorrt_unified_copy import UnifiedCopy, plan_copy
from bitsmith.compile.tensorrt_unified_plan import UnifiedPlan, UnifiedSettings, plan_unified
from bitsmith.core.digest import stage_key
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import source_digest
from bitsmith.core.versions import result_versions

Target = Literal["tensorrt-llm", "tensorrt-llm-pytorch"]


@dataclass(frozen=True, slots=True)
class TensorrtJob:
    """What the user asks. has_kv_reuse, has_chunked_prefill: None lets the checkpoint decide.

    trtllm_python, trtllm_command: where `trtllm-build` is, if not on PATH. build_flags: its options by name.
    triton: directory of a Triton model repository to write. requires_engine: an export alone is refused.
    """

    checkpoint: Path
    out: Path
    target: Target
    trtllm_version: str = str(DEFAULT_RELEASE)
    tp_size: int = 1
    pp_size: int = 1
    kv_cache: KvCacheChoice = "auto"
    kv_scale: KvScaleChoice = "calibrated"
    kv_scale_floor: float = 0.0
    limits: RunLimits = field(default_factory=RunLimits)
    memory_frac: float = 0.9
    has_kv_reuse: bool | None = None
    has_chunked_prefill: bool | None = None
    speculation: Speculation | None = None
    build_flags: Mapping[str, str] = field(default_factory=dict)
    is_strict: bool = False
    requires_engine: bool = False
    trtllm_python: str | None = None
    trtllm_command: str | None = None
    triton: Path | None = None
    is_streaming: bool = False


@dataclass(frozen=True, slots=True)
class EngineWork:
    """tool None: the checkpoint is exported with the commands to build it elsewhere."""

    export: ExportPlan
    build: BuildPlan
    tool: BuildTool | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PytorchWork:
    """content: how the checkpoint comes about; arguments: of the LLM class."""

    content: UnifiedPlan | UnifiedCopy
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorrtPlan:
    """Everything resolved and checked; `config` is what the manifest shows."""

    release: Release
    source: ExportSource | None
    work: EngineWork | PytorchWork
    parents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def stage_key(self) -> str:
        return stage_key(list(self.parents.values()), self.config, self.versions)


def plan_tensorrt(job: TensorrtJob) -> TensorrtPlan:
    """Raises Refused within seconds; writes nothing."""
    if job.triton is not None:
        check_repository_path(job.triton)
    if not 0 <= job.kv_scale_floor < float("inf"):
        raise Refused(f"--kv-scale-floor must be 0 or more, not {job.kv_scale_floor}.")
    if job.target == "tensorrt-llm":
        release = require_engine_release(job.trtllm_version)
        source: ExportSource | None = open_source(job.checkpoint)
        assert source is not None
        work: EngineWork | PytorchWork = _plan_engine(job, release, source)
    else:
        release = require_pytorch_release(job.trtllm_version)
        _refuse_engine_options(job)
        copy = plan_copy(job.checkpoint, release, job.kv_cache)
        source = None if copy is not None else open_source(job.checkpoint)
        work = _plan_pytorch(job, release, source, copy)
    parents = {"checkpoint": source_digest(job.checkpoint)}
    return TensorrtPlan(release, source, work, parents, _config(job, release), result_versions("torch"))


def _plan_engine(job: TensorrtJob, release: Release, source: ExportSource) -> EngineWork:
    settings = ExportSettings(
        release,
        job.tp_size,
        job.pp_size,
        job.kv_cache,
        job.kv_scale,
        job.kv_scale_floor,
        job.is_strict,
        wants_kv_reuse=job.has_kv_reuse is True,
        wants_chunked_prefill=job.has_chunked_prefill is True,
    )
    export = plan_export(source, settings)
    build = plan_build(export, BuildSettings(job.limits, job.speculation, job.build_flags))
    for name, is_asked in (("KV reuse", job.has_kv_reuse), ("Chunked prefill", job.has_chunked_prefill)):
        if is_asked and not build.has_paged_attention:
            raise Refused(f"{name} needs use_paged_context_fmha, which the given build flags turn off.")
    tool = find_tool(job.trtllm_python, job.trtllm_command)
    if tool is None and job.requires_engine:
        raise Refused(
            "--require-engine: there is no trtllm-build on PATH. Give --trtllm-python or --trtllm-command, "
            "or leave --require-engine out to export with the command to build elsewhere."
        )
    if tool is not None:
        check_memory(sum(path.stat().st_size for path in job.checkpoint.glob("*.safetensors")))
    arguments = llm_arguments(_run_settings(job, build.has_paged_attention), None, release)
    del arguments["backend"]
    del arguments["kv_cache_config"]["dtype"]  # an engine's cache type is built in
    return EngineWork(export, build, tool, arguments)


def _plan_pytorch(
    job: TensorrtJob, release: Release, source: ExportSource | None, copy: UnifiedCopy | None
) -> PytorchWork:
    content: UnifiedPlan | UnifiedCopy
    if copy is not None:
        content = copy
    else:
        assert source is not None
        settings = UnifiedSettings(
            release, job.tp_size, job.pp_size, job.kv_cache, job.kv_scale, job.is_strict
        )
        content = plan_unified(source, settings)
    arguments = llm_arguments(_run_settings(job, True), content.kv_algo, release)
    return PytorchWork(content, arguments)


def _run_settings(job: TensorrtJob, has_paged_attention: bool) -> RunSettings:
    is_engine = job.target == "tensorrt-llm"
    return RunSettings(
        job.limits,
        job.tp_size,
        job.pp_size,
        job.memory_frac,
        has_kv_reuse=has_paged_attention if job.has_kv_reuse is None else job.has_kv_reuse,
        has_chunked_prefill=bool(job.has_chunked_prefill),
        speculation=None if is_engine else job.speculation,  # built into an engine
    )


def _refuse_engine_options(job: TensorrtJob) -> None:
    given = {
        "--require-engine": job.requires_engine,
        "--trtllm-python": job.trtllm_python is not None,
        "--trtllm-command": job.trtllm_command is not None,
        "build flags": bool(job.build_flags),
        "--kv-scale-floor": job.kv_scale_floor > 0,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise Refused(
            f"{', '.join(wrong)}: the PyTorch backend builds no engine and reads no KV scales. Leave it out, "
            "or use --target tensorrt-llm."
        )


def _config(job: TensorrtJob, release: Release) -> dict[str, Any]:
    """Everything that affects the result; where the tool is does not."""
    left_out = ("checkpoint", "out", "trtllm_python", "trtllm_command", "triton", "is_streaming")
    config = {key: value for key, value in asdict(job).items() if key not in left_out}
    return config | {"trtllm_version": str(release), "build_flags": dict(job.build_flags)}
