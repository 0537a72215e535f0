"""Tiny random models of every architecture, quantized copies, and one engine compiled from each kind."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from bitsmith.compile import trusted_engines
from bitsmith.compile.arithmetic import describe_arithmetic
from bitsmith.compile.compile_plan import CompileJob, plan_compile
from bitsmith.compile.decoder import Decoder
from bitsmith.compile.decoder_plan import DecoderPlan
from bitsmith.compile.engine import Engine
from bitsmith.compile.job import compile_engine
from bitsmith.compile.packing import pack_modules
from bitsmith.compile.step_runner import EagerRunner
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.model_ref import ModelSource
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import ActivationScale, KVCacheScheme, QuantizationScheme, parse_scheme_name
from bitsmith.ops.library import build_operators, load_operators
from bitsmith.quantize import job as job_module
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.compressed_tensors import (
    kv_scale_names,
    pack_weight,
    quantization_config,
    weight_args,
)
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
GROUP_SIZE = 32

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="session")
def reporter() -> Reporter:
    return Reporter(quiet=True)


@pytest.fixture(scope="session", autouse=True)
def operators(reporter: Reporter) -> None:
    torch.set_num_threads(2)
    load_operators(build_operators(reporter))


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """make_model(model_type, dtype=..., **config) -> directory; equal arguments give the same one."""
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        key = json.dumps([model_type, str(dtype), overrides], sort_keys=True)
        if key not in made:
            torch.manual_seed(0)
            config = AutoConfig.for_model(model_type, **(SIZES | overrides))
            build: Any = AutoModelForCausalLM.from_config
            model = build(config, dtype=dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:  # norms and biases, which start as ones and zeros
                        parameter.add_(torch.randn_like(parameter) * 0.1)
            made[key] = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(made[key])
            _save_tokenizer(made[key])
        return made[key]

    return make


def _save_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(path)


@pytest.fixture(scope="session")
def make_quantized(tmp_path_factory: pytest.TempPathFactory, make_model: ModelMaker) -> ModelMaker:
    """make_quantized(num_bits, symmetric=..., kv_scales=..., kv_cache=..., skip=...) -> by rounding.

    kv_scales: for each layer the same (key, value) scale, of a cache of type kv_cache. skip: part of a
    module's name that stays dense.
    """
    made: dict[str, Path] = {}

    def make(
        num_bits: int = 4,
        *,
        symmetric: bool = True,
        kv_scales: tuple[float, float] | None = None,
        kv_cache: KVCacheScheme = "fp8",
        skip: str = "lm_head",
    ) -> Path:
        declared: KVCacheScheme = "none" if kv_scales is None else kv_cache
        key = f"{num_bits} {symmetric} {kv_scales} {declared} {skip}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("quantized")
            quantization = quantization_config(
                weight_args(num_bits, GROUP_SIZE, symmetric, False), [skip], declared
            )
            _quantize(make_model("llama", dtype=torch.bfloat16), made[key], quantization, kv_scales)
        return made[key]

    return make


def _quantize(
    source: Path, target: Path, quantization: dict[str, Any], kv_scales: tuple[float, float] | None
) -> None:
    weights, (skip,) = quantization["config_groups"]["group_0"]["weights"], quantization["ignore"]
    reader, writer = CheckpointReader(source), CheckpointWriter(target)
    for name in reader.names:
        weight = reader.tensor(name)
        if name.endswith("_proj.weight") and skip not in name:
            rounded = round_to_nearest(weight.float(), weights["num_bits"], symmetric=weights["symmetric"])
            for part, tensor in pack_weight(name.removesuffix(".weight"), rounded).items():
                writer.add(part, tensor)
        else:
            writer.add(name, weight)
    if kv_scales is not None:
        for layer_index in range(SIZES["num_hidden_layers"]):
            for name, scale in zip(kv_scale_names(f"model.layers.{layer_index}"), kv_scales, strict=True):
                writer.add(name, torch.tensor([scale]))
    writer.finish()
    config = reader.config | {"quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(config))
    _save_tokenizer(target)


def round_to_nearest(weight: torch.Tensor, num_bits: int, *, symmetric: bool) -> QuantizedWeight:
    low, high = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    grouped = weight.reshape(len(weight), -1, GROUP_SIZE)
    if symmetric:
        scale = (grouped.abs().amax(2) / high).bfloat16()
        zero_point = None
        values = (grouped / scale.float().unsqueeze(2)).round()
    else:
        smallest, largest = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((largest - smallest) / (high - low)).bfloat16()
        zero_point = (low - smallest / scale.float()).round().clamp(low, high).to(torch.int8)
        values = (grouped / scale.float().unsqueeze(2)).round() + zero_point.float().unsqueeze(2)
    integers = values.clamp(low, high).to(torch.int8).flatten(1)
    return QuantizedWeight(integers, scale, zero_point, num_bits, GROUP_SIZE)


@pytest.fixture(scope="session")
def make_fp8(tmp_path_factory: pytest.TempPathFactory, make_model: ModelMaker) -> Iterator[ModelMaker]:
    """make_fp8(scheme name, model type, int8_inputs) -> a checkpoint that `quantize` wrote: of FP8 with an
    FP8 KV cache, or of INT8 where int8_inputs says how far a scale of its inputs reaches."""
    made: dict[tuple[str, str, ActivationScale | None], Path] = {}
    text = tmp_path_factory.mktemp("text") / "words.txt"
    text.write_text(" ".join(f"{'abcdefgh'[i % 8] * (1 + i % 5)}{i * i % 97}" for i in range(600)))

    def make(name: str, model_type: str = "llama", int8_inputs: ActivationScale | None = None) -> Path:
        key = (name, model_type, int8_inputs)
        if key not in made:
            num_bits, method = parse_scheme_name(name)
            kv_cache: KVCacheScheme = "fp8" if method == "fp8" else "none"
            scheme = QuantizationScheme(name, num_bits, method, kv_cache=kv_cache, int8_inputs=int8_inputs)
            model = ModelSource("tiny", make_model(model_type, dtype=torch.bfloat16))
            out = tmp_path_factory.mktemp("fp8") / "checkpoint"
            job = QuantizeJob(model, scheme, CalibrationSettings(str(text), 6, 32), out)
            quantize_model(job, plan_quantize(job), Reporter(quiet=True))
            made[key] = out
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "reread_in_fresh_process", lambda checkpoint, records: None)
        yield make


@pytest.fixture(scope="session")
def eager_engine(tmp_path_factory: pytest.TempPathFactory) -> EngineMaker:
    """eager_engine(checkpoint, **job settings) -> Engine over the module itself; nothing is compiled."""

    def make(checkpoint: Path, **settings: Any) -> Engine:
        settings = {"kv_cache": "fp32", "activations": "fp32"} | settings
        plan = plan_compile(CompileJob(checkpoint, tmp_path_factory.getbasetemp() / "unused", **settings))
        modules = list(pack_modules(open_weights(checkpoint), plan.decoder, plan.activations))
        tensors = {name: tensor for module in modules for name, tensor in module.tensors.items()}
        linears = {module.name: module.specs for module in modules if module.specs}
        decoder_plan = DecoderPlan(plan.decoder, plan.kv.kv_cache, linears, plan.kv.kv_scales)
        return Engine(
            plan=decoder_plan,
            limits=plan.limits,
            arithmetic=describe_arithmetic(decoder_plan, kv_is_calibrated=plan.kv.are_calibrated),
            tokenizer_path=checkpoint,
            weights=tensors,
            runner=EagerRunner(Decoder(decoder_plan, tensors).eval()),
        )

    return make


@pytest.fixture(scope="session")
def _own_trust_list(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Engines that tests build are not written to the user's own list."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trusted_engines, "cache_dir", lambda: directory)
        yield directory


@pytest.fixture(scope="session")
def dense_job(make_model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> CompileJob:
    out = tmp_path_factory.mktemp("engines") / "dense"
    return CompileJob(
        make_model("llama"), out, kv_cache="fp32", activations="fp32", max_batch_size=4, max_num_tokens=64
    )


@pytest.fixture(scope="session")
def dense_engine_path(dense_job: CompileJob, _own_trust_list: Path, reporter: Reporter) -> Path:
    """An engine that computes in fp32, compiled for real."""
    compile_engine(dense_job, plan_compile(dense_job), reporter)
    return dense_job.out


@pytest.fixture(scope="session")
def quantized_engine_path(
    make_quantized: ModelMaker,
    tmp_path_factory: pytest.TempPathFactory,
    _own_trust_list: Path,
    reporter: Reporter,
) -> Path:
    """An engine of 4-bit weights over an fp8 cache, compiled for real."""
    checkpoint = make_quantized(4, kv_scales=(0.02, 0.01))
    job = CompileJob(checkpoint, tmp_path_factory.mktemp("engines") / "quantized")
    compile_engine(job, plan_compile(job), reporter)
    return job.out


@pytest.fixture
def load_transformers() -> Callable[[Path], PreTrainedModel]:
    def load(path: Path) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return model

    return load
