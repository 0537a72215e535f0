"""From a request's progress to text: detokenizer, stop strings and log-probabilities together."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bitsmith.core.sampling import FinishReason, SamplingParams
from bitsmith.serve.detokenizer import Detokenizer
from bitsmith.serve.request import TokenLogprob
from bitsmith.serve.scheduled_step import RequestProgress
from bitsmith.serve.stop_checker import StopChecker
from bitsmith.serve.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class PlacedLogprob:
    """text_offset: where in the output text the token begins."""

    entry: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new in one generation. token_ids: tokens that arrived, those of a stop string included."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PlacedLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0


class TextCollector:
    """Follows one request. After a stop string it is finished, whatever else the engine sends."""

    def __init__(
        self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes, prompt_token_ids)
        self._stop_checker = StopChecker(params.stop)
        self._num_decoded = 0  # characters decoded so far, shown or held
        self._num_shown = 0
        self._held_logprobs: deque[PlacedLogprob] = deque()
        self.finish_reason: FinishReason | None = None
        self.num_output_tokens = 0

    @property
    def is_stopped_by_text(self) -> bool:
        """A stop string ended the text before the engine did: the request is to be aborted there."""
        return self._stop_checker.is_stopped

    def feed(self, progress: RequestProgress) -> TextDelta:
        """Tokens are taken one by one, so that the text, its end and the count of tokens do not depend on how
        many tokens a step brought."""
        assert self.finish_reason is None, f"{progress.request_id} went on after its end"
        shown = ""
        taken = 0
        for index, token_id in enumerate(progress.token_ids):
            if progress.logprobs:
                self._held_logprobs.append(PlacedLogprob(progress.logprobs[index], self._num_decoded))
            text = self._detokenizer.feed((token_id,))
            self._num_decoded += len(text)
            shown += self._stop_checker.feed(text)
            taken += 1
            if self._stop_checker.is_stopped:
                break
        self.num_output_tokens += taken
        self.finish_reason = "stop" if self._stop_checker.is_stopped else progress.finish_reason
        if self.finish_reason is not None:
            shown += self._finish_text()
        self._num_shown += len(shown)
        return TextDelta(
            text=shown,
            token_ids=progress.token_ids[:taken],
            logprobs=self._take_logprobs(),
            prompt_logprobs=progress.prompt_logprobs,
            finish_reason=self.finish_reason,
            num_cached_tokens=progress.num_cached_tokens,
        )

    def _finish_text(self) -> str:
        """The rest of the text: a last unfinished character, then what was held for a stop string."""
        if self._stop_checker.is_stopped:
            return ""
        rest = self._stop_checker.feed(self._detokenizer.flush())
        if self._stop_checker.is_stopped:
            self.finish_reason = "stop"
            return rest
        return rest + self._stop_checker.flush()

    def _take_logprobs(self) -> tuple[PlacedLogprob, ...]:
        """Entries of tokens whose text has been reached; at the end also tokens without text, such as the
        end token, but nothing of a stop string or after it."""
        taken: list[PlacedLogprob] = []
        is_last = self.finish_reason is not None and not self._stop_checker.is_stopped
        while self._held_logprobs and (is_last or self._held_logprobs[0].text_offset < self._num_shown):
            taken.append(self._held_logprobs.popleft())
        return tuple(taken)
