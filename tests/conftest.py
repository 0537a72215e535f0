"""Settings that all tests share."""

import pytest
from hypothesis import settings

# No deadlines: how long an example takes says more of the machine than of the code. The same examples on
# every run, so that a change is never blamed for a failure that it did not cause.
settings.register_profile("bitsmith", deadline=None, derandomize=True)
settings.load_profile("bitsmith")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sanitize",
        action="store_true",
        help="tests of operators run on a build with sanitizers (`make asan` preloads their runtime)",
    )
