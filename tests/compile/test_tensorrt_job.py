"""Whole jobs: what is exported without the tools, what is built with them, what is refused before work."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitsmith.compile.tensorrt_inspect import check_against
from bitsmith.compile.tensorrt_job import TensorrtJob, plan_tensorrt
from bitsmith.compile.tensorrt_llm_args import RunLimits
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.compile.tensorrt_speculation import Speculation
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import Manifest, verify_files
from bitsmith.core.progress import Reporter

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
FP8, AWQ = GOLDEN / "mo_hf_llama_fp8_kvfp8", GOLDEN / "mo_hf_llama_int4awq_kvfp8"
QUIET = Reporter(quiet=True)


@pytest.fixture(autouse=True)
def without_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No trtllm-build on PATH, and a cache of the test's own."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(checkpoint: Path, out: Path, target: str = "tensorrt-llm", **options: Any) -> Manifest:
    job = TensorrtJob(checkpoint, out, target, **options)  # type: ignore[arg-type]
    return compile_tensorrt(job, plan_tensorrt(job), QUIET)


def test_without_tools_the_checkpoint_is_exported(tmp_path: Path) -> None:
    manifest = run(FP8, tmp_path / "engine", limits=RunLimits(8, 1024, 128))
    verify_files(tmp_path / "engine", manifest)
    details = manifest.details
    assert details["state"] == "exported"
    assert details["not_run"] == ["trtllm-build", "parity against the dequantized checkpoint"]
    assert details["kv_cache"]["algo"] == "FP8"
    assert details["kv_cache"]["provenance"] == "calibrated"
    assert details["kv_cache"]["scales"][0] == pytest.approx(0.00218854635, rel=1e-6)
    assert details["rounded_again"].keys() <= {
        f"model.layers.{layer}.{part}"
        for layer in (0, 1)
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
    }
    assert details["validator"]["accepted"] is True
    assert check_against(tmp_path / "engine", "tensorrt-llm=1.2.1", FP8).is_accepted
    assert (tmp_path / "engine" / "tokenizer" / "config.json").is_file()


def test_build_script_has_the_exact_command(tmp_path: Path) -> None:
    run(FP8, tmp_path / "engine", limits=RunLimits(8, 1024, 128))
    fake = tmp_path / "bin" / "trtllm-build"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "engine" / "build.sh")],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    options = dict(zip(words[0::2], words[1::2], strict=True))
    assert options == {
        "--checkpoint_dir": str(tmp_path / "engine" / "checkpoint"),
        "--output_dir": str(tmp_path / "engine" / "engine"),
        "--max_seq_len": "128",
        "--max_beam_width": "1",
        "--max_batch_size": "8",
        "--max_num_tokens": "1024",
        "--workers": "1",
        "--use_paged_context_fmha": "enable",
        "--use_fp8_context_fmha": "enable",
    }


def test_what_is_lost_is_in_the_manifest(tmp_path: Path) -> None:
    manifest = run(AWQ, tmp_path / "engine")
    assert [fallback.where for fallback in manifest.fallbacks] == ["use_paged_context_fmha"]
    command = manifest.details["build_command"]
    assert command[command.index("--use_paged_context_fmha") + 1] == "disable"
    assert command[command.index("--use_fp8_context_fmha") + 1] == "disable"
    arguments = yaml.safe_load((tmp_path / "engine" / "llm_args.yaml").read_text())
    assert arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": False}


def test_weight_only_says_that_the_target_rounds_again(tmp_path: Path) -> None:
    manifest = run(GOLDEN / "mo_hf_llama_int8wo", tmp_path / "engine")
    assert manifest.details["requantized_at_build"] is True
    assert manifest.details["quant_algo"] == "W8A16"


def fake_environment(path: Path, *, version: str = "1.2.1", tokens: str = "right") -> Path:
    """A `python` that stands in for TensorRT-LLM's: it builds empty engines and answers the parity script."""
    script = path / "fake.py"
    script.write_text(f'''
import json, sys
arguments = sys.argv[1:]
if arguments[0] == "-m":
    options = dict(zip(arguments[2::2], arguments[3::2]))
    print("[TRT-LLM] building", options["--checkpoint_dir"])
    if "{version}" == "broken":
        print("[TRT-LLM] [E] no GPU"); sys.exit(3)
    import pathlib
    out = pathlib.Path(options["--output_dir"]); out.mkdir()
    for rank in range(int(options["--workers"])):
        (out / f"rank{{rank}}.engine").write_bytes(b"engine")
    (out / "config.json").write_text(json.dumps({{"version": "{version}"}}))
else:
    reference, answer = arguments[3], arguments[4]
    tokens = json.load(open(reference))["tokens"]
    if "{tokens}" == "wrong":
        tokens = [token + 1 for token in tokens]
    json.dump({{"tokens": tokens}}, open(answer, "w"))
''')
    python = path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    return python


