"""A resolved scheme in words: what a terminal shows and what titles a report."""

from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.budget import BudgetPlan


def describe_scheme(scheme: QuantizationScheme, budget: BudgetPlan | None = None) -> str:
    """The scheme's name and what its settings came to."""
    if scheme.method is None:
        return scheme.name
    if scheme.method == "fp8":
        weights = "tensor" if scheme.activation_scale == "tensor" else "output channel"
        inputs = "a calibrated scale" if scheme.activation_scale == "tensor" else "a scale for each token"
        return f"{scheme.name}, one weight scale per {weights}, inputs with {inputs}"
    if scheme.method == "smoothquant":
        inputs = "a calibrated scale" if scheme.activation_scale == "tensor" else "a scale for each token"
        return f"{scheme.name}, SmoothQuant, one weight scale per output channel, inputs with {inputs}"
    grid = "symmetric" if scheme.symmetric else "asymmetric"
    order = ", act order" if scheme.act_order else ""
    refined = f", refined in {scheme.refine_steps} steps" if scheme.refine_steps else ""
    if budget is not None:
        choices = "; ".join(map(str, budget.choices))
        return f"{scheme.name} within {budget.budget} ({choices}), {grid}{order}{refined}"
    return f"{scheme.name}, group size {scheme.group_size}, {grid}{order}{refined}"
