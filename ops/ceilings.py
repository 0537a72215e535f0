"""What this machine can do at most, measured by the operator library's own loops: bytes read from memory per
second, multiply-adds per second in fp32 and in int8. Kept in the user's cache.

A ceiling belongs to a processor model, a number of threads and a build of the library: its loops use the
instructions that its kernels use. Not known here: engines.
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bitsmith.core.cache import cache_dir
from bitsmith.core.digest import canonical_json, sha256_bytes
from bitsmith.core.huge_pages import allocate_in_huge_pages
from bitsmith.core.whole_file import whole_file
from bitsmith.ops.isa import cpu_model
from bitsmith.ops.library import loaded_digest

_CACHE_NAME = "ceilings.json"
_READ_BYTES = 256 << 20  # well beyond the last cache, so that a part is cold again when its turn comes
# One run takes about a millisecond: beside busy neighbours some runs still go undisturbed.
_PART_BYTES = 16 << 20
_NUM_STEPS = 100_000
_SECONDS_EACH = 1.0
_MIN_RUNS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates per second, best of several runs: bytes read; operations, a multiply-add being two.

    form: which kernels' instructions. measured_at: UTC, ISO 8601.
    """

    processor: str
    form: str
    num_threads: int
    read_bytes_per_s: float
    fp32_operations_per_s: float
    int8_operations_per_s: float
    measured_at: str

    def describe(self) -> str:
        return (
            f"{self.processor}, {self.num_threads} threads, {self.form}: at most "
            f"{self.read_bytes_per_s / 1e9:.1f} GB/s read, {self.fp32_operations_per_s / 1e9:.0f} GFLOP/s "
            f"fp32, {self.int8_operations_per_s / 1e9:.0f} GOP/s int8 (measured {self.measured_at})"
        )


def machine_ceilings(*, refresh: bool = False) -> Ceilings:
    """The ceilings of the threads that the operators now use; measured, about four seconds, if not known yet.

    Comes after `load_operators`. refresh: measure again and keep that.
    """
    key = _key()
    known = None if refresh else _read_cache().get(key)
    if known is not None:
        with contextlib.suppress(TypeError):  # written by another release
            return Ceilings(**known)
    ceilings = measure_ceilings()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        _write_cache(key, ceilings)
    return ceilings


def measure_ceilings() -> Ceilings:
    """Measure now. On a busy machine the result is what others leave of it."""
    operators: Any = torch.ops.bitsmith
    data = allocate_in_huge_pages(_READ_BYTES)
    data.fill_(1)  # zeros may all be one page of memory
    starts = range(0, _READ_BYTES, _PART_BYTES)
    parts = itertools.cycle([data[start : start + _PART_BYTES] for start in starts])

    def read() -> int:
        part = next(parts)
        operators.ceiling_read(part)
        return part.numel()

    return Ceilings(
        processor=cpu_model(),
        form=operators.active_form(),
        num_threads=operators.num_threads(),
        read_bytes_per_s=_best_rate(read),
        fp32_operations_per_s=_best_rate(lambda: operators.ceiling_arithmetic(_NUM_STEPS, False)),
        int8_operations_per_s=_best_rate(lambda: operators.ceiling_arithmetic(_NUM_STEPS, True)),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _best_rate(work: Callable[[], int]) -> float:
    """Amount of work per second in the fastest run. work: does some and says how much."""
    best, end, num_runs = 0.0, time.perf_counter() + _SECONDS_EACH, 0
    while num_runs < _MIN_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        amount = work()
        best = max(best, amount / (time.perf_counter() - start))
        num_runs += 1
    return best


def _key() -> str:
    operators: Any = torch.ops.bitsmith
    facts = [cpu_model(), operators.num_threads(), operators.active_form(), loaded_digest()]
    return sha256_bytes(canonical_json(facts))


def _cache_path() -> Path:
    return cache_dir() / _CACHE_NAME


def _read_cache() -> dict[str, dict[str, Any]]:
    """Key -> fields; empty where there is no file or a damaged one."""
    try:
        body = json.loads(_cache_path().read_bytes())
    except (OSError, ValueError):
        return {}
    entries = body if isinstance(body, dict) else {}
    return {key: value for key, value in entries.items() if isinstance(value, dict)}


def _write_cache(key: str, ceilings: Ceilings) -> None:
    path = _cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        entries = _read_cache() | {key: dataclasses.asdict(ceilings)}
        with whole_file(path) as partial:
            partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