def test_with_tools_the_engine_is_built_and_compared(tmp_path: Path) -> None:
    manifest = run(
        FP8, tmp_path / "engine", trtllm_python=str(fake_environment(tmp_path)), requires_engine=True
    )
    assert manifest.details["state"] == "built"
    assert manifest.details["not_run"] == []
    assert manifest.details["parity"]["agreement"] == 1.0
    assert "engine/rank0.engine" in manifest.files
    assert "[TRT-LLM] building" in (tmp_path / "engine" / "build.log").read_text()
    verify_files(tmp_path / "engine", manifest)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"version": "broken"}, "exit code 3. Its last lines:\n(.|\n)*no GPU"),
        ({"version": "1.1.0"}, "built by TensorRT-LLM 1.1.0, the plan was for 1.2.1"),
        ({"tokens": "wrong"}, "does not compute this model"),
    ],
)
def test_a_failed_build_leaves_nothing(environment: dict[str, str], reason: str, tmp_path: Path) -> None:
    python = fake_environment(tmp_path, **environment)
    with pytest.raises(WorkFailed, match=reason):
        run(FP8, tmp_path / "engine", trtllm_python=str(python))
    assert not (tmp_path / "engine").exists()


REFUSALS: list[tuple[Path, dict[str, Any], str]] = [
    (FP8, {"requires_engine": True}, "no trtllm-build on PATH"),
    (FP8, {"trtllm_python": "/nowhere/python"}, "not an executable"),
    (FP8, {"trtllm_command": "nonesuch run"}, "no such program"),
    (FP8, {"trtllm_command": "sh", "trtllm_python": "sh"}, "give one of them"),
    (FP8, {"trtllm_version": "1.3.0"}, "last stable release with trtllm-build"),
    (FP8, {"trtllm_version": "0.13"}, "older than 0.14"),
    (FP8, {"trtllm_version": "latest"}, "not understood"),
    (FP8, {"limits": RunLimits(max_model_len=4096)}, "more than the model was made for"),
    (FP8, {"build_flags": {"paged_kv_cache": "enable"}}, "cannot be set here. Valid"),
    (FP8, {"build_flags": {"tokens_per_block": "48"}}, "takes 16, 32"),
    (FP8, {"build_flags": {"use_fp8_context_fmha": "disable"}}, "forces use_fp8_context_fmha on"),
    (FP8, {"build_flags": {"reduce_fusion": "enable"}}, "needs tensor parallelism"),
    (FP8, {"build_flags": {"user_buffer": "enable"}}, "needs reduce_fusion"),
    (FP8, {"build_flags": {"context_fmha": "disable"}, "has_kv_reuse": True}, "build flags turn off"),
    (AWQ, {"build_flags": {"use_paged_context_fmha": "enable"}}, "cannot be on with FP8 KV"),
    (AWQ, {"build_flags": {"gemm_plugin": "fp8"}}, "needs FP8 weights"),
    (AWQ, {"has_chunked_prefill": True}, "chunked prefill cannot be had"),
    (AWQ, {"is_strict": True}, "--strict"),
    (FP8, {"speculation": Speculation("ngram")}, "lookahead and"),
    (
        FP8,
        {"speculation": Speculation("lookahead"), "limits": RunLimits(2048, 1024)},
        "needs --max-num-tokens",
    ),
    (FP8, {"kv_scale_floor": -1.0}, "0 or more"),
]


