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
from bitsmith.compile.reference_model import load_reference
from bitsmith.compile.tensorrt_job import TensorrtJob, plan_tensorrt
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.compile.tensorrt_release import DEFAULT_RELEASE
from bitsmith.compile.tensorrt_simulation import KVScales, SimulatedEngine
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel, ScoringRequest
from bitsmith.quantize.weight_source import open_weights

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


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_logits_are_the_native_engines_but_for_the_cache(
    model_type: str, make_fp8: ModelMaker, eager_engine: EngineMaker, tmp_path: Path, reporter: Reporter
) -> None:
    """Caches are left unrounded: the target has one KV scale for each layer, the native engine has two."""
    checkpoint = make_fp8("w8a8-fp8", model_type)
    export = _export(checkpoint, tmp_path / "export", reporter)
    native = _score(EngineLogitsModel(eager_engine(checkpoint, activations="auto", kv_cache="fp32")))
    unrounded = _score(EngineLogitsModel(eager_engine(checkpoint, activations="fp32", kv_cache="fp32")))
    simulated = _simulate(export, "unrounded")
    _restore_norms(simulated, checkpoint)
    apart = (native - _score(simulated)).square().mean()
    moved_by_rounding = (native - unrounded).square().mean()
    assert apart < 5e-3 * moved_by_rounding


def _restore_norms(simulated: SimulatedEngine, checkpoint: Path) -> None:
    """Gemma's norms are stored as 1 + w in 16 bits there, which is coarser than w in 16 bits."""
    norms = {n: w for n, w in load_reference(open_weights(checkpoint)).state_dict().items() if "norm" in n}
    simulated.model.load_state_dict(norms, strict=False)
