"""The validator's answer for every golden checkpoint, and the reasons it gives."""

from pathlib import Path

import pytest

from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_release import parse_release
from bitsmith.compile.tensorrt_unified_check import check_unified_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
ONES, NOT_FP8, BLACKWELL = "kv-scale-ones", "fp8-kv-without-fp8", "not-on-blackwell"

# golden: (refusals for 0.14, warnings for 0.14, refusals for 1.2.1, warnings for 1.2.1)
ENGINE: dict[str, tuple[set[str], set[str], set[str], set[str]]] = {
    "mo_trt_llama_bf16": (set(), set(), set(), set()),
    "mo_trt_mistral_fp8_kvfp8": (set(), {ONES}, set(), {ONES}),
    "mo_trt_llama_fp8_kvfp8": (set(), {ONES}, set(), {ONES}),
    "mo_trt_llama_fp8_tp2": (set(), {ONES}, set(), {ONES}),
    "mo_trt_llama_fp8_tied": (set(), {ONES}, set(), {ONES}),
    "mo_trt_llama_kvfp8_only": (set(), {ONES, NOT_FP8}, set(), {ONES, NOT_FP8}),
    "mo_trt_llama_int4awq": (set(), set(), set(), {BLACKWELL}),
    "mo_trt_llama_int4awq_vocab250": (set(), set(), set(), {BLACKWELL}),
    "mo_trt_llama_int4awq_kvfp8": (set(), {ONES, NOT_FP8}, set(), {ONES, NOT_FP8, BLACKWELL}),
    # 1.x keeps FP8 context attention for W4A8_AWQ, so only 0.14 loses it.
    "mo_trt_llama_w4a8awq": (set(), {ONES, NOT_FP8}, set(), {ONES, BLACKWELL}),
    "mo_trt_llama_int8sq": (set(), {ONES, NOT_FP8}, set(), {ONES, NOT_FP8, BLACKWELL}),
    "mo_trt_llama_fp8pcpt": (
        {"rowwise-release", "tensor-dtype"},
        {ONES, NOT_FP8, "tensor-extra"},
        set(),
        {ONES, NOT_FP8, BLACKWELL},
    ),
    "mo_trt_llama_int4blockwise": ({"tensor-missing"}, set(), {"tensor-missing"}, {BLACKWELL}),
    "mo_trt_llama_int8wo": (
        {"tensor-missing", "tensor-shape", "weight-only-scale", "exclude-embedding"},
        set(),
        {"tensor-missing", "tensor-shape", "weight-only-scale", "exclude-embedding"},
        {BLACKWELL},
    ),
    "mo_trt_qwen2_fp8_kvfp8": ({"config-missing-qwen"}, {ONES}, {"config-missing-qwen"}, {ONES}),
    "mo_trt_qwen3_fp8_kvfp8": (
        {"architecture-release", "config-missing-qwen", "qwen3-bias", "qk-layernorm"},
        {ONES},
        {"config-missing-qwen", "qwen3-bias", "qk-layernorm"},
        {ONES},
    ),
}
IGNORED = "kv-scales-ignored"
# golden: (refusals, warnings)
UNIFIED: dict[str, tuple[set[str], set[str]]] = {
    "mo_hf_llama_bf16": (set(), set()),
    "mo_hf_llama_fp8_kvfp8": (set(), {IGNORED}),
    "mo_hf_qwen3_fp8_kvfp8": (set(), {IGNORED}),
    "mo_hf_gemma2_fp8_kvfp8": (set(), {IGNORED}),
    "mo_hf_llama_fp8pcpt": (set(), {IGNORED}),
    "mo_hf_llama_fp8_pb_wo": (set(), set()),
    "mo_hf_llama_int8wo": (set(), {IGNORED}),
    "mo_hf_llama_nvfp4_kvfp8": (set(), {IGNORED}),
    "mo_hf_llama_nvfp4_kvnvfp4": (set(), set()),  # here the scales are read
    "mo_hf_llama_kvfp8_only": (set(), {IGNORED}),
    "mo_hf_llama_int4awq_kvfp8": (set(), {IGNORED, BLACKWELL}),
    "mo_hf_llama_w4a8awq": (set(), {IGNORED, BLACKWELL}),
    "mo_hf_llama_int4blockwise": ({"tensor-missing"}, {BLACKWELL}),
    "mo_hf_llama_int8sq": ({"quant-algo"}, {IGNORED}),
}
SAME_SOURCE = ("tied", "vocab250", "mistral", "qwen", "nvfp4", "pb_wo", "gemma")


def source_of(name: str) -> Path | None:
    """The dense model of the goldens that were all made from it."""
    return None if any(part in name for part in SAME_SOURCE) else GOLDEN / "mo_hf_llama_bf16"


def test_every_golden_has_an_expected_answer() -> None:
    present = {path.name for path in GOLDEN.glob("mo_*")}
    assert present == {*ENGINE, *UNIFIED}


@pytest.mark.parametrize("name", ENGINE)
@pytest.mark.parametrize("version", ["0.14", "1.2.1"])
def test_engine_checkpoint(name: str, version: str) -> None:
    expected = ENGINE[name][:2] if version == "0.14" else ENGINE[name][2:]
    report = check_engine_checkpoint(GOLDEN / name, parse_release(version), source_of(name))
    assert {finding.code for finding in report.refusals} == expected[0], report.lines()
    assert {finding.code for finding in report.warnings} == expected[1], report.lines()
    assert report.is_accepted == (not expected[0])


@pytest.mark.parametrize("name", UNIFIED)
def test_unified_checkpoint(name: str) -> None:
    report = check_unified_checkpoint(GOLDEN / name, parse_release("1.2.1"), source_of(name))
    assert {finding.code for finding in report.refusals} == UNIFIED[name][0], report.lines()
    assert {finding.code for finding in report.warnings} == UNIFIED[name][1], report.lines()


def test_a_finding_says_what_to_do() -> None:
    report = check_engine_checkpoint(GOLDEN / "mo_trt_llama_int4blockwise", parse_release("1.2.1"))
    assert report.lines()[0].endswith("refused as a TensorRT-LLM 1.2.1 checkpoint (5 refusals, 1 warnings)")
    assert "prequant_scaling_factor: is required, bfloat16 [128]; pre_quant_scale is true: write ones" in str(
        report.refusals[0]
    )
    assert report.refusals[-1].text == "and 6 more like these."
    assert report.to_json()["accepted"] is False


@pytest.mark.parametrize("name", ["mo_trt_llama_bf16", "mo_hf_llama_bf16"])
def test_one_format_is_not_taken_for_the_other(name: str) -> None:
    release = parse_release("1.2.1")
    check = check_unified_checkpoint if name.startswith("mo_trt") else check_engine_checkpoint
    assert not check(GOLDEN / name, release).is_accepted
