"""--kv-cache, --kv-scale and --activations: what "auto" comes to, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitsmith.compile import arithmetic
from bitsmith.compile.compile_plan import CompileJob, CompilePlan, plan_compile
from bitsmith.core.errors import Refused

ModelMaker = Callable[..., Path]


def _plan(checkpoint: Path, tmp_path: Path, **settings: Any) -> CompilePlan:
    return plan_compile(CompileJob(checkpoint, tmp_path / "engine", **settings))


def test_auto_follows_the_checkpoint(
    make_model: ModelMaker, make_quantized: ModelMaker, tmp_path: Path
) -> None:
    dense = _plan(make_model("llama"), tmp_path)
    assert (dense.kv.kv_cache, dense.activations) == ("bf16", "bf16")
    declared = _plan(make_quantized(4, kv_scales=(0.02, 0.01)), tmp_path)
    assert declared.kv.kv_cache == "fp8"
    assert list(map(list, declared.kv.kv_scales)) == [pytest.approx([0.02, 0.01])] * 2
    assert _plan(make_quantized(4), tmp_path).kv.kv_cache == "bf16"


@pytest.mark.parametrize(
    ("flags", "expected"), [({"sse4_2", "fma"}, "bf16"), ({"avx2", "fma", "f16c"}, "int8")]
)
def test_auto_activations_of_quantized_weights_follow_the_processor(
    flags: set[str],
    expected: str,
    make_quantized: ModelMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arithmetic, "cpu_flags", lambda: frozenset(flags))
    assert _plan(make_quantized(4), tmp_path).activations == expected


def test_int8_activations_need_quantized_weights(make_model: ModelMaker, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="int8 needs quantized weights"):
        _plan(make_model("llama"), tmp_path, activations="int8")


@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
@pytest.mark.parametrize("kv_scales", [None, (1.0, 1.0), (0.02, 0.0), (float("nan"), 0.01)])
def test_a_cache_without_calibrated_scales_is_refused(
    kv_scales: tuple[float, float] | None, kv_cache: str, make_quantized: ModelMaker, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="scales"):
        _plan(make_quantized(4, kv_scales=kv_scales), tmp_path, kv_cache=kv_cache)


def test_an_int8_cache_is_declared_or_converted_from_fp8_scales(
    make_quantized: ModelMaker, tmp_path: Path
) -> None:
    """One calibration tells both: the largest magnitude is scale * 448, and scale * 127."""
    declared = _plan(make_quantized(4, kv_scales=(0.08, 0.04), kv_cache="int8"), tmp_path)
    assert (declared.kv.kv_cache, declared.kv.are_calibrated) == ("int8", True)
    assert list(map(list, declared.kv.kv_scales)) == [pytest.approx([0.08, 0.04])] * 2
    converted = _plan(make_quantized(4, kv_scales=(0.02, 0.01)), tmp_path, kv_cache="int8")
    assert (converted.kv.kv_cache, converted.kv.are_calibrated) == ("int8", True)
    amax = [0.02 * 448, 0.01 * 448]
    assert [[s * 127 for s in pair] for pair in converted.kv.kv_scales] == [pytest.approx(amax)] * 2
    back = _plan(make_quantized(4, kv_scales=(0.08, 0.04), kv_cache="int8"), tmp_path, kv_cache="fp8")
    assert [[s * 448 for s in pair] for pair in back.kv.kv_scales] == [
        pytest.approx([0.08 * 127, 0.04 * 127])
    ] * 2


@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
def test_scales_of_one_on_request_are_loud(kv_cache: str, make_quantized: ModelMaker, tmp_path: Path) -> None:
    checkpoint = make_quantized(4, kv_scales=(0.02, 0.01))
    plan = _plan(checkpoint, tmp_path, kv_cache=kv_cache, kv_scale="ones")
    assert plan.kv.kv_scales == ((1.0, 1.0),) * 2
    assert any(f"{kv_cache} KV cache has uncalibrated" in warning for warning in plan.warnings)


def test_an_inert_kv_scale_is_refused(make_quantized: ModelMaker, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--kv-scale ones applies to an fp8 or int8"):
        _plan(make_quantized(4), tmp_path, kv_scale="ones")


def test_an_int8_head_needs_int8_activations(make_quantized: ModelMaker, tmp_path: Path) -> None:
    path = make_quantized(4)
    assert _plan(path, tmp_path, lm_head="int8", activations="int8").config["lm_head"] == "int8"
    with pytest.raises(Refused, match="--lm-head int8 goes with int8 activations; this engine's are bf16"):
        _plan(path, tmp_path, lm_head="int8", activations="bf16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_num_tokens": 8, "max_batch_size": 16}, "max_num_tokens 8 is less"),
        ({"max_model_len": 257}, "257 is beyond the model's context of 256"),
        ({"num_threads": 0}, "num_threads is 0"),
    ],
)
def test_limits_that_cannot_be(
    settings: dict[str, Any], message: str, make_model: ModelMaker, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=message):
        _plan(make_model("llama"), tmp_path, **settings)


def test_the_table_of_limits_says_what_decided(make_model: ModelMaker, tmp_path: Path) -> None:
    rows = {row.name: row for row in _plan(make_model("llama"), tmp_path).limit_rows}
    assert (rows["max_model_len"].resolved, rows["max_model_len"].decided_by) == (
        256,
        "max_position_embeddings 256",
    )
    rows = {row.name: row for row in _plan(make_model("llama"), tmp_path, max_model_len=99).limit_rows}
    assert (rows["max_model_len"].resolved, rows["max_model_len"].decided_by) == (99, "build")


def test_a_full_disk_is_refused_before_work(
    make_model: ModelMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Usage:
        free = 1 << 20

    monkeypatch.setattr("bitsmith.compile.compile_plan.shutil.disk_usage", lambda path: _Usage())
    with pytest.raises(Refused, match="MiB free"):
        _plan(make_model("llama"), tmp_path)


def test_the_stage_key_changes_with_what_changes_the_engine(make_model: ModelMaker, tmp_path: Path) -> None:
    path = make_model("llama")
    key = _plan(path, tmp_path).stage_key
    assert _plan(path, tmp_path, kv_cache="bf16").stage_key == key  # the same thing, spelled out
    changes: list[dict[str, Any]] = [{"kv_cache": "fp32"}, {"activations": "fp32"}, {"max_model_len": 99}]
    keys = {_plan(path, tmp_path, **change).stage_key for change in changes}
    assert len(keys | {key}) == 4
    assert _plan(make_model("mistral"), tmp_path).stage_key not in keys | {key}
