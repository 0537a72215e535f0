"""The operators' own threads: as many as asked for, the same bits, callers side by side, forked children."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

COUNT_SCRIPT = """
import sys
from pathlib import Path
import torch
from bitsmith.ops.library import load_operators
load_operators(Path(sys.argv[1]))
ops = torch.ops.bitsmith
torch.set_num_threads(1)
x, weight = torch.randn(64, 512), torch.randn(512, 512)
def run(count):
    ops.set_num_threads(count)
    y = ops.linear_dense(x, weight, None, 0)
    return y, len(list(Path("/proc/self/task").iterdir()))
x @ weight
before = len(list(Path("/proc/self/task").iterdir()))
alone, one = run(1)
together, three = run(3)
again, fewer = run(2)
maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
same = torch.equal(alone, together) and torch.equal(alone, again)
print(len(maps), one - before, three - before, fewer - before, same)
"""

FORK_SCRIPT = """
import os, sys
from pathlib import Path
import torch
from bitsmith.ops.library import load_operators
load_operators(Path(sys.argv[1]))
torch.ops.bitsmith.set_num_threads(2)
x, weight = torch.randn(64, 512), torch.randn(512, 512)
expected = torch.ops.bitsmith.linear_dense(x, weight, None, 0)
child = os.fork()
if child == 0:
    same = torch.equal(torch.ops.bitsmith.linear_dense(x, weight, None, 0), expected)
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_script(script: str, library: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", script, str(library)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_threads_are_as_many_as_asked_for(library: Path) -> None:
    done = run_script(COUNT_SCRIPT, library)
    assert done.stdout.split() == ["1", "0", "2", "2", "True"], done


def test_a_forked_child_has_threads_of_its_own(library: Path) -> None:
    assert run_script(FORK_SCRIPT, library).returncode == 0


def test_the_number_of_threads_is_told_and_checked(ops: Any) -> None:
    ops.set_num_threads(3)
    assert ops.num_threads() == 3
    ops.set_num_threads(0)
    assert ops.num_threads() == torch.get_num_threads()
    with pytest.raises(ValueError, match="-1 threads"):
        ops.set_num_threads(-1)


def test_many_short_jobs_from_several_callers(ops: Any) -> None:
    """Every job's parts are done once, by whichever threads, also while another caller has the pool."""
    ops.set_num_threads(3)
    inputs = [torch.randn(rows, 128) for rows in (40, 60, 80, 100)]
    weight = torch.randn(256, 128)
    expected = [ops.linear_dense(x, weight, None, 0) for x in inputs]

    def repeat(index: int) -> bool:
        return all(
            torch.equal(ops.linear_dense(inputs[index], weight, None, 0), expected[index]) for _ in range(300)
        )

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(repeat, range(len(inputs))))
