"""The pool of KV-cache blocks: who holds which, which are free in what order, which are known by content.

It knows block ids, token ids and counts; it does not know requests or tensors.

States of a block: held (ref_count > 0); evictable (ref_count 0, on the free list, content still known);
blank (ref_count 0, on the free list, content unknown). The free list is a queue: taken from the front,
given back at the end, so the least recently used content is lost first.
"""

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

ROOT_HASH = BlockHash(b"")
ROOT_SERIAL = 0


class IntegrityError(RuntimeError):
    """The pool contradicts itself: a bug, and serving on could mix the texts of two requests."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block known by its content.

    block_hash: of the parent's hash and the tokens, so it stands for the whole prefix. A hash is a hint only:
    a hit is believed when `token_ids` are equal and the parent is the very block the walk came from, told by
    its `serial`, a number never given twice.
    """

    block_id: BlockId
    block_hash: BlockHash
    token_ids: tuple[int, ...]
    serial: int
    parent_serial: int


def hash_block_tokens(parent_hash: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """SHA-256 chained through the parent's."""
    return BlockHash(hashlib.sha256(parent_hash + array("q", token_ids).tobytes()).digest())


class BlockPool:
    """Reference counts, free list and content index of `num_blocks` blocks."""

    def __init__(
        self, num_blocks: int, hash_block: Callable[[BlockHash, Sequence[int]], BlockHash] = hash_block_tokens
    ) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._hash_block = hash_block
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))
        self._by_hash: dict[BlockHash, CachedBlock] = {}
        self._by_id: dict[BlockId, CachedBlock] = {}
        self._serials = itertools.count(ROOT_SERIAL + 1)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def free_block_ids(self) -> list[BlockId]:
        """Front first: the order in which blocks will be taken."""
        return list(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def take_new(self, num_blocks: int) -> list[BlockId]:
        """Blocks from the front of the free list, their old content forgotten."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks asked, {len(self._free)} free"
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return taken

    def touch(self, block_ids: Iterable[BlockId]) -> None:
        """One more holder for each; an evictable block leaves the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """One holder fewer for each, in the order given; without any it goes to the end of the free list."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is released but nobody holds it"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def find(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """The known block that holds these tokens after this parent (None: at the start)."""
        cached = self._by_hash.get(self._hash_block(parent.block_hash if parent else ROOT_HASH, token_ids))
        is_hit = (
            cached is not None
            and cached.token_ids == token_ids
            and cached.parent_serial == (parent.serial if parent else ROOT_SERIAL)
        )
        return cached if is_hit else None

    def cache_full(
        self, block_id: BlockId, parent: CachedBlock | None, token_ids: tuple[int, ...]
    ) -> CachedBlock:
        """Make a held block's content known; the block that stands for this content is returned.

        When another block already holds the same content it stays the known one, and this block goes on
        without being known.
        """
        known = self.find(parent, token_ids)
        if known is not None:
            return known
        block_hash = self._hash_block(parent.block_hash if parent else ROOT_HASH, token_ids)
        stale = self._by_hash.get(block_hash)  # a lost parent's child, or a collision: the newer content wins
        if stale is not None:
            self._forget(stale.block_id)
        assert block_id not in self._by_id, f"block {block_id} is filled twice"
        cached = CachedBlock(
            block_id, block_hash, token_ids, next(self._serials), parent.serial if parent else ROOT_SERIAL
        )
        self._by_hash[block_hash] = self._by_id[block_id] = cached
        return cached

    def _forget(self, block_id: BlockId) -> None:
        cached = self._by_id.pop(block_id, None)
        if cached is not None:
            del self._by_hash[cached.block_hash]

    def check_integrity(self, *, is_idle: bool) -> None:
        """Raise IntegrityError unless free + held == all and the content index agrees with itself.

        is_idle: nobody should hold anything.
        """
        num_held = sum(count > 0 for count in self._ref_counts)
        if num_held + len(self._free) != self.num_blocks:
            raise IntegrityError(f"{num_held} blocks held + {len(self._free)} free != {self.num_blocks}")
        for block_id in self._free:
            if self._ref_counts[block_id] != 0:
                raise IntegrityError(f"block {block_id} is free with {self._ref_counts[block_id]} holders")
        if is_idle and num_held:
            raise IntegrityError(f"idle, yet {num_held} blocks are held")
        indexed = {cached.block_id: cached for cached in self._by_hash.values()}
        if len(indexed) != len(self._by_hash) or indexed != self._by_id:
            raise IntegrityError("the two indexes of known blocks differ")
