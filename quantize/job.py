"""Run a planned quantize job: layers, then files, then a second reading of the files."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bitsmith.core.artifact import ArtifactSpec, PendingArtifact, read_finished, write_artifact
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import Fallback, Manifest
from bitsmith.core.progress import Reporter
from bitsmith.quantize.checkpoint_output import copy_side_files, write_config, write_weights
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.layerwise import LayerwiseQuantizer
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan, needs_calibration, plan_quantize
from bitsmith.quantize.records import LayerReport, is_finite
from bitsmith.quantize.reread import expected_digests, reread_in_fresh_process
from bitsmith.quantize.resume_state import ResumeState

__all__ = ["QuantizeJob", "QuantizePlan", "plan_quantize", "quantize_model", "say_calibration"]


def quantize_model(job: QuantizeJob, plan: QuantizePlan, reporter: Reporter) -> Manifest:
    """Write the quantized checkpoint at `job.out`.

    Raises Refused before anything is written, WorkFailed afterwards; finished layers are then kept in the
    partial directory for a run with `resume`.
    """
    reader = CheckpointReader(job.model.path)
    _check_finite(reader)
    spec = ArtifactSpec(
        path=job.out,
        kind="quantized-checkpoint",
        stage_key=plan.stage_key,
        parents=plan.parents,
        config=plan.config,
        versions=plan.versions,
    )
    try:
        with write_artifact(spec, keep_partial=True) as pending:
            _fill(job, plan, reader, pending, reporter)
    except WorkFailed as error:
        raise WorkFailed(f"{error} Finished layers are kept; go on with --resume.") from error
    return read_finished(job.out, "quantized-checkpoint")


def _fill(
    job: QuantizeJob,
    plan: QuantizePlan,
    reader: CheckpointReader,
    pending: PendingArtifact,
    reporter: Reporter,
) -> None:
    fingerprint = {"parents": plan.parents, "config": plan.config, "versions": plan.versions}
    state = ResumeState(pending.partial, fingerprint)
    reports: list[LayerReport] = []
    if plan.scheme.method is not None or needs_calibration(plan.scheme):
        token_ids = None if plan.windows is None else plan.windows.token_ids
        quantizer = LayerwiseQuantizer(
            DecoderStack(reader),
            plan.scheme,
            tuple(plan.selection.shapes),
            plan.scale_dtype,
            token_ids,
            job.calibration.seed,
        )
        reports = quantizer.run(state, reporter)
    not_copied = copy_side_files(job.model.path, pending.partial)
    write_config(reader.config, pending.partial, plan)
    write_weights(reader, state, pending.partial, plan)
    state.remove()
    reread_in_fresh_process(pending.partial, expected_digests(reports))
    pending.details = _details(job, plan, reports) | {"files_not_copied": not_copied}
    numeric = [fallback for report in reports for fallback in report.fallbacks]
    pending.fallbacks = [*_calibration_fallbacks(plan), *numeric]
    for fallback in numeric:
        reporter.warn(f"{fallback.where}: {fallback.done} instead of {fallback.asked}: {fallback.reason}.")


def _check_finite(reader: CheckpointReader) -> None:
    for name in reader.names:
        if not is_finite(reader.tensor(name)):
            raise Refused(f"{reader.path}: tensor {name!r} holds NaN or infinity; the model is damaged.")


def say_calibration(plan: QuantizePlan, reporter: Reporter) -> None:
    """Where the calibration tokens come from, and whether there are fewer than were asked for."""
    windows = plan.windows
    if windows is None:
        return
    if windows.source.is_fallback:
        reporter.say("Calibration: the built-in text, a fallback; give --calibration for real work.")
    for fallback in _calibration_fallbacks(plan):
        reporter.warn(f"calibration: {fallback.done} instead of {fallback.asked}: {fallback.reason}.")


def _calibration_fallbacks(plan: QuantizePlan) -> list[Fallback]:
    """Fewer rows than asked for, if so."""
    windows = plan.windows
    if windows is None or windows.num_obtained >= windows.num_requested:
        return []
    asked = f"{windows.num_requested} rows of {windows.token_ids.shape[1]} tokens"
    done = f"{windows.num_obtained} rows ({windows.token_ids.numel()} tokens)"
    return [Fallback("calibration", asked, done, f"{windows.source.name} has no more text")]


def _details(job: QuantizeJob, plan: QuantizePlan, reports: Sequence[LayerReport]) -> dict[str, Any]:
    modules = [record for report in reports for record in report.modules]
    errors = [record.relative_error for record in modules if record.relative_error is not None]
    return {
        "model": {"name": job.model.name, "origin": dict(job.model.origin)},
        "calibration": _calibration_details(plan),
        "modules": [asdict(record) for record in modules],
        "methods": dict(Counter(record.method for record in modules)),
        "mean_relative_error": math.fsum(errors) / len(errors) if errors else None,
        "kv_scales": [report.kv_scales for report in reports] if plan.scheme.kv_cache != "none" else None,
        "changed": sorted(name for report in reports for name in report.changed),
        "refine": [asdict(report.refine) for report in reports if report.refine is not None],
        "unquantized": [asdict(module) for module in plan.selection.unquantized],
        "source_bytes": _weight_bytes(job.model.path),
    }


def _calibration_details(plan: QuantizePlan) -> dict[str, Any] | None:
    windows = plan.windows
    if windows is None:
        return None
    return {
        "source": windows.source.name,
        "is_fallback": windows.source.is_fallback,
        "num_requested": windows.num_requested,
        "num_obtained": windows.num_obtained,
        "seq_len": windows.token_ids.shape[1],
        "num_tokens": windows.token_ids.numel(),
        "packing": windows.packing,
        "provenance": dict(windows.source.provenance),
    }


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
