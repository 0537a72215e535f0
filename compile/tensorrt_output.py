"""Doing a planned TensorRT-LLM job: the artifact of either target, checked before it counts."""

import json
from pathlib import Path
from typing import Any

import yaml

from bitsmith.compile.tensorrt_build import build_script
from bitsmith.compile.tensorrt_builder import run_build
from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_export import CheckpointExport
from bitsmith.compile.tensorrt_finding import CheckReport
from bitsmith.compile.tensorrt_job import EngineWork, PytorchWork, TensorrtJob, TensorrtPlan
from bitsmith.compile.tensorrt_llm_args import arguments_yaml, bench_script, serve_script
from bitsmith.compile.tensorrt_parity import SCRIPT, run_parity, write_reference
from bitsmith.compile.tensorrt_quantization import WEIGHT_ONLY
from bitsmith.compile.tensorrt_triton import TritonSettings, make_engine_repository, make_llm_repository
from bitsmith.compile.tensorrt_unified_check import check_unified_checkpoint
from bitsmith.compile.tensorrt_unified_copy import UnifiedCopy, copy_checkpoint
from bitsmith.compile.tensorrt_unified_export import UnifiedExport
from bitsmith.compile.trusted_engines import record_engine
from bitsmith.core.artifact import ArtifactSpec, PendingArtifact, read_finished, write_artifact
from bitsmith.core.errors import WorkFailed
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter
from bitsmith.quantize.checkpoint_output import copy_side_files
from bitsmith.quantize.modelopt_config import QUANT_CONFIG_NAME

ARGUMENTS_NAME = "llm_args.yaml"
_DEFAULT_MAX_BATCH = 2048  # trtllm-build's own


def compile_tensorrt(job: TensorrtJob, plan: TensorrtPlan, reporter: Reporter) -> Manifest:
    """Write the artifact at `job.out`. Raises WorkFailed; a failed build leaves nothing at the path."""
    spec = ArtifactSpec.of(job.out, "engine", plan)
    with write_artifact(spec) as pending:
        if isinstance(plan.work, EngineWork):
            _write_engine(job, plan, plan.work, pending, reporter)
        else:
            _write_pytorch(job, plan, plan.work, pending, reporter)
        for fallback in pending.fallbacks:
            reporter.warn(
                f"{fallback.where}: {fallback.done} instead of {fallback.asked}: {fallback.reason}."
            )
    if job.triton is not None:
        _write_triton(job, plan)
    manifest = read_finished(job.out, "engine")
    if manifest.details["state"] == "built":
        record_engine(manifest.content_digest)
    return manifest


def _write_engine(
    job: TensorrtJob, plan: TensorrtPlan, work: EngineWork, pending: PendingArtifact, reporter: Reporter
) -> None:
    assert plan.source is not None
    directory = pending.partial
    (directory / "checkpoint").mkdir()
    exported = CheckpointExport(plan.source, work.export)
    exported.write(directory / "checkpoint", reporter)
    report = check_engine_checkpoint(directory / "checkpoint", plan.release)
    _copy_tokenizer(job.checkpoint, directory / "tokenizer", plan.source.config)
    _write_script(directory / "build.sh", build_script(work.build, plan.release))
    (directory / "parity.py").write_text(SCRIPT, encoding="utf-8")
    if not plan.release.is_legacy:
        text = yaml.safe_dump(dict(work.arguments), sort_keys=False)
        (directory / ARGUMENTS_NAME).write_text(text, encoding="utf-8")
        _write_script(directory / "serve.sh", serve_script("engine", ARGUMENTS_NAME, "tensorrt"))
    pending.fallbacks = list(work.export.fallbacks)
    pending.details = _engine_details(plan, work, exported) | _checked(report)
    if work.tool is None:
        reporter.say("No trtllm-build here: exported, not built. build.sh holds the command.")
        return
    reference = directory / "parity_reference.json"
    write_reference(directory / "checkpoint", plan.release, plan.source.config, reference)
    run_build(work.tool, work.build, directory, plan.release, work.export.model.world_size, reporter)
    pending.details["parity"] = run_parity(work.tool, directory, reporter)
    pending.details |= {"state": "built", "not_run": []}


