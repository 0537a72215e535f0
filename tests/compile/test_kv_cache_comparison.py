"""The KV-cache types side by side: measured on the decode path, with the bytes that are really allocated."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bitsmith.compile.engine import Engine
from bitsmith.compile.kv_cache_comparison import compare_kv_caches
from bitsmith.compile.kv_cache_row import KVCacheRow
from bitsmith.compile.reference_model import load_reference, reference_logits
from bitsmith.quantize.weight_source import open_weights

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]
WINDOWS = torch.randint(0, 301, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()


def _compare(engine: Engine, checkpoint: Path) -> dict[str, KVCacheRow]:
    source = open_weights(checkpoint)
    model = load_reference(source)
    reference = [reference_logits(model, window, len(window)) for window in WINDOWS]
    rows = compare_kv_caches(engine, source, WINDOWS, reference)
    return {row.kv_cache: row for row in rows}


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8", "int8"])
def test_all_types_of_a_calibrated_checkpoint_are_measured(
    kv_cache: str, make_quantized: ModelMaker, eager_engine: EngineMaker
) -> None:
    checkpoint = make_quantized(4, kv_scales=(0.02, 0.01))
    rows = _compare(eager_engine(checkpoint, kv_cache=kv_cache), checkpoint)
    qualities = {name: row.quality for name, row in rows.items()}
    bf16, fp8, int8 = (qualities[name] for name in ("bf16", "fp8", "int8"))
    assert bf16 is not None and fp8 is not None and int8 is not None
    assert {row.scales for row in (rows["fp8"], rows["int8"])} == {"calibrated scales"}
    assert (bf16.perplexity_change, bf16.perplexity_change_stderr, bf16.kl_bf16) == (0, 0, 0)
    assert bf16.num_rows == 3 * (20 - 1)  # half of a window is decoded; the last row has no next token
    # fp32 activations: what is left is the cache's own rounding, bf16's least.
    assert 0 < bf16.kl_reference < int8.kl_reference and bf16.kl_reference < fp8.kl_reference
    for quality in (fp8, int8):
        assert 0 < quality.kl_bf16 < 0.05
        assert quality.perplexity == pytest.approx(bf16.perplexity * (1 + quality.perplexity_change))
        assert abs(quality.perplexity_change) < 0.1 and quality.perplexity_change_stderr > 0


def test_bytes_are_those_of_the_tensors(make_quantized: ModelMaker, eager_engine: EngineMaker) -> None:
    checkpoint = make_quantized(4, kv_scales=(0.02, 0.01))
    rows = _compare(eager_engine(checkpoint, kv_cache="int8"), checkpoint)
    assert {name: row.bytes_per_token for name, row in rows.items()} == {
        "bf16": 2 * 2 * 2 * 16 * 2, "fp8": 2 * 2 * 2 * 16, "int8": 2 * 2 * 2 * 16
    }  # fmt: skip
    assert rows["fp8"].bytes_per_token <= 0.52 * rows["bf16"].bytes_per_token


def test_a_type_without_calibrated_scales_is_said_to_be_unmeasured(
    make_quantized: ModelMaker, eager_engine: EngineMaker
) -> None:
    checkpoint = make_quantized(4)
    rows = _compare(eager_engine(checkpoint, kv_cache="bf16"), checkpoint)
    assert all(row.quality is None for row in rows.values())
    assert rows["int8"].describe().endswith("(no calibrated scales): 128 bytes a token, quality not measured")
    rows = _compare(eager_engine(checkpoint, kv_cache="fp8", kv_scale="ones"), checkpoint)
    assert rows["fp8"].scales == "uncalibrated scales of one"
    assert rows["fp8"].quality is not None and rows["bf16"].quality is not None
    assert rows["int8"].quality is None


def test_worse_scales_are_seen(make_quantized: ModelMaker, eager_engine: EngineMaker) -> None:
    """Scales of a cache that saturates: the comparison must not hide it."""
    checkpoint = make_quantized(4, kv_scales=(0.0004, 0.0002))
    quality = _compare(eager_engine(checkpoint, kv_cache="fp8"), checkpoint)["fp8"].quality
    assert quality is not None and quality.kl_bf16 > 0.05


def test_a_row_survives_json_and_reads_as_text(make_quantized: ModelMaker, eager_engine: EngineMaker) -> None:
    checkpoint = make_quantized(4, kv_scales=(0.02, 0.01))
    for row in _compare(eager_engine(checkpoint, kv_cache="fp8"), checkpoint).values():
        assert KVCacheRow.from_json(json.loads(json.dumps(asdict(row)))) == row
        assert f"KV cache {row.kv_cache}" in row.describe() and "bytes a token, perplexity" in row.describe()
