"""ModelOpt's unified checkpoints read as weights: against the model they were made from, and damaged ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.smoothed_weight import SmoothedWeight
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import WeightSource, open_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = {"self_attn.q_proj": "input_layernorm", "self_attn.k_proj": "input_layernorm"} | {
    "mlp.up_proj": "post_attention_layernorm"
}
# Golden -> type of q_proj and of down_proj, and the largest relative error of its rounding.
GOLDENS: dict[str, tuple[type, type, float]] = {
    "fp8_kvfp8": (Fp8Weight, Fp8Weight, 0.04),
    "fp8pcpt": (Fp8Weight, Fp8Weight, 0.04),
    "int8wo": (QuantizedWeight, QuantizedWeight, 0.01),
    "int8sq": (SmoothedWeight, SmoothedWeight, 0.02),
    "int4awq_kvfp8": (QuantizedWeight, SmoothedWeight, 0.15),
    "w4a8awq": (QuantizedWeight, SmoothedWeight, 0.15),
}


def applied(source: WeightSource, layer: str, linear: str) -> Tensor:
    """The weight, with the norm before it that smoothing may have changed: [out, in] fp32."""
    weight = source.dequantized(f"{layer}.{linear}.weight").float()
    norm = NORMS.get(linear)
    return weight if norm is None else weight * source.tensor(f"{layer}.{norm}.weight").float()


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_come_back_as_the_model_that_they_were_made_from(name: str) -> None:
    query_kind, down_kind, limit = GOLDENS[name]
    original, source = (open_weights(GOLDEN / f"mo_hf_llama_{kind}") for kind in ("bf16", name))
    assert set(source.names) == set(original.names)
    for layer in ("model.layers.0", "model.layers.1"):
        assert type(source.linear(f"{layer}.self_attn.q_proj")) is query_kind
        assert type(source.linear(f"{layer}.mlp.down_proj")) is down_kind
        for linear in LINEARS:
            expected = applied(original, layer, linear)
            error = (applied(source, layer, linear) - expected).norm() / expected.norm()
            assert 0 < error < limit, (layer, linear, float(error))


def test_scales_of_inputs_and_of_the_cache_are_those_in_the_file() -> None:
    path = GOLDEN / "mo_hf_llama_fp8_kvfp8"
    source, stored = open_weights(path), load_file(path / "model.safetensors")
    assert (source.fp8_activations, source.kv_cache_type) == ("tensor", "fp8")
    attention = "model.layers.1.self_attn"
    scales = (float(stored[f"{attention}.k_proj.k_scale"]), float(stored[f"{attention}.v_proj.v_scale"]))
    assert source.kv_scales(1) == scales
    query = source.linear(f"{attention}.q_proj")
    assert isinstance(query, Fp8Weight)
    assert query.input_scale == float(stored[f"{attention}.q_proj.input_scale"])
    assert open_weights(GOLDEN / "mo_hf_llama_fp8pcpt").fp8_activations == "token"


@pytest.mark.parametrize(
    ("golden", "tensor", "replacement", "named"),
    [
        ("int8wo", "mlp.up_proj.weight_scale", torch.ones(3), "weight_scale"),
        ("int8wo", "mlp.up_proj.weight_scale", torch.full((256,), torch.nan), "not finite"),
        ("int8wo", "mlp.up_proj.weight", torch.ones(256, 128), "int8"),
        ("int4awq_kvfp8", "mlp.down_proj.pre_quant_scale", torch.ones(7), "256 finite numbers"),
        ("int4awq_kvfp8", "mlp.down_proj.weight", torch.ones(64, 256, dtype=torch.int8), "uint8"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    golden: str, tensor: str, replacement: Tensor, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(GOLDEN / f"mo_hf_llama_{golden}", path)
    tensors = load_file(path / "model.safetensors") | {f"model.layers.0.{tensor}": replacement}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(Refused, match=named):
        open_weights(path).linear(f"model.layers.0.{tensor.rpartition('.')[0]}")


@pytest.mark.parametrize("name", ["nvfp4_kvfp8", "fp8_pb_wo"])
def test_other_algorithms_are_refused_with_those_that_can_be_read(name: str) -> None:
    with pytest.raises(Refused, match=r"quant_algo .* FP8, FP8_PER_CHANNEL_PER_TOKEN, W8A16"):
        open_weights(GOLDEN / f"mo_hf_llama_{name}")


def test_another_cache_type_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "mo_hf_llama_fp8_kvfp8", tmp_path / "other")
    path = tmp_path / "other" / "hf_quant_config.json"
    body = json.loads(path.read_text())
    body["quantization"]["kv_cache_quant_algo"] = "INT8"
    path.write_text(json.dumps(body))
    with pytest.raises(Refused, match="KV cache of type 'INT8'"):
        open_weights(tmp_path / "other")