def _engine_details(plan: TensorrtPlan, work: EngineWork, exported: CheckpointExport) -> dict[str, Any]:
    model, kv = work.export.model, work.export.kv
    return {
        "target": "tensorrt-llm",
        "state": "exported",
        "not_run": ["trtllm-build", "parity against the dequantized checkpoint"],
        "trtllm_version": str(plan.release),
        "quant_algo": model.quant.quant_algo,
        "kv_cache": {"algo": kv.algo, "scales": list(kv.scales), "provenance": kv.provenance},
        "rounded_again": exported.errors,
        # The file holds plain weights; the target rounds them itself, and its integers are not the source's.
        "requantized_at_build": model.quant.quant_algo in WEIGHT_ONLY,
        "build_command": list(work.build.command("checkpoint", "engine")),
    }


def _write_pytorch(
    job: TensorrtJob, plan: TensorrtPlan, work: PytorchWork, pending: PendingArtifact, reporter: Reporter
) -> None:
    directory = pending.partial
    model = directory / "model"
    model.mkdir()
    copy_side_files(job.checkpoint, model)
    (model / QUANT_CONFIG_NAME).unlink(missing_ok=True)
    errors: dict[str, float] = {}
    if isinstance(work.content, UnifiedCopy):
        copy_checkpoint(job.checkpoint, model)
    else:
        assert plan.source is not None
        exported = UnifiedExport(plan.source, work.content)
        exported.write(model, reporter)
        errors = exported.errors
    report = check_unified_checkpoint(model, plan.release)
    (directory / ARGUMENTS_NAME).write_text(arguments_yaml(dict(work.arguments)), encoding="utf-8")
    _write_script(directory / "serve.sh", serve_script("model", ARGUMENTS_NAME, "pytorch"))
    _write_script(
        directory / "bench.sh", bench_script(job.checkpoint.resolve().name, "model", ARGUMENTS_NAME)
    )
    pending.fallbacks = list(work.content.fallbacks)
    pending.details = {
        "target": "tensorrt-llm-pytorch",
        "state": "exported",
        "not_run": ["trtllm-serve", "trtllm-bench"],
        "trtllm_version": str(plan.release),
        "quant_algo": work.content.quant_algo,
        "kv_cache": {"algo": work.content.kv_algo, "provenance": "this backend uses a scale of 1.0"},
        "rounded_again": errors,
    } | _checked(report)


def _checked(report: CheckReport) -> dict[str, Any]:
    """The validator's answer for what was written; a refusal is a fault of the export."""
    if not report.is_accepted:
        raise WorkFailed("The validator refuses what was written:\n" + "\n".join(report.lines()))
    return {"validator": report.to_json() | {"path": ""}}


def _copy_tokenizer(source: Path, target: Path, config: Any) -> None:
    target.mkdir()
    copy_side_files(source, target)
    (target / QUANT_CONFIG_NAME).unlink(missing_ok=True)
    body = {key: value for key, value in config.items() if key != "quantization_config"}
    (target / "config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _write_triton(job: TensorrtJob, plan: TensorrtPlan) -> None:
    assert job.triton is not None
    max_batch = job.limits.max_batch_size or _DEFAULT_MAX_BATCH
    settings = TritonSettings(job.triton, max_batch, job.is_streaming)
    out = job.out.resolve()
    if isinstance(plan.work, PytorchWork):
        make_llm_repository(settings, str(out / "model"), plan.work.arguments)
        return
    cache = plan.work.arguments["kv_cache_config"]
    options = {
        "kv_cache_free_gpu_mem_fraction": str(cache["free_gpu_memory_fraction"]),
        "enable_kv_cache_reuse": str(cache["enable_block_reuse"]).lower(),
        "enable_chunked_context": str(plan.work.arguments["enable_chunked_prefill"]).lower(),
        "batch_scheduler_policy": "guaranteed_no_evict",
        "exclude_input_in_output": "true",
    }
    make_engine_repository(settings, str(out / "engine"), str(out / "tokenizer"), options)
