"""`--until-gate`: the smallest model found that passes a gate, by trying mixed-precision budgets.

Each try is a whole chain of its own below `tries/`: quantized within a budget, compiled, and judged by the
engine's own numbers. What bits cost is measured by the first try, for all. Of the tries only the smallest
passing one keeps its weights; it becomes the run's own checkpoint and engine, its report holds the ladder.
"""

import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bitsmith.compile.job import compile_engine, plan_compile
from bitsmith.core.artifact import find_finished, write_artifact
from bitsmith.core.digest import canonical_json, sha256_bytes
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.core.model_ref import source_digest
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import QualityReport
from bitsmith.core.recipe import Recipe
from bitsmith.core.scheme import parse_scheme_name
from bitsmith.evaluate.job import artifact_spec
from bitsmith.evaluate.ladder import LadderTry, with_ladder
from bitsmith.evaluate.measurement import finite_or_none
from bitsmith.evaluate.report import read_report, write_report_files
from bitsmith.pipeline.chain import ChainPlan, artifact_bytes, plan_chain
from bitsmith.pipeline.command_evaluate import finished_or_evaluated
from bitsmith.pipeline.command_quantize import finished_or_quantized
from bitsmith.pipeline.contenders import ContenderSource
from bitsmith.pipeline.ladder_record import drop_weights, move_weights, read_tries, write_tries
from bitsmith.pipeline.rung_search import smallest_passing
from bitsmith.quantize.bit_plan import BIT_PLAN_NAME
from bitsmith.quantize.bit_planning import measurement_key

RUNG_BITS = 0.25
_EVERYTHING = 32.0  # bits: a budget that any plan is within
_TRIES = "tries"


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """recipe: with the gate, without a budget. rungs: budgets in bits, from small to large. key: of all that
    a try's verdict depends on, its budget aside."""

    recipe: Recipe
    root: Path
    rungs: tuple[float, ...]
    key: str
    accept_terms: bool


def plan_ladder(
    recipe: Recipe, gate: Path, root: Path, reporter: Reporter, *, accept_terms: bool
) -> LadderPlan:
    """Everything that a try needs is checked, and the gate read. Raises Refused; writes nothing."""
    _check_recipe(recipe)
    if recipe.evaluate.gate is not None:
        reporter.say(f"The gate is {gate}, as --until-gate says; the recipe's own is not used.")
    recipe = replace(recipe, evaluate=replace(recipe.evaluate, gate=str(gate)))
    chain = plan_chain(_within(recipe, _EVERYTHING), root, reporter, accept_terms=accept_terms)
    budget = chain.quantize_plan.budget
    assert budget is not None
    low, high = (8 * size / budget.num_weights for size in (budget.smallest_bytes, budget.largest_bytes))
    first, last = math.ceil(low / RUNG_BITS), math.ceil(high / RUNG_BITS)
    rungs = tuple(step * RUNG_BITS for step in range(first, last + 1))
    reporter.say(
        f"ladder: {len(rungs)} budgets from {rungs[0]:g} to {rungs[-1]:g} bits a weight, at most "
        f"{math.ceil(math.log2(len(rungs) + 1))} tries"
    )
    return LadderPlan(recipe, root, rungs, _key(chain), accept_terms)


def climb(plan: LadderPlan, reporter: Reporter) -> tuple[list[LadderTry], LadderTry | None]:
    """(tries in the order in which they were made, the smallest that passes). None on record is redone."""
    tries = read_tries(plan.root, plan.key)

    def passes(rung: int) -> bool:
        made = next((made for made in tries if made.bits_budget == plan.rungs[rung]), None)
        if made is None:
            made = _try(plan, plan.rungs[rung], reporter)
            tries.append(made)
            write_tries(plan.root, plan.key, tries)
            best = min((made.bits_budget for made in tries if made.passes), default=None)
            for other in tries:
                if other.bits_budget != best:
                    drop_weights(_directory(plan, other.bits_budget))
        reporter.say(f"ladder: {made.bits_budget:g} bits a weight: {made.verdict}")
        return made.passes

    rung = smallest_passing(len(plan.rungs), passes)
    best = None if rung is None else next(t for t in tries if t.bits_budget == plan.rungs[rung])
    return tries, best


