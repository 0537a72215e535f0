"""From a budget to a plan: what bits cost is measured, or known already; the plan is solved and kept."""

from pathlib import Path
from typing import Any

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.digest import stage_key
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.quantize.allocation import Unit, smallest_bytes
from bitsmith.quantize.bit_plan import BitPlan, read_units
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan
from bitsmith.quantize.resume_state import ResumeState
from bitsmith.quantize.sensitivity import SensitivityMeter, SensitivitySettings

STATE_NAME = "sensitivity-state"


def make_bit_plan(
    job: QuantizeJob, plan: QuantizePlan, reader: CheckpointReader, partial: Path, reporter: Reporter
) -> BitPlan:
    """Written to `partial`. Layers that were measured before an interruption are not measured again."""
    assert plan.budget is not None
    key = measurement_key(plan)
    units = _taken_over(job.measured, key)
    if units is None:
        units = _measured(plan, reader, ResumeState(partial, {"measurements": key}, STATE_NAME), reporter)
    least = smallest_bytes(units)
    if least > plan.budget.limit_bytes:
        raise WorkFailed(
            f"{plan.budget.budget} cannot be met: modules that the model's forward never calls keep the "
            f"scheme's {plan.scheme.num_bits} bits, so that the least is "
            f"{8 * least / plan.budget.num_weights:.3f} bits a weight. Give a larger budget."
        )
    bit_plan = BitPlan.of(key, units, plan.budget.limit_bytes)
    bit_plan.write(partial)
    for line in describe_bit_plan(bit_plan.summary()):
        reporter.say(line)
    return bit_plan


def measurement_key(plan: QuantizePlan) -> str:
    """Of everything that measurements depend on: not the budget itself."""
    assert plan.budget is not None
    config: dict[str, Any] = {**plan.config, "budget": plan.budget.config()["choices"]}
    return stage_key(list(plan.parents.values()), config, plan.versions)


def describe_bit_plan(summary: dict[str, Any]) -> list[str]:
    """The table of a plan, as `BitPlan.summary` has it."""
    uniform = summary["best_uniform"]
    beside = "" if uniform is None else f"; of {uniform['choice']} throughout {uniform['error']:.3g}"
    lines = [
        f"bit plan: {summary['average_bits']:.3f} bits a weight, scales counted "
        f"({summary['num_bytes'] / 1e6:.2f} of {summary['limit_bytes'] / 1e6:.2f} MB), expected error "
        f"{summary['error']:.3g}{beside}"
    ]
    num_weights = sum(part["num_weights"] for part in summary["parts"])
    lines += [
        f"  {part['choice']}: {part['num_modules']} modules, {part['num_weights'] / num_weights:.1%} of "
        f"weights, {part['num_bytes'] / 1e6:.2f} MB ({', '.join(part['kinds'])})"
        for part in summary["parts"]
    ]
    return lines


def _taken_over(path: Path | None, key: str) -> list[Unit] | None:
    if path is None:
        return None
    found, units = read_units(path)
    if found != key:
        raise Refused(f"{path} was measured for another model, or with other settings. Leave it out.")
    return units


def _measured(
    plan: QuantizePlan, reader: CheckpointReader, state: ResumeState, reporter: Reporter
) -> list[Unit]:
    assert plan.budget is not None and plan.windows is not None
    settings = SensitivitySettings(plan.scheme, plan.selection.shapes, plan.budget.choices, plan.scale_dtype)
    meter = SensitivityMeter(DecoderStack(reader), settings, plan.windows.token_ids)
    return meter.run(state, reporter)
