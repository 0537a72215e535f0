"""Preflight of a quantize job: everything that can be refused is refused here, and nothing is written."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bitsmith.core.artifact import partial_path
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.digest import stage_key
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import ModelSource, source_digest
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.core.text_source import TokenWindows
from bitsmith.core.versions import result_versions
from bitsmith.quantize.budget import Budget, BudgetPlan, candidate_choices, check_budget, plan_budget
from bitsmith.quantize.calibration import CalibrationSettings, load_windows, token_digest
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.deployment import Deployment, plan_deployment
from bitsmith.quantize.estimate import Estimate, estimate_run, with_budget
from bitsmith.quantize.gptq_format import gptq_section
from bitsmith.quantize.layer_refiner import rows_per_step
from bitsmith.quantize.modelopt_config import modelopt_section
from bitsmith.quantize.packed_format import (
    FormatName,
    check_modules_fit,
    check_scheme_fits,
    grid_settings,
    packed_format,
)
from bitsmith.quantize.scheme_checks import check_scheme, needs_calibration
from bitsmith.quantize.selection import Selection, resolve_group_size, select_modules


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """What a user asks for. resume: go on with an unfinished run at `out`. deployment None: for no target.
    format None: the backend's own. budget: modules get different widths within it. measured: a bit plan of
    the same model and settings, whose measurements are taken over; it changes no result."""

    model: ModelSource
    scheme: QuantizationScheme
    calibration: CalibrationSettings
    out: Path
    resume: bool = False
    deployment: Deployment | None = None
    format: FormatName | None = None
    budget: Budget | None = None
    measured: Path | None = None

    @property
    def needs_calibration(self) -> bool:
        return self.budget is not None or needs_calibration(self.scheme)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What the job came to: no "auto" is left. windows: None where no calibration is needed.
    format: how weights are packed, where they are by this program."""

    scheme: QuantizationScheme
    selection: Selection
    scale_dtype: torch.dtype
    windows: TokenWindows | None
    estimate: Estimate
    parents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    format: FormatName = "compressed-tensors"
    budget: BudgetPlan | None = None

    @property
    def stage_key(self) -> str:
        return stage_key(list(self.parents.values()), self.config, self.versions)


def plan_quantize(job: QuantizeJob) -> QuantizePlan:
    """Raises Refused, in seconds, for whatever would make the job fail or do less than asked."""
    check_scheme(job.scheme)
    form = job.format or "compressed-tensors"
    check_scheme_fits(form, job.scheme)
    if job.budget is not None:
        check_budget(job.budget, job.scheme, form, job.deployment)
    _check_out(job)
    reader, stack = open_original(job.model.path)
    if job.needs_calibration:
        check_seq_len(job.calibration, reader)
    selection = select_modules(stack, reader, job.scheme)
    scheme = job.scheme
    if job.deployment is not None:
        scheme = plan_deployment(job.deployment, scheme, selection.shapes, reader.config)
    scheme = _resolve_act_order(resolve_group_size(scheme, selection.shapes))
    check_modules_fit(form, grid_settings(scheme), selection.shapes)
    dtype = packed_format(form).scale_dtype or scale_dtype(reader, selection)
    budget = None
    if job.budget is not None:
        choices = candidate_choices(job.scheme, scheme, job.deployment)
        budget = plan_budget(job.budget, choices, reader, selection.shapes, scheme, dtype)
    windows = load_windows(job.calibration, job.model.path) if job.needs_calibration else None
    _check_refine(scheme, windows)
    num_tokens = 0 if windows is None else windows.token_ids.numel()
    estimate = estimate_run(
        reader, scheme, selection.shapes, num_tokens, stack.num_layers, _tokens_per_step(scheme, windows)
    )
    if budget is not None:
        estimate = with_budget(estimate, budget, selection.shapes)
    check_disk(job.out, estimate)
    return QuantizePlan(
        scheme=scheme,
        selection=selection,
        scale_dtype=dtype,
        windows=windows,
        estimate=estimate,
        parents={"model": source_digest(job.model.path)},
        config=resolved_config(job, scheme, windows)
        | ({} if budget is None else {"budget": budget.config()}),
        versions=result_versions("torch", "transformers", "tokenizers"),
        format=form,
        budget=budget,
    )


