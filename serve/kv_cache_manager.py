"""Which cache blocks each request holds. Knows requests and the block pool; the scheduler sees only this."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bitsmith.core.model_input import BLOCK_SIZE
from bitsmith.serve.block_pool import BlockId, BlockPool, CachedBlock
from bitsmith.serve.request import Request


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True)
class _Holding:
    """block_ids: in order of position. known: the chain of content-known blocks, one for each full block that
    was computed; where content was known already it names another block than the one held."""

    block_ids: list[BlockId] = field(default_factory=list)
    known: list[CachedBlock] = field(default_factory=list)


class KVCacheManager:
    """Gives blocks to requests and takes them back.

    prefix_caching off: no block's content is ever made known, so nothing is found again.
    """

    def __init__(self, pool: BlockPool, *, prefix_caching: bool = True) -> None:
        self._pool = pool
        self._prefix_caching = prefix_caching
        self._holdings: dict[str, _Holding] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def max_tokens_per_request(self) -> int:
        """Tokens of a request that has the whole pool to itself."""
        return self._pool.num_blocks * BLOCK_SIZE

    def block_ids(self, request: Request) -> tuple[BlockId, ...]:
        return tuple(self._holdings[request.request_id].block_ids)

    def find_cached_prefix(self, request: Request) -> list[CachedBlock]:
        """Known blocks that hold the start of the request's tokens.

        At most num_tokens - 1 tokens, so that the last one is computed and gives logits; and no token whose
        logits a prompt log-probability still needs.
        """
        limit = request.num_tokens - 1
        if request.next_prompt_logprob_position is not None:
            limit = min(limit, request.next_prompt_logprob_position)
        found: list[CachedBlock] = []
        for start in range(0, limit // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            cached = self._pool.find(found[-1] if found else None, _block_tokens(request, start))
            if cached is None:
                break
            found.append(cached)
        return found

    def admit(self, request: Request, prefix: Sequence[CachedBlock]) -> bool:
        """Give a request all the blocks that its present tokens need, or nothing.

        Whole, not chunk by chunk: a request that starts can finish its prefill (no admit-preempt thrash).
        """
        assert request.request_id not in self._holdings, f"{request.request_id} is admitted twice"
        num_new = num_blocks_for(request.num_tokens) - len(prefix)
        num_evictable = sum(self._pool.ref_count(cached.block_id) == 0 for cached in prefix)
        if num_new > self._pool.num_free_blocks - num_evictable:
            return False
        held = [cached.block_id for cached in prefix]
        self._pool.touch(held)
        self._holdings[request.request_id] = _Holding(held + self._pool.take_new(num_new), list(prefix))
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """See that the request holds blocks for `num_tokens` tokens; False when the pool has too few."""
        holding = self._holdings[request.request_id]
        num_new = num_blocks_for(num_tokens) - len(holding.block_ids)
        if num_new > self._pool.num_free_blocks:
            return False
        if num_new > 0:
            holding.block_ids += self._pool.take_new(num_new)
        return True

    def cache_computed(self, request: Request) -> None:
        """Make known every full block that has been computed; called after each step.

        Only tokens that are settled: `num_computed_tokens` has been cut back to the accepted ones by now.
        """
        if not self._prefix_caching:
            return
        assert request.num_computed_tokens <= request.num_tokens, "drafts must be settled first"
        holding = self._holdings[request.request_id]
        for index in range(len(holding.known), request.num_computed_tokens // BLOCK_SIZE):
            parent = holding.known[-1] if holding.known else None
            tokens = _block_tokens(request, index * BLOCK_SIZE)
            holding.known.append(self._pool.cache_full(holding.block_ids[index], parent, tokens))

    def free(self, request: Request) -> None:
        """Take back everything, last block first, so that the end of a text is lost before its beginning.

        A request that never ran holds nothing: that is fine.
        """
        holding = self._holdings.pop(request.request_id, None)
        if holding is not None:
            self._pool.release(reversed(holding.block_ids))

    def check_integrity(self) -> None:
        self._pool.check_integrity(is_idle=not self._holdings)


def _block_tokens(request: Request, start: int) -> tuple[int, ...]:
    return tuple(request.token_ids[start : start + BLOCK_SIZE])
