"""The KV-cache types side by side: the same weights and operators, decoding the same tokens over each.

Every type is run by the module itself, not by the compiled package, which is made for one type; so the rows
differ in the cache alone. Measured only where two types can be: bf16 needs no scales, fp8 and int8 do.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bitsmith.compile.arithmetic import calibrated_scales
from bitsmith.compile.decoder import Decoder
from bitsmith.compile.decoder_plan import DecoderPlan, KVCacheType, KVScales
from bitsmith.compile.engine import Engine
from bitsmith.compile.kv_cache import allocate_kv_cache
from bitsmith.compile.kv_cache_row import DecodeQuality, KVCacheRow
from bitsmith.compile.logit_comparison import LogitComparison
from bitsmith.compile.parity_schedule import decode_steps, run_steps
from bitsmith.compile.step_runner import EagerRunner
from bitsmith.core.errors import Refused
from bitsmith.quantize.kv_scales import ScaledKVCache
from bitsmith.quantize.weight_source import WeightSource

_NUM_DECODED = 64  # of each window, after a prompt of at least as many


def compare_kv_caches(
    engine: Engine,
    source: WeightSource,
    windows: Sequence[Sequence[int]],
    reference: Sequence[Tensor],
) -> tuple[KVCacheRow, ...]:
    """windows: token ids, all of one length. reference: for each the logits of transformers in fp32."""
    plans: dict[KVCacheType, DecoderPlan] = {"bf16": engine.plan.with_kv_cache("bf16")}
    words: dict[KVCacheType, str] = {"bf16": "no scales"}
    for kv_cache in ("fp8", "int8"):
        scales, words[kv_cache] = _scales(engine.plan, source, kv_cache)
        if scales is not None:
            plans[kv_cache] = engine.plan.with_kv_cache(kv_cache, scales)
    qualities: Mapping[KVCacheType, DecodeQuality] = {}
    if len(plans) > 1:
        engines = {
            kv_cache: dataclasses.replace(
                engine, plan=plan, runner=EagerRunner(Decoder(plan, engine.weights).eval())
            )
            for kv_cache, plan in plans.items()
        }
        qualities = _decode(engines, windows, reference)
    return tuple(
        KVCacheRow(kv_cache, text, _bytes_per_token(engine.plan, kv_cache), qualities.get(kv_cache))
        for kv_cache, text in words.items()
    )


def _scales(plan: DecoderPlan, source: WeightSource, kv_cache: ScaledKVCache) -> tuple[KVScales | None, str]:
    """The engine's own, or those that its checkpoint was calibrated with; and in words what they are."""
    if kv_cache == plan.kv_cache:
        are_ones = all(pair == (1.0, 1.0) for pair in plan.kv_scales)
        return plan.kv_scales, "uncalibrated scales of one" if are_ones else "calibrated scales"
    try:
        return calibrated_scales(source, plan.config, kv_cache), "calibrated scales"
    except Refused:
        return None, "no calibrated scales"


def _bytes_per_token(plan: DecoderPlan, kv_cache: KVCacheType) -> float:
    return allocate_kv_cache(plan.with_kv_cache(kv_cache), 1).bytes_per_token


def _decode(
    engines: Mapping[KVCacheType, Engine],
    windows: Sequence[Sequence[int]],
    reference: Sequence[Tensor],
) -> dict[KVCacheType, DecodeQuality]:
    """All engines take the same steps in turn, so that no logits are kept."""
    seq_len = len(windows[0])
    limits = engines["bf16"].limits
    steps = decode_steps(len(windows), seq_len, limits, num_decoded=min(_NUM_DECODED, seq_len // 2))
    records = {kv_cache: _DecodeRecord() for kv_cache in engines}
    for pieces in zip(*(run_steps(engine, windows, steps) for engine in engines.values()), strict=True):
        piece, bf16_logits = pieces[0]
        targets = torch.tensor(windows[piece.window][piece.start + 1 : piece.end + 1])
        expected = reference[piece.window][piece.start : piece.end]
        for record, (_, logits) in zip(records.values(), pieces, strict=True):
            record.add(logits, bf16_logits, expected, targets)
    base = records["bf16"].losses()
    return {kv_cache: record.result(base) for kv_cache, record in records.items()}


class _DecodeRecord:
    """What one cache type has come to so far."""

    def __init__(self) -> None:
        self._against_reference, self._against_bf16 = LogitComparison(), LogitComparison()
        self._losses: list[Tensor] = []

    def add(self, logits: Tensor, bf16_logits: Tensor, expected: Tensor, targets: Tensor) -> None:
        """logits of three kinds: [rows, vocab_size]. targets: the next tokens, none after the last row."""
        self._against_reference.add(expected, logits)
        self._against_bf16.add(bf16_logits, logits)
        log_p = logits[: len(targets)].log_softmax(-1)
        self._losses.append(-log_p.gather(1, targets[:, None])[:, 0].double())

    def losses(self) -> Tensor:
        """[rows] fp64, nats: of each next token."""
        return torch.cat(self._losses)

    def result(self, base: Tensor) -> DecodeQuality:
        """base: the losses over the bf16 cache, of the same tokens."""
        losses = self.losses()
        apart = losses - base
        ratio = math.exp(float(apart.mean()))
        return DecodeQuality(
            num_rows=len(losses),
            perplexity=math.exp(float(losses.mean())),
            perplexity_change=ratio - 1,
            perplexity_change_stderr=ratio * float(apart.std()) / len(apart) ** 0.5,
            kl_reference=self._against_reference.result().kl_mean,
            kl_bf16=self._against_bf16.result().kl_mean,
        )