@pytest.mark.parametrize(("checkpoint", "options", "reason"), REFUSALS, ids=[r for _, _, r in REFUSALS])
def test_refused_before_work(checkpoint: Path, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=reason):
        run(checkpoint, tmp_path / "engine", **options)
    assert not (tmp_path / "engine").exists()


def test_pytorch_target(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    speculation = Speculation("ngram", max_draft_len=3)
    manifest = run(
        FP8, out, "tensorrt-llm-pytorch", limits=RunLimits(16, None, 64), speculation=speculation, tp_size=2
    )
    assert manifest.details["state"] == "exported"
    assert manifest.details["not_run"] == ["trtllm-serve", "trtllm-bench"]
    assert [fallback.where for fallback in manifest.fallbacks] == ["kv_cache"]
    assert yaml.safe_load((out / "llm_args.yaml").read_text()) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.9, "enable_block_reuse": True},
        "enable_chunked_prefill": False,
        "max_batch_size": 16,
        "max_seq_len": 64,
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2},
        "disable_overlap_scheduler": True,
    }
    assert check_against(out, "tensorrt-llm-pytorch", FP8).is_accepted
    for script in ("serve.sh", "bench.sh"):
        subprocess.run(["bash", "-n", str(out / script)], check=True)
    assert 'trtllm-serve "$here/model" --backend pytorch' in (out / "serve.sh").read_text()


def test_speculation_names_by_release(tmp_path: Path) -> None:
    draft = Speculation("draft-target", model="/models/draft")
    for version, name in (("1.2.1", "Draft_Target"), ("1.3.0", "DraftTarget")):
        out = tmp_path / version
        run(FP8, out, "tensorrt-llm-pytorch", speculation=draft, trtllm_version=version)
        assert yaml.safe_load((out / "llm_args.yaml").read_text())["speculative_config"] == {
            "decoding_type": name,
            "max_draft_len": 4,
            "speculative_model": "/models/draft",
        }


def test_nvfp4_is_taken_over_byte_for_byte(tmp_path: Path) -> None:
    golden = GOLDEN / "mo_hf_llama_nvfp4_kvnvfp4"
    run(golden, tmp_path / "engine", "tensorrt-llm-pytorch")
    copied = tmp_path / "engine" / "model" / "model.safetensors"
    assert copied.read_bytes() == (golden / "model.safetensors").read_bytes()
    with pytest.raises(Refused, match="must be auto"):
        run(golden, tmp_path / "other", "tensorrt-llm-pytorch", kv_cache="bf16")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"requires_engine": True}, "--require-engine: the PyTorch backend builds no engine"),
        ({"kv_scale_floor": 1.0}, "--kv-scale-floor"),
        ({"trtllm_version": "0.21"}, "has no PyTorch backend"),
        ({"speculation": Speculation("lookahead")}, "belongs to the engine flow"),
    ],
)
def test_pytorch_refusals(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=reason):
        run(FP8, tmp_path / "engine", "tensorrt-llm-pytorch", **options)


def test_same_work_has_the_same_key(tmp_path: Path) -> None:
    job = TensorrtJob(FP8, tmp_path / "a", "tensorrt-llm")
    other = TensorrtJob(FP8, tmp_path / "b", "tensorrt-llm", triton=tmp_path / "triton")
    changed = TensorrtJob(FP8, tmp_path / "a", "tensorrt-llm", kv_scale_floor=1.0)
    assert plan_tensorrt(job).stage_key == plan_tensorrt(other).stage_key
    assert plan_tensorrt(job).stage_key != plan_tensorrt(changed).stage_key


def test_planted_fault_in_an_artifact_is_found(tmp_path: Path) -> None:
    run(FP8, tmp_path / "engine")
    config = tmp_path / "engine" / "checkpoint" / "config.json"
    body = json.loads(config.read_text())
    body["quantization"]["exclude_modules"] = []
    config.write_text(json.dumps(body))
    assert "exclude-head" in check_against(tmp_path / "engine", "tensorrt-llm").codes()


def test_against_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not known; write"):
        check_against(FP8, "tensorrt")
    with pytest.raises(Refused, match="newer than"):
        check_against(FP8, "tensorrt-llm=1.3.0")
    shutil.copytree(FP8, tmp_path / "copy")
    assert not check_against(tmp_path / "copy", "tensorrt-llm").is_accepted
