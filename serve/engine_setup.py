"""From settings and an engine to a ready loop: every "auto" gets its value here, once."""

from dataclasses import dataclass

from bitsmith.core.errors import Refused
from bitsmith.core.model_input import BLOCK_SIZE
from bitsmith.serve.block_pool import BlockPool
from bitsmith.serve.engine_loop import EngineLoop
from bitsmith.serve.kv_cache_manager import KVCacheManager, num_blocks_for
from bitsmith.serve.machine_memory import available_memory_bytes
from bitsmith.serve.model_runner import StepModel
from bitsmith.serve.ngram_proposer import NgramProposer
from bitsmith.serve.scheduler import Scheduler, SchedulerLimits
from bitsmith.serve.serve_settings import RuntimeSettings
from bitsmith.serve.speculation import AdaptiveSpeculator, SpeculationLimits, Speculator
from bitsmith.serve.step_cost import StepCost

_KV_MEMORY_FRAC = 0.4  # of what is available; the rest is for activations, logits and other work
# A step is as long as its tokens make it, and every stream waits for it: beyond this many, the products of a
# processor gain no more speed from a longer chunk, and the others' gaps only grow.
_STEP_TOKENS = 256
_PROMPT_LOGITS_BYTES = 128 << 20  # fp32 rows of the vocabulary that scoring may ask for in one step
_MIN_PROMPT_LOGITS = 16


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """What the running engine can take. max_model_len: prompt and output of one request, cut to what the
    whole KV cache holds. max_prompt_len None: as long as the context. num_kv_blocks 0: the engine's own."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    kv_cache_bytes: int
    speculate: str
    max_prompt_len: int | None = None

    def describe(self) -> str:
        cache = f"{self.num_kv_blocks} blocks ({self.kv_cache_bytes / 2**20:.0f} MiB)"
        return (
            f"context {self.max_model_len} tokens, up to {self.max_num_seqs} requests at once, "
            f"KV cache {cache if self.num_kv_blocks else 'of its own'}, speculation {self.speculate}"
        )


def resolve_limits(model: StepModel, settings: RuntimeSettings) -> RuntimeLimits:
    """Raises Refused where a setting is beyond what the engine was compiled for, or memory is short."""
    max_num_seqs = _within("max_num_seqs", settings.max_num_seqs, model.max_batch_size, "max_batch_size")
    max_tokens = _within(
        "max_num_batched_tokens", settings.max_num_batched_tokens, model.max_num_tokens, "max_num_tokens"
    )
    if settings.max_num_batched_tokens is None:
        max_tokens = min(max_tokens, max(_STEP_TOKENS, max_num_seqs))
    if max_num_seqs > max_tokens:
        if settings.max_num_seqs is not None:
            raise Refused(f"max_num_seqs {max_num_seqs} is above the {max_tokens} tokens of a step.")
        max_num_seqs = max_tokens
    num_blocks = _num_kv_blocks(model, settings, max_num_seqs)
    return RuntimeLimits(
        vocab_size=model.vocab_size,
        max_model_len=min(model.max_model_len, num_blocks * BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_kv_blocks=num_blocks,
        kv_cache_bytes=num_blocks * BLOCK_SIZE * model.kv_bytes_per_token,
        speculate=settings.speculate,
    )


def _within(name: str, asked: int | None, limit: int, limit_name: str) -> int:
    if asked is not None and asked > limit:
        raise Refused(f"{name} is {asked}, but the engine was compiled with {limit_name} {limit}.")
    return limit if asked is None else asked


def _num_kv_blocks(model: StepModel, settings: RuntimeSettings, max_num_seqs: int) -> int:
    block_bytes = BLOCK_SIZE * model.kv_bytes_per_token
    num_useful = max_num_seqs * num_blocks_for(model.max_model_len)
    available = available_memory_bytes()
    if settings.kv_cache_bytes is None:
        num_blocks = min(num_useful, int(available * _KV_MEMORY_FRAC) // block_bytes)
        hint = "Free some memory."
    else:
        if settings.kv_cache_bytes > available:
            raise Refused(f"kv_cache_bytes is {settings.kv_cache_bytes}; {available} bytes are available.")
        num_blocks = min(num_useful, settings.kv_cache_bytes // block_bytes)
        hint = "Raise kv_cache_bytes."
    if num_blocks < 1:
        raise Refused(f"The KV cache has no room for one block of {block_bytes} bytes. {hint}")
    return num_blocks


def build_engine_loop(model: StepModel, settings: RuntimeSettings, limits: RuntimeLimits) -> EngineLoop:
    """Allocates the KV cache."""
    model.allocate_kv_cache(limits.num_kv_blocks)
    kv_cache = KVCacheManager(BlockPool(limits.num_kv_blocks), prefix_caching=settings.prefix_caching)
    scheduler_limits = SchedulerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_prompt_logits=max(_MIN_PROMPT_LOGITS, _PROMPT_LOGITS_BYTES // (4 * limits.vocab_size)),
    )
    speculator: Speculator | None = None
    if settings.speculate == "ngram":
        speculation_limits = SpeculationLimits(num_speculative_tokens=settings.num_speculative_tokens)
        speculator = AdaptiveSpeculator(NgramProposer(), speculation_limits, StepCost())
    return EngineLoop(Scheduler(scheduler_limits, kv_cache), model, limits.num_kv_blocks, speculator)
