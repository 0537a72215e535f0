"""The exporter: equal to ModelOpt's checkpoints, to TensorRT-LLM's tables, and to itself turned back."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_checkpoint import open_checkpoint
from bitsmith.compile.tensorrt_engine_layout import lay_out
from bitsmith.compile.tensorrt_export import CheckpointExport
from bitsmith.compile.tensorrt_linear import DenseLinear, Int4Linear, SourceLinear
from bitsmith.compile.tensorrt_names import LINEARS, NORMS
from bitsmith.compile.tensorrt_plan import ExportPlan, ExportSettings, plan_export
from bitsmith.compile.tensorrt_release import parse_release
from bitsmith.compile.tensorrt_rounding import (
    fp8_linear,
    fp8_rowwise_linear,
    int4_linear,
    int8_linear,
    relative_error,
)
from bitsmith.compile.tensorrt_source import ExportSource, open_source
from bitsmith.compile.tensorrt_source_scheme import SourceScheme
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
TABLES: dict[str, Any] = json.loads((GOLDEN / "trtllm_0.14_parameters.json").read_text())
Q = "model.layers.0."
QUIET = Reporter(quiet=True)
# Redundant factors that ModelOpt writes beside the merged one.
KV_EXTRAS = (".k_cache_scaling_factor", ".v_cache_scaling_factor")


class RoundedSource:
    """Dense weights, rounded to nearest when they are read, with given maxima."""

    path = Path("rounded")

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        scheme: SourceScheme,
        *,
        is_shared: bool = True,
        input_scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.weights, self.scheme = config, weights, scheme
        self._is_shared = is_shared
        self._input_scales = input_scales

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def tensor(self, name: str) -> Tensor:
        return self.weights[name]

    def is_quantized(self, module: str) -> bool:
        return self.scheme.quant_algo is not None and module != "lm_head"

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        return None if self.scheme.kv_algo is None else (0.01 + layer, 0.02)

    def linear(self, module: str) -> SourceLinear:
        weight, algo = self.weights[f"{module}.weight"], self.scheme.quant_algo
        if not self.is_quantized(module) or algo in ("W8A16", "W4A16"):
            return DenseLinear(weight)
        stem, _, leaf = module.rpartition(".")
        input_scale = torch.tensor([0.02])
        if self._input_scales is not None:
            input_scale = self._input_scales[f"{module}.input_scale"].reshape(1)
        if algo == "FP8":
            groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
            sharing = next((group for group in groups if leaf in group), (leaf,))
            names = [f"{stem}.{part}.weight" for part in sharing if self._is_shared or part == leaf]
            amax = max(float(self.weights[name].float().abs().max()) for name in names)
            return fp8_linear(weight, input_scale, torch.tensor([amax / 448]))
        if algo == "FP8_PER_CHANNEL_PER_TOKEN":
            return fp8_rowwise_linear(weight)
        shared = leaf if leaf in ("o_proj", "down_proj") or not self._is_shared else stem
        generator = torch.Generator().manual_seed(len(shared))
        pre_quant = (torch.rand(weight.shape[1], generator=generator) + 0.5).to(weight.dtype)
        if algo == "W8A8_SQ_PER_CHANNEL":
            return int8_linear(weight, input_scale, pre_quant)
        group_size = self.scheme.group_size
        linear = int4_linear(weight, group_size, pre_quant if self.scheme.has_pre_quant_scale else None)
        if not self.scheme.is_symmetric:
            zeros = torch.randint(-8, 8, linear.scale.shape, generator=generator).to(torch.int8)
            # The scale is a power of two, so that zero_point * scale is exact in bf16.
            return Int4Linear(linear.values, torch.exp2(linear.scale.log2().round()), zeros)
        if algo == "W4A8_AWQ":
            return Int4Linear(
                linear.values, linear.scale, None, linear.pre_quant_scale, input_scale, torch.tensor([0.01])
            )
        return linear


def hf_config(model_type: str, **sizes: Any) -> dict[str, Any]:
    names = {"gemma3_text": "Gemma3ForCausalLM"}
    architecture = names.get(model_type, f"{model_type.capitalize()}ForCausalLM")
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    config |= {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config |= {"max_position_embeddings": 128, "tie_word_embeddings": model_type.startswith("gemma")}
    return config | sizes


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """bf16 weights with Hugging Face's names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    model_type, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_size = config["head_dim"]
    query, kv = config["num_attention_heads"] * head_size, config["num_key_value_heads"] * head_size

    def randn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

    weights = {
        "model.embed_tokens.weight": randn(config["vocab_size"], hidden),
        "model.norm.weight": randn(hidden) + 1,
        "lm_head.weight": randn(config["vocab_size"], hidden),
    }
    shapes = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    shapes |= {"o_proj": (hidden, query), "down_proj": (hidden, inner)}
    for layer in range(config["num_hidden_layers"]):
        for module in (part for parts in LINEARS.values() for part in parts):
            rows, columns = shapes.get(module.rpartition(".")[2], (inner, hidden))
            weights[f"model.layers.{layer}.{module}.weight"] = randn(rows, columns)
            has_bias = model_type == "qwen2" and module[-6] in "qkv" and module.startswith("self_attn")
            if (has_bias and module != "self_attn.o_proj") or (config.get("mlp_bias") and "mlp" in module):
                weights[f"model.layers.{layer}.{module}.bias"] = randn(rows)
        for norm in NORMS.values():
            size = head_size if norm.startswith("self_attn") else hidden
            weights[f"model.layers.{layer}.{norm}.weight"] = randn(size) + 1
    return weights


