"""The scheduler's decisions: exact tokens, exact block ids, exact order."""

from collections.abc import Callable

import pytest

from bitsmith.serve.block_pool import BlockPool, IntegrityError
from bitsmith.serve.kv_cache_manager import KVCacheManager
from bitsmith.serve.request import Request, RequestStatus, Vocabulary
from bitsmith.serve.scheduled_step import RequestOutput, RequestProgress, ScheduledStep, StepOutput
from bitsmith.serve.scheduler import Scheduler, SchedulerLimits

MakeRequest = Callable[..., Request]


def make_scheduler(
    num_blocks: int, max_num_seqs: int = 4, max_tokens: int = 64, max_prompt_logits: int = 64
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    limits = SchedulerLimits(max_num_seqs, max_tokens, max_prompt_logits)
    return Scheduler(limits, KVCacheManager(pool)), pool


def parts(step: ScheduledStep) -> list[tuple[str, int, int]]:
    return [(s.request.request_id, s.start, s.end) for s in step.requests]


def finish(scheduler: Scheduler, step: ScheduledStep, token_id: int = 9) -> list[RequestProgress]:
    """As if the model had answered token_id everywhere, all drafts rejected."""
    outputs = tuple(RequestOutput((token_id,) if s.is_sampling else ()) for s in step.requests)
    return scheduler.update(step, StepOutput(outputs))


def test_a_prompt_is_cut_to_the_budget_and_decodes_go_first(make_request: MakeRequest) -> None:
    scheduler, _ = make_scheduler(32, max_tokens=20)
    scheduler.add(make_request(range(10), max_tokens=9))
    scheduler.add(make_request(range(100, 140), max_tokens=9))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        seen.append(parts(step))
        finish(scheduler, step)
    assert seen == [
        [("r0", 0, 10), ("r1", 0, 10)],
        [("r0", 10, 11), ("r1", 10, 29)],
        [("r0", 11, 12), ("r1", 29, 40)],
        [("r0", 12, 13), ("r1", 40, 41)],
    ]


def test_blocks_are_given_for_the_whole_prompt_and_come_back_last_first(make_request: MakeRequest) -> None:
    scheduler, pool = make_scheduler(8, max_tokens=16)
    scheduler.add(make_request(range(40), max_tokens=1))
    step = scheduler.schedule()
    assert step.requests[0].block_ids == (0, 1, 2)
    assert pool.free_block_ids == [3, 4, 5, 6, 7]
    finish(scheduler, step)
    finish(scheduler, scheduler.schedule())
    (news,) = finish(scheduler, scheduler.schedule())
    assert (news.token_ids, news.finish_reason) == ((9,), "length")
    assert pool.free_block_ids == [3, 4, 5, 6, 7, 2, 1, 0]
    pool.check_integrity(is_idle=True)


def test_a_prefix_hit_shares_blocks_but_never_the_last_token(make_request: MakeRequest) -> None:
    scheduler, pool = make_scheduler(8)
    prompt = list(range(32))
    scheduler.add(make_request(prompt, max_tokens=5))
    finish(scheduler, scheduler.schedule())
    scheduler.add(make_request(prompt, max_tokens=5))
    step = scheduler.schedule()
    assert [s.block_ids for s in step.requests] == [(0, 1, 2), (0, 3)], "both full blocks are known"
    assert parts(step)[1] == ("r1", 16, 32), "but of 32 tokens at most 31 may be a hit"
    assert pool.ref_count(step.requests[1].block_ids[0]) == 2
    assert step.requests[1].request.num_cached_tokens == 16


def test_output_blocks_are_known_too(make_request: MakeRequest) -> None:
    scheduler, _ = make_scheduler(8)
    scheduler.add(make_request(range(15), max_tokens=4))
    while scheduler.has_unfinished:
        finish(scheduler, scheduler.schedule(), token_id=7)
    scheduler.add(make_request([*range(15), 7, 7, 5], max_tokens=4))
    assert parts(scheduler.schedule()) == [("r1", 16, 18)]


def test_the_youngest_is_preempted_and_comes_back_first(make_request: MakeRequest) -> None:
    scheduler, pool = make_scheduler(4)
    scheduler.add(make_request([1] * 31, max_tokens=20))
    scheduler.add(make_request([2] * 32, max_tokens=20))
    scheduler.add(make_request([3] * 8, max_tokens=20))
    step = scheduler.schedule()
    assert parts(step) == [("r0", 0, 31), ("r1", 0, 32)], "r2 has to wait for blocks"
    finish(scheduler, step)
    step = scheduler.schedule()
    assert parts(step) == [("r0", 31, 32)], "r1 needs a third block: it goes, being the youngest"
    assert [request.request_id for request in scheduler.waiting] == ["r1", "r2"]
    assert scheduler.waiting[0].status is RequestStatus.PREEMPTED
    assert pool.free_block_ids == [3, 2]
    finish(scheduler, step)
    step = scheduler.schedule()
    assert parts(step) == [("r0", 32, 33)], "r1 needs three blocks for what it has; one is free"
    assert [s.block_ids for s in step.requests] == [(0, 1, 3)]
    assert scheduler.num_preemptions == 1


def test_drafts_are_dropped_before_anybody_is_preempted(make_request: MakeRequest) -> None:
    scheduler, _ = make_scheduler(2)
    scheduler.add(make_request([1] * 14, max_tokens=3))
    scheduler.add(make_request([2] * 14, max_tokens=3))
    finish(scheduler, scheduler.schedule())
    scheduler.running[0].draft_token_ids = (9, 9, 9)
    step = scheduler.schedule()
    assert parts(step) == [("r0", 14, 15), ("r1", 14, 15)]
    assert scheduler.num_preemptions == 0


def test_rejected_drafts_are_not_computed_tokens(make_request: MakeRequest) -> None:
    scheduler, _ = make_scheduler(4)
    scheduler.add(make_request([1] * 5, max_tokens=50))
    finish(scheduler, scheduler.schedule())
    request = scheduler.running[0]
    request.draft_token_ids = (7, 8, 6)
    step = scheduler.schedule()
    assert (step.requests[0].num_draft_tokens, step.requests[0].num_sampling_logits) == (3, 4)
    assert request.tokens_with_drafts(5, 9) == [9, 7, 8, 6]
    scheduler.update(step, StepOutput((RequestOutput((7, 5)),)))
    assert (request.output_token_ids, request.num_computed_tokens) == ([9, 7, 5], 7)
    assert parts(scheduler.schedule()) == [(request.request_id, 7, 8)]


@pytest.mark.parametrize(
    ("sampled", "max_tokens", "sampling", "kept", "reason"),
    [
        ((4, 2, 5), 9, {}, (4, 2), "stop"),
        ((4, 2, 5), 9, {"ignore_eos": True}, (4, 2, 5), None),
        ((4, 6, 5), 9, {"stop_token_ids": (6,), "ignore_eos": True}, (4, 6), "stop"),
        ((4, 6, 5), 2, {}, (4, 6), "length"),
        ((4, 2, 5), 2, {}, (4, 2), "stop"),
    ],
)
def test_the_end_of_a_text_is_found_among_accepted_drafts(
    make_request: MakeRequest,
    sampled: tuple[int, ...],
    max_tokens: int,
    sampling: dict[str, object],
    kept: tuple[int, ...],
    reason: str | None,
) -> None:
    scheduler, pool = make_scheduler(4)
    vocabulary = Vocabulary(300, frozenset({2}))
    request = make_request([1, 2, 3], max_tokens=max_tokens, vocabulary=vocabulary, **sampling)
    scheduler.add(request)
    step = scheduler.schedule()
    (news,) = scheduler.update(step, StepOutput((RequestOutput(sampled),)))
    assert (news.token_ids, news.finish_reason) == (kept, reason)
    assert (pool.num_free_blocks == 4) == (reason is not None)


def test_prompt_logprobs_keep_to_their_own_budget(make_request: MakeRequest) -> None:
    scheduler, _ = make_scheduler(16, max_prompt_logits=10)
    scheduler.add(make_request(range(25), wants_prompt_logprobs=True, num_logprobs=1))
    scheduler.add(make_request(range(50, 60)))
    seen = []
    for _ in range(3):
        step = scheduler.schedule()
        seen.append([(s.start, s.end, s.num_prompt_logits, s.is_sampling) for s in step.requests])
        outputs = tuple(
            RequestOutput((9,) if s.is_sampling else (), (), (None,) * s.num_prompt_logits)  # type: ignore[arg-type]
            for s in step.requests
        )
        scheduler.update(step, StepOutput(outputs))
    assert [rows[0] for rows in seen] == [
        (0, 10, 10, False),
        (10, 20, 10, False),
        (20, 25, 4, True),
    ]
    assert seen[0][1] == (0, 10, 0, True), "the other request is not held up"


def test_a_broken_row_ends_its_request_only(make_request: MakeRequest) -> None:
    scheduler, pool = make_scheduler(4)
    scheduler.add(make_request([1, 2]))
    scheduler.add(make_request([3, 4]))
    step = scheduler.schedule()
    news = scheduler.update(step, StepOutput((RequestOutput(is_broken=True), RequestOutput((5,)))))
    assert [(one.request_id, one.finish_reason) for one in news] == [("r0", "error"), ("r1", None)]
    assert len(scheduler.running) == 1 and pool.num_free_blocks == 3


def test_abort_of_waiting_running_and_unknown(make_request: MakeRequest) -> None:
    scheduler, pool = make_scheduler(8, max_num_seqs=1)
    for _ in range(3):
        scheduler.add(make_request(range(20), max_tokens=50))
    finish(scheduler, scheduler.schedule())
    for request_id in ("r1", "r0", "r7", "r1"):
        scheduler.abort(request_id)
    assert [request.request_id for request in scheduler.waiting] == ["r2"]
    assert parts(scheduler.schedule()) == [("r2", 16, 20)], "the aborted prefix is still known"
    scheduler.abort("r2")
    assert not scheduler.has_unfinished and pool.num_free_blocks == 8
    scheduler.check_integrity()


def test_integrity_check_notices_a_leak_when_idle(make_request: MakeRequest) -> None:
    scheduler, pool = make_scheduler(8)
    scheduler.add(make_request([1, 2], max_tokens=1))
    finish(scheduler, scheduler.schedule())
    scheduler.check_integrity()
    pool.take_new(1)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
