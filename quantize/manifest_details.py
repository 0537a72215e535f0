"""What a quantized checkpoint's manifest says of how it was made, whoever quantized it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bitsmith.core.manifest import Fallback
from bitsmith.core.model_files import weight_bytes
from bitsmith.core.progress import Reporter
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan
from bitsmith.quantize.records import LayerReport


def manifest_details(job: QuantizeJob, plan: QuantizePlan, reports: Sequence[LayerReport]) -> dict[str, Any]:
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
        "source_bytes": weight_bytes(job.model.path),
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


def say_calibration(plan: QuantizePlan, reporter: Reporter) -> None:
    """Where the calibration tokens come from, and whether there are fewer than were asked for."""
    windows = plan.windows
    if windows is None:
        return
    if windows.source.is_fallback:
        reporter.say("Calibration: the built-in text, a fallback; give --calibration for real work.")
    for fallback in calibration_fallbacks(plan):
        reporter.warn(f"calibration: {fallback.done} instead of {fallback.asked}: {fallback.reason}.")


def calibration_fallbacks(plan: QuantizePlan) -> list[Fallback]:
    """Fewer rows than asked for, if so."""
    windows = plan.windows
    if windows is None or windows.num_obtained >= windows.num_requested:
        return []
    asked = f"{windows.num_requested} rows of {windows.token_ids.shape[1]} tokens"
    done = f"{windows.num_obtained} rows ({windows.token_ids.numel()} tokens)"
    return [Fallback("calibration", asked, done, f"{windows.source.name} has no more text")]
