"""Running `trtllm-build` where it exists: on PATH, in another Python, or through a container's command.

Success is engine files that exist and a configuration of the release that was planned. Whether the engine
computes the right thing is tensorrt_parity.py's question.
"""

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from bitsmith.compile.tensorrt_build import BuildPlan
from bitsmith.compile.tensorrt_release import Release
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.logged_process import run_logged
from bitsmith.core.progress import Reporter

TOOL = "trtllm-build"


@dataclass(frozen=True, slots=True)
class BuildTool:
    """build: what stands for `trtllm-build`. python: what runs a script in the same environment."""

    build: tuple[str, ...]
    python: tuple[str, ...]


def find_tool(python: str | None, command: str | None) -> BuildTool | None:
    """The tool that was named, or the one on PATH, or None. Raises Refused when a named one is absent."""
    if python is not None and command is not None:
        raise Refused("--trtllm-python and --trtllm-command say two things; give one of them.")
    if command is not None:
        words = tuple(shlex.split(command))
        if not words or shutil.which(words[0]) is None:
            raise Refused(f"--trtllm-command {command!r}: no such program here.")
        return BuildTool((*words, TOOL), (*words, "python3"))
    if python is not None:
        found = shutil.which(python)
        if found is None:
            raise Refused(f"--trtllm-python {python!r} is not an executable on this machine.")
        return BuildTool((found, "-m", "tensorrt_llm.commands.build"), (found,))
    found = shutil.which(TOOL)
    if found is None:
        return None
    beside = Path(found).parent / "python3"
    return BuildTool((found,), (str(beside) if beside.exists() else "python3",))


def check_memory(checkpoint_bytes: int) -> None:
    """Building holds each rank's weights twice in host memory. Raises Refused when that cannot be."""
    available = _available_bytes()
    needed = 2 * checkpoint_bytes
    if available is not None and needed > available:
        raise Refused(
            f"Building needs about {needed / 1e9:.1f} GB of memory (weights twice); "
            f"{available / 1e9:.1f} GB are available. Build on a larger machine: build.sh has the command."
        )


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def run_build(
    tool: BuildTool, plan: BuildPlan, directory: Path, release: Release, num_ranks: int, reporter: Reporter
) -> None:
    """directory: holds `checkpoint`; gets `engine` and `build.log`. Raises WorkFailed with the log's end."""
    checkpoint, output = directory / "checkpoint", directory / "engine"
    command = (*tool.build, *plan.command(str(checkpoint.resolve()), str(output.resolve()))[1:])
    reporter.say(f"Building: {shlex.join(command)}")
    run_logged(command, directory / "build.log", reporter)
    _check_engine(output, release, num_ranks)


def _check_engine(output: Path, release: Release, num_ranks: int) -> None:
    names = [f"rank{rank}.engine" for rank in range(num_ranks)]
    missing = [name for name in names if not (output / name).is_file() or not (output / name).stat().st_size]
    if missing:
        raise WorkFailed(f"trtllm-build ended well but {output} lacks {', '.join(missing)}.")
    try:
        body = json.loads((output / "config.json").read_bytes())
        version = str(body["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkFailed(f"{output / 'config.json'} cannot be read ({error}).") from error
    if not version.startswith(str(release)):
        raise WorkFailed(
            f"The engine was built by TensorRT-LLM {version}, the plan was for {release}. Say "
            f"--trtllm-version {version}, or use that release's environment."
        )
