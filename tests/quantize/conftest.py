"""Tiny random models of several architectures, with a byte-level tokenizer: nothing is downloaded."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from bitsmith.core.model_ref import ModelSource
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme, parse_scheme_name, resolve_int8_inputs
from bitsmith.quantize import conversion as conversion_module
from bitsmith.quantize import job as job_module
from bitsmith.quantize import layerwise
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.job import QuantizeJob
from bitsmith.quantize.reread import check_digests, stored_digests

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_PER_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
}

ModelMaker = Callable[..., Path]
JobMaker = Callable[..., QuantizeJob]
ModelEditor = Callable[[Path, Callable[[dict[str, Tensor]], None]], Path]
ConfigEditor = Callable[[Path, dict[str, dict[str, Any]]], None]
Saboteur = Callable[[pytest.MonkeyPatch, int, BaseException], list[int]]


def _save_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(path)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """make_model(architecture, dtype=..., **config) -> directory; equal arguments give the same one."""
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
        key = repr((architecture, dtype, sorted(overrides.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(architecture)
            settings = _SIZES | _PER_ARCHITECTURE.get(architecture, {}) | overrides
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    AutoConfig.for_model(architecture, **settings)
                )
                for name, parameter in model.named_parameters():
                    if "norm" in name:  # norms start at one or zero; make them matter
                        parameter.data.add_(0.1 * torch.randn_like(parameter))
            model.to(dtype).save_pretrained(path)
            _save_tokenizer(path)
            (path / "chat_template.jinja").write_text(
                "{{ bos_token }}{% for m in messages %}{{ m }}{% endfor %}"
            )
            made[key] = path
        return made[key]

    return make


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 3,000 bytes, so as many tokens."""
    words = [f"{'abcdefgh'[i % 8] * (1 + i % 5)}{i * i % 97}" for i in range(600)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words))
    return path


def make_scheme(name: str = "w4a16-gptq", **settings: Any) -> QuantizationScheme:
    num_bits, method = parse_scheme_name(name)
    int8_inputs = resolve_int8_inputs(name, settings.pop("activation_scale", None))
    return QuantizationScheme(name, num_bits, method, int8_inputs=int8_inputs, **settings)


@pytest.fixture
def make_job(make_model: ModelMaker, text_file: Path, tmp_path: Path) -> JobMaker:
    """make_job(scheme name, model=path, out=name, resume=..., calibration={...}, **scheme settings)."""

    def make(name: str = "w4a16-gptq", **settings: Any) -> QuantizeJob:
        model = settings.pop("model", None) or make_model()
        out = tmp_path / settings.pop("out", "out")
        resume, form = settings.pop("resume", False), settings.pop("format", None)
        calibration = {"source": str(text_file), "num_samples": 6, "seq_len": 32} | settings.pop(
            "calibration", {}
        )
        groups = {"group_size": 32} if "a16" in name else {}
        scheme = make_scheme(name, **groups | settings)
        return QuantizeJob(
            ModelSource("tiny", model), scheme, CalibrationSettings(**calibration), out, resume, format=form
        )

    return make


@pytest.fixture
def edit_model(tmp_path: Path) -> ModelEditor:
    """edit_model(model, change) -> a copy of the model, its tensors changed in place by change."""

    def edit(model: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
        target = tmp_path / "edited"
        shutil.copytree(model, target)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    return edit


@pytest.fixture
def dead_input_model(make_model: ModelMaker, edit_model: ModelEditor) -> Path:
    """A tiny Llama whose first down_proj gets nothing but zeros."""

    def clear(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()

    return edit_model(make_model(), clear)


@pytest.fixture(scope="session")
def edit_config_group() -> ConfigEditor:
    """edit_config_group(checkpoint, {part: {key: value}}): entries of the only config group, written anew."""

    def edit(checkpoint: Path, change: dict[str, dict[str, Any]]) -> None:
        path = checkpoint / "config.json"
        config = json.loads(path.read_text())
        group = config["quantization_config"]["config_groups"]["group_0"]
        for part, entries in change.items():
            group[part] = (group[part] or {}) | entries
        path.write_text(json.dumps(config))

    return edit


@pytest.fixture(scope="session")
def fail_at() -> Saboteur:
    """fail_at(monkeypatch, layer, error): the driver raises before a layer; gives the layers that it did."""

    def fail(monkeypatch: pytest.MonkeyPatch, layer: int, error: BaseException) -> list[int]:
        genuine = layerwise.LayerwiseQuantizer._do_layer
        done: list[int] = []

        def do_layer(self: layerwise.LayerwiseQuantizer, index: int, *args: object) -> object:
            if index == layer:
                raise error
            done.append(index)
            return genuine(self, index, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(layerwise.LayerwiseQuantizer, "_do_layer", do_layer)
        return done

    return fail


@pytest.fixture(autouse=True)
def _reread_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting Python and torch anew costs seconds; tests that ask for `fresh_process` do it."""
    if "fresh_process" not in request.fixturenames:
        for module in (job_module, conversion_module):
            monkeypatch.setattr(
                module,
                "reread_in_fresh_process",
                lambda checkpoint, expected: check_digests(stored_digests(checkpoint, expected), expected),
            )


@pytest.fixture
def fresh_process() -> None:
    """Ask for the second reading to be done by another process, as it is in earnest."""


@pytest.fixture
def reporter() -> Reporter:
    return Reporter(quiet=True)


@pytest.fixture(scope="session")
def packed() -> ModuleType:
    """packed_checkpoints.py beside this file: tests are no package, so that it cannot be imported by name."""
    path = Path(__file__).with_name("packed_checkpoints.py")
    spec = importlib.util.spec_from_file_location("bitsmith_tests_packed_checkpoints", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(make_model: ModelMaker) -> Path:
    """A tiny Llama in bf16."""
    return make_model()
