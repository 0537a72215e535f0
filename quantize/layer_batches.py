"""Calibration batches on their way through the layers: what the next layer reads, how it is called."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitsmith.quantize.decoder_stack import DecoderStack, LayerCalls

TOKENS_PER_BATCH = 4096
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LayerBatches:
    """hidden_states: by batch, what the next layer reads. keywords: by batch, then by layer.
    probe: the calls of a few tokens, None where no tokens are needed. reference: by batch, what the next
    layer reads in the unquantized model; empty unless layers are refined. step_keywords: by layer, of a call
    with some rows; empty where none was asked for."""

    hidden_states: list[Tensor]
    keywords: Sequence[Sequence[Mapping[str, Any]]]
    probe: LayerCalls | None
    reference: list[Tensor]
    step_keywords: Sequence[Mapping[str, Any]]

    @classmethod
    def none(cls) -> "LayerBatches":
        return cls([], [], None, [], [])

    def with_hidden(self, hidden: list[Tensor]) -> "LayerBatches":
        """hidden: the next layer's inputs by batch, followed by the reference's, if any."""
        num_batches = len(self.keywords)
        return dataclasses.replace(self, hidden_states=hidden[:num_batches], reference=hidden[num_batches:])

    def layer_keywords(self, index: int) -> list[Mapping[str, Any]]:
        """By batch, of one layer."""
        return [by_layer[index] for by_layer in self.keywords]


def rows_per_batch(seq_len: int) -> int:
    return max(1, TOKENS_PER_BATCH // seq_len)


def embed_batches(
    stack: DecoderStack, token_ids: Tensor, num_step_rows: int, *, keep_reference: bool
) -> LayerBatches:
    """The embedded tokens, and what the layers are called with besides. token_ids: [rows, seq].

    num_step_rows: rows of the calls whose `step_keywords` are wanted, 0 for none.
    """
    stack.fill_embedding()
    hidden, keywords = [], []
    by_size: dict[int, Sequence[Mapping[str, Any]]] = {}
    for rows in torch.split(token_ids, rows_per_batch(token_ids.shape[1])):
        calls = stack.layer_calls(rows)
        hidden.append(calls.hidden_states)
        # Rows are of one length and unpadded, so masks depend on the batch's size alone.
        keywords.append(by_size.setdefault(rows.shape[0], calls.keywords))
    probe = stack.layer_calls(token_ids[:1, :_PROBE_TOKENS])
    step_keywords: Sequence[Mapping[str, Any]] = []
    if num_step_rows:
        step_keywords = stack.layer_calls(token_ids[:num_step_rows]).keywords
    stack.release_embedding()
    return LayerBatches(hidden, keywords, probe, list(hidden) if keep_reference else [], step_keywords)