def export(source: ExportSource, path: Path, chosen: ExportSettings) -> tuple[ExportPlan, CheckpointExport]:
    plan = plan_export(source, chosen)
    exported = CheckpointExport(source, plan)
    exported.write(path, QUIET)
    return plan, exported


def differences(path: Path, golden: Path) -> set[str]:
    """Names whose kind or bytes differ, and names that only one has, in any rank."""
    names: set[str] = set()
    for file in sorted(golden.glob("rank*.safetensors")):
        ours, theirs = load_file(path / file.name), load_file(file)
        names |= set(ours) ^ {name for name in theirs if not name.endswith(KV_EXTRAS)}
        for name in set(ours) & set(theirs):
            kinds = {(ours[name].dtype, ours[name].shape), (theirs[name].dtype, theirs[name].shape)}
            if len(kinds) == 2 or not torch.equal(
                ours[name].view(torch.uint8), theirs[name].view(torch.uint8)
            ):
                names.add(name.removeprefix("transformer.layers."))
    return names


@pytest.mark.parametrize("name", ["bf16", "kvfp8_only", "fp8pcpt", "int8sq"])
def test_export_of_unified_golden_equals_modelopts_checkpoint(name: str, tmp_path: Path) -> None:
    export(open_source(GOLDEN / f"mo_hf_llama_{name}"), tmp_path, ExportSettings(kv_scale_floor=1.0))
    assert differences(tmp_path, GOLDEN / f"mo_trt_llama_{name}") == set()


