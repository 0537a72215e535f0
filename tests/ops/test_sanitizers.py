"""With --sanitize, what `make asan` is for is caught: a read beyond a tensor's memory, and overflow."""

import subprocess
import sys
from pathlib import Path

import pytest

from bitsmith.ops.library import SANITIZER_FLAGS, find_compiler

SOURCE = """
extern "C" float beyond(const float* data) { return data[4]; }
extern "C" int overflow(int value) { return value + 1; }
"""
SCRIPT = """
import ctypes, sys, torch
library = ctypes.CDLL(sys.argv[1])
four = torch.zeros(4)
library.beyond(ctypes.c_void_p(four.data_ptr())) if sys.argv[2] == "beyond" else library.overflow(2**31 - 1)
"""


@pytest.mark.parametrize(
    ("fault", "said"), [("beyond", "heap-buffer-overflow"), ("overflow", "signed integer overflow")]
)
def test_a_fault_ends_the_process(
    fault: str, said: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--sanitize"):
        pytest.skip("needs --sanitize: run `make asan`")
    source, library = tmp_path / "faults.cpp", tmp_path / "faults.so"
    source.write_text(SOURCE)
    build = [find_compiler(), "-shared", "-fPIC", *SANITIZER_FLAGS, str(source), "-o", str(library)]
    subprocess.run(build, check=True)
    command = [sys.executable, "-c", SCRIPT, str(library), fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert said in done.stderr
