"""The smallest rung that passes is found, with few tries, each made once."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bitsmith.pipeline.rung_search import smallest_passing


@given(st.integers(1, 200), st.data())
def test_where_larger_rungs_pass_too_the_smallest_is_found(num_rungs: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num_rungs))
    tried: list[int] = []

    def passes(rung: int) -> bool:
        tried.append(rung)
        return rung >= first

    assert smallest_passing(num_rungs, passes) == (None if first == num_rungs else first)
    assert len(tried) == len(set(tried)) <= math.ceil(math.log2(num_rungs + 1))


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_what_is_found_passes_and_nothing_is_given_up_untried(verdicts: list[bool]) -> None:
    tried: list[int] = []

    def passes(rung: int) -> bool:
        tried.append(rung)
        return verdicts[rung]

    found = smallest_passing(len(verdicts), passes)
    if found is None:
        assert not any(verdicts[rung] for rung in tried) and len(verdicts) - 1 in tried
    else:
        assert verdicts[found] and (found == 0 or found - 1 in tried)
