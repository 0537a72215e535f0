"""The block pool: exact ids, exact free-list order, content index; and laws under any sequence of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bitsmith.serve.block_pool import (
    ROOT_HASH,
    BlockHash,
    BlockId,
    BlockPool,
    CachedBlock,
    IntegrityError,
    hash_block_tokens,
)

A, B, C = (1,) * 16, (2,) * 16, (3,) * 16


def test_blocks_are_taken_from_the_front_and_given_back_at_the_end() -> None:
    pool = BlockPool(5)
    assert pool.take_new(3) == [0, 1, 2]
    pool.release([BlockId(1)])
    assert pool.free_block_ids == [3, 4, 1]
    pool.release([BlockId(2), BlockId(0)])
    assert pool.free_block_ids == [3, 4, 1, 2, 0]
    assert pool.take_new(4) == [3, 4, 1, 2]


def test_a_block_with_two_holders_is_free_after_the_second_release() -> None:
    pool = BlockPool(2)
    (block,) = pool.take_new(1)
    pool.touch([block])
    pool.release([block])
    assert (pool.ref_count(block), pool.free_block_ids) == (1, [1])
    pool.release([block])
    assert pool.free_block_ids == [1, 0]


def test_content_is_found_after_release_and_lost_when_the_block_is_taken() -> None:
    pool = BlockPool(2)
    blocks = pool.take_new(2)
    first = pool.cache_full(blocks[0], None, A)
    second = pool.cache_full(blocks[1], first, B)
    pool.release(reversed(blocks))
    assert pool.free_block_ids == [1, 0]
    assert pool.find(None, A) == first and pool.find(first, B) == second
    assert pool.find(None, B) is None, "B is known only after A"
    pool.touch([first.block_id])
    assert pool.free_block_ids == [1]
    assert pool.take_new(1) == [1]
    assert pool.find(first, B) is None and pool.find(None, A) == first


def test_the_first_of_two_blocks_with_equal_content_stays_the_known_one() -> None:
    pool = BlockPool(3)
    one, two, three = pool.take_new(3)
    known = pool.cache_full(one, None, A)
    assert pool.cache_full(two, None, A) is known
    child = pool.cache_full(three, known, B)
    assert child.parent_serial == known.serial
    pool.release([one, two, three])
    pool.check_integrity(is_idle=True)


def _colliding(parent: BlockHash, token_ids: object) -> BlockHash:
    return BlockHash(b"level-2" if parent else b"level-1")


def test_a_hash_collision_is_a_miss() -> None:
    pool = BlockPool(4, hash_block=_colliding)
    blocks = pool.take_new(3)
    a = pool.cache_full(blocks[0], None, A)
    b = pool.cache_full(blocks[1], a, C)
    assert pool.find(None, B) is None
    assert pool.find(a, B) is None
    assert pool.find(a, C) == b
    # Another first block takes the same hash; the old child has equal tokens and an equal parent hash.
    other = pool.cache_full(blocks[2], None, B)
    assert other.block_hash == a.block_hash
    assert pool.find(other, C) is None
    pool.check_integrity(is_idle=False)


def test_hashes_differ_by_parent_and_by_token() -> None:
    root = hash_block_tokens(ROOT_HASH, A)
    assert root == hash_block_tokens(ROOT_HASH, A)
    assert len({root, hash_block_tokens(ROOT_HASH, B), hash_block_tokens(root, A)}) == 3


def test_integrity_check_finds_a_leak_and_a_contradiction() -> None:
    pool = BlockPool(3)
    pool.take_new(1)
    pool.check_integrity(is_idle=False)
    with pytest.raises(IntegrityError, match="idle, yet 1 blocks are held"):
        pool.check_integrity(is_idle=True)
    pool._ref_counts[2] = 1
    with pytest.raises(IntegrityError, match="2 blocks held"):
        pool.check_integrity(is_idle=False)


class PoolMachine(RuleBasedStateMachine):
    """Against a plain model: holders as a multiset, and for every known block the path of tokens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[BlockId] = []
        self.paths: dict[int, tuple[tuple[int, ...], ...]] = {}  # serial -> tokens from the root
        self.known: list[CachedBlock] = []

    @precondition(lambda self: self.pool.num_free_blocks > 0)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free_blocks))
        expected = self.pool.free_block_ids[:count]
        taken = self.pool.take_new(count)
        assert taken == expected
        assert not set(taken) & set(self.held)
        self.held += taken
        self.known = [cached for cached in self.known if cached.block_id not in taken]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])
        if block not in self.held:
            assert self.pool.free_block_ids[-1] == block

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 2))
    def fill(self, data: st.DataObject, token: int) -> None:
        unknown = [block for block in self.held if block not in {c.block_id for c in self.known}]
        if not unknown:
            return
        block = data.draw(st.sampled_from(sorted(set(unknown))))
        parent = data.draw(st.sampled_from([None, *self.known]))
        cached = self.pool.cache_full(block, parent, (token,))
        path = (*(self.paths[parent.serial] if parent else ()), (token,))
        if cached.serial in self.paths:
            assert self.paths[cached.serial] == path
        self.paths[cached.serial] = path
        self.known = [c for c in self.known if c.block_hash != cached.block_hash or c is cached]
        if cached not in self.known:
            self.known.append(cached)

    @rule(data=st.data(), token=st.integers(0, 2))
    def look_up_and_touch(self, data: st.DataObject, token: int) -> None:
        parent = data.draw(st.sampled_from([None, *self.known]))
        cached = self.pool.find(parent, (token,))
        if cached is not None:
            assert cached in self.known
            assert self.paths[cached.serial] == (*(self.paths[parent.serial] if parent else ()), (token,))
            self.pool.touch([cached.block_id])
            self.held.append(cached.block_id)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(is_idle=not self.held)
        for block in range(6):
            assert self.pool.ref_count(BlockId(block)) == self.held.count(BlockId(block))
        assert self.pool.num_free_blocks == 6 - len(set(self.held))
        assert len(set(self.pool.free_block_ids)) == self.pool.num_free_blocks


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
