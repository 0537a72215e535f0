"""Exactly one BOS, whoever writes it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from bitsmith.core.errors import Refused
from bitsmith.core.tokenizer import adds_bos, load_tokenizer, render_chat

BOS = 256
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN
LOOKS_LIKE_BOS = "<bos" + PLAIN
MESSAGES = [{"role": "user", "content": "hi"}]


def ids_of(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("template", "tokenizer_adds", "prefix"),
    [
        (WITH_BOS, True, [BOS]),  # both write it: one
        (WITH_BOS, False, [BOS]),
        (PLAIN, True, [BOS]),  # the model wants it
        (PLAIN, False, []),  # the model does not
    ],
)
def test_exactly_one_bos(
    template: str,
    tokenizer_adds: bool,
    prefix: list[int],
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = make_tokenizer(adds_bos=tokenizer_adds, template=template)
    assert adds_bos(tokenizer) == tokenizer_adds
    assert render_chat(tokenizer, MESSAGES) == prefix + ids_of("user: hi\n", tokenizer)


@pytest.mark.parametrize("tokenizer_adds", [True, False])
def test_text_that_only_looks_like_bos_stays(
    tokenizer_adds: bool, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = make_tokenizer(adds_bos=tokenizer_adds, template=LOOKS_LIKE_BOS)
    expected = ids_of("<bosuser: hi\n", tokenizer)
    assert expected[0] != BOS
    assert render_chat(tokenizer, MESSAGES) == [BOS] * tokenizer_adds + expected


def test_the_generation_prompt_is_the_callers_choice(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = make_tokenizer(template=PLAIN + "{% if add_generation_prompt %}assistant:{% endif %}")
    prompted, plain = (
        render_chat(tokenizer, MESSAGES, add_generation_prompt=wanted) for wanted in (True, False)
    )
    assert prompted == plain + ids_of("assistant:", tokenizer)


def test_a_model_without_template_is_refused(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    with pytest.raises(Refused, match="no chat template"):
        render_chat(make_tokenizer(), MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",  # the sandbox
        "{% for %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_refuses_is_refused(
    template: str, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    with pytest.raises(Refused, match="chat template refuses these messages"):
        render_chat(make_tokenizer(template=template), MESSAGES)


def test_a_tokenizer_is_loaded_from_its_directory(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    original = make_tokenizer(adds_bos=True, template=PLAIN)
    original.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("hello").input_ids == original("hello").input_ids
    assert render_chat(loaded, MESSAGES) == render_chat(original, MESSAGES)


def test_directories_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(Refused, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    with pytest.raises(Refused):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
