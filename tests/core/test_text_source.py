"""Text in, windows out: nothing repeated, nothing shared between splits, nothing silently missing."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from bitsmith.core.builtin_text import MIN_PARAGRAPH_CHARS
from bitsmith.core.errors import Refused
from bitsmith.core.text_source import TextSource, load_text, pack_windows

TokenizerMaker = Callable[..., PreTrainedTokenizerFast]
BOS, EOS = 256, 257


def source_of(documents: Sequence[str]) -> TextSource:
    return TextSource("test", False, tuple(documents), {"split": "calibration"})


def paragraphs(documents: Sequence[str]) -> set[str]:
    pieces = (piece.strip() for document in documents for piece in document.split("\n\n"))
    return {piece for piece in pieces if len(piece) >= MIN_PARAGRAPH_CHARS}


def test_the_builtin_splits_share_no_document_and_no_paragraph() -> None:
    calibration, evaluation = (load_text("builtin", split) for split in ("calibration", "evaluation"))
    assert not set(calibration.documents) & set(evaluation.documents)
    assert not paragraphs(calibration.documents) & paragraphs(evaluation.documents)
    for text in (calibration, evaluation):
        assert text.is_fallback
        assert text.name == "built-in text"
        # Enough for 128 windows of 512 tokens, at a generous 6 characters a token.
        assert sum(map(len, text.documents)) > 128 * 512 * 6
        assert max(map(len, text.documents)) <= 6000 + 2000
    assert calibration.provenance["sha256"] != evaluation.provenance["sha256"]


def test_the_builtin_text_is_the_same_each_time() -> None:
    import platform

    from bitsmith.core import builtin_text

    before = load_text("builtin", "calibration")
    builtin_text._both_splits.cache_clear()
    assert load_text("builtin", "calibration") == before
    assert before.provenance["python"] == platform.python_version()


def test_jsonl_and_txt(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": text, "id": 1}, ensure_ascii=False) for text in ("one\u2028two", "  ", "three")
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    source = load_text(str(tmp_path / "t.jsonl"), "calibration")
    assert source.documents == ("one\u2028two", "three")
    assert not source.is_fallback
    assert (source.provenance["num_documents"], source.provenance["num_empty_documents"]) == (2, 1)
    (tmp_path / "t.txt").write_text("\ufeffall\n\nof it\n", encoding="utf-8")
    assert load_text(str(tmp_path / "t.txt"), "evaluation").documents == ("all\n\nof it\n",)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', r"line 2 is not valid JSON"),
        ('{"content": "a"}', r"line 2 has no string field `text`; found fields content"),
        ('{"messages": []}', r"Chat `messages` are not read"),
        ('{"text": 3}', r"no string field `text`"),
        ('["a"]', r"found list"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(Refused, match=f"{re.escape(str(path))}, {said}" if said.startswith("line") else said):
        load_text(str(path), "calibration")


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.txt"])
def test_an_empty_set_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n \n")
    with pytest.raises(Refused, match="calibration set is empty"):
        load_text(str(tmp_path / name), "calibration")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        load_text(str(tmp_path / "t.txt"), "calibration")
    (tmp_path / "t.txt").write_bytes(b"abc\xff")
    with pytest.raises(Refused, match="not UTF-8: byte 3"):
        load_text(str(tmp_path / "t.txt"), "calibration")
    with pytest.raises(Refused, match=r"give builtin, FILE\.jsonl, FILE\.txt or hf:DATASET"):
        load_text("t.parquet", "calibration")


def test_a_hub_data_set_gives_its_own_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"text": [f"{split} text", ""]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_text("hf:org/set", "calibration").documents == ("train text",)
    evaluation = load_text("hf:org/set:cfg", "evaluation")
    assert evaluation.documents == ("test text",)
    assert asked == [("org/set", None, "train"), ("org/set", "cfg", "test")]
    assert evaluation.provenance["split"] == "test"


def test_a_hub_data_set_without_what_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"body": ["a"]})
    )
    with pytest.raises(Refused, match="no column `text`; it has body"):
        load_text("hf:org/set", "calibration")

    def missing(*_: object, **__: object) -> None:
        raise ValueError("Unknown split \"test\". Should be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(Refused, match="split 'test' for evaluation, could not be loaded: Unknown split"):
        load_text("hf:org/set", "evaluation")


def test_what_was_asked_and_what_was_obtained(make_tokenizer: TokenizerMaker) -> None:
    """10,000 tokens give 19 windows of 512, however many are asked for, and none twice."""
    tokenizer = make_tokenizer()
    documents = ["".join(chr(32 + (i * 7 + i // 90) % 90) for i in range(9_999))]
    windows = pack_windows(source_of(documents), tokenizer, num_windows=128, seq_len=512, seed=0)
    assert (windows.num_requested, windows.num_obtained) == (128, 19)
    assert windows.token_ids.shape == (19, 512)
    assert len({tuple(row) for row in windows.token_ids.tolist()}) == 19


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(alphabet="abcdefgh ", max_size=30), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(2, 9),
    st.integers(0, 3),
)
def test_windows_are_pieces_of_the_text_in_its_shuffled_order(
    make_tokenizer: TokenizerMaker, documents: list[str], num_windows: int, seq_len: int, seed: int
) -> None:
    tokenizer = make_tokenizer()
    num_tokens = sum(len(document) + 1 for document in documents)
    if num_tokens < seq_len:
        with pytest.raises(Refused, match="calibration set is empty"):
            pack_windows(source_of(documents), tokenizer, num_windows=num_windows, seq_len=seq_len, seed=seed)
        return
    windows = pack_windows(
        source_of(documents), tokenizer, num_windows=num_windows, seq_len=seq_len, seed=seed
    )
    assert windows.num_obtained == min(num_windows, num_tokens // seq_len) == len(windows.token_ids)
    assert windows.token_ids.dtype == torch.int64
    # Every token is in the text at most as often as there: nothing is repeated.
    everything = torch.tensor(
        [i for d in documents for i in [*tokenizer(d).input_ids, EOS]], dtype=torch.int64
    )
    used, there = (torch.bincount(t.flatten(), minlength=258) for t in (windows.token_ids, everything))
    assert bool((used <= there).all())
    again = pack_windows(source_of(documents), tokenizer, num_windows=num_windows, seq_len=seq_len, seed=seed)
    assert torch.equal(again.token_ids, windows.token_ids)


def test_documents_end_with_eos_and_another_seed_gives_other_windows(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer()
    documents = [chr(97 + i) * 7 for i in range(26)]
    one, other = (
        pack_windows(source_of(documents), tokenizer, num_windows=5, seq_len=8, seed=seed) for seed in (0, 1)
    )
    assert one.packing == "each document ended by EOS (257)"
    for row in one.token_ids.tolist():
        assert row[-1] == EOS
        assert len(set(row[:-1])) == 1
    assert one.token_ids.tolist() != other.token_ids.tolist()


def test_windows_begin_with_bos_where_the_tokenizer_adds_it(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    windows = pack_windows(source_of(["abc" * 20]), tokenizer, num_windows=3, seq_len=8, seed=0)
    assert windows.packing == "each document ended by EOS (257); each window begins with BOS"
    assert windows.token_ids[:, 0].tolist() == [BOS] * 3
    assert not bool((windows.token_ids[:, 1:] == BOS).any())


def test_without_eos_documents_are_kept_apart_by_bos(make_tokenizer: TokenizerMaker) -> None:
    windows = pack_windows(
        source_of(["abc"] * 4), make_tokenizer(has_eos=False), num_windows=1, seq_len=4, seed=0
    )
    assert windows.token_ids[0, 3] == BOS
    assert windows.packing == "each document ended by BOS (256)"


@pytest.mark.parametrize(
    ("num_windows", "seq_len", "said"), [(0, 8, "num_windows is 0"), (1, 1, "seq_len is 1")]
)
def test_senseless_sizes_are_refused(
    num_windows: int, seq_len: int, said: str, make_tokenizer: TokenizerMaker
) -> None:
    with pytest.raises(Refused, match=said):
        pack_windows(
            source_of(["a" * 99]), make_tokenizer(), num_windows=num_windows, seq_len=seq_len, seed=0
        )
