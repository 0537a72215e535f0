"""GGUF vocabulary -> tokenizer.json and tokenizer_config.json.

GGUF stores the vocabulary and a *name* for the rule that splits text before merging. Where that rule is
not reproduced exactly, numbers and runs of spaces get other token ids than the model was trained on, so
each known name is spelled out here and an unknown one is refused.
"""

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from bitsmith.core.errors import Refused

_SPACE = "\u2581"  # SentencePiece's visible space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

# `tokenizer.ggml.pre` -> rule. None: GPT-2's own regular expression, which ByteLevel brings.
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
}
_SINGLE_DIGITS = ("smollm",)
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3")
_ADDS_BOS_UNSAID = ("llama-bpe", "llama3")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_tokenizer(metadata: Mapping[str, Any], directory: Path, *, max_length: int) -> None:
    """Write both files. Raises Refused when the vocabulary's kind or splitting rule is unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise Refused(f"GGUF field tokenizer.ggml.model is {kind!r}; known are 'gpt2' and 'llama'.")
    tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    _add_special_tokens(tokenizer, metadata)
    _add_post_processor(tokenizer, metadata)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = _tokenizer_config(metadata, max_length)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise Refused(f"GGUF field tokenizer.ggml.pre is {pre!r}; known are {', '.join(_SPLITS)}.")
    vocab = {token: token_id for token_id, token in enumerate(_required(metadata, "tokens"))}
    merges = [_split_merge(merge) for merge in _required(metadata, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    split = _SPLITS[pre]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise Refused(f"The GGUF file has no field tokenizer.ggml.{name}; its tokenizer cannot be rebuilt.")
    return value


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = [_respelled(token) for token in _required(metadata, "tokens")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_of(tokens, _required(metadata, "scores"), _required(metadata, "token_type"))
    unk_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(vocab, merges, unk_token=tokens[unk_id], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _respelled(token: str) -> str:
    """Tokens that are runs of spaces are stored as real spaces; the model sees the visible form."""
    return _SPACE * len(token) if token and not token.strip(" ") else token


def _merges_of(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Merges that a SentencePiece BPE vocabulary implies: every cut of a piece into two pieces.

    SentencePiece merges the pair whose result scores best, and takes user-defined pieces (runs of
    spaces, say) before any other, whatever their score.
    """
    mergeable = {TokenType.NORMAL, TokenType.USER_DEFINED}
    vocab = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] in mergeable}
    rank = {
        token: (types[token_id] != TokenType.USER_DEFINED, -scores[token_id], token_id)
        for token, token_id in vocab.items()
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(vocab, key=rank.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        merges.extend(sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])))
    return merges


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    types = _required(metadata, "token_type")
    tokens = [_respelled(token) for token in _required(metadata, "tokens")]
    added = [
        AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    before = tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == before, "a special token is not in the vocabulary"


def _adds(metadata: Mapping[str, Any], end: str) -> bool:
    said = metadata.get(f"tokenizer.ggml.add_{end}_token")
    if said is not None:
        return bool(said)
    if end == "eos":
        return False
    # Unsaid, the convention is BOS for SentencePiece and for Llama 3, none for other byte-level ones.
    return (
        metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _ADDS_BOS_UNSAID
    )


def _add_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    ends = {end: _special_token(metadata, end) for end in ("bos", "eos") if _adds(metadata, end)}
    template = "$A"
    if "bos" in ends:
        template = f"{ends['bos'][0]} {template}"
    if "eos" in ends:
        template = f"{template} {ends['eos'][0]}"
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(ends.values())
        )


def _special_token(metadata: Mapping[str, Any], name: str) -> tuple[str, int]:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        raise Refused(f"GGUF says that {name.upper()} is added, but has no tokenizer.ggml.{name}_token_id.")
    return _required(metadata, "tokens")[token_id], token_id


def _tokenizer_config(metadata: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    tokens = _required(metadata, "tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, field in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
