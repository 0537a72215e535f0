"""Preflight of a quantize job that nvidia-modelopt does: refused here what can be, nothing written."""

import math
from collections.abc import Mapping
from dataclasses import replace

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import source_digest
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.core.versions import result_versions
from bitsmith.quantize.calibration import load_windows
from bitsmith.quantize.deployment import plan_deployment
from bitsmith.quantize.estimate import Estimate, estimate_run
from bitsmith.quantize.modelopt_presets import preset_names
from bitsmith.quantize.plan import (
    QuantizeJob,
    QuantizePlan,
    check_disk,
    check_out_is_apart,
    check_seq_len,
    open_original,
    resolved_config,
    scale_dtype,
)
from bitsmith.quantize.scheme_checks import needs_calibration
from bitsmith.quantize.selection import Selection, resolve_group_size, select_modules

_FP32_BYTES = 4
_LIBRARIES_BYTES = 1 << 30  # torch, transformers and ModelOpt themselves


def plan_modelopt(job: QuantizeJob, versions: Mapping[str, str]) -> QuantizePlan:
    """versions: of ModelOpt and what it runs on. The scheme was checked. Raises Refused."""
    if job.format is not None:
        raise Refused(
            f"format is {job.format!r}; --backend modelopt writes ModelOpt's own. Leave it out, or quantize "
            "with --backend bitsmith."
        )
    if job.budget is not None:
        raise Refused(
            f"{job.budget} with --backend modelopt: it quantizes all modules to one width. Leave the budget "
            "out, or quantize with --backend bitsmith."
        )
    check_out_is_apart(job)
    reader, stack = open_original(job.model.path)
    if needs_calibration(job.scheme):
        check_seq_len(job.calibration, reader)
    selection = select_modules(stack, reader, job.scheme)
    scheme = _resolve(job, selection, reader)
    windows = load_windows(job.calibration, job.model.path) if needs_calibration(scheme) else None
    estimate = _estimate(reader, scheme, selection, stack.num_layers)
    check_disk(job.out, estimate)
    return QuantizePlan(
        scheme=scheme,
        selection=selection,
        scale_dtype=scale_dtype(reader, selection),
        windows=windows,
        estimate=estimate,
        parents={"model": source_digest(job.model.path)},
        config=resolved_config(job, scheme, windows)
        | {"backend": {"name": "modelopt", "presets": list(preset_names(scheme))}},
        versions={**result_versions("transformers", "tokenizers"), **versions},
    )


def _resolve(job: QuantizeJob, selection: Selection, reader: CheckpointReader) -> QuantizationScheme:
    """No "auto" is left. Its scales are amax over the end of the grid, so that none is negative."""
    scheme = replace(job.scheme, signed_scale=False, act_order=False)
    if scheme.name == "w8a16-rtn":
        scheme = replace(scheme, group_size="channel")
    if job.deployment is not None:
        scheme = plan_deployment(job.deployment, scheme, selection.shapes, reader.config)
    return resolve_group_size(scheme, selection.shapes)


def _estimate(
    reader: CheckpointReader, scheme: QuantizationScheme, selection: Selection, num_layers: int
) -> Estimate:
    """ModelOpt holds the whole model in fp32, and what it exports beside it. Its time is not known."""
    ours = estimate_run(reader, scheme, selection.shapes, 0, num_layers, 0)
    model_bytes = _FP32_BYTES * sum(math.prod(reader.shape(name)) for name in reader.names)
    return Estimate(
        output_bytes=ours.output_bytes,
        disk_bytes=ours.output_bytes + model_bytes,  # the result, and the export that it is taken from
        peak_memory_bytes=2 * model_bytes + _LIBRARIES_BYTES,
        seconds=None,
    )
