"""The built-in task: which of four words ends the passage? Made from any text by rule, no download.

An item is a passage from a document whose last word was taken away. The wrong choices are words of the
same text that are about as frequent as the right one (nearest ranks), so that frequency alone does not
tell the answer. A choice is scored by its log-likelihood after the passage. Passages do not overlap, so
items are close to independent. Knows nothing of models.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bitsmith.core.errors import Refused

NUM_CHOICES = 4
_CONTEXT_WORDS = 48
_MIN_OCCURRENCES = 3
_NUM_NEIGHBOURS = 24  # wrong choices come from this many words of nearest frequency rank
_WORD = re.compile(r"\S+")
# A word of prose of at least four letters: not a piece of `some_name`, `word()` or `--word`.
_TARGET = re.compile(r"(?<!\S)[a-z]{4,}(?=[.,;:!?]*(?:\s|$))")


@dataclass(frozen=True, slots=True)
class ClozeItem:
    """Each choice brings its leading space. `answer` is the index of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class _Passage:
    document: int
    start: int
    end: int  # of the context; the target word follows
    target: str


def make_cloze_items(documents: Sequence[str], num_items: int, seed: int) -> list[ClozeItem]:
    """`num_items` items, the same for the same documents and seed. Raises Refused when there are too few."""
    generator = random.Random(seed)
    ranking = _ranked_words(documents)
    rank = {word: index for index, word in enumerate(ranking)}
    passages = [p for d, text in enumerate(documents) for p in _passages(d, text, rank)]
    if len(passages) < num_items or len(ranking) <= _NUM_NEIGHBOURS:
        raise Refused(
            f"The evaluation text has {len(passages)} passages fit for the cloze task; {num_items} items "
            "were asked for. Ask for fewer cloze items or give a longer text."
        )
    chosen = generator.sample(passages, num_items)
    return [_item(documents[p.document], p, ranking, rank, generator) for p in chosen]


def _ranked_words(documents: Sequence[str]) -> list[str]:
    """Words that may be answers, most frequent first; ties in alphabetical order."""
    counts = Counter(word for text in documents for word in _TARGET.findall(text))
    frequent = [(-count, word) for word, count in counts.items() if count >= _MIN_OCCURRENCES]
    return [word for _, word in sorted(frequent)]


def _passages(document: int, text: str, rank: dict[str, int]) -> list[_Passage]:
    """Passages of `_CONTEXT_WORDS` words, side by side, each followed by a word that may be an answer."""
    words = list(_WORD.finditer(text))
    passages = []
    first = 0
    while first + _CONTEXT_WORDS < len(words):
        last = first + _CONTEXT_WORDS
        # The passage grows by up to its own length until a fit word follows, else the search moves on.
        limit = min(len(words), last + _CONTEXT_WORDS)
        while last < limit and not _is_target(text, words, last, rank):
            last += 1
        if last < limit:
            target = _leading_word(words[last].group())
            passages.append(_Passage(document, words[first].start(), words[last - 1].end(), target))
        first = last + 1
    return passages


def _is_target(text: str, words: Sequence[re.Match[str]], index: int, rank: dict[str, int]) -> bool:
    """A word that may be an answer, after a single space: a line's first word has no leading space."""
    gap = text[words[index - 1].end() : words[index].start()]
    return gap == " " and _leading_word(words[index].group()) in rank


def _leading_word(chunk: str) -> str:
    """`word` of `word`, `word.` and `word,`."""
    return chunk.rstrip(".,;:!?")


def _item(
    text: str, passage: _Passage, ranking: Sequence[str], rank: dict[str, int], generator: random.Random
) -> ClozeItem:
    position = rank[passage.target]
    low = max(0, min(position - _NUM_NEIGHBOURS // 2, len(ranking) - _NUM_NEIGHBOURS - 1))
    neighbours = [w for w in ranking[low : low + _NUM_NEIGHBOURS + 1] if w != passage.target]
    choices = [passage.target, *generator.sample(neighbours, NUM_CHOICES - 1)]
    generator.shuffle(choices)
    return ClozeItem(
        context=text[passage.start : passage.end],
        choices=tuple(f" {word}" for word in choices),
        answer=choices.index(passage.target),
    )
