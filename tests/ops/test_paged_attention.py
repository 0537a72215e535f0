"""Attention over the paged cache: against the reference, and one row's bits whatever the batch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bitsmith.ops import reference
from bitsmith.ops.reference import AttentionSettings

NUM_HEADS, NUM_KV_HEADS = 6, 2
# What one means in a cache of each type; integers need a fine one.
STEP = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float8_e4m3fn: 1.0, torch.int8: 1 / 16}


@dataclass(frozen=True, slots=True)
class Batch:
    """R requests over one cache; see `ModelInput`."""

    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    def run(self, ops: Any, settings: AttentionSettings) -> torch.Tensor:
        result: torch.Tensor = ops.paged_attention(
            self.query,
            *self.caches,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            settings.softmax_scale,
            settings.key_scale,
            settings.value_scale,
            settings.sliding_window,
            settings.soft_cap,
        )
        return result

    def reference(self, settings: AttentionSettings) -> torch.Tensor:
        return reference.paged_attention(
            self.query, self.caches, self.block_table, self.query_start_loc, self.seq_lens, settings
        )


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(
    dtype: torch.dtype, head_size: int, lens: list[tuple[int, int]], num_heads: int = NUM_HEADS
) -> Batch:
    """lens: (new rows, tokens in the cache with them) of each request; blocks in random order."""
    num_blocks = sum(-(-seq_len // 16) for _, seq_len in lens) + 3
    spread = 2 / STEP[dtype]
    caches = tuple((torch.randn(num_blocks, NUM_KV_HEADS, 16, head_size) * spread).to(dtype) for _ in "kv")
    free = torch.randperm(num_blocks).tolist()
    table = torch.zeros(len(lens), max((-(-s // 16) for _, s in lens), default=0) + 1, dtype=torch.int32)
    for r, (_, seq_len) in enumerate(lens):
        for b in range(-(-seq_len // 16)):
            table[r, b] = free.pop()
        if seq_len % 16:  # what lies behind the last token must not matter
            for cache in caches:
                if dtype != torch.float8_e4m3fn:
                    garbage = float("nan") if dtype.is_floating_point else 127
                    cache[int(table[r, seq_len // 16]), :, seq_len % 16 :] = garbage
    starts = [0]
    for rows, _ in lens:
        starts.append(starts[-1] + rows)
    query = torch.randn(starts[-1], num_heads, head_size)
    return Batch(query, (caches[0], caches[1]), table, int32(starts), int32([s for _, s in lens]))


MIXED = [(1, 1), (40, 40), (3, 700), (0, 17), (1, 530), (20, 300)]


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("head_size", [64, 12])
@pytest.mark.parametrize("num_heads", [2, 4, 10])
def test_equals_reference(form: Any, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_size)
    batch = make_batch(dtype, head_size, MIXED, num_heads)
    for sliding_window in (0, 1, 5, 300):
        for soft_cap in (0.0, 5.0):
            settings = AttentionSettings(
                head_size**-0.5, 0.7 * STEP[dtype], 1.3 * STEP[dtype], sliding_window, soft_cap
            )
            expected = batch.reference(settings)
            difference = (batch.run(form, settings) - expected).abs().max() / expected.abs().max()
            assert difference < 3e-6, (sliding_window, soft_cap)


@pytest.mark.parametrize("lens", [[], [(0, 0)], [(0, 20), (0, 0)]], ids=str)
def test_no_rows(form: Any, lens: list[tuple[int, int]]) -> None:
    batch = make_batch(torch.float32, 8, lens)
    assert batch.run(form, AttentionSettings(1.0)).shape == (0, NUM_HEADS, 8)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("sliding_window", [0, 290])
def test_a_row_does_not_depend_on_chunks_neighbours_or_block_ids(
    form: Any, two_threads: None, dtype: torch.dtype, sliding_window: int
) -> None:
    torch.manual_seed(1)
    settings = AttentionSettings(0.125, 0.9 * STEP[dtype], 1.1 * STEP[dtype], sliding_window)
    seq_len = 600
    whole = make_batch(dtype, 64, [(seq_len, seq_len)])
    expected = whole.run(form, settings)

    for chunk in (1, 7, 256):  # chunked prefill and decode
        for start in range(0, seq_len, chunk) if chunk > 1 else (0, 15, 16, 255, 256, 257, 599):
            end = min(start + chunk, seq_len)
            part = Batch(
                whole.query[start:end], whole.caches, whole.block_table, int32([0, end - start]), int32([end])
            )
            assert torch.equal(part.run(form, settings), expected[start:end]), (chunk, start)

    order = torch.randperm(whole.caches[0].shape[0])  # the same blocks under other ids
    moved = tuple(torch.empty_like(cache) for cache in whole.caches)
    for to, cache in zip(moved, whole.caches, strict=True):
        to.view(torch.uint8)[order] = cache.view(torch.uint8)
    table = order[whole.block_table.long()].int()
    other = Batch(whole.query, (moved[0], moved[1]), table, whole.query_start_loc, whole.seq_lens)
    assert torch.equal(other.run(form, settings), expected)

    pieces = [(0, 5), (300, 301), (431, 439), (520, 600)]  # several requests of one step
    rows = torch.cat([whole.query[a:b] for a, b in pieces])
    starts = [0]
    for a, b in pieces:
        starts.append(starts[-1] + b - a)
    tables = whole.block_table.repeat(len(pieces), 1)
    mixed = Batch(rows, whole.caches, tables, int32(starts), int32([b for _, b in pieces]))
    assert torch.equal(mixed.run(form, settings), torch.cat([expected[a:b] for a, b in pieces]))


def test_query_may_be_a_view(form: Any) -> None:
    batch = make_batch(torch.float32, 16, [(5, 20)])
    wide = torch.randn(5, 2, NUM_HEADS, 16)
    view = Batch(wide[:, 1], batch.caches, batch.block_table, batch.query_start_loc, batch.seq_lens)
    copy = Batch(wide[:, 1].clone(), batch.caches, batch.block_table, batch.query_start_loc, batch.seq_lens)
    assert torch.equal(view.run(form, AttentionSettings(0.25)), copy.run(form, AttentionSettings(0.25)))


def test_large_scores_do_not_overflow(form: Any) -> None:
    batch = make_batch(torch.float32, 16, [(2, 40)])
    settings = AttentionSettings(1000.0)
    output = batch.run(form, settings)
    assert output.isfinite().all()
    assert torch.allclose(output, batch.reference(settings), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"block_table": torch.full((2, 3), 9, dtype=torch.int32)},
            IndexError,
            "block id 9 of request 0 is outside",
        ),
        (
            {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
            IndexError,
            "request 0 with seq_len 20 needs 2 blocks",
        ),
        ({"seq_lens": int32([0, 1])}, ValueError, "request 0 has 2 rows but seq_len 0"),
        ({"query_start_loc": int32([0, 2, 4])}, ValueError, "query_start_loc must go from 0 to the 3 rows"),
        ({"query_start_loc": int32([0, 3])}, ValueError, r"must be \[R, max_blocks\]"),
        ({"seq_lens": torch.tensor([20, 1])}, ValueError, "seq_lens must be contiguous int32"),
        ({"query": torch.randn(3, 3, 8)}, ValueError, "does not fit a cache of 2 heads of size 8"),
        ({"sliding_window": -1}, ValueError, "must not be negative"),
    ],
)
def test_wrong_arguments_are_named(
    ops: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "query": torch.randn(3, 2, 8),
        "key_cache": torch.randn(4, 2, 16, 8),
        "value_cache": torch.randn(4, 2, 16, 8),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_start_loc": int32([0, 2, 3]),
        "seq_lens": int32([20, 1]),
        "softmax_scale": 1.0,
        "key_scale": 1.0,
        "value_scale": 1.0,
        "sliding_window": 0,
        "soft_cap": 0.0,
    }
    with pytest.raises(error, match=message):
        ops.paged_attention(**(arguments | change))
