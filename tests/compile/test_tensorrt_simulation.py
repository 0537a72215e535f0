"""The exported numbers, computed as an FP8 TensorRT-LLM engine would, are the native engine's."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitsmith.compile.engine import Engine
from bitsmith.compile.engine_logits import EngineLogitsModel
from bitsmith.compile.tensorrt_job import TensorrtJob, plan_tensorrt
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.compile.tensorrt_release import DEFAULT_RELEASE
from bitsmith.compile.tensorrt_simulation import KVScales, SimulatedEngine
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel, ScoringRequest

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]
NUM_WINDOWS, SEQ_LEN = 24, 12


def _windows() -> Tensor:
    return torch.randint(0, 301, (NUM_WINDOWS, SEQ_LEN), generator=torch.Generator().manual_seed(5))


def _score(model: LogitsModel) -> Tensor:
    requests = [ScoringRequest(tuple(window), SEQ_LEN) for window in _windows().tolist()]
    return torch.stack(list(model.score(requests)))


def _perplexity(logits: Tensor) -> float:
    targets = _windows()[:, 1:]
    return math.exp(float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())))


def _export(checkpoint: Path, out: Path, reporter: Reporter) -> Path:
    job = TensorrtJob(checkpoint, out, "tensorrt-llm", is_strict=True)
    compile_tensorrt(job, plan_tensorrt(job), reporter)
    return out


def _simulate(export: Path, kv_scales: KVScales) -> SimulatedEngine:
    hf_config = json.loads((export / "tokenizer" / "config.json").read_bytes())
    return SimulatedEngine(export / "checkpoint", DEFAULT_RELEASE, hf_config, kv_scales)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_perplexity_is_within_a_percent_of_the_native_engines(
    model_type: str, make_fp8: ModelMaker, eager_engine: EngineMaker, tmp_path: Path, reporter: Reporter
) -> None:
    checkpoint = make_fp8("w8a8-fp8", model_type)
    export = _export(checkpoint, tmp_path / "export", reporter)  # strict: no weight was rounded again
    native = _score(EngineLogitsModel(eager_engine(checkpoint, activations="auto", kv_cache="auto")))
    simulated = _simulate(export, "exported")
    assert "14 FP8 linears, FP8 (exported scales) KV cache" in simulated.name
    assert _perplexity(_score(simulated)) == pytest.approx(_perplexity(native), rel=0.01)
    assert _perplexity(_score(_simulate(export, "ones"))) == pytest.approx(_perplexity(native), rel=0.01)
