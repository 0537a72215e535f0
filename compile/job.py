"""Run a planned compile: operators, packed weights, compiled package, parity; then the engine is finished."""

import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from bitsmith.compile.arithmetic import describe_arithmetic
from bitsmith.compile.compile_plan import CompileJob, CompilePlan, plan_compile
from bitsmith.compile.decoder import Decoder
from bitsmith.compile.decoder_plan import PLAN_NAME, DecoderPlan, LinearSpec
from bitsmith.compile.engine import PACKAGE_NAME, PARITY_NAME, TOKENIZER_DIR, Engine, apply_num_threads
from bitsmith.compile.lowering import compile_package
from bitsmith.compile.packing import num_modules, pack_modules
from bitsmith.compile.parity import ParityRecord, measure_parity
from bitsmith.compile.trusted_engines import record_engine
from bitsmith.compile.weight_files import WeightFilesWriter, map_weights
from bitsmith.core.artifact import (
    ArtifactSpec,
    PendingArtifact,
    find_finished,
    read_finished,
    write_artifact,
)
from bitsmith.core.errors import WorkFailed
from bitsmith.core.manifest import Manifest
from bitsmith.core.model_files import resolve_inside
from bitsmith.core.progress import Reporter
from bitsmith.ops.library import LIBRARY_NAME, build_operators, load_operators
from bitsmith.quantize.checkpoint_output import copy_side_files

__all__ = ["CompileJob", "CompilePlan", "compile_engine", "plan_compile"]


def compile_engine(job: CompileJob, plan: CompilePlan, reporter: Reporter) -> Manifest:
    """Write the engine at `job.out`, or find it finished there. Raises WorkFailed beyond a parity limit."""
    finished = find_finished(job.out, plan.stage_key)
    if finished is not None:
        reporter.say(f"{job.out} is finished already, from the same checkpoint and settings; nothing redone.")
        return finished
    _say_plan(plan, reporter)
    library = build_operators(reporter)
    load_operators(library)
    apply_num_threads(job.num_threads)
    spec = ArtifactSpec.of(job.out, "engine", plan)
    with write_artifact(spec) as pending:
        _fill(job, plan, library, pending, reporter)
    manifest = read_finished(job.out, "engine")
    record_engine(manifest.content_digest)
    return manifest


def _say_plan(plan: CompilePlan, reporter: Reporter) -> None:
    for warning in plan.warnings:
        reporter.warn(warning)
    for row in plan.limit_rows:
        model = "" if row.model is None else f", the model allows {row.model}"
        reporter.say(f"{row.name}: {row.resolved} (decided by {row.decided_by}{model})")


def _fill(
    job: CompileJob, plan: CompilePlan, library: Path, pending: PendingArtifact, reporter: Reporter
) -> None:
    directory = pending.partial
    shutil.copyfile(library, directory / LIBRARY_NAME)
    not_copied = _copy_tokenizer(job.checkpoint, directory / TOKENIZER_DIR)
    decoder_plan = _pack(plan, directory, reporter)
    for bits, num_products in _widened(decoder_plan).items():
        reporter.say(
            f"{num_products} products have {bits}-bit weights, packed as 4 bits: the same numbers, in the "
            "memory and at the speed of 4-bit weights."
        )
    (directory / PLAN_NAME).write_text(decoder_plan.to_json(), encoding="utf-8")
    reporter.say("Compiling the decoder ...")
    decoder = Decoder(decoder_plan, map_weights(directory)).eval()
    compile_package(decoder, decoder_plan, directory / PACKAGE_NAME)
    arithmetic = describe_arithmetic(decoder_plan, kv_is_calibrated=plan.kv.are_calibrated)
    reporter.say(f"Comparing the engine ({arithmetic}) with transformers in fp32 ...")
    facts = {"limits": asdict(plan.limits), "arithmetic": arithmetic}
    engine = Engine.from_directory(directory, facts, enforce_eager=False)
    record = measure_parity(engine, plan.source)
    (directory / PARITY_NAME).write_text(record.to_json(), encoding="utf-8")
    _say_parity(record, reporter)
    pending.details = {
        "checkpoint": str(job.checkpoint),
        "asked": _asked(job),
        "arithmetic": arithmetic,
        "limits": [asdict(row) for row in plan.limit_rows],
        "context": plan.decoder.context_reason,
        "kv_bytes_per_token": decoder_plan.kv_bytes_per_token,
        "widened": _widened(decoder_plan),
        "kv_scales": "calibrated" if plan.kv.are_calibrated else "ones",
        "weight_bytes": sum(path.stat().st_size for path in directory.glob("weights-*.safetensors")),
        "parity": {"overall": asdict(record.overall), "limit": asdict(record.limit)},
        "kv_caches": [asdict(row) for row in record.kv_caches],
        "files_not_copied": not_copied,
    }


def _copy_tokenizer(checkpoint: Path, target: Path) -> list[str]:
    """Tokenizer, chat template, generation config and config.json, byte for byte."""
    target.mkdir()
    shutil.copyfile(resolve_inside(checkpoint, "config.json"), target / "config.json")
    return copy_side_files(checkpoint, target)


def _pack(plan: CompilePlan, directory: Path, reporter: Reporter) -> DecoderPlan:
    writer = WeightFilesWriter(directory)
    linears: dict[str, tuple[LinearSpec, ...]] = {}
    modules = pack_modules(plan.source, plan.decoder, plan.activations, plan.lm_head)
    for module in reporter.track(modules, total=num_modules(plan.decoder), label="Packing weights"):
        writer.add(module.tensors)
        if module.specs:
            linears[module.name] = module.specs
    writer.finish()
    return DecoderPlan(plan.decoder, plan.kv.kv_cache, linears, plan.kv.kv_scales)


def _widened(plan: DecoderPlan) -> dict[str, int]:
    """Bits in the checkpoint -> products whose weights have more bits here."""
    bits = [spec.checkpoint_bits for specs in plan.linears.values() for spec in specs]
    return {str(width): number for width, number in sorted(Counter(filter(None, bits)).items())}


def _asked(job: CompileJob) -> dict[str, str]:
    """The settings as they were given, for the line that rebuilds the engine."""
    names = ("kv_cache", "activations", "lm_head", "kv_scale", "max_batch_size", "max_num_tokens")
    asked = {name: str(getattr(job, name)) for name in names}
    for name in ("max_model_len", "num_threads"):
        if getattr(job, name) is not None:
            asked[name] = str(getattr(job, name))
    return asked


def _say_parity(record: ParityRecord, reporter: Reporter) -> None:
    """One line for each phase. Raises WorkFailed beyond the limit."""
    for name, phase in record.phases.items():
        reporter.say(
            f"parity, {name}: max |difference| / max |logit| {phase.max_relative:.2e}, RMS {phase.rms:.2e}, "
            f"KL {phase.kl_mean:.2e} nats/token, top-1 agreement {phase.top1_agreement:.2%} "
            f"({phase.num_rows} rows)"
        )
    for row in record.kv_caches:
        reporter.say(row.describe())
    limit = record.limit
    if not record.is_within_limit:
        raise WorkFailed(
            f"The engine differs too much from its reference: {limit.metric} is {record.decisive:.3e}, "
            f"the limit is {limit.limit:.3g} ({limit.reason}). The engine was not finished."
        )
