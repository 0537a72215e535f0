"""One type of KV cache in the compile report: its bytes, and what decoding over it costs in quality."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DecodeQuality:
    """Of the decoded rows. perplexity_change: relative to the bf16 cache, and its standard error over rows.
    kl_reference: KL(transformers in fp32 || this cache), kl_bf16: KL(bf16 cache || this one), nats/token.
    """

    num_rows: int
    perplexity: float
    perplexity_change: float
    perplexity_change_stderr: float
    kl_reference: float
    kl_bf16: float


@dataclass(frozen=True, slots=True)
class KVCacheRow:
    """bytes_per_token: of the tensors as allocated, all layers, keys and values. quality None: not measured,
    for want of scales or of another type to compare with.
    """

    kv_cache: str
    scales: str
    bytes_per_token: float
    quality: DecodeQuality | None

    def describe(self) -> str:
        """One line for terminals."""
        start = f"KV cache {self.kv_cache} ({self.scales}): {self.bytes_per_token:,.0f} bytes a token"
        quality = self.quality
        if quality is None:
            return f"{start}, quality not measured"
        change = ""
        if self.kv_cache != "bf16":
            change = (
                f" ({quality.perplexity_change:+.2%} ± {quality.perplexity_change_stderr:.2%} against bf16)"
            )
        return (
            f"{start}, perplexity {quality.perplexity:.3f}{change}, KL {quality.kl_reference:.2e} to "
            f"transformers and {quality.kl_bf16:.2e} to bf16, {quality.num_rows} decoded rows"
        )

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "KVCacheRow":
        quality = plain["quality"]
        return cls(**{**plain, "quality": None if quality is None else DecodeQuality(**quality)})
