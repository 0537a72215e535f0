"""One of the two models of a comparison, and the check that both can be given the same ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from bitsmith.core.errors import Refused
from bitsmith.core.protocols import LogitsModel, TextGenerator

_PROBE = "The naïve fox — 12345 +\n\tdef f(x):  return x"


@dataclass(frozen=True, slots=True)
class Contender:
    """digest: content digest of the artifact or model directory that the model was loaded from.

    tokenizer: the one that comes with it. facts: lines for the report, such as the KV-cache type.
    title: what a person calls it, where `model.name` only says how it is computed.
    """

    model: LogitsModel
    digest: str
    tokenizer: PreTrainedTokenizerBase
    generator: TextGenerator | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    title: str = ""


def check_comparable(
    tokenizer: PreTrainedTokenizerBase,
    contenders: Mapping[str, Contender],
    *,
    window_len: int,
    generates: bool,
) -> None:
    """Raises Refused when the contenders (by role) cannot be given the same ids, or not all of them.

    tokenizer: the one that the evaluation was planned with. window_len: tokens per window, 0 for none.
    generates: whether some task needs generated text.
    """
    sizes = {role: contender.model.vocab_size for role, contender in contenders.items()}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{role} {size}" for role, size in sizes.items())
        raise Refused(f"The vocabularies differ in size ({text}): distributions cannot be compared.")
    planned = _fingerprint(tokenizer)
    for role, contender in contenders.items():
        if _fingerprint(contender.tokenizer) != planned:
            raise Refused(f"The tokenizer of the {role} gives other ids than that of the planned evaluation.")
        limit = contender.model.max_model_len
        if window_len > limit:
            raise Refused(
                f"Windows of {window_len} tokens do not fit in the context of the {role}, {limit}. "
                "Ask for shorter windows, or compile with a larger --max-model-len."
            )
        if generates and contender.generator is None:
            raise Refused(f"A task generates text, but no generator was given for the {role}.")


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """What decides the ids of a text, as far as two tokenizers can be compared."""
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return tokenizer.get_vocab(), special, list(tokenizer(_PROBE).input_ids)
