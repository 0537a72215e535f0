"""Is the compiled engine the model that it was compiled from? Measured at the end of every compile.

The engine's logits are held against Hugging Face transformers in fp32 on the dequantized weights, so what
is measured is the engine's own error (kernels, activations, KV cache) and not that of the quantization.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.decoder_plan import Activations, DecoderPlan, KVCacheType
from bitsmith.compile.engine import Engine
from bitsmith.compile.kv_cache_comparison import compare_kv_caches
from bitsmith.compile.kv_cache_row import KVCacheRow
from bitsmith.compile.logit_comparison import LogitComparison, LogitDifference
from bitsmith.compile.parity_schedule import Step, decode_steps, mixed_steps, prefill_steps, run_steps
from bitsmith.compile.reference_model import load_reference, reference_logits
from bitsmith.core.errors import Refused
from bitsmith.core.text_source import load_text, pack_windows
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.quantize.weight_source import WeightSource

_NUM_WINDOWS = 4
_SEQ_LEN = 128
_REFERENCE_BYTES = 512 << 20  # fp32 logits of all windows
_SEED = 0


@dataclass(frozen=True, slots=True)
class ParityLimit:
    """The metric that decides, its limit, and why the limit is where it is."""

    metric: str
    limit: float
    reason: str


@dataclass(frozen=True, slots=True)
class ParityRecord:
    """What `parity.json` holds. kv_caches: the cache types side by side, the engine's own among them."""

    reference: str
    text: dict[str, Any]
    phases: dict[str, LogitDifference]
    overall: LogitDifference
    kv_caches: tuple[KVCacheRow, ...]
    limit: ParityLimit

    @property
    def decisive(self) -> float:
        """The worst phase's value of the metric that decides; NaN counts as the worst."""
        values = [float(getattr(phase, self.limit.metric)) for phase in self.phases.values()]
        return max(values, key=lambda value: math.inf if math.isnan(value) else value)

    @property
    def is_within_limit(self) -> bool:
        return self.decisive <= self.limit.limit  # False for NaN

    def to_json(self) -> str:
        plain = asdict(self) | {"decisive": self.decisive, "is_within_limit": self.is_within_limit}
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


# Mean KL in nats/token, about three times what was measured on the demo model (SmolLM2-135M, AVX2, 1024
# positions of the built-in text), since other models and processors differ; an engine that is wrong, and
# not only imprecise, is off by whole nats.
_ACTIVATION_LIMITS: dict[Activations, tuple[float, str]] = {
    "fp32": (1e-3, "weights or cache rounded to bf16 are allowed what bf16 arithmetic is"),
    "bf16": (1e-3, "bf16 activations and cache measured 1.4e-4"),
    "fp8": (1.5e-1, "fp8 activations beside an fp8 cache measured 4.1e-2, with Gemma 3 270M 6.2e-2"),
    "int8": (1.5e-2, "int8 activations over a bf16 cache measured 4.4e-3 with 4-bit weights"),
}
_KV_LIMITS: Mapping[KVCacheType, tuple[float, str]] = {
    "fp8": (3e-2, "an fp8 cache added 1.0e-2"),
    "int8": (2e-2, "an int8 cache added 6.6e-3"),
}


def parity_limit(plan: DecoderPlan) -> ParityLimit:
    """The limit for this arithmetic: activations' part and, where the cache is fp8 or int8, the cache's."""
    used = {spec.activations for specs in plan.linears.values() for spec in specs}
    if used == {"fp32"} and plan.kv_cache == "fp32":
        return ParityLimit(
            "max_relative", 1e-4, "both compute in fp32 and differ only in the order of summation"
        )
    coarsest = next(name for name in ("fp8", "int8", "bf16", "fp32") if name in used)
    limit, reason = _ACTIVATION_LIMITS[coarsest]
    if plan.kv_cache in _KV_LIMITS:
        added, measured = _KV_LIMITS[plan.kv_cache]
        limit, reason = limit + added, f"{reason}; {measured}"
    return ParityLimit(
        "kl_mean", limit, f"{reason}; what was measured is of the demo model, and has a threefold margin"
    )


def measure_parity(engine: Engine, source: WeightSource) -> ParityRecord:
    """Compare an engine with its source in transformers."""
    windows, text = _windows(engine, source.path)
    model = load_reference(source)
    reference = [reference_logits(model, window, len(window)) for window in windows]
    del model
    num_windows, seq_len = len(windows), len(windows[0])
    schedule: dict[str, list[Step]] = {
        "prefill": prefill_steps(num_windows, seq_len, engine.limits),
        "decode": decode_steps(num_windows, seq_len, engine.limits),
        "mixed": mixed_steps(num_windows, seq_len, engine.limits),
    }
    overall = LogitComparison()
    phases = {
        name: _compare(engine, windows, steps, reference, overall)
        for name, steps in schedule.items()
        if steps
    }
    import transformers

    return ParityRecord(
        reference=f"transformers {transformers.__version__}, fp32, eager attention, dequantized weights",
        text=text,
        phases=phases,
        overall=overall.result(),
        kv_caches=compare_kv_caches(engine, source, windows, reference),
        limit=parity_limit(engine.plan),
    )


def _windows(engine: Engine, checkpoint: Path) -> tuple[list[list[int]], dict[str, Any]]:
    """Token windows of the built-in evaluation text, or random ids for a checkpoint without a tokenizer."""
    seq_len = min(_SEQ_LEN, engine.max_model_len)
    while seq_len > 2 and _NUM_WINDOWS * seq_len * engine.vocab_size * 4 > _REFERENCE_BYTES:
        seq_len //= 2
    if seq_len < 2:
        raise Refused(f"max_model_len {engine.max_model_len} is too short to check; it must be at least 2.")
    size = {"num_windows": _NUM_WINDOWS, "seq_len": seq_len}
    try:
        tokenizer = load_tokenizer(checkpoint)
    except Refused:
        generator = torch.Generator().manual_seed(_SEED)
        token_ids = torch.randint(0, engine.vocab_size, (_NUM_WINDOWS, seq_len), generator=generator)
        return token_ids.tolist(), {"source": "random token ids: no tokenizer", "seed": _SEED} | size
    text = load_text("builtin", "evaluation")
    packed = pack_windows(text, tokenizer, num_windows=_NUM_WINDOWS, seq_len=seq_len, seed=_SEED)
    return packed.token_ids.tolist(), text.provenance | {"source": text.name, "seed": _SEED} | size


def _compare(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    steps: Sequence[Step],
    reference: Sequence[Tensor],
    overall: LogitComparison,
) -> LogitDifference:
    comparison = LogitComparison()
    for piece, logits in run_steps(engine, windows, steps):
        expected = reference[piece.window][piece.start : piece.end]
        comparison.add(expected, logits)
        overall.add(expected, logits)
    return comparison.result()
