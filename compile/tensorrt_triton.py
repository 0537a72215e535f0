"""A Triton model repository beside an export, filled in, with a script that asks it one question."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bitsmith.compile.tensorrt_triton_engine import engine_repository
from bitsmith.compile.tensorrt_triton_llm import LLM_CONFIG, LLM_MODEL
from bitsmith.core.errors import Refused

_SMOKE_TEST = "smoke_test.sh"


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """path: the repository. max_batch_size: of the engine flow; the LLM-API backend batches by itself."""

    path: Path
    max_batch_size: int
    is_streaming: bool = False


def llm_repository(settings: TritonSettings, model: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Files of the LLM-API Python backend. arguments: keyword arguments of the LLM class."""
    body: dict[str, Any] = {"model": model, **arguments}
    # Batching across requests happens inside the LLM API, so Triton itself must not batch.
    body["triton_config"] = {"max_batch_size": 0, "decoupled": settings.is_streaming}
    return {
        "tensorrt_llm/config.pbtxt": LLM_CONFIG,
        "tensorrt_llm/1/model.py": LLM_MODEL,
        "tensorrt_llm/1/model.yaml": yaml.safe_dump(body, sort_keys=False),
    }


def write_repository(settings: TritonSettings, files: Mapping[str, str], smoke_test: str) -> None:
    """Write the files and smoke_test.sh; a repository that was written here before is replaced."""
    check_repository_path(settings.path)
    shutil.rmtree(settings.path, ignore_errors=True)
    for name, text in files.items():
        target = settings.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    script = settings.path / _SMOKE_TEST
    script.write_text(smoke_test, encoding="utf-8")
    script.chmod(0o755)


def check_repository_path(path: Path) -> None:
    """Raises Refused for a directory that holds something else."""
    is_other = path.exists() and not (path / _SMOKE_TEST).is_file()
    if is_other and (not path.is_dir() or any(path.iterdir())):
        raise Refused(f"--triton {path} exists and is no model repository of this program; choose another.")


def smoke_test(model: str, max_tokens_name: str) -> str:
    """Asks a running server for eight tokens over Triton's generate interface."""
    return f"""#!/usr/bin/env bash
# Usage: ./smoke_test.sh [URL]. Needs a Triton server that has loaded this repository.
set -euo pipefail
url="${{1:-http://127.0.0.1:8000}}"
curl --fail --silent --show-error "$url/v2/health/ready"
answer="$(curl --fail --silent --show-error "$url/v2/models/{model}/generate" \\
  -d '{{"text_input": "The capital of France is", "{max_tokens_name}": 8}}')"
echo "$answer"
grep -q text_output <<< "$answer"
"""


def make_engine_repository(
    settings: TritonSettings, engine: str, tokenizer: str, options: Mapping[str, str]
) -> None:
    """options: parameters of the C++ backend, by their names in config.pbtxt."""
    files = engine_repository(engine, tokenizer, settings.max_batch_size, settings.is_streaming, options)
    write_repository(settings, files, smoke_test("ensemble", "max_tokens"))


def make_llm_repository(settings: TritonSettings, model: str, arguments: Mapping[str, Any]) -> None:
    files = llm_repository(settings, model, arguments)
    write_repository(settings, files, smoke_test("tensorrt_llm", "sampling_param_max_tokens"))