@pytest.mark.parametrize(
    ("golden", "dense", "tp_size"),
    [
        ("mo_trt_llama_fp8_kvfp8", "mo_hf_llama_bf16", 1),
        ("mo_trt_llama_fp8_tp2", "mo_hf_llama_bf16", 2),
        ("mo_trt_mistral_fp8_kvfp8", "hf_mistral", 1),
        ("mo_trt_qwen2_fp8_kvfp8", "hf_qwen2", 1),
        ("mo_trt_qwen3_fp8_kvfp8", "hf_qwen3", 1),
        ("mo_trt_llama_fp8_tied", "hf_llama_tied", 1),
    ],
)
def test_fp8_of_source_with_golden_maxima_equals_modelopts_checkpoint(
    golden: str, dense: str, tp_size: int, tmp_path: Path
) -> None:
    theirs = load_file(GOLDEN / golden / "rank0.safetensors")
    names = {part: name for name, parts in LINEARS.items() for part in parts}
    input_scales = {
        f"model.layers.{layer}.{part}.input_scale": theirs[
            f"transformer.layers.{layer}.{name}.activation_scaling_factor"
        ]
        for layer in range(2)
        for part, name in names.items()
    }
    reader = open_source(GOLDEN / dense)
    weights = load_file(GOLDEN / dense / "model.safetensors")
    source = RoundedSource(reader.config, weights, SourceScheme("FP8"), input_scales=input_scales)
    export(source, tmp_path, ExportSettings(kv_cache="fp8", kv_scale="ones", tp_size=tp_size))
    differing = differences(tmp_path, GOLDEN / golden)
    # ModelOpt splits the embedding too (use_parallel_embedding); here it is replicated.
    assert differing == ({"transformer.vocab_embedding.weight"} if tp_size == 2 else set())


def test_fp8_of_unified_golden_differs_only_by_rounding_twice(tmp_path: Path) -> None:
    """The unified file divides in bf16 and has scales for q, k, v, gate and up that the engine shares."""
    source = open_source(GOLDEN / "mo_hf_llama_fp8_kvfp8")
    _, exported = export(source, tmp_path, ExportSettings(kv_scale_floor=1.0))
    golden = GOLDEN / "mo_trt_llama_fp8_kvfp8"
    differing = differences(tmp_path, golden)
    assert {name.rpartition(".")[2] for name in differing} == {"weight"}
    ours, theirs = (open_checkpoint(path, parse_release("1.2.1")) for path in (tmp_path, golden))
    for name in LINEARS:
        pairs = zip(ours.dequantized_linears(0, name), theirs.dequantized_linears(0, name), strict=True)
        for (_, left), (_, right) in pairs:
            assert relative_error(left, right) < 0.08
    rerounded = {module.rpartition(".")[2] for module in exported.errors}
    assert rerounded <= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert max(exported.errors.values()) < 0.04


@pytest.mark.parametrize("name", ["int4awq_kvfp8", "w4a8awq"])
def test_awq_of_unified_golden(name: str, tmp_path: Path) -> None:
    """Integers and scales of qkv, dense and proj are ModelOpt's; smoothing stays where the file has it."""
    export(open_source(GOLDEN / f"mo_hf_llama_{name}"), tmp_path, ExportSettings(kv_scale_floor=1.0))
    golden = GOLDEN / f"mo_trt_llama_{name}"
    differing = {name.split(".", 1)[1] for name in differences(tmp_path, golden)}
    folded = {"attention.qkv.prequant_scaling_factor", "input_layernorm.weight", "post_layernorm.weight"}
    assert folded <= differing
    assert all(name.startswith(("mlp.fc.", "mlp.gate.")) for name in differing - folded)
    ours = load_file(tmp_path / "rank0.safetensors")
    assert bool((ours["transformer.layers.0.attention.qkv.prequant_scaling_factor"] == 1).all())
    report = check_engine_checkpoint(tmp_path, parse_release("1.2.1"), GOLDEN / "mo_hf_llama_bf16")
    assert report.is_accepted, report.lines()


