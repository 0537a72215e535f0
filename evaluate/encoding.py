"""Text to token ids for scoring: exactly one BOS where the tokenizer wants one, and clean joins.

Knows nothing of models or tasks. What a tokenizer "wants" is what it adds by itself to plain text.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from bitsmith.core.tokenizer import adds_bos
from bitsmith.evaluate.continuations import Continuation


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """The rules of one tokenizer. Baseline and candidate are always given ids from the same encoder."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer puts BOS before plain text by itself."""
        return adds_bos(self.tokenizer)

    @property
    def end_token_id(self) -> int | None:
        token_id = self.tokenizer.eos_token_id
        return None if token_id is None else int(token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context: BOS, or EOS where there is no BOS."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        token_id = eos if bos is None else bos
        assert token_id is not None, "a tokenizer has BOS or EOS"
        return int(token_id)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of a text. None: special tokens as the tokenizer adds them, unless the text brings BOS itself.

        Whether it does is judged by the first id, not by the characters: a text that only looks like BOS
        keeps everything, one whose chat template wrote BOS does not get a second.
        """
        plain = self._ids(text, add_special_tokens=False)
        if add_special_tokens is False:
            return plain
        brings_bos = self.tokenizer.bos_token_id is not None and plain[:1] == [self.tokenizer.bos_token_id]
        if add_special_tokens is None and brings_bos:
            return plain
        return self._ids(text, add_special_tokens=True)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a non-empty context and of its continuation, split where the joint encoding allows.

        Trailing spaces of the context belong to the continuation, as tokenizers glue them to words. When
        one token spans the join and would swallow the continuation, that is encoded alone.
        """
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:
            context, continuation = context[:-num_spaces], context[-num_spaces:] + continuation
        context_ids = self.encode(context)
        continuation_ids = self.encode(context + continuation)[len(context_ids) :]
        if continuation and not continuation_ids:
            continuation_ids = self.encode(continuation, add_special_tokens=False)
        return context_ids, continuation_ids

    def continuation(self, context: str, continuation: str) -> Continuation:
        """As `encode_pair`; an empty context becomes the prefix token."""
        if context.strip():
            context_ids, continuation_ids = self.encode_pair(context, continuation)
        else:
            context_ids = []
            continuation_ids = self.encode(context + continuation, add_special_tokens=False)
        if not context_ids:
            context_ids = [self.prefix_token_id]
            if continuation_ids[:1] == context_ids:  # the text begins with the prefix token itself
                continuation_ids = continuation_ids[1:]
        return Continuation(tuple(context_ids), tuple(continuation_ids))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]
