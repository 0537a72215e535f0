"""The decoder against transformers in fp32, for every architecture and every way of batching."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bitsmith.compile.batch import RequestStep, build_model_input
from bitsmith.compile.engine import Engine
from bitsmith.core.model_input import ModelInput

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]
Loader = Callable[[Path], PreTrainedModel]

WINDOW = 24
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "phi3": {"sliding_window": WINDOW},
}


def _token_ids(num_tokens: int) -> list[int]:
    return torch.randint(0, 301, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def _reference(model: PreTrainedModel, token_ids: Sequence[int], **inputs: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False, **inputs).logits[0]
    return logits


def _max_relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _compute(engine: Engine, token_ids: Sequence[int], bounds: Sequence[int]) -> Tensor:
    """Logits of all positions, computed in chunks that end at `bounds`."""
    blocks = [3, 17, 1, 9, 5, 12, 0, 8]
    kv_cache = engine.new_kv_cache(18)
    pieces, start = [], 0
    for end in bounds:
        step = RequestStep(token_ids[start:end], start, blocks, end - start)
        pieces.append(engine.execute(build_model_input([step]), kv_cache))
        start = end
    return torch.cat(pieces)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_equals_transformers(
    model_type: str, make_model: ModelMaker, eager_engine: EngineMaker, load_transformers: Loader
) -> None:
    path = make_model(model_type, **ARCHITECTURES[model_type])
    engine, model = eager_engine(path), load_transformers(path)
    token_ids = _token_ids(70)
    expected = _reference(model, token_ids)
    whole = _compute(engine, token_ids, [70])
    assert _max_relative(whole, expected) < 1e-4
    in_chunks_then_decoded = _compute(engine, token_ids, [20, 37, *range(38, 71)])
    assert _max_relative(in_chunks_then_decoded, expected) < 1e-4


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantized_weights_equal_their_dequantized_form(
    num_bits: int, symmetric: bool, make_quantized: ModelMaker, eager_engine: EngineMaker
) -> None:
    from bitsmith.compile.reference_model import load_reference
    from bitsmith.quantize.weight_source import open_weights

    path = make_quantized(num_bits, symmetric=symmetric)
    token_ids = _token_ids(40)
    expected = _reference(load_reference(open_weights(path)), token_ids)
    assert _max_relative(_compute(eager_engine(path), token_ids, [40]), expected) < 1e-4


def test_partly_quantized_projections_are_joined_and_not_fused(
    make_quantized: ModelMaker, eager_engine: EngineMaker
) -> None:
    from bitsmith.compile.reference_model import load_reference
    from bitsmith.quantize.weight_source import open_weights

    path = make_quantized(4, skip="k_proj")
    engine = eager_engine(path)
    assert [spec.is_quantized for spec in engine.plan.linears["layers.0.qkv"]] == [True, False, True]
    assert len(engine.plan.linears["layers.0.gate_up"]) == 1
    token_ids = _token_ids(40)
    expected = _reference(load_reference(open_weights(path)), token_ids)
    assert _max_relative(_compute(engine, token_ids, [40]), expected) < 1e-4


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_window_edges(
    model_type: str,
    length: int,
    make_model: ModelMaker,
    eager_engine: EngineMaker,
    load_transformers: Loader,
) -> None:
    path = make_model(model_type, **ARCHITECTURES[model_type])
    engine = eager_engine(path)
    token_ids = _token_ids(length)
    one_by_one = _compute(engine, token_ids, range(1, length + 1))
    torch.testing.assert_close(one_by_one, _compute(engine, token_ids, [length]), rtol=1e-5, atol=1e-5)
    assert _max_relative(one_by_one, _reference(load_transformers(path), token_ids)) < 1e-4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_variants_at_long_positions(
    rope: dict[str, Any], make_model: ModelMaker, eager_engine: EngineMaker, load_transformers: Loader
) -> None:
    """Tokens that stand far apart: a wrong frequency is invisible at position 0 and among neighbours."""
    scaling = rope | {"rope_theta": 1e4}
    path = make_model("llama", rope_parameters=scaling, max_position_embeddings=8192)
    engine, model = eager_engine(path), load_transformers(path)
    positions = torch.tensor([0, 1, 2, 1000, 1001, 8000, 8001])
    token_ids = torch.tensor(_token_ids(7))
    # Without a mask transformers takes a jump in the positions for the start of another sequence.
    mask = torch.ones((1, 7), dtype=torch.int64)
    expected = _reference(model, token_ids.tolist(), position_ids=positions[None], attention_mask=mask)
    model_input = ModelInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=torch.arange(7),
        block_table=torch.zeros((1, 1), dtype=torch.int32),
        query_start_loc=torch.tensor([0, 7], dtype=torch.int32),
        seq_lens=torch.tensor([7], dtype=torch.int32),
        logits_indices=torch.arange(7),
    )
    actual = engine.execute(model_input, engine.new_kv_cache(1))
    assert _max_relative(actual, expected) < 1e-4
    plain = eager_engine(make_model("llama", max_position_embeddings=8192))
    unscaled = plain.execute(model_input, plain.new_kv_cache(1))
    assert _max_relative(unscaled, expected) > 1e-3  # the variant matters here, so the test can see it


def test_an_fp8_cache_costs_little_and_is_really_fp8(
    make_quantized: ModelMaker, eager_engine: EngineMaker
) -> None:
    path = make_quantized(4, kv_scales=(0.02, 0.01))
    token_ids = _token_ids(40)
    fp8, fp32 = eager_engine(path, kv_cache="fp8"), eager_engine(path)
    difference = _max_relative(_compute(fp8, token_ids, [40]), _compute(fp32, token_ids, [40]))
    assert 1e-4 < difference < 0.1
    assert (fp8.kv_bytes_per_token, fp32.kv_bytes_per_token) == (2 * 2 * 2 * 16, 4 * 2 * 2 * 2 * 16)
    assert fp8.new_kv_cache(2).num_bytes == 2 * 16 * fp8.kv_bytes_per_token