EXPORTED_MODES: dict[str, tuple[SourceScheme, str]] = {
    "none": (SourceScheme(), "auto"),
    "kv_fp8_only": (SourceScheme(None, "FP8"), "auto"),
    "kv_int8_only": (SourceScheme(None, "FP8"), "int8"),
    "FP8": (SourceScheme("FP8"), "auto"),
    "FP8_kvfp8": (SourceScheme("FP8", "FP8"), "auto"),
    "W4A16_AWQ": (SourceScheme("W4A16_AWQ", None, 128, has_pre_quant_scale=True), "auto"),
    "W4A16_AWQ_kvfp8": (SourceScheme("W4A16_AWQ", "FP8", 128, has_pre_quant_scale=True), "auto"),
    "W4A16_AWQ_kvint8": (SourceScheme("W4A16_AWQ", "FP8", 128, has_pre_quant_scale=True), "int8"),
    "W4A16_AWQ_sym_noprequant": (SourceScheme("W4A16_AWQ", None, 128), "auto"),
    "W4A16_AWQ_zp_noprequant": (SourceScheme("W4A16_AWQ", None, 128, is_symmetric=False), "auto"),
    "W4A8_AWQ": (SourceScheme("W4A8_AWQ", None, 128, has_pre_quant_scale=True), "auto"),
    "W8A16": (SourceScheme("W8A16"), "auto"),
    "W8A8_SQ_PER_CHANNEL": (SourceScheme("W8A8_SQ_PER_CHANNEL"), "auto"),
    "W8A8_SQ_PER_CHANNEL_kvfp8": (SourceScheme("W8A8_SQ_PER_CHANNEL", "FP8"), "auto"),
}
NOT_EXPORTED = ("tied", "paremb", "bias", "excl", "noexclude")


def exported_tables() -> Iterator[str]:
    for name in TABLES:
        mode = name.split("__")[1]
        if mode in EXPORTED_MODES and not any(part in name for part in NOT_EXPORTED):
            yield name


@pytest.mark.parametrize("name", exported_tables())
def test_export_fits_tensorrt_llms_own_table(name: str, tmp_path: Path) -> None:
    family, mode = name.split("__")[:2]
    theirs = TABLES[name]["config"]
    keys = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    keys |= {"head_dim": "head_size", "num_hidden_layers": "num_hidden_layers"}
    config = hf_config(family, **{ours: theirs[key] for ours, key in keys.items()})
    scheme, kv_cache = EXPORTED_MODES[mode]
    source = RoundedSource(config, random_weights(config), scheme)
    chosen = ExportSettings(
        parse_release("0.14"),
        tp_size=theirs["mapping"]["tp_size"],
        kv_cache=kv_cache,  # type: ignore[arg-type]
    )
    plan, _ = export(source, tmp_path, chosen)
    header = open_checkpoint(tmp_path, plan.release).ranks[0].header
    ours = {
        key: ["fp8" if dtype == "float8_e4m3fn" else dtype, list(shape)]
        for key, (dtype, shape) in lay_out(plan.model, header, plan.release).items()
    }
    assert ours == TABLES[name]["parameters"]


def test_many_tables_are_compared() -> None:
    assert len(list(exported_tables())) >= 50


SCHEMES = {
    "none": SourceScheme(None, "FP8"),
    "FP8": SourceScheme("FP8", "FP8"),
    "rowwise": SourceScheme("FP8_PER_CHANNEL_PER_TOKEN"),
    "smooth": SourceScheme("W8A8_SQ_PER_CHANNEL"),
    "awq": SourceScheme("W4A16_AWQ", None, 64, has_pre_quant_scale=True),
    "int4": SourceScheme("W4A16_AWQ", None, 64),
    "asymmetric": SourceScheme("W4A16_AWQ", None, 64, is_symmetric=False),
    "w8a16": SourceScheme("W8A16"),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], SourceScheme, ExportSettings]:
    """Random sizes that the scheme and the parallel degrees can be laid out for."""
    scheme = SCHEMES[draw(st.sampled_from(sorted(SCHEMES)))]
    is_int4 = scheme.quant_algo == "W4A16_AWQ"
    tp_size = draw(st.sampled_from([1, 2, 4]))
    unit = 64 if is_int4 else 2
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    num_heads = 4 * draw(st.sampled_from([1, 2]))
    head_size = 64 if is_int4 else draw(st.sampled_from([2, 6, 16]))
    model_type = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma2"]))
    pp_size = 1 if model_type == "gemma2" else draw(st.sampled_from([1, 2]))
    config = hf_config(
        model_type,
        hidden_size=max(unit, 8) * draw(st.integers(1, 3)),
        intermediate_size=unit * tp_size * draw(st.integers(1, 2)),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        vocab_size=draw(st.integers(17, 41)),
        num_hidden_layers=2 if model_type == "gemma2" else pp_size,
    )
    if model_type != "gemma2":
        config["tie_word_embeddings"] = draw(st.booleans())
    return config, scheme, ExportSettings(tp_size=tp_size, pp_size=pp_size)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.booleans())
