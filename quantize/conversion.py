"""A quantized checkpoint in another format: the same integers and scales, packed anew, or a refusal.

Lossless or not at all: weights dequantized from the result equal those of the source bit for bit, and another
process proves it before the result counts.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.artifact import ArtifactSpec, read_finished, write_artifact
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.digest import stage_key
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.core.model_ref import ModelSource, source_digest
from bitsmith.core.versions import result_versions
from bitsmith.quantize.checkpoint_output import MAX_SHARD_BYTES, copy_side_files, write_settings
from bitsmith.quantize.packed_format import FormatName, GridSettings, check_modules_fit, packed_format
from bitsmith.quantize.reordered_weight import ReorderedWeight
from bitsmith.quantize.reread import reread_in_fresh_process
from bitsmith.quantize.weight import QuantizedWeight, tensor_sha256
from bitsmith.quantize.weight_source import StoredWeight, WeightSource


@dataclass(frozen=True, slots=True)
class ConvertJob:
    """strict: a GPTQ file whose zero-point label its values do not confirm is refused."""

    model: ModelSource
    format: FormatName
    out: Path
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """grid: what all modules of the result share. scale_dtype: of the result, None: as they are."""

    source: WeightSource
    grid: GridSettings
    modules: frozenset[str]
    scale_dtype: torch.dtype | None
    parents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def stage_key(self) -> str:
        return stage_key(list(self.parents.values()), self.config, self.versions)


def plan_convert(job: ConvertJob) -> ConvertPlan:
    """Reads every weight. Raises Refused, naming the tensor, for what the format cannot hold exactly."""
    path = job.model.path
    if job.out.resolve() in (path.resolve(), *path.resolve().parents):
        raise Refused(f"--out {job.out} is the checkpoint's own directory, or holds it; choose another.")
    reader = CheckpointReader(path)
    source = WeightSource(reader, strict=job.strict)
    if job.format != "compressed-tensors" and source.kv_cache_type != "none":
        raise Refused(
            f"{path} has scales for an {source.kv_cache_type} KV cache, for which format {job.format} has no "
            "place. Quantize again with --kv-cache none, or keep the checkpoint as it is."
        )
    survey = _survey(source, job.format)
    check_modules_fit(job.format, survey.grid, survey.shapes)
    config = {"format": job.format, "strict": job.strict, "grid": asdict(survey.grid)}
    return ConvertPlan(
        source=source,
        grid=survey.grid,
        modules=frozenset(survey.shapes),
        scale_dtype=packed_format(job.format).scale_dtype or _model_dtype(reader, survey),
        parents={"checkpoint": source_digest(path)},
        config=config,
        versions=result_versions("torch"),
    )


def convert_checkpoint(job: ConvertJob, plan: ConvertPlan) -> Manifest:
    """The finished artifact at `job.out`. Raises WorkFailed."""
    spec = ArtifactSpec.of(job.out, "quantized-checkpoint", plan)
    form = packed_format(job.format)
    with write_artifact(spec) as pending:
        not_copied = copy_side_files(job.model.path, pending.partial)
        write_settings(plan.source.config, pending.partial, form, plan.grid)
        writer = CheckpointWriter(pending.partial, max_shard_bytes=MAX_SHARD_BYTES)
        expected: dict[str, str] = {}
        for name in plan.source.names:
            module = name.removesuffix(".weight")
            if module not in plan.modules or module == name:
                tensors = {name: plan.source.tensor(name)}
            else:
                weight = _integers(plan.source, module, plan.source.linear(module))
                expected[module] = tensor_sha256(weight.dequantize())
                tensors = form.store(module, _fitted(weight, plan))
            for stored_name, tensor in tensors.items():
                writer.add(stored_name, tensor)
        writer.finish()
        reread_in_fresh_process(pending.partial, expected)
        pending.details = {
            "model": {"name": job.model.name, "origin": dict(job.model.origin)},
            "notes": list(plan.source.notes),
            "num_modules": len(expected),
            "files_not_copied": not_copied,
        }
    return read_finished(job.out, "quantized-checkpoint")


@dataclass(frozen=True, slots=True)
class _Survey:
    """shapes: quantized module -> (out, in). scales_fit: the types that hold every scale exactly."""

    grid: GridSettings
    shapes: Mapping[str, tuple[int, int]]
    scales_fit: frozenset[torch.dtype]


def _survey(source: WeightSource, target: FormatName) -> _Survey:
    needed = packed_format(target).scale_dtype
    shapes: dict[str, tuple[int, int]] = {}
    sizes: set[tuple[int, bool]] = set()  # (group size, whether that is the whole row)
    num_bits: dict[int, str] = {}
    scales_fit = {torch.float16, torch.bfloat16, torch.float32}
    left, symmetric = [], True
    for name in source.names:
        module = name.removesuffix(".weight")
        if module == name or ".layers." not in name:
            continue
        stored = source.linear(module)
        if isinstance(stored, Tensor):
            left += [module] if stored.dim() == 2 else []
            continue
        weight = _integers(source, module, stored)
        scales_fit -= {dtype for dtype in scales_fit if not _holds(weight.scale, dtype)}
        if needed is not None and needed not in scales_fit:
            raise Refused(
                f"{source.path}: a scale of {module} ({weight.scale.dtype}) is not exact in {needed}, the "
                f"only type that format {target} has. Quantize the original model with --format {target}."
            )
        shapes[module] = (weight.out_features, weight.in_features)
        sizes.add((weight.group_size, weight.group_size == weight.in_features))
        num_bits.setdefault(weight.num_bits, module)
        symmetric = symmetric and weight.is_symmetric
    if not shapes:
        raise Refused(f"{source.path} has no integer weights; there is nothing to convert.")
    if len(num_bits) > 1:
        widths = ", ".join(f"{bits} bits ({module})" for bits, module in num_bits.items())
        raise Refused(f"{source.path} has weights of {widths}; modules of one width are converted.")
    is_channel = all(is_row for _, is_row in sizes)
    group_size = None if is_channel else math.gcd(*(size for size, _ in sizes))
    grid = GridSettings(next(iter(num_bits)), group_size, symmetric, left=tuple(left))
    return _Survey(grid, shapes, frozenset(scales_fit))


def _integers(source: WeightSource, module: str, weight: StoredWeight | Tensor) -> QuantizedWeight:
    """weight: the module's, as the source gives it."""
    if isinstance(weight, ReorderedWeight):
        raise Refused(
            f"{source.path}: {module} has groups of columns that are not neighbours (g_idx of act-order "
            "without static groups), which no other format holds. Quantize it again with static groups."
        )
    if not isinstance(weight, QuantizedWeight):
        raise Refused(
            f"{source.path}: {module} is not plain integers: it is FP8, or its inputs are scaled or "
            "quantized too. It has no other format here."
        )
    return weight


def _model_dtype(reader: CheckpointReader, survey: _Survey) -> torch.dtype | None:
    """The model's own type, as which other tools load scales, if it holds all of them."""
    name = reader.config.get("dtype") or reader.config.get("torch_dtype")
    return next((dtype for dtype in survey.scales_fit if str(dtype) == f"torch.{name}"), None)


def _holds(scale: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(scale.to(dtype).double(), scale.double())


def _fitted(weight: QuantizedWeight, plan: ConvertPlan) -> QuantizedWeight:
    """The same real weights on the grid that all modules share."""
    if plan.grid.group_size is not None:
        weight = weight.with_group_size(plan.grid.group_size)
    zero_point = weight.zero_point
    if zero_point is None and not plan.grid.symmetric:
        zero_point = torch.zeros(weight.scale.shape, dtype=torch.int8)
    scale = weight.scale if plan.scale_dtype is None else weight.scale.to(plan.scale_dtype)
    return replace(weight, scale=scale, zero_point=zero_point)
