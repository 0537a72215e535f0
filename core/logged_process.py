"""Running another program: its lines go to the terminal and to a log as they come."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitsmith.core.errors import WorkFailed
from bitsmith.core.progress import Reporter

_TAIL_LINES = 15


def run_logged(
    command: Sequence[str], log: Path, reporter: Reporter, *, variables: Mapping[str, str] | None = None
) -> None:
    """Run without a shell until it ends. Raises WorkFailed with its last lines when it fails.

    variables: added to this process's environment. Its standard input stays open and empty while this process
    lives, so that a program that reads it learns when its caller is gone. It is killed when this function is
    left by an exception, as by Ctrl-C.
    """
    tail: list[str] = []
    with log.open("a", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(variables or {})},
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise WorkFailed(f"{command[0]} cannot be started: {error.strerror or error}.") from error
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    file.write(line)
                    reporter.say(line.rstrip("\n"))
                    tail = [*tail, line.rstrip("\n")][-_TAIL_LINES:]
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0:
        last = "\n".join(tail)
        raise WorkFailed(f"{command[0]} ended with exit code {process.returncode}. Its last lines:\n{last}")
