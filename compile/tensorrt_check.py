"""The validator of TensorRT-LLM checkpoints: every check in order, cheap ones first.

A later check runs only where the earlier ones found what it needs, so that one mistake is reported once.
"""

from collections.abc import Iterator
from pathlib import Path

from bitsmith.compile.tensor_file import TensorFile, open_tensor_file
from bitsmith.compile.tensorrt_check_kv import check_kv_scales
from bitsmith.compile.tensorrt_check_names import check_names
from bitsmith.compile.tensorrt_check_quant import check_quantization
from bitsmith.compile.tensorrt_check_shards import check_shards
from bitsmith.compile.tensorrt_check_source import check_against_source
from bitsmith.compile.tensorrt_check_values import check_values
from bitsmith.compile.tensorrt_checkpoint import EngineCheckpoint, rank_name, read_config
from bitsmith.compile.tensorrt_config import read_model
from bitsmith.compile.tensorrt_finding import CheckReport, Finding, Severity, collapse, refuse, warn
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_release import Release
from bitsmith.core.errors import Refused


def check_engine_checkpoint(path: Path, release: Release, source: Path | None = None) -> CheckReport:
    """Check a checkpoint for one release. source: the model it came from, for a numeric comparison."""
    findings = tuple(collapse(_check(path, release, source)))
    return CheckReport(str(path), f"a TensorRT-LLM {release} checkpoint", findings)


def _check(path: Path, release: Release, source: Path | None) -> Iterator[Finding]:
    try:
        body = read_config(path)
    except Refused as error:
        yield refuse("config-unreadable", "config.json", str(error))
        return
    model, findings = read_model(body, release)
    yield from findings
    if model is None:
        return
    quantization = list(check_quantization(model, body, release))
    yield from quantization
    files, file_findings = _open_ranks(path, model)
    yield from file_findings
    if files is None or any(finding.code == "quant-algo" for finding in quantization):
        return
    named = [
        finding for rank, file in enumerate(files) for finding in check_names(model, rank, release, file)
    ]
    yield from named
    for file in files:
        yield from check_values(model, file)
        yield from check_kv_scales(model, file)
    if any(finding.severity is Severity.REFUSE for finding in (*named, *quantization)):
        return
    checkpoint = EngineCheckpoint(path, model, release, files)
    yield from check_shards(checkpoint)
    if source is not None:
        yield from check_against_source(checkpoint, body, source)


def _open_ranks(path: Path, model: EngineModel) -> tuple[tuple[TensorFile, ...] | None, list[Finding]]:
    findings = []
    files = []
    for rank in range(model.world_size):
        name = rank_name(rank)
        try:
            files.append(open_tensor_file(path / name))
        except Refused as error:
            findings.append(refuse("rank-file", name, str(error)))
    expected = {rank_name(rank) for rank in range(model.world_size)}
    for extra in sorted(p.name for p in path.glob("rank*.safetensors") if p.name not in expected):
        text = f"is not read: mapping says {model.world_size} rank(s). Remove it, or correct the mapping."
        findings.append(warn("rank-extra", extra, text))
    return (tuple(files) if len(files) == model.world_size else None), findings
