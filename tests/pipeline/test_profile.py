"""Where the time goes: what is run, how seen calls become parts, and the command on a compiled engine."""

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsmith.compile import trusted_engines
from bitsmith.compile.compile_plan import CompileJob, plan_compile
from bitsmith.compile.job import compile_engine
from bitsmith.compile.limits import EngineLimits
from bitsmith.compile.step_work import OperatorCall, StepWork
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.ops import ceilings as ceilings_module
from bitsmith.ops.ceilings import Ceilings
from bitsmith.pipeline.main import main
from bitsmith.pipeline.phase_profile import PhaseProfile, profile_phase
from bitsmith.pipeline.profile_measurement import (
    PhaseMeasurement,
    StepTimes,
    TimedEvent,
    operator_seconds,
)
from bitsmith.pipeline.profile_report import above_ceiling, profile_document, profile_lines
from bitsmith.pipeline.profile_workload import Workload, check_workload, plan_phases

LIMITS = EngineLimits(max_batch_size=4, max_num_tokens=64, max_model_len=128)
# 1000 bytes take 1 ms; 2000 operations in fp32, or 8000 in int8, take 1 ms.
CEILINGS = Ceilings("a processor", "avx2", 2, 1e6, 2e6, 8e6, "2026-01-01T00:00:00+00:00")
CALLS = (
    OperatorCall("linear_quantized", "qkv", "int8", 1000, 4000),
    OperatorCall("write_kv_cache", "cache_write", "fp32", 100, 0),
    OperatorCall("paged_attention", "attention", "fp32", 500, 3000),
    OperatorCall("linear_dense", "head", "fp32", 2000, 1000),
)


def chunks(steps: Any) -> list[list[tuple[int, int, int]]]:
    return [[(len(part.token_ids), part.start, part.num_logits) for part in step] for step in steps]


def test_prompts_fill_steps_one_after_another() -> None:
    prefill, decode = plan_phases(Workload(40, 2, 3), 64, 100)
    assert chunks(prefill.steps) == [[(40, 0, 1), (24, 0, 0)], [(16, 24, 1), (40, 0, 1)]]
    assert chunks(decode.steps) == [[(1, 40, 1)] * 3, [(1, 41, 1)] * 3]
    assert (prefill.num_tokens, decode.num_tokens) == (120, 6)
    used = [block for part in decode.steps[0] for block in part.block_ids]
    assert sorted(used) == list(range(9))  # 42 tokens: three blocks each, none shared
    assert all(0 <= token < 100 for step in prefill.steps for part in step for token in part.token_ids)


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Workload(0, 1, 1), "--prompt-tokens is 0"),
        (Workload(1, -2, 1), "--new-tokens is -2"),
        (Workload(1, 1, 0), "--batch-size is 0"),
        (Workload(100, 29, 1), "max_model_len is 128"),
        (Workload(1, 1, 5), "at most 4"),
    ],
)
def test_a_workload_beyond_the_engine_is_refused(workload: Workload, words: str) -> None:
    check_workload(Workload(100, 28, 4), LIMITS)
    with pytest.raises(Refused, match=words):
        check_workload(workload, LIMITS)


def seen(names: list[str], each_us: float = 1000.0) -> tuple[TimedEvent, ...]:
    """Events of these names, one after another, with others inside."""
    events = [TimedEvent("execute", 0.0, len(names) * each_us)]
    for index, name in enumerate(names):
        start = index * each_us
        events += [
            TimedEvent(f"bitsmith::{name}", start, start + each_us),
            TimedEvent("aten::empty", start, 1),
        ]
    return tuple(events)


def test_calls_are_told_apart_by_their_order() -> None:
    names = [call.operator for call in CALLS]
    events = [dataclasses.replace(event, end_us=event.end_us + 7) for event in seen(names)]
    seconds = operator_seconds(CALLS, reversed(events))
    assert seconds == pytest.approx([0.001007] * 4)
    swapped = [names[3], *names[1:3], names[0]]  # which product is which does not show in the name
    assert len(operator_seconds(CALLS, seen(swapped))) == 4
    for wrong in (names[:3], [*names, "linear_dense"], [names[0], names[2], names[1], names[3]]):
        with pytest.raises(WorkFailed, match=f"saw {len(wrong)} calls"):
            operator_seconds(CALLS, seen(wrong))


