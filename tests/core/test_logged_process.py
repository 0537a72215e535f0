"""Another program's lines on the terminal and in a log; its failure; its end when nobody waits for it."""

import os
import sys
import time
from pathlib import Path

import pytest

from bitsmith.core.errors import WorkFailed
from bitsmith.core.logged_process import run_logged
from bitsmith.core.progress import Reporter


class Listener(Reporter):
    """Keeps what is said; raises at the line `stop`."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
        if text == "stop":
            raise KeyboardInterrupt


def run(code: str, log: Path, listener: Listener, **variables: str) -> None:
    run_logged((sys.executable, "-I", "-c", code), log, listener, variables=variables)


def test_lines_of_both_streams_reach_the_terminal_and_the_log(tmp_path: Path) -> None:
    code = "import os, sys; print('one', flush=True); print(os.environ['TWO'], file=sys.stderr)"
    listener = Listener()
    run(code, tmp_path / "log", listener, TWO="2")
    assert listener.lines == ["one", "2"]
    assert (tmp_path / "log").read_text() == "one\n2\n"


def test_a_failure_tells_the_exit_code_and_the_last_lines_only(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match=r"exit code 3\. Its last lines:\nline 16\n") as failure:
        run("for i in range(31): print(f'line {i}')\nraise SystemExit(3)", tmp_path / "log", Listener())
    assert str(failure.value).endswith("line 30")
    assert (tmp_path / "log").read_text().startswith("line 0\n")


def test_a_program_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match="cannot be started"):
        run_logged((str(tmp_path / "nothing"),), tmp_path / "log", Listener())


def test_its_standard_input_ends_only_with_the_caller(tmp_path: Path) -> None:
    listener = Listener()
    code = "import os, select; print(select.select([0], [], [], 0.2)[0]); print(os.isatty(0))"
    run(code, tmp_path / "log", listener)
    assert listener.lines == ["[]", "False"]


def test_an_interrupt_kills_it(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid()); print('stop', flush=True); time.sleep(60)"
    listener = Listener()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(code, tmp_path / "log", listener)
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(listener.lines[0]), 0)
