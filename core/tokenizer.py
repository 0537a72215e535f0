"""Tokenizers of model directories, and chat messages -> token ids with exactly one BOS.

Local files only, and never code that comes with a model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bitsmith.core.errors import Refused

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises Refused when there is none or it needs remote code."""
    if not any((path / name).is_file() for name in _FILES):
        raise Refused(f"{path} has no tokenizer (none of {', '.join(_FILES)}).")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise Refused(f"The tokenizer at {path} cannot be loaded: {error}") from error
    return cast(PreTrainedTokenizerBase, tokenizer)


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts BOS before a text."""
    bos_id = tokenizer.bos_token_id
    with_special: list[int] = tokenizer("a", add_special_tokens=True).input_ids
    without: list[int] = tokenizer("a", add_special_tokens=False).input_ids
    return bos_id is not None and with_special[:1] == [bos_id] and without[:1] != [bos_id]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation through the model's chat template.

    Templates that write BOS themselves meet tokenizers that add it again, and a doubled BOS costs
    quality silently. So the text is encoded without special tokens, and BOS is put first only when the
    tokenizer would have added it and the template did not write it. What the template wrote stays.
    """
    if not tokenizer.chat_template:
        raise Refused("The model has no chat template; use plain text completion instead.")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise Refused(f"The model's chat template refuses these messages: {error}") from error
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    bos_id = tokenizer.bos_token_id
    if adds_bos(tokenizer) and token_ids[:1] != [bos_id]:
        return [cast(int, bos_id), *token_ids]
    return token_ids
