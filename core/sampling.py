"""What a caller asks of generation, and why it ended."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked at the door; the engine loop trusts it.

    temperature 0 is greedy. top_k 0 and top_p 1 do not filter. seed None draws one.
    logit_bias: token id -> additive bias. num_logprobs None: log-probabilities are not returned.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
