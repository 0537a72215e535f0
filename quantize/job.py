"""Run a planned quantize job: layers, then files, then a second reading of the files."""

import shutil

from bitsmith.core.artifact import ArtifactSpec, PendingArtifact, read_finished, write_artifact
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter
from bitsmith.quantize.bit_planning import STATE_NAME, make_bit_plan
from bitsmith.quantize.checkpoint_output import copy_side_files, write_config, write_weights
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.layerwise import LayerwiseQuantizer
from bitsmith.quantize.manifest_details import calibration_fallbacks, manifest_details
from bitsmith.quantize.methods import choose_method
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan, plan_quantize
from bitsmith.quantize.records import LayerReport, is_finite
from bitsmith.quantize.reread import expected_digests, reread_in_fresh_process
from bitsmith.quantize.resume_state import ResumeState
from bitsmith.quantize.scheme_checks import needs_calibration

__all__ = ["QuantizeJob", "QuantizePlan", "plan_quantize", "quantize_model"]


def quantize_model(job: QuantizeJob, plan: QuantizePlan, reporter: Reporter) -> Manifest:
    """Write the quantized checkpoint at `job.out`.

    Raises Refused before anything is written, WorkFailed afterwards; finished layers are then kept in the
    partial directory for a run with `resume`.
    """
    reader = CheckpointReader(job.model.path)
    check_finite(reader)
    spec = ArtifactSpec.of(job.out, "quantized-checkpoint", plan)
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
    bit_plan = None if plan.budget is None else make_bit_plan(job, plan, reader, pending.partial, reporter)
    choices = {} if bit_plan is None else bit_plan.choices
    reports: list[LayerReport] = []
    if plan.scheme.method is not None or needs_calibration(plan.scheme):
        uses_tokens = plan.windows is not None and needs_calibration(plan.scheme)
        token_ids = plan.windows.token_ids if plan.windows is not None and uses_tokens else None
        quantizer = LayerwiseQuantizer(
            DecoderStack(reader),
            plan.scheme,
            tuple(plan.selection.shapes),
            choose_method(plan.scheme, plan.scale_dtype, choices),
            token_ids,
            job.calibration.seed,
        )
        reports = quantizer.run(state, reporter)
    not_copied = copy_side_files(job.model.path, pending.partial)
    write_config(reader.config, pending.partial, plan, choices)
    write_weights(reader, state, pending.partial, plan)
    state.remove()
    shutil.rmtree(pending.partial / STATE_NAME, ignore_errors=True)
    reread_in_fresh_process(pending.partial, expected_digests(reports))
    pending.details = manifest_details(job, plan, reports) | {"files_not_copied": not_copied}
    if bit_plan is not None:
        pending.details["bit_plan"] = bit_plan.summary()
    numeric = [fallback for report in reports for fallback in report.fallbacks]
    pending.fallbacks = [*calibration_fallbacks(plan), *numeric]
    for fallback in numeric:
        reporter.warn(f"{fallback.where}: {fallback.done} instead of {fallback.asked}: {fallback.reason}.")


def check_finite(reader: CheckpointReader) -> None:
    for name in reader.names:
        if not is_finite(reader.tensor(name)):
            raise Refused(f"{reader.path}: tensor {name!r} holds NaN or infinity; the model is damaged.")
