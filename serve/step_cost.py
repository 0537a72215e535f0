"""How a step's time grows with its tokens: what one more row costs, relative to an empty step.

seconds ≈ fixed × (1 + row_cost × tokens), fitted by least squares over the recent steps, older ones fading.
"""

_PRIOR_ROW_COST = 0.2  # measured on an AVX2 processor with a 135M model at 4 bits; only the first guess
_PRIOR_WEIGHT = 4.0
_DECAY = 0.98
_OUTLIER = 1.5  # a step that took so many times what was expected was disturbed; it counts as this much
_MIN_ROW_COST, _MAX_ROW_COST = 0.005, 2.0


class StepCost:
    """Fed with steps that decode; prefill steps are of another kind."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = 0.0

    @property
    def row_cost(self) -> float:
        fixed, slope = self._fit()
        if fixed <= 0:
            return _MAX_ROW_COST
        return min(max(slope / fixed, _MIN_ROW_COST), _MAX_ROW_COST)

    def observe(self, num_tokens: int, seconds: float) -> None:
        if self._weight == 0:
            fixed = seconds / (1 + _PRIOR_ROW_COST * num_tokens)
            for prior_tokens in (1, 16):
                self._add(prior_tokens, fixed * (1 + _PRIOR_ROW_COST * prior_tokens), _PRIOR_WEIGHT)
        fixed, slope = self._fit()
        expected = max(fixed + slope * num_tokens, 0.0)
        self._weight *= _DECAY
        self._x *= _DECAY
        self._y *= _DECAY
        self._xx *= _DECAY
        self._xy *= _DECAY
        self._add(num_tokens, min(seconds, _OUTLIER * expected) if expected else seconds, 1.0)

    def _add(self, x: float, y: float, weight: float) -> None:
        self._weight += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y

    def _fit(self) -> tuple[float, float]:
        """(fixed seconds, seconds per token). Without a spread of sizes the guess's ratio is kept."""
        if self._weight == 0:
            return 1.0, _PRIOR_ROW_COST
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if variance < 1e-3:
            fixed = mean_y / (1 + _PRIOR_ROW_COST * mean_x)
            return fixed, fixed * _PRIOR_ROW_COST
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        return mean_y - slope * mean_x, slope