def profile_of(execute_s: float, each_us: float = 1000.0, slowdown: float = 1.0) -> PhaseProfile:
    """Two steps of CALLS; batches and sampling take 0.2 ms."""
    phase = plan_phases(Workload(4, 2, 1), 64, 100)[1]
    measured = PhaseMeasurement(
        StepTimes(0.0001, execute_s, 0.0001),
        execute_s * slowdown,
        seen([call.operator for call in CALLS] * 2, each_us),
    )
    return profile_phase(phase, [StepWork(CALLS, 50)] * 2, measured, CEILINGS)


def test_the_parts_add_up_and_the_profilers_own_time_is_taken_off() -> None:
    profile = profile_of(execute_s=0.010, each_us=1500.0, slowdown=1.5)
    parts = {row.name: row for row in profile.rows}
    assert list(parts) == [
        "qkv", "cache_write", "attention", "head", "generated_code", "batch_building", "sampling",
    ]  # fmt: skip
    assert parts["qkv"].seconds == pytest.approx(0.002)  # 2 × 1.5 ms as the profiler saw it
    assert parts["generated_code"].seconds == pytest.approx(0.002)
    assert sum(row.seconds for row in profile.rows) == pytest.approx(profile.seconds) == pytest.approx(0.0102)
    assert (parts["qkv"].num_calls, parts["qkv"].num_bytes, parts["qkv"].num_operations) == (2, 2000, 8000)
    assert profile.slowdown == pytest.approx(1.5)


def test_the_floor_is_the_slower_of_reading_and_computing() -> None:
    parts = {row.name: row for row in profile_of(0.010).rows}
    assert parts["qkv"].floor_s == pytest.approx(2 * 0.001)  # 1000 bytes; int8 operations take 0.5 ms
    assert parts["attention"].floor_s == pytest.approx(2 * 0.0015)  # 3000 fp32 operations; 500 bytes
    assert parts["generated_code"].floor_s == pytest.approx(2 * 0.00005)


def test_the_class_follows_from_work_and_overhead() -> None:
    profile = profile_of(0.010)
    assert profile.memory_s == pytest.approx(2 * 0.00365)
    assert profile.compute_s == pytest.approx(2 * 0.0025)
    assert profile.bound == "memory-bound"
    assert profile_of(0.020).bound == "overhead-bound"  # 8 of 20 ms in operators
    busy = dataclasses.replace(profile, compute_s=profile.memory_s * 1.1)
    assert busy.bound == "compute-bound"


def test_numbers_carry_units_and_ceilings() -> None:
    profile = profile_of(0.010)
    lines = list(profile_lines([profile]))
    table = {line[:15].strip(): line.split() for line in lines[2:]}
    assert table["part"][-3:] == ["GFLOP/s", "of", "ceiling"]
    # One call and 1.000 ms of a step, 1000 bytes, 4000 operations at 0.0 G/s each, the floor itself.
    assert table["qkv"] == ["qkv", "1", "1.000", "19.6%", "0.001", "0.0", "0.00", "0.0", "100%"]
    assert lines[-2].startswith("memory-bound: of 5.100 ms, the bytes alone take 3.650 ms")
    document = profile_document({"path": "e"}, Workload(4, 2, 1), CEILINGS, [profile])
    json.dumps(document, allow_nan=False)
    (phase,) = document["phases"]
    assert phase["class"] == "memory-bound"
    qkv = phase["parts"][0]
    assert qkv["bytes_per_s"] == pytest.approx(1e6)
    assert qkv["share_of_ceiling"] == pytest.approx(1.0)
    assert above_ceiling([profile]) == ["decode: attention", "decode: head"]


