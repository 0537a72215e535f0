"""The smallest rung of a ladder that passes, found by halving: each try leaves at most half of the rungs.

Right where a larger rung never fails when a smaller one passes; else what is found still passes, and the rung
below it was tried and did not.
"""

from collections.abc import Callable


def smallest_passing(num_rungs: int, passes: Callable[[int], bool]) -> int | None:
    """Rungs are 0 to num_rungs - 1, from small to large. None: the largest was tried and did not pass."""
    low, high, best = 0, num_rungs - 1, None
    while low <= high:
        middle = (low + high) // 2
        if passes(middle):
            best, high = middle, middle - 1
        else:
            low = middle + 1
    return best
