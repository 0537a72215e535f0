"""The whole chain from one recipe: everything is checked first, then each stage runs or is found finished.

Directories below `root`: quantized, engine, baseline-engine (the unquantized model by the same compiler,
for speed), report.
"""

from dataclasses import dataclass
from pathlib import Path

from bitsmith.compile.engine import Engine
from bitsmith.compile.job import CompileJob, plan_compile
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.core.model_files import weight_bytes
from bitsmith.core.model_ref import ModelSource, resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import QualityReport, Verdict
from bitsmith.core.recipe import Recipe
from bitsmith.core.recipe_sections import QuantizeSection
from bitsmith.core.scheme import (
    QuantizationScheme,
    parse_scheme_name,
    resolve_int8_inputs,
    resolve_refine_steps,
)
from bitsmith.core.text_source import load_text
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.evaluate.job import EvaluateJob, EvaluatePlan, plan_evaluate
from bitsmith.evaluate.quick_suite import QuickSettings
from bitsmith.evaluate.task_files import TaskSettings
from bitsmith.pipeline.chain_summary import (
    ChainSummary,
    Pair,
    read_summary,
    summary_key,
    write_summary,
)
from bitsmith.pipeline.command_evaluate import finished_or_evaluated
from bitsmith.pipeline.command_quantize import finished_or_quantized, make_deployment, say_plan
from bitsmith.pipeline.contenders import ContenderSource
from bitsmith.pipeline.decode_speed import check_context, measure_decode_speed
from bitsmith.pipeline.engine_pair import compile_pair
from bitsmith.pipeline.scheme_text import describe_scheme
from bitsmith.pipeline.serve_check import ask_served_engine
from bitsmith.quantize.backend import Backend, choose_backend
from bitsmith.quantize.budget import read_budget
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.kv_scales import KV_GRID_END
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A recipe that passed every check that can be made before the first long step."""

    recipe: Recipe
    root: Path
    source: ModelSource
    backend: Backend
    quantize_job: QuantizeJob
    quantize_plan: QuantizePlan
    evaluate_plan: EvaluatePlan

    @property
    def engine_title(self) -> str:
        return f"{self.source.name}, {describe_scheme(self.quantize_plan.scheme, self.quantize_plan.budget)}"

    @property
    def engine_job(self) -> CompileJob:
        settings = self.recipe.compile
        return CompileJob(
            checkpoint=self.root / "quantized",
            out=self.root / "engine",
            kv_cache=settings.kv_cache,
            activations=settings.activations,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_model_len=settings.max_model_len,
            kv_scale=settings.kv_scale,
            num_threads=settings.num_threads,
            lm_head=settings.lm_head,
        )

    @property
    def baseline_job(self) -> CompileJob:
        """The unquantized model with the same limits, bf16 weights and bf16 KV cache."""
        settings = self.recipe.compile
        return CompileJob(
            checkpoint=self.source.path,
            out=self.root / "baseline-engine",
            kv_cache="bf16",
            activations="bf16",
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_model_len=settings.max_model_len,
            num_threads=settings.num_threads,
        )


def plan_chain(recipe: Recipe, root: Path, reporter: Reporter, *, accept_terms: bool = False) -> ChainPlan:
    """Fetch the model and check all stages. Raises Refused before anything is written below `root`."""
    backend = choose_recipe_backend(recipe.quantize)
    source = resolve_model(recipe.model, reporter=reporter, accept_terms=accept_terms)
    evaluate_plan = _plan_evaluate(recipe, root, source)
    quantize_job = _quantize_job(recipe, root, source, resume=backend.can_resume)
    quantize_plan = backend.plan(quantize_job)
    plan = ChainPlan(recipe, root, source, backend, quantize_job, quantize_plan, evaluate_plan)
    _check_kv_cache(recipe)
    check_context(plan_compile(plan.baseline_job).limits.max_model_len)
    say_plan(plan.quantize_plan, reporter)
    return plan


def run_chain(plan: ChainPlan, reporter: Reporter) -> tuple[ChainSummary, QualityReport]:
    """Run or reuse every stage, then measure what is asked of the finished engines."""
    finished_or_quantized(plan.backend, plan.quantize_job, plan.quantize_plan, reporter)
    compile_pair(plan.engine_job, plan.baseline_job, reporter)
    engine = ContenderSource(plan.engine_job.out, plan.engine_title)
    baseline = ContenderSource(plan.source.path, plan.source.name)
    report = finished_or_evaluated(plan.evaluate_plan, engine, baseline, reporter)
    key = _summary_key(plan)
    summary = read_summary(plan.root, key)
    if summary is not None:
        reporter.say("speed and serving: measured already; nothing redone")
        return summary, report
    summary = _measure(plan, report, key, reporter)
    write_summary(plan.root, summary)
    return summary, report


def choose_recipe_backend(section: QuantizeSection) -> Backend:
    """Raises Refused for a scheme that it does not do, or that the native engine cannot run afterwards."""
    backend, scheme = choose_backend(section.backend, section.backend_python), _scheme(section)
    backend.check(scheme)
    if section.backend == "modelopt" and scheme.moves_scales:
        raise Refused(
            f"quantize.backend modelopt with {scheme.name}: inputs are multiplied by scales of their own, "
            "which the native engine does not apply. Set quantize.backend: bitsmith, or take an FP8 scheme."
        )
    return backend


def _scheme(section: QuantizeSection) -> QuantizationScheme:
    num_bits, method = parse_scheme_name(section.scheme)
    return QuantizationScheme(
        name=section.scheme,
        num_bits=num_bits,
        method=method,
        group_size=section.group_size,
        symmetric=section.symmetric,
        act_order=section.act_order,
        kv_cache=section.kv_cache,
        refine_steps=resolve_refine_steps(section.refine, section.refine_steps),
        int8_inputs=resolve_int8_inputs(section.scheme, section.activation_scale),
    )


def _quantize_job(recipe: Recipe, root: Path, source: ModelSource, *, resume: bool) -> QuantizeJob:
    section = recipe.quantize
    calibration = CalibrationSettings(
        section.calibration.source,
        section.calibration.num_samples,
        section.calibration.seq_len,
        section.calibration.seed,
    )
    deployment = make_deployment(section.target, section.tensor_parallel)
    out = root / "quantized"
    return QuantizeJob(
        source,
        _scheme(section),
        calibration,
        out,
        resume=resume,
        deployment=deployment,
        format=section.format,
        budget=read_budget(section.bits_budget, section.size_budget),
    )


def _plan_evaluate(recipe: Recipe, root: Path, source: ModelSource) -> EvaluatePlan:
    section = recipe.evaluate
    quick = QuickSettings(section.num_windows, section.seq_len, section.num_cloze_items, section.seed)
    tasks = TaskSettings(
        tasks=section.tasks, limit=section.task_limit, allow_task_code=section.allow_task_code
    )
    job = EvaluateJob(
        out=root / "report",
        quick=quick,
        tasks=tasks if section.tasks else None,
        gate=Path(section.gate) if isinstance(section.gate, str) else section.gate,
    )
    return plan_evaluate(job, load_tokenizer(source.path), load_text(section.source, "evaluation"))


def _check_kv_cache(recipe: Recipe) -> None:
    """What compile would refuse after the quantization, refused now."""
    kv_cache = recipe.compile.kv_cache
    needs_scales = kv_cache in KV_GRID_END and recipe.compile.kv_scale == "calibrated"
    if needs_scales and recipe.quantize.kv_cache == "none":
        raise Refused(
            f"compile.kv_cache is {kv_cache}, but quantize.kv_cache calibrates no scales for it. "
            f"Set quantize.kv_cache: {kv_cache}, or compile.kv_scale: ones."
        )


def _summary_key(plan: ChainPlan) -> str:
    digests = [
        read_manifest(plan.root / name).content_digest for name in ("engine", "baseline-engine", "report")
    ]
    serve = plan.recipe.serve
    return summary_key({"artifacts": digests, "serve": [serve.speculate, serve.host, serve.port]})


def _measure(plan: ChainPlan, report: QualityReport, key: str, reporter: Reporter) -> ChainSummary:
    engine, baseline = Engine.load(plan.engine_job.out), Engine.load(plan.baseline_job.out)
    reporter.say("measuring decode speed: one stream, 256-token prompt, 128 new tokens, median of 3")
    speed = measure_decode_speed({"baseline": baseline, "engine": engine})
    served = ""
    if report.verdict is not Verdict.FAIL:
        served = ask_served_engine(plan.engine_job.out, plan.recipe.serve.speculate, reporter)
    metrics = {metric.name: metric.value for metric in report.metrics}
    serve = plan.recipe.serve
    return ChainSummary(
        key=key,
        verdict=None if report.verdict is None else str(report.verdict),
        report=str(plan.root / "report" / "report.html"),
        serve_command=f"bitsmith serve {plan.engine_job.out} --speculate {serve.speculate} "
        f"--host {serve.host} --port {serve.port}",
        size_bytes=Pair(weight_bytes(plan.source.path), artifact_bytes(plan.engine_job.out)),
        perplexity=Pair(metrics["baseline_perplexity"], metrics["perplexity"]),
        decode_tokens_per_s=Pair(speed["baseline"].tokens_per_s, speed["engine"].tokens_per_s),
        gigabytes_per_s=Pair(speed["baseline"].gigabytes_per_s, speed["engine"].gigabytes_per_s),
        baseline=baseline.arithmetic,
        engine=engine.arithmetic,
        served=served,
    )


def artifact_bytes(directory: Path) -> int:
    """Of the files that the manifest lists."""
    return sum((directory / name).stat().st_size for name in read_manifest(directory).files)
