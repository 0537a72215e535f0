"""What evaluation asks of a model, whoever runs it: transformers, a compiled engine, a live server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bitsmith.core.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A sequence of token ids, of which the logits after the last `num_scored` positions are wanted."""

    token_ids: tuple[int, ...]
    num_scored: int

    def __post_init__(self) -> None:
        assert 0 < self.num_scored <= len(self.token_ids), (self.num_scored, len(self.token_ids))


class LogitsModel(Protocol):
    """Scores token sequences."""

    @property
    def name(self) -> str:
        """What is being scored, its arithmetic included, for the report."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[torch.Tensor]:
        """Logits of each request in order: [num_scored, vocab_size] fp32, unscaled."""
        ...


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The end of one generation. `text` is cut before the first stop string."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class TextGenerator(Protocol):
    """Continues prompts."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[GeneratedText]:
        """Results in the order of the prompts."""
        ...
