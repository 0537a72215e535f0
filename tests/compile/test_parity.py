"""The parity check at the end of a compile: what it measures, and that it decides."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsmith.compile.engine import PACKAGE_NAME, Engine
from bitsmith.compile.job import CompileJob, compile_engine, plan_compile
from bitsmith.compile.limits import EngineLimits
from bitsmith.compile.parity import ParityLimit, ParityRecord, measure_parity, parity_limit
from bitsmith.compile.parity_schedule import decode_steps, mixed_steps, prefill_steps, run_steps
from bitsmith.core.artifact import partial_path
from bitsmith.core.errors import WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.quantize.weight_source import open_weights

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="module")
def record(make_model: ModelMaker, eager_engine: EngineMaker) -> ParityRecord:
    path = make_model("gemma2", sliding_window=24)
    return measure_parity(eager_engine(path), open_weights(path))


def test_fp32_is_held_to_1e_4(record: ParityRecord) -> None:
    assert (record.limit.metric, record.limit.limit) == ("max_relative", 1e-4)
    assert record.is_within_limit
    assert 0 < record.decisive < 1e-4


def test_a_checkpoint_without_a_tokenizer_is_checked_on_random_ids(
    make_model: ModelMaker, eager_engine: EngineMaker, tmp_path: Path
) -> None:
    source = make_model("llama")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, tmp_path / name)
    record = measure_parity(eager_engine(tmp_path), open_weights(tmp_path))
    assert "random" in record.text["source"]
    assert record.is_within_limit


def test_an_engine_that_is_wrong_in_one_phase_is_found(
    make_model: ModelMaker, eager_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("llama")
    engine = eager_engine(path)
    execute = Engine.execute

    def off_by_a_position(self: Engine, model_input: Any, kv_cache: Any = None) -> torch.Tensor:
        if model_input.token_ids.numel() <= 4:  # decode only
            model_input = dataclasses.replace(model_input, positions=model_input.positions + 1)
        return execute(self, model_input, kv_cache)

    monkeypatch.setattr(Engine, "execute", off_by_a_position)
    record = measure_parity(engine, open_weights(path))
    assert record.phases["prefill"].max_relative < 1e-4
    assert record.phases["decode"].max_relative > 1e-4
    assert not record.is_within_limit


@pytest.mark.parametrize("limits", [(1, 1), (1, 300), (2, 3), (32, 1024)])
def test_every_phase_computes_the_same_logits(
    limits: tuple[int, int], make_model: ModelMaker, eager_engine: EngineMaker
) -> None:
    engine = eager_engine(make_model("llama"))
    engine = dataclasses.replace(engine, limits=EngineLimits(*limits, 256))
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, 301, (3, 45), generator=generator).tolist()
    whole = torch.zeros(3, 45, 301)
    for piece, logits in run_steps(engine, windows, prefill_steps(3, 45, engine.limits)):
        whole[piece.window, piece.start : piece.end] = logits
    for phase in (decode_steps(3, 45, engine.limits), mixed_steps(3, 45, engine.limits)):
        for piece, logits in run_steps(engine, windows, phase):
            torch.testing.assert_close(
                logits, whole[piece.window, piece.start : piece.end], rtol=1e-4, atol=1e-4
            )


def test_a_mixed_batch_decodes_continues_and_begins() -> None:
    *_, mixed = mixed_steps(4, 100, EngineLimits(8, 512, 256))
    assert [(piece.start, piece.end) for piece in mixed] == [(99, 100), (50, 100), (0, 50)]
    assert mixed_steps(4, 100, EngineLimits(1, 512, 256)) == []


def test_nan_is_never_within_a_limit(record: ParityRecord) -> None:
    broken = dataclasses.replace(record.overall, max_relative=float("nan"))
    for position in range(3):
        phases = dict(record.phases)
        phases[list(phases)[position]] = broken
        assert not dataclasses.replace(record, phases=phases).is_within_limit


def test_beyond_the_limit_no_engine_is_finished(
    dense_job: CompileJob,
    dense_engine_path: Path,
    tmp_path: Path,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copy_package(
        decoder: Any, plan: Any, path: Path
    ) -> None:  # the graph is the same: no need to compile
        shutil.copyfile(dense_engine_path / PACKAGE_NAME, path)

    monkeypatch.setattr("bitsmith.compile.job.compile_package", copy_package)
    monkeypatch.setattr(
        "bitsmith.compile.parity.parity_limit", lambda plan: ParityLimit("rms", 0.0, "none is")
    )
    job = dataclasses.replace(dense_job, out=tmp_path / "engine")
    with pytest.raises(WorkFailed, match="differs too much"):
        compile_engine(job, plan_compile(job), reporter)
    assert not job.out.exists()
    assert not partial_path(job.out).exists()


def test_limits_follow_the_arithmetic(make_quantized: ModelMaker, eager_engine: EngineMaker) -> None:
    path = make_quantized(4, kv_scales=(0.02, 0.01))

    def limit(activations: str, kv_cache: str) -> ParityLimit:
        return parity_limit(eager_engine(path, activations=activations, kv_cache=kv_cache).plan)

    assert limit("fp32", "fp32").metric == "max_relative"
    kl_limits = [
        limit("bf16", "bf16"),
        limit("int8", "bf16"),
        limit("bf16", "fp8"),
        limit("int8", "fp8"),
        limit("int8", "int8"),
    ]
    assert {entry.metric for entry in kl_limits} == {"kl_mean"}
    assert [entry.limit for entry in kl_limits] == pytest.approx([1e-3, 1.5e-2, 3.1e-2, 4.5e-2, 3.5e-2])
    assert all("measured" in entry.reason for entry in kl_limits)