def test_export_turned_back_is_the_source(
    case: tuple[dict[str, Any], SourceScheme, ExportSettings], is_shared: bool
) -> None:
    """Exactly where scales are shared from the start; else within one step of the shared scale."""
    config, scheme, chosen = case
    source = RoundedSource(config, random_weights(config), scheme, is_shared=is_shared)
    with TemporaryDirectory() as directory:
        path = Path(directory)
        plan, exported = export(source, path, chosen)
        report = check_engine_checkpoint(path, plan.release)
        assert report.is_accepted, report.lines()
        back = dict(open_checkpoint(path, plan.release).dequantized())
    expected = {name for name in source.weights if not name.startswith("lm_head")}
    unused = ("pre_feedforward", "post_feedforward") if config["model_type"] != "gemma2" else ()
    norms = () if config["model_type"] == "qwen3" else ("q_norm", "k_norm")
    expected = {name for name in expected if not any(part in name for part in (*unused, *norms))}
    assert expected <= set(back)
    for name in expected:
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2].endswith("_proj"):
            want = source.linear(module).dequantize()
            step = _one_step(want, scheme) if module in exported.errors else torch.zeros(())
            assert bool(((back[name] - want).abs() <= step).all()), (name, exported.errors.get(module))
        elif "norm" in name and config["model_type"] == "gemma2":
            assert torch.allclose(back[name], source.weights[name].float(), atol=2**-7)
        else:
            assert torch.equal(back[name], source.weights[name].float()), name
    if is_shared:
        assert exported.errors == {}


def _one_step(want: Tensor, scheme: SourceScheme) -> Tensor:
    """The largest change that rounding again to a shared scale may make."""
    largest = want.abs().max()
    if scheme.quant_algo == "FP8":
        return torch.maximum(want.abs() / 16, largest / 448 / 512) * 1.001
    # Smoothing by the mean of scales in [0.5, 1.5] changes a row's or group's scale by 3 at most.
    return 3 * largest / (127 if scheme.quant_algo == "W8A8_SQ_PER_CHANNEL" else 7)


def test_kv_scales(tmp_path: Path) -> None:
    source = open_source(GOLDEN / "mo_hf_llama_fp8_kvfp8")
    name = "transformer.layers.0.attention.kv_cache_scaling_factor"
    calibrated = 0.0021885463502258062  # the larger of key and value

    def scale_of(chosen: ExportSettings, directory: str) -> float:
        path = tmp_path / directory
        path.mkdir()
        export(source, path, chosen)
        return float(load_file(path / "rank0.safetensors")[name])

    assert scale_of(ExportSettings(), "calibrated") == pytest.approx(calibrated, rel=1e-6)
    assert scale_of(ExportSettings(kv_scale_floor=1.0), "floor") == 1.0
    assert scale_of(ExportSettings(kv_scale="ones"), "ones") == 1.0
    assert scale_of(ExportSettings(kv_cache="int8"), "int8") == pytest.approx(
        calibrated * 448 / 127, rel=1e-6
    )


