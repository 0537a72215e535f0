"""The operator library, built once (the user's cache keeps it) and loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsmith.core.progress import Reporter
from bitsmith.ops.isa import FORM_ISA, cpu_flags
from bitsmith.ops.library import COMPILE_FLAGS, SANITIZER_FLAGS, build_operators, load_operators

# Those that this processor can run.
FORMS = tuple(form for form, needed in FORM_ISA.items() if needed <= cpu_flags())


@pytest.fixture(scope="session")
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Of the compiler, for the library that is tested."""
    return (*COMPILE_FLAGS, *SANITIZER_FLAGS) if request.config.getoption("--sanitize") else COMPILE_FLAGS


@pytest.fixture(scope="session")
def library(flags: tuple[str, ...]) -> Path:
    path = build_operators(Reporter(quiet=True), flags)
    load_operators(path)
    return path


@pytest.fixture(autouse=True)
def one_thread(library: Path) -> Iterator[None]:
    """Small products on a busy machine are fastest so; `two_threads` overrides it."""
    usual, operators = torch.get_num_threads(), torch.ops.bitsmith
    torch.set_num_threads(1)
    operators.set_num_threads(1)
    yield
    torch.set_num_threads(usual)
    operators.set_num_threads(0)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    torch.ops.bitsmith.set_num_threads(2)


@pytest.fixture
def ops(library: Path) -> Any:
    """The operators in the form that this machine would use."""
    return torch.ops.bitsmith


@pytest.fixture(params=FORMS)
def form(library: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The operators in each form that this build has."""
    operators: Any = torch.ops.bitsmith
    usual = operators.active_form()
    try:
        operators.select_form(request.param)
    except ValueError:
        pytest.skip(f"this build has no form {request.param}")
    yield operators
    operators.select_form(usual)
