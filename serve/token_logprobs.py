"""Log-probabilities of given tokens: natural-log log-softmax of raw logits, in fp32, in slices.

Raw: temperature, penalties and bias do not alter them, so they are the same numbers an evaluation wants.
"""

from collections.abc import Sequence

import torch

from bitsmith.serve.request import TokenLogprob

_ROWS_PER_SLICE = 32  # a slice of log-softmax is a second copy of its rows: bounded, whatever is asked
LOGPROB_FLOOR = -9999.0  # stands for minus infinity, which JSON cannot carry


def compute_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int, num_token_ids: int
) -> list[TokenLogprob]:
    """One entry for each row. logits: [n, vocab]; token_ids: the n tokens that followed.

    At least the most likely token is in `top`, so that "was it the arg-max" can be read off. Ids from
    num_token_ids on have no text and are left out of `top`; they stay in the normaliser.
    """
    assert len(logits) == len(token_ids), (len(logits), len(token_ids))
    num_top = min(max(num_top, 1), num_token_ids)
    entries: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _ROWS_PER_SLICE):
        ids = torch.tensor(token_ids[start : start + _ROWS_PER_SLICE])
        logprobs = torch.log_softmax(logits[start : start + _ROWS_PER_SLICE].float(), dim=-1)
        logprobs = logprobs.clamp_(min=LOGPROB_FLOOR)
        chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
        top = torch.topk(logprobs[:, :num_token_ids], num_top, dim=-1)
        for token_id, logprob, values, indices in zip(
            ids.tolist(), chosen, top.values.tolist(), top.indices.tolist(), strict=True
        ):
            entries.append(TokenLogprob(token_id, logprob, tuple(zip(indices, values, strict=True))))
    return entries
