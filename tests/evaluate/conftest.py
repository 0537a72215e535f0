"""Tiny things to evaluate with: a tokenizer trained here, a random model, tables of logits."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import GeneratedText, ScoringRequest
from bitsmith.core.sampling import SamplingParams
from bitsmith.core.text_source import TextSource

WORDS = [
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
    "shadow",
    "candle",
    "market",
    "harbor",
    "island",
    "winding",
    "doctor",
    "pepper",
    "dragon",
    "mirror",
    "castle",
    "hunter",
    "singer",
    "planet",
    "button",
    "cotton",
    "dinner",
    "engine",
    "fabric",
    "guitar",
    "helmet",
    "insect",
    "jacket",
    "kitten",
    "ladder",
    "magnet",
    "needle",
    "orange",
    "pencil",
    "quartz",
    "ribbon",
    "saddle",
    "tunnel",
    "velvet",
    "wallet",
    "yellow",
    "zipper",
]


@pytest.fixture(scope="session")
def documents() -> tuple[str, ...]:
    """Prose without sense, but with habits: four words of five follow from the word before."""
    generator = random.Random(7)
    follower = dict(zip(WORDS, generator.sample(WORDS, len(WORDS)), strict=True))
    words = [WORDS[0]]
    while len(words) < 8000:
        words.append(follower[words[-1]] if generator.random() < 0.8 else generator.choice(WORDS))
    sentences = [" ".join(words[start : start + 10]) + "." for start in range(0, 8000, 10)]
    return tuple(" ".join(sentences[start : start + 40]) for start in range(0, 800, 40))


@pytest.fixture(scope="session")
def text(documents: tuple[str, ...]) -> TextSource:
    return TextSource("made in the test", False, documents, {"kind": "test", "split": "evaluation"})


def _train(documents: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _wrap(trained: Tokenizer) -> PreTrainedTokenizerFast:
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=trained, **settings)  # type: ignore[no-untyped-call]
    return wrapped


@pytest.fixture(scope="session")
def tokenizer(documents: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Adds no special tokens by itself."""
    return _wrap(_train(documents))


@pytest.fixture(scope="session")
def bos_tokenizer(documents: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Puts BOS before every text."""
    trained = _train(documents)
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", trained.token_to_id("<s>"))]
    )
    return _wrap(trained)


@pytest.fixture(scope="session")
def llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random, but sharp enough that its choices are not all ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.25,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


@dataclass
class TransformersLogits:
    """A LogitsModel and TextGenerator over a transformers model, in padded batches of `batch_size`."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    batch_size: int = 1
    name: str = "tiny"
    noise: float = 0.0  # added to every logit, drawn anew each time

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[torch.Tensor]:
        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            longest = max(len(request.token_ids) for request in batch)
            ids = torch.tensor([[*r.token_ids, *[0] * (longest - len(r.token_ids))] for r in batch])
            with torch.no_grad():
                logits = self.model(ids).logits.float()
            logits = logits + self.noise * torch.randn_like(logits)
            for row, request in zip(logits, batch, strict=True):
                yield row[: len(request.token_ids)][-request.num_scored :]

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[GeneratedText]:
        for prompt, wanted in zip(prompts, params, strict=True):
            assert wanted.temperature == 0
            yield self._generate(list(prompt), wanted)

    def _generate(self, ids: list[int], wanted: SamplingParams) -> GeneratedText:
        output: list[int] = []
        while len(output) < wanted.max_tokens:
            with torch.no_grad():
                token_id = int(self.model(torch.tensor([ids + output])).logits[0, -1].argmax())
            if token_id in wanted.stop_token_ids:
                return GeneratedText(self._text(output), tuple(output), "stop")
            output.append(token_id)
            found = [place for s in wanted.stop if (place := self._text(output).find(s)) >= 0]
            if found:
                return GeneratedText(self._text(output)[: min(found)], tuple(output), "stop")
        return GeneratedText(self._text(output), tuple(output), "length")

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture
def logits_model(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Callable[..., TransformersLogits]:
    def make(**settings: object) -> TransformersLogits:
        return TransformersLogits(llama, tokenizer, **settings)  # type: ignore[arg-type]

    return make


@dataclass
class FavouriteWords:
    """Gives the next token of known texts a lead of `lead` in logits; a fifth in every `every`-th place.

    Its logits depend on the last two token ids only.
    """

    table: dict[tuple[int, ...], int]
    vocab_size: int
    lead: float
    every: int = 0
    name: str = "favourites"
    max_model_len: int = 4096

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[torch.Tensor]:
        for request in requests:
            ids = request.token_ids
            rows = torch.zeros(len(ids), self.vocab_size)
            for place in range(len(ids)):
                key = tuple(ids[max(0, place - 1) : place + 1])
                right = self.table.get(key)
                if right is not None:
                    is_weak = self.every > 0 and sum(key) % self.every == 0
                    rows[place, right] = 0.2 * self.lead if is_weak else self.lead
            yield rows[-request.num_scored :]


@pytest.fixture(scope="session")
def favourites(
    documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> Callable[..., FavouriteWords]:
    """Models that know the documents well enough to answer the cloze task."""
    seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False).input_ids
        for place in range(1, len(ids) - 1):
            seen[tuple(ids[place - 1 : place + 1])][ids[place + 1]] += 1
    table = {key: counts.most_common(1)[0][0] for key, counts in seen.items()}

    def make(lead: float = 4.0, **settings: object) -> FavouriteWords:
        return FavouriteWords(table, len(tokenizer), lead, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def reporter() -> Reporter:
    return Reporter(quiet=True)