REFUSALS: list[tuple[str, ExportSettings, str]] = [
    ("mo_hf_llama_bf16", ExportSettings(kv_cache="fp8"), "no calibrated KV scales"),
    ("mo_hf_llama_bf16", ExportSettings(kv_cache="fp32"), "native engine"),
    ("mo_hf_llama_bf16", ExportSettings(tp_size=3), "does not divide by tp_size 3"),
    ("mo_hf_llama_bf16", ExportSettings(pp_size=3), "do not divide by pp_size 3"),
    ("mo_hf_llama_int4awq_kvfp8", ExportSettings(tp_size=2), "are not a multiple of 128"),
    ("mo_hf_llama_int4awq_kvfp8", ExportSettings(wants_kv_reuse=True), "KV reuse cannot be had"),
    ("mo_hf_llama_int4awq_kvfp8", ExportSettings(is_strict=True), "--strict: use_paged_context_fmha"),
    ("mo_hf_llama_fp8_kvfp8", ExportSettings(is_strict=True), "--strict: model.layers.0.self_attn.q_proj"),
    ("mo_hf_llama_int8wo", ExportSettings(kv_cache="bf16", is_strict=True), "weights again when it builds"),
    ("mo_hf_llama_fp8pcpt", ExportSettings(parse_release("0.14")), "only inner MLPs"),
    ("mo_hf_qwen3_fp8_kvfp8", ExportSettings(parse_release("0.21")), "came to the engine flow with 1.0"),
    ("mo_hf_gemma2_fp8_kvfp8", ExportSettings(pp_size=2), "cannot do across pipeline"),
    ("mo_hf_llama_nvfp4_kvfp8", ExportSettings(), "'NVFP4'"),
]


@pytest.mark.parametrize(("golden", "chosen", "reason"), REFUSALS, ids=[f"{g}-{r}" for g, _, r in REFUSALS])
def test_refused_before_work(golden: str, chosen: ExportSettings, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        plan_export(open_source(GOLDEN / golden), chosen)


def test_lost_features_are_listed() -> None:
    plan = plan_export(open_source(GOLDEN / "mo_hf_llama_int4awq_kvfp8"), ExportSettings())
    assert not plan.has_paged_attention
    assert [fallback.where for fallback in plan.fallbacks] == ["use_paged_context_fmha"]
    assert "W4A16_AWQ weights" in plan.fallbacks[0].reason


def gemma3_source() -> RoundedSource:
    rope = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = hf_config("gemma3_text", num_hidden_layers=3, layer_types=layers, sliding_window=64)
    config |= {"rope_parameters": rope, "query_pre_attn_scalar": 256}
    config["hidden_activation"] = "gelu_pytorch_tanh"
    return RoundedSource(config, random_weights(config), SourceScheme("FP8", "FP8"))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gemma3(tp_size: int, tmp_path: Path) -> None:
    plan, _ = export(gemma3_source(), tmp_path, ExportSettings(tp_size=tp_size))
    report = check_engine_checkpoint(tmp_path, plan.release)
    assert report.is_accepted, report.lines()
    body = json.loads((tmp_path / "config.json").read_text())
    assert body["rotary_base"] == 1e6
    assert body["rotary_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 8.0}
    assert body["rope_local_base_freq"] == 1e4
    assert (body["sliding_window"], body["sliding_window_pattern"]) == (64, 3)
    assert body["query_pre_attn_scalar"] == 256
    assert body["use_parallel_embedding"] == (tp_size > 1)
    tensors = load_file(tmp_path / "rank0.safetensors")
    assert "lm_head.weight" not in tensors
    weights = gemma3_source().weights
    for ours, theirs in (
        ("input_layernorm", "input_layernorm"),
        ("attention.q_layernorm", "self_attn.q_norm"),
    ):
        want = (weights[f"{Q}{theirs}.weight"].float() + 1).bfloat16()
        assert torch.equal(tensors[f"transformer.layers.0.{ours}.weight"], want)


def test_norms_without_the_added_one_are_found(tmp_path: Path) -> None:
    """The commonest fault of a Gemma checkpoint shows against its source."""
    golden = GOLDEN / "mo_hf_gemma2_fp8_kvfp8"
    export(open_source(golden), tmp_path, ExportSettings())
    assert check_engine_checkpoint(tmp_path, parse_release("1.2.1"), golden).is_accepted
    file = tmp_path / "rank0.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name in tensors:
        if "norm" in name or "ln_f" in name:
            tensors[name] -= 1
    save_file(tensors, file)
    codes = check_engine_checkpoint(tmp_path, parse_release("1.2.1"), golden).codes()
    assert codes & {"norm-zero", "source-norm"}
