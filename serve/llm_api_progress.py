"""From what TensorRT-LLM's LLM API says of a request to the progress that the server understands."""

from collections.abc import Mapping
from typing import Any

from bitsmith.core.sampling import FinishReason
from bitsmith.serve.request import TokenLogprob
from bitsmith.serve.scheduled_step import RequestProgress

_FINISH_REASONS: dict[str | None, FinishReason | None] = {
    None: None,
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
}


def progress_of(request_id: str, output: Any, num_told: int, *, wants_logprobs: bool) -> RequestProgress:
    """News in a CompletionOutput, of which `num_told` tokens are known already.

    Its token ids are all so far; the stop ids at the end are cut off with the last news, so there may be
    fewer than were told. Log-probabilities that were asked for and are not there end the request in error.
    """
    token_ids = tuple(int(token_id) for token_id in output.token_ids[num_told:])
    reason = _FINISH_REASONS.get(output.finish_reason, "error")
    logprobs: tuple[TokenLogprob, ...] = ()
    if wants_logprobs and token_ids:
        given = (output.logprobs or [])[num_told : num_told + len(token_ids)]
        if len(given) != len(token_ids):
            return failure_of(request_id)
        logprobs = tuple(_logprob(*pair) for pair in zip(token_ids, given, strict=True))
    return RequestProgress(request_id, token_ids, logprobs, (), reason, 0)


def failure_of(request_id: str) -> RequestProgress:
    return RequestProgress(request_id, (), (), (), "error", 0)


def _logprob(token_id: int, given: Any) -> TokenLogprob:
    """given: id -> its log-probability and rank, or the chosen token's number alone, by release."""
    if not isinstance(given, Mapping):
        return TokenLogprob(token_id, float(given), ())
    values = {int(other): float(entry.logprob) for other, entry in given.items()}
    top = tuple(sorted(values.items(), key=lambda pair: -pair[1]))
    return TokenLogprob(token_id, values[token_id], top)