@pytest.fixture(scope="module")
def engine_path(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny engine, compiled for real; neither the trust list nor the ceilings are the user's own."""
    directory = tmp_path_factory.mktemp("profile")
    num_threads = torch.get_num_threads()
    job = CompileJob(tiny_model, directory / "engine", max_batch_size=4, max_num_tokens=64, max_model_len=128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trusted_engines, "cache_dir", lambda: directory)
        patch.setattr(ceilings_module, "cache_dir", lambda: directory)
        patch.setattr(ceilings_module, "_READ_BYTES", 1 << 20)
        patch.setattr(ceilings_module, "_NUM_STEPS", 100)
        patch.setattr(ceilings_module, "_SECONDS_EACH", 0.0)
        compile_engine(job, plan_compile(job), Reporter(quiet=True))
        yield job.out
    torch.set_num_threads(num_threads)
    torch.ops.bitsmith.set_num_threads(0)


def run_profile(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    capsys.readouterr()
    exit_code = main(["profile", *arguments, "--json"])
    captured = capsys.readouterr()
    return exit_code, json.loads(captured.out), captured.err


def test_the_command_tells_phases_and_parts(
    engine_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "profile.json", tmp_path / "trace.json.gz"
    exit_code, document, said = run_profile(
        capsys, str(engine_path), "--prompt-tokens", "48", "--new-tokens", "3", "--batch-size", "2",
        "--num-threads", "1", "--out", str(out), "--trace", str(trace),
    )  # fmt: skip
    assert exit_code == 0
    assert json.loads(out.read_text()) == document
    assert document["ceilings"]["num_threads"] == 1
    prefill, decode = document["phases"]
    assert (prefill["num_steps"], prefill["num_tokens"]) == (2, 96)
    assert (decode["num_steps"], decode["num_tokens"]) == (3, 6)
    for phase in (prefill, decode):
        calls = {part["name"]: part["num_calls"] for part in phase["parts"]}
        assert calls["qkv"] == calls["attention"] == calls["down"] == 2 * phase["num_steps"]  # two layers
        assert calls["head"] == phase["num_steps"]
        total = sum(part["seconds"] for part in phase["parts"])
        assert total == pytest.approx(phase["total"]["seconds"])
        assert phase["class"] in ("memory-bound", "compute-bound", "overhead-bound")
        assert f"{phase['class']}: of " in said
    head = next(part for part in decode["parts"] if part["name"] == "head")
    assert head["num_bytes"] == 3 * 260 * 64 * 2  # the tied bf16 table, once a step
    assert head["num_operations"] == 3 * 2 * 2 * 260 * 64
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"prefill", "decode", "bitsmith::paged_attention"} <= {event.get("name") for event in events}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "trace.json.gz"]


def test_ceilings_are_measured_again_only_when_asked(
    engine_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [str(engine_path), "--prompt-tokens", "4", "--new-tokens", "1", "--num-threads", "1"]
    first = run_profile(capsys, *few)[1]["ceilings"]
    monkeypatch.setattr(ceilings_module, "measure_ceilings", lambda: CEILINGS)
    assert run_profile(capsys, *few)[1]["ceilings"] == first
    refreshed = run_profile(capsys, *few, "--refresh-ceilings")[1]["ceilings"]
    assert refreshed == dataclasses.asdict(CEILINGS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-tokens", "128", "--new-tokens", "1"], "max_model_len is 128"),
        (["--num-threads", "0"], "num_threads is 0"),
        (["--out", "missing/profile.json"], "directory that exists"),
        (["--out", "one.json", "--trace", "one.json"], "a file of its own"),
        (["--trace", "trace.txt"], ".json or .json.gz"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], words: str, engine_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, document, _ = run_profile(capsys, str(engine_path), *arguments)
    assert exit_code == 2
    assert words in document["error"]["message"]


def test_an_engine_of_someone_else_is_refused_and_so_is_what_is_none(
    engine_path: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_profile(capsys, str(tiny_model))[0] == 2
    monkeypatch.setattr(trusted_engines, "cache_dir", lambda: tmp_path)
    exit_code, document, _ = run_profile(capsys, str(engine_path))
    assert exit_code == 2
    assert "--trust-engine" in document["error"]["message"]
