"""One flat batch from requests: every token has its place, its cache cell and its request."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from bitsmith.core.model_input import BLOCK_SIZE, ModelInputBuilder


def test_two_requests() -> None:
    builder = ModelInputBuilder()
    builder.add([7, 8, 9], 15, [4, 2, 6], [2])
    builder.add([5], 0, [3], [0])
    built = builder.build()
    assert built.token_ids.tolist() == [7, 8, 9, 5]
    assert built.positions.tolist() == [15, 16, 17, 0]
    assert built.slot_mapping.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 3 * 16]
    assert built.block_table.tolist() == [[4, 2], [3, 0]]  # only blocks that are in use
    assert built.query_start_loc.tolist() == [0, 3, 4]
    assert built.seq_lens.tolist() == [18, 1]
    assert built.logits_indices.tolist() == [2, 3]


def test_nothing() -> None:
    built = ModelInputBuilder().build()
    assert built.block_table.shape == (0, 0) and built.query_start_loc.tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=5))
def test_laws(requests: list[tuple[int, int]]) -> None:
    builder = ModelInputBuilder()
    block_id = 0
    for start, num_tokens in requests:
        blocks = range(block_id, block_id := block_id + 4)
        builder.add([1] * num_tokens, start, blocks, range(num_tokens))
    built = builder.build()
    total = sum(num_tokens for _, num_tokens in requests)
    assert len(set(built.slot_mapping.tolist())) == total  # no two tokens share a cell
    assert torch.equal(built.positions % BLOCK_SIZE, built.slot_mapping % BLOCK_SIZE)
    assert built.logits_indices.tolist() == list(range(total))
    assert built.seq_lens.tolist() == [start + num_tokens for start, num_tokens in requests]
    dtypes = [tensor.dtype for tensor in (built.token_ids, built.block_table, built.logits_indices)]
    assert dtypes == [torch.int64, torch.int32, torch.int64]
