"""Our lm-eval model against lm-eval's own Hugging Face backend on the same weights, item by item."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.lm_eval_model import HarnessModel

PAIRS = [
    ("river stone garden", " winter"),
    ("river stone garden", " bridge silver"),
    ("river stone garden", " window"),
    ("the candle ", "market"),  # the trailing space belongs to the continuation
    ("", "island winding doctor"),
    ("mirror castle " * 40, " hunter"),  # longer than the context: shortened from the left
    ("naïve — 12", "3 +\n\tx"),
    ("orange", ""),
]


def _instances(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


@pytest.fixture
def harness(
    logits_model: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, reporter: Reporter
) -> Callable[..., HarnessModel]:
    def make(used: PreTrainedTokenizerFast = tokenizer, **settings: Any) -> HarnessModel:
        model = logits_model(**settings)
        return HarnessModel(model, TextEncoder(used), model.max_model_len, reporter, model)

    return make


def test_loglikelihoods_equal_those_of_hflm(
    llama: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    bos_tokenizer: PreTrainedTokenizerFast,
    harness: Callable[..., HarnessModel],
) -> None:
    requests = _instances("loglikelihood", PAIRS[:-1])  # hflm ends the run at an empty continuation
    for used in (tokenizer, bos_tokenizer):
        hflm = HFLM(pretrained=llama, tokenizer=used, batch_size=4)
        theirs = hflm.loglikelihood(requests, disable_tqdm=True)
        ours = harness(used).loglikelihood(requests)
        for (our_logprob, our_greedy), (logprob, greedy) in zip(ours, theirs, strict=True):
            assert our_logprob == pytest.approx(logprob, abs=1e-5)
            assert our_greedy == greedy


def test_an_empty_continuation_is_certain(harness: Callable[..., HarnessModel]) -> None:
    assert harness().loglikelihood(_instances("loglikelihood", [PAIRS[-1]])) == [(0.0, True)]


def test_rolling_loglikelihoods_equal_those_of_hflm(
    llama: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: tuple[str, ...],
    harness: Callable[..., HarnessModel],
) -> None:
    texts = [(documents[0],), ("river",), (documents[1][:300],)]
    requests = _instances("loglikelihood_rolling", texts)
    theirs = HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=2).loglikelihood_rolling(requests)
    ours = harness().loglikelihood_rolling(requests)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_rolling_scores_every_token_once_after_one_bos(
    bos_tokenizer: PreTrainedTokenizerFast, harness: Callable[..., HarnessModel]
) -> None:
    model = harness(bos_tokenizer)
    model.loglikelihood_rolling(_instances("loglikelihood_rolling", [("river stone garden winter",)]))
    assert model.notes.first_prompt == (bos_tokenizer.bos_token_id,)


def test_generations_equal_those_of_hflm(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, harness: Callable[..., HarnessModel]
) -> None:
    settings = {"until": ["\n", " window"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 12}
    arguments = [("river stone garden", settings), ("candle", settings), ("market harbor " * 40, settings)]
    requests = _instances("generate_until", arguments)
    hflm = HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=1)
    theirs = hflm.generate_until(requests, disable_tqdm=True)
    model = harness()
    assert model.generate_until(requests) == theirs
    assert model.notes.num_truncated == 1
    assert model.notes.num_cut_off >= 1


@pytest.mark.parametrize("batch_size", [7, 32])
def test_batch_size_does_not_matter(batch_size: int, harness: Callable[..., HarnessModel]) -> None:
    words = [
        "river",
        "stone",
        "garden",
        "winter",
        "letter",
        "bridge",
        "silver",
        "morning",
        "window",
        "forest",
    ]
    pairs = [(" ".join(words[: 1 + i % 9]), f" {words[(3 * i) % 10]}") for i in range(50)]
    requests = _instances("loglikelihood", pairs)
    alone = harness().loglikelihood(requests)
    batched = harness(batch_size=batch_size).loglikelihood(requests)
    assert [logprob for logprob, _ in batched] == pytest.approx([p for p, _ in alone], abs=1e-4)
    assert [greedy for _, greedy in batched] == [greedy for _, greedy in alone]


def test_equal_inputs_are_fed_once(
    logits_model: Callable[..., Any],
    tokenizer: PreTrainedTokenizerFast,
    documents: tuple[str, ...],
    reporter: Reporter,
) -> None:
    model = logits_model()
    fed: list[int] = []
    score = model.score

    def counted(requests: Sequence[Any]) -> Any:
        fed.append(len(requests))
        return score(requests)

    model.score = counted
    by_length: dict[int, list[str]] = {}
    for word in sorted(set(documents[0].replace(".", "").split())):
        num_tokens = len(tokenizer(f" {word}", add_special_tokens=False).input_ids)
        by_length.setdefault(num_tokens, []).append(f" {word}")
    choices = [*by_length[1][:3], by_length[2][0]]
    requests = _instances("loglikelihood", [("river stone", choice) for choice in choices])
    HarnessModel(model, TextEncoder(tokenizer), model.max_model_len, reporter).loglikelihood(requests)
    assert fed == [2], "three choices of one token share a pass, the longer one has its own"


def test_settings_that_would_be_ignored_are_refused(harness: Callable[..., HarnessModel]) -> None:
    settings = {"until": ["\n"], "max_gen_toks": 4, "num_beams": 4}
    with pytest.raises(Refused, match="'num_beams' is not supported"):
        harness().generate_until(_instances("generate_until", [("river", settings)]))


def test_no_room_for_the_prompt_is_refused(harness: Callable[..., HarnessModel]) -> None:
    settings = {"until": ["\n"], "max_gen_toks": 96}
    with pytest.raises(Refused, match="no room for the prompt"):
        harness().generate_until(_instances("generate_until", [("river", settings)]))


def test_a_continuation_longer_than_the_context_fails(harness: Callable[..., HarnessModel]) -> None:
    with pytest.raises(WorkFailed, match="does not fit in the context of 96"):
        harness().loglikelihood(_instances("loglikelihood", [("river", " stone" * 200)]))


def test_a_template_that_refuses_a_role_is_refused(
    logits_model: Callable[..., Any], bos_tokenizer: PreTrainedTokenizerFast, reporter: Reporter
) -> None:
    model = HarnessModel(logits_model(), TextEncoder(bos_tokenizer), 96, reporter)
    bos_tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    )
    text = model.apply_chat_template([{"role": "user", "content": "river"}])
    assert model.tok_encode(text).count(bos_tokenizer.bos_token_id) == 1
    with pytest.raises(Refused, match="roles system, user"):
        model.apply_chat_template([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
