"""Counters, gauges and histograms in Prometheus' text form. No prompt, key or user ever stands in a label."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from bitsmith.serve.engine_loop import EngineStats

_PREFIX = "bitsmith_"
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Histogram:
    """Cumulative buckets with an upper bound each, sum and count."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = _PREFIX + name
        self._text = text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self._name} {self._text}"
        yield f"# TYPE {self._name} histogram"
        total = 0
        for bound, count in zip((*self._buckets, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum:.9g}"
        yield f"{self._name}_count {total}"


class ServerMetrics:
    """What the HTTP process counts; the engine's own numbers come with each step report."""

    def __init__(self) -> None:
        self.ttft_s = Histogram("ttft_seconds", "Arrival to first token, queueing included.", _TTFT_BUCKETS)
        self.itl_s = Histogram("itl_seconds", "Gap between two steps' tokens of one request.", _ITL_BUCKETS)
        self.e2e_latency_s = Histogram("e2e_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_finished: Counter[str] = Counter()
        self.num_refused: Counter[int] = Counter()

    def render(self, stats: EngineStats, *, is_ready: bool) -> str:
        lines = [
            *self.ttft_s.lines(),
            *self.itl_s.lines(),
            *self.e2e_latency_s.lines(),
            *_labelled("requests_finished_total", "Choices by end.", "finish_reason", self.num_finished),
            *_labelled("requests_refused_total", "Requests by error status.", "status", self.num_refused),
        ]
        for name, kind, text, value in (*self._counters(), *_engine_values(stats, is_ready=is_ready)):
            lines += (
                f"# HELP {_PREFIX}{name} {text}",
                f"# TYPE {_PREFIX}{name} {kind}",
                f"{_PREFIX}{name} {value}",
            )
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterator[tuple[str, str, str, int]]:
        yield "prompt_tokens_total", "counter", "Prompt tokens taken in.", self.num_prompt_tokens
        yield (
            "prompt_cached_tokens_total",
            "counter",
            "Prompt tokens found in the prefix cache.",
            self.num_cached_prompt_tokens,
        )
        yield "output_tokens_total", "counter", "Tokens generated.", self.num_output_tokens


def _engine_values(stats: EngineStats, *, is_ready: bool) -> Iterator[tuple[str, str, str, float]]:
    spec = stats.speculation
    yield "ready", "gauge", "1 when requests can be served.", int(is_ready)
    yield "requests_running", "gauge", "Requests in the batch.", stats.num_running
    yield "requests_waiting", "gauge", "Requests queued in the engine.", stats.num_waiting
    yield "kv_blocks_capacity", "gauge", "KV-cache blocks of 16 tokens.", stats.num_kv_blocks
    yield "kv_blocks_free", "gauge", "KV-cache blocks that nobody holds.", stats.num_free_kv_blocks
    yield "kv_cache_bytes", "gauge", "Bytes of keys and values, all blocks together.", stats.kv_cache_bytes
    yield "preemptions_total", "counter", "Requests sent back to be recomputed.", stats.num_preemptions
    yield "steps_total", "counter", "Steps of the engine.", stats.num_steps
    yield "scheduled_tokens_total", "counter", "Tokens computed.", stats.num_scheduled_tokens
    yield "spec_drafts_total", "counter", "Times drafts were verified.", spec.num_drafts
    yield "spec_draft_tokens_total", "counter", "Tokens drafted.", spec.num_draft_tokens
    yield "spec_accepted_tokens_total", "counter", "Drafted tokens accepted.", spec.num_accepted_tokens
    yield (
        "spec_tokens_allowed",
        "gauge",
        "Draft tokens of an ordinary request at the present batch size; 0 means switched off.",
        spec.num_speculative_tokens,
    )
    yield "spec_row_cost_ratio", "gauge", "Measured cost of a token in a step / empty step.", spec.row_cost
    yield "spec_suspended_requests", "gauge", "Requests whose drafts were mostly wrong.", spec.num_suspended


def _labelled(name: str, text: str, label: str, counts: Counter[str] | Counter[int]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {text}"
    yield f"# TYPE {_PREFIX}{name} counter"
    for value, count in sorted(counts.items()):
        yield f'{_PREFIX}{name}{{{label}="{value}"}} {count}'