def publish(
    plan: LadderPlan, tries: list[LadderTry], best: LadderTry | None, reporter: Reporter
) -> tuple[ChainPlan, QualityReport]:
    """The smallest passing try becomes the run's own, with the ladder in its report. Where none passes, the
    report is that of the largest try, and there is no engine."""
    shown = best or max(tries, key=lambda made: made.bits_budget)
    chain = plan_chain(_within(plan.recipe, shown.bits_budget), plan.root, Reporter(quiet=True))
    if best is not None:
        directory = _directory(plan, best.bits_budget)
        move_weights(directory, plan.root)
        if find_finished(chain.quantize_job.out, chain.quantize_plan.stage_key) is None:
            _try(plan, best.bits_budget, reporter)  # another run took their place: made again, the same
            move_weights(directory, plan.root)
    report = with_ladder(read_report(_directory(plan, shown.bits_budget) / "report"), tries)
    parents = read_manifest(_directory(plan, shown.bits_budget) / "report").parents
    spec = artifact_spec(chain.evaluate_plan, parents["candidate"], parents["baseline"])
    if not _holds(chain.evaluate_plan.job.out, spec.stage_key, report):
        with write_artifact(spec) as pending:
            write_report_files(pending.partial, report)
            pending.details["verdict"] = str(shown.verdict)
    return chain, report


def _check_recipe(recipe: Recipe) -> None:
    section = recipe.quantize
    for name in ("bits_budget", "size_budget"):
        if getattr(section, name) is not None:
            raise Refused(
                f"quantize.{name} is {getattr(section, name)}, and --until-gate looks for the budget "
                "by itself. Leave one of them out."
            )
    method = parse_scheme_name(section.scheme)[1]
    if method not in ("rtn", "gptq", "awq", "awq-gptq"):
        raise Refused(
            f"--until-gate gives modules different widths of integers, and quantize.scheme {section.scheme} "
            "has none to choose from. Use a scheme such as w4a16-gptq."
        )


def _within(recipe: Recipe, bits: float) -> Recipe:
    return replace(recipe, quantize=replace(recipe.quantize, bits_budget=bits))


def _directory(plan: LadderPlan, bits: float) -> Path:
    return plan.root / _TRIES / f"{bits:05.2f}"


def _key(chain: ChainPlan) -> str:
    evaluate = artifact_spec(chain.evaluate_plan, "candidate", source_digest(chain.source.path))
    parts = {
        "measurements": measurement_key(chain.quantize_plan),
        "baseline": plan_compile(chain.baseline_job).stage_key,
        "compile": asdict(chain.recipe.compile),
        "evaluate": evaluate.stage_key,
    }
    return sha256_bytes(canonical_json(parts))


def _try(plan: LadderPlan, bits: float, reporter: Reporter) -> LadderTry:
    directory = _directory(plan, bits)
    chain = plan_chain(_within(plan.recipe, bits), directory, reporter, accept_terms=plan.accept_terms)
    measured = plan.root / _TRIES / f"{measurement_key(chain.quantize_plan)}.json"
    known = measured if measured.is_file() else None
    job = replace(chain.quantize_job, measured=known)
    checkpoint = finished_or_quantized(chain.backend, job, chain.quantize_plan, reporter)
    if known is None:
        shutil.copyfile(job.out / BIT_PLAN_NAME, measured)
    compile_engine(chain.engine_job, plan_compile(chain.engine_job), reporter)
    report = finished_or_evaluated(
        chain.evaluate_plan,
        ContenderSource(chain.engine_job.out, chain.engine_title),
        ContenderSource(chain.source.path, chain.source.name),
        reporter,
    )
    assert report.verdict is not None
    values = {metric.name: metric.value for metric in report.metrics}
    return LadderTry(
        bits_budget=bits,
        bits=checkpoint.details["bit_plan"]["average_bits"],
        checkpoint_bytes=artifact_bytes(job.out),
        engine_bytes=artifact_bytes(chain.engine_job.out),
        verdict=report.verdict,
        metrics={rule.metric: finite_or_none(values.get(rule.metric, math.nan)) for rule in report.outcomes},
        reasons=tuple(f"{rule.metric}: {rule.reason}" for rule in report.outcomes if rule.verdict != "PASS"),
    )


def _holds(path: Path, stage_key: str, report: QualityReport) -> bool:
    """Whether this report is there already, with this ladder."""
    if find_finished(path, stage_key) is None:
        return False
    return bool(read_report(path).details.get("ladder") == report.details["ladder"])
