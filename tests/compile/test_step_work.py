"""Bytes and operations of a step against numbers that were worked out by hand."""

import dataclasses
from collections import Counter

import pytest

from bitsmith.compile.batch import RequestStep
from bitsmith.compile.decoder_config import DecoderConfig, read_decoder_config
from bitsmith.compile.decoder_plan import DecoderPlan, KVCacheType, LinearSpec
from bitsmith.compile.step_work import StepWork, step_work

# Two layers of 8 heads of 4 over 2 KV heads; the second sees 3 keys.
CONFIG: DecoderConfig = dataclasses.replace(
    read_decoder_config(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
    ),
    sliding_windows=(0, 3),
)


def int4(in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(in_features, out_features, 4, 16, "int8", False, False)


def dense(in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(in_features, out_features, 16, 0, "bf16", True, False)


LAYER = {
    "qkv": (int4(32, 32), dense(32, 16)),  # two products where the rows are not stored alike
    "output": (int4(32, 32),),
    "gate_up": (int4(32, 96),),
    "down": (int4(48, 32),),
}
LINEARS = {f"layers.{i}.{name}": specs for i in range(2) for name, specs in LAYER.items()}
PLAN = DecoderPlan(CONFIG, "fp8", LINEARS | {"head": (LinearSpec(32, 100, 16, 0, "bf16", False, False),)}, ())
LAYER_BYTES = {
    "qkv.0.weight": 512, "qkv.0.scale": 128, "qkv.1.weight": 1024, "qkv.1.bias": 64,
    "output.0.weight": 512, "output.0.scale": 128, "gate_up.0.weight": 1536, "gate_up.0.scale": 384,
    "gate_up.0.zero_point": 192, "down.0.weight": 768, "down.0.scale": 192,
    "attention_norm.weight": 128, "mlp_norm.weight": 128,
}  # fmt: skip
STORED = {f"layers.{i}.{name}": size for i in range(2) for name, size in LAYER_BYTES.items()}
STORED |= {"embedding": 6400, "final_norm.weight": 128, "rotaries.0.inverse_frequencies": 8}


def by_role(work: StepWork, field: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for call in work.calls:
        sums[call.role] += getattr(call, field)
    return sums


def test_calls_come_in_the_order_of_the_decoder() -> None:
    work = step_work(PLAN, STORED, [RequestStep([1], 0, [0], 1)])
    layer = [
        "linear_quantized",
        "linear_dense",
        "write_kv_cache",
        "paged_attention",
        "linear_quantized",
        "linear_quantized",
        "gated_activation",
        "linear_quantized",
    ]
    assert [call.operator for call in work.calls] == [*layer, *layer, "linear_dense"]
    assert {call.role for call in work.calls if call.arithmetic == "int8"} == {
        "qkv", "output", "gate_up", "down",
    }  # fmt: skip


def test_one_decoded_token() -> None:
    """At position 9 the first layer's query sees 10 keys, the second's 3."""
    work = step_work(PLAN, STORED, [RequestStep([1], 9, [0], 1)])
    assert by_role(work, "num_bytes") == {
        "qkv": 2 * (512 + 128 + 1024 + 64),
        "cache_write": 2 * 16,  # K and V, 2 heads of 4, a byte each
        "attention": (10 + 3) * 16,
        "output": 2 * 640,
        "gate_up": 2 * (1536 + 384 + 192),
        "activation": 0,
        "down": 2 * 960,
        "head": 6400,  # the embedding's own table
    }
    assert by_role(work, "num_operations") == {
        "qkv": 2 * 2 * 32 * 48,
        "cache_write": 0,
        "attention": (10 + 3) * 8 * 4 * 4,
        "output": 2 * 2 * 32 * 32,
        "gate_up": 2 * 2 * 32 * 96,
        "activation": 0,
        "down": 2 * 2 * 48 * 32,
        "head": 2 * 32 * 100,
    }
    assert work.generated_bytes == 64 + 5 * 128  # one row of the table, five norms


def test_a_mixed_step() -> None:
    """Rows 4..7 of one request (no logits), one row at 0 of another, with logits."""
    requests = [RequestStep([1, 2, 3, 4], 4, [0], 0), RequestStep([5], 0, [1], 1)]
    work = step_work(PLAN, STORED, requests)
    full, windowed = (call for call in work.calls if call.role == "attention")
    assert full.num_operations == (5 + 6 + 7 + 8 + 1) * 8 * 4 * 4
    assert full.num_bytes == (8 + 1) * 16  # keys 0..7 and 0
    assert windowed.num_operations == (3 + 3 + 3 + 3 + 1) * 8 * 4 * 4
    assert windowed.num_bytes == (6 + 1) * 16  # keys 2..7 and 0
    assert by_role(work, "num_operations")["output"] == 2 * 5 * 2 * 32 * 32
    assert by_role(work, "num_bytes")["output"] == 2 * 640  # weights are read once for all rows
    assert by_role(work, "num_operations")["head"] == 2 * 32 * 100
    assert by_role(work, "num_bytes")["cache_write"] == 2 * 5 * 16
    assert work.generated_bytes == 5 * 64 + 5 * 128


def test_a_head_that_computes_no_row_reads_nothing() -> None:
    work = step_work(PLAN, STORED, [RequestStep([1, 2], 0, [0], 0)])
    assert by_role(work, "num_bytes")["head"] == by_role(work, "num_operations")["head"] == 0
    assert work.calls[-1].role == "head"  # the call is made all the same


@pytest.mark.parametrize(("kv_cache", "factor"), [("fp8", 1), ("int8", 1), ("bf16", 2), ("fp32", 4)])
def test_the_cache_type_decides_its_bytes(kv_cache: KVCacheType, factor: int) -> None:
    plan = dataclasses.replace(PLAN, kv_cache=kv_cache)
    work = step_work(plan, STORED, [RequestStep([1], 9, [0], 1)])
    assert by_role(work, "num_bytes")["attention"] == 13 * 16 * factor


def test_a_head_of_its_own_and_fp8_weights() -> None:
    head = LinearSpec(32, 100, 8, 32, "fp8", False, False, is_fp8=True)
    plan = dataclasses.replace(PLAN, linears={**PLAN.linears, "head": (head,)})
    work = step_work(
        plan, STORED | {"head.0.weight": 3200, "head.0.scale": 400}, [RequestStep([1], 0, [0], 1)]
    )
    call = work.calls[-1]
    assert (call.operator, call.arithmetic, call.num_bytes) == ("linear_fp8", "fp32", 3600)