def open_original(path: Path) -> tuple[CheckpointReader, DecoderStack]:
    """The model to quantize. Raises Refused where it is quantized already, is not known or lacks weights."""
    reader = CheckpointReader(path)
    quantization = (
        reader.config.get("quantization_config") or modelopt_section(reader) or gptq_section(reader)
    )
    if quantization is not None:
        method = quantization.get("quant_method", "gptq" if "bits" in quantization else "modelopt")
        raise Refused(f"{path} is quantized already, with {method!r}; quantize the original model.")
    stack = DecoderStack(reader)
    missing = stack.missing_names()
    if missing:
        raise Refused(f"{path} lacks {len(missing)} weights of its model, first {missing[0]!r}.")
    return reader, stack


def _resolve_act_order(scheme: QuantizationScheme) -> QuantizationScheme:
    """On for GPTQ unless refused: groups are static, so that it costs nothing at run time."""
    if scheme.act_order is not None:
        return scheme
    return replace(scheme, act_order=scheme.uses_gptq)


def _check_refine(scheme: QuantizationScheme, windows: TokenWindows | None) -> None:
    """Some rows are learned from and others decide whether the result is kept."""
    if scheme.refine_steps and windows is not None and windows.num_obtained < 2:
        raise Refused(
            f"refine needs at least 2 calibration rows and has {windows.num_obtained}. Give more text, a "
            "larger calibration.num_samples or a smaller calibration.seq_len."
        )


def _tokens_per_step(scheme: QuantizationScheme, windows: TokenWindows | None) -> int:
    if windows is None or not scheme.refine_steps:
        return 0
    return rows_per_step(windows.num_obtained) * windows.token_ids.shape[1]


def _check_out(job: QuantizeJob) -> None:
    partial = partial_path(job.out)
    if partial.exists() and not job.resume:
        raise Refused(
            f"There is an unfinished run in {partial}. Go on with it by --resume, or remove it to start over."
        )
    check_out_is_apart(job)


def check_out_is_apart(job: QuantizeJob) -> None:
    inside = job.out.resolve()
    if inside == job.model.path.resolve() or inside in job.model.path.resolve().parents:
        raise Refused(f"--out {job.out} is the model's own directory, or holds it; choose another.")


def check_seq_len(calibration: CalibrationSettings, reader: CheckpointReader) -> None:
    longest = reader.config.get("max_position_embeddings")
    if isinstance(longest, int) and calibration.seq_len > longest:
        raise Refused(
            f"calibration.seq_len is {calibration.seq_len}; the model takes at most {longest} tokens."
        )


def check_disk(out: Path, estimate: Estimate) -> None:
    existing = next(parent for parent in (out, *out.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < estimate.disk_bytes:
        raise Refused(
            f"{existing} has {free / 1e9:.1f} GB free; this run needs about "
            f"{estimate.disk_bytes / 1e9:.1f} GB ({estimate.output_bytes / 1e9:.1f} GB is the result)."
        )


def scale_dtype(reader: CheckpointReader, selection: Selection) -> torch.dtype:
    """Scales are stored in the weights' own type, as other tools do."""
    dtypes = {reader.dtype(f"{name}.weight") for name in selection.shapes}
    unknown = dtypes - {torch.float32, torch.bfloat16, torch.float16}
    if unknown:
        raise Refused(
            f"Weights of type {', '.join(map(str, unknown))} cannot be quantized; use bf16, fp16 or fp32."
        )
    # Where modules differ, the narrowest would lose range or digits that another has: take fp32.
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def resolved_config(
    job: QuantizeJob, scheme: QuantizationScheme, windows: TokenWindows | None
) -> dict[str, Any]:
    target: dict[str, Any] = {} if job.deployment is None else {"deployment": job.deployment.to_json()}
    if job.format not in (None, "compressed-tensors"):
        target["format"] = job.format
    if windows is None:
        return {"scheme": asdict(scheme), "calibration": None} | target
    calibration = {
        **asdict(job.calibration),
        "source": windows.source.name,
        "token_digest": token_digest(windows.token_ids),
        "num_obtained": windows.num_obtained,
    }
    return {"scheme": asdict(scheme), "calibration": calibration} | target
