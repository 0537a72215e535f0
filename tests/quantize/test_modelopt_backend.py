"""Quantizing with ModelOpt, with a double at the process boundary."""

import json
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitsmith.core import cache
from bitsmith.core.artifact import find_finished, partial_path
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import read_manifest, verify_files
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme, parse_scheme_name
from bitsmith.quantize.backend import NativeBackend, choose_backend
from bitsmith.quantize.budget import Budget
from bitsmith.quantize.fp8_weight import to_fp8
from bitsmith.quantize.job import QuantizeJob, plan_quantize
from bitsmith.quantize.modelopt_backend import ModelOptBackend
from bitsmith.quantize.modelopt_environment import PINS, ModelOptEnvironment
from bitsmith.quantize.weight_source import open_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
DOUBLE = Path(__file__).with_name("modelopt_double.py")
VERSIONS = dict(PINS) | {"python": "3.12.1", "torch": "2.13.0+cpu"}
JobMaker = Callable[..., QuantizeJob]


class Double:
    """A Python that says it has ModelOpt."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "python"
        home.mkdir()
        lines = (
            f"#!{sys.executable} -I",
            "import runpy, sys",
            f"sys.argv[1:1] = [{str(home)!r}]",
            f"runpy.run_path({str(DOUBLE)!r}, run_name='__main__')",
        )
        self.python.write_text("\n".join(lines))
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.behave()

    def behave(self, **behaviour: Any) -> None:
        defaults = {"versions": VERSIONS, "pip_fails": False, "crashes": False, "result": {}}
        (self.home / "behaviour.json").write_text(json.dumps(defaults | behaviour))

    def export(self, model: Path, changes: Mapping[str, torch.Tensor | None] | None = None) -> None:
        """What it will write: FP8 weights and an FP8 KV cache, all else in fp32 as ModelOpt computed it."""
        reader, tensors = CheckpointReader(model), {}
        for name in reader.names:
            weight, module = reader.tensor(name).float(), name.removesuffix(".weight")
            tensors[name] = weight
            if name.endswith("_proj.weight"):
                scale = weight.abs().max() / 448
                tensors[name] = to_fp8(weight, scale)
                tensors |= {f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(0.05)}
            for letter in ("k", "v"):
                if module.endswith(f"{letter}_proj"):
                    tensors[f"{module}.{letter}_scale"] = torch.tensor(0.02)
        for name, tensor in (changes or {}).items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        path = self.home / "export"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        self.export_config(quant_algo="FP8", kv_cache_quant_algo="FP8")

    def export_config(self, **section: str) -> None:
        body = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": section}
        (self.home / "export" / "hf_quant_config.json").write_text(json.dumps(body))
        flat = {"quant_method": "modelopt", "quant_algo": section["quant_algo"]}
        config = {"quantization_config": flat, "dtype": "float32"}
        (self.home / "export" / "config.json").write_text(json.dumps(config))

    @property
    def calls(self) -> list[list[str]]:
        path = self.home / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def num_runs(self) -> int:
        return sum(call[1].endswith("modelopt_script.py") for call in self.calls)


@pytest.fixture
def double(tmp_path: Path) -> Double:
    return Double(tmp_path / "double")


@pytest.fixture
def backend(double: Double) -> ModelOptBackend:
    return ModelOptBackend(ModelOptEnvironment(double.python))


@pytest.fixture
def job(make_job: JobMaker, double: Double) -> QuantizeJob:
    """FP8 with an FP8 KV cache, which the double will export."""
    made = make_job("w8a8-fp8", kv_cache="fp8")
    double.export(made.model.path)
    return made


def test_its_result_becomes_an_artifact(
    job: QuantizeJob, backend: ModelOptBackend, double: Double, reporter: Reporter
) -> None:
    plan = backend.plan(job)
    manifest = backend.quantize(job, plan, reporter)
    verify_files(job.out, manifest)
    assert manifest.kind == "quantized-checkpoint"
    assert manifest.config["backend"] == {"name": "modelopt", "presets": ["FP8_DEFAULT_CFG", "FP8_KV_CFG"]}
    assert manifest.versions["modelopt"] == "0.47.0" and manifest.versions["modelopt-python"] == "3.12.1"
    assert manifest.details["backend_versions"]["torch"] == "2.13.0+cpu"
    assert [record["name"] for record in manifest.details["modules"]] == list(plan.selection.shapes)
    record = manifest.details["modules"][0]
    assert (record["method"], record["num_bits"]) == ("modelopt", 8)
    assert record["sqnr_db"] > 25 and record["seconds"] == pytest.approx(0.1)
    assert manifest.details["kv_scales"] == [[pytest.approx(0.02)] * 2] * 3
    assert manifest.details["source_bytes"] > 0 and manifest.details["calibration"]["num_obtained"] == 6


def test_weights_are_modelopts_and_all_else_is_the_sources(
    job: QuantizeJob, backend: ModelOptBackend, double: Double, reporter: Reporter
) -> None:
    backend.quantize(job, backend.plan(job), reporter)
    source, exported = CheckpointReader(job.model.path), load_file(double.home / "export/model.safetensors")
    written = CheckpointReader(job.out)
    assert set(written.names) == set(exported)
    for name in written.names:
        if name in source and not name.endswith("_proj.weight"):
            assert torch.equal(written.tensor(name), source.tensor(name)), name
        else:
            assert written.dtype(name) == exported[name].dtype, name
            assert torch.equal(written.tensor(name).float(), exported[name].float()), name
    quantization = written.config["quantization_config"]
    assert written.config == source.config | {"quantization_config": quantization}
    assert quantization["quant_method"] == "modelopt"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (job.out / name).read_bytes() == (job.model.path / name).read_bytes()
    assert list(open_weights(job.out).kv_scales(1) or ()) == pytest.approx([0.02, 0.02])
    beside = {path.name for path in job.out.parent.iterdir() if not path.name.startswith(".")}
    assert beside == {"out", "double"}, "a log or a partial directory was left"


def test_it_calibrates_on_the_tokens_of_our_own_methods(
    job: QuantizeJob, backend: ModelOptBackend, double: Double, reporter: Reporter
) -> None:
    ours, theirs = plan_quantize(job), backend.plan(job)
    assert ours.windows is not None
    assert theirs.config["calibration"] == ours.config["calibration"]
    backend.quantize(job, theirs, reporter)
    given = load_file(double.home / "tokens.safetensors")["token_ids"]
    assert given.dtype == torch.int64 and torch.equal(given, ours.windows.token_ids.long())
    request = json.loads((double.home / "request.json").read_text())
    assert request["group_size"] is None and request["rows_per_batch"] == 64
    assert request["model"] == str(job.model.path.resolve())
    assert double.calls[-1][0] == "-I"


def test_the_stage_key_names_the_backend_its_version_and_its_python(
    job: QuantizeJob, backend: ModelOptBackend, double: Double, reporter: Reporter
) -> None:
    key = backend.plan(job).stage_key
    assert key != plan_quantize(job).stage_key
    for changed in ({"python": "3.13.0"}, {"torch": "2.12.0"}, {"transformers": "5.0.0"}):
        double.behave(versions=VERSIONS | changed)
        assert backend.plan(job).stage_key != key
    double.behave(versions=VERSIONS | {"torch": "2.13.0+cu130"})
    assert backend.plan(job).stage_key == key
    double.behave()
    backend.quantize(job, backend.plan(job), reporter)
    assert find_finished(job.out, key) is not None


def test_a_crash_keeps_the_log_and_nothing_else(
    job: QuantizeJob, backend: ModelOptBackend, double: Double, reporter: Reporter
) -> None:
    double.behave(crashes=True)
    with pytest.raises(WorkFailed, match="exit code 3") as failure:
        backend.quantize(job, backend.plan(job), reporter)
    log = job.out.parent / "out.modelopt.log"
    assert f"The whole log is {log}" in str(failure.value) and "out of memory" in str(failure.value)
    assert "line 0\n" not in str(failure.value) and "line 0\n" in log.read_text()
    assert not job.out.exists() and not partial_path(job.out).exists()
    double.behave()
    backend.quantize(job, backend.plan(job), reporter)
    assert not log.exists()


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{UP}.weight_scale": None, f"{UP}.weight": torch.ones(96, 64)}, f"left '{UP}' as it was"),
        ({f"{UP}.weight_scale": torch.tensor(torch.nan)}, f"'{UP}.weight_scale' holds NaN"),
        ({f"{UP}.weight": torch.ones(96, 32).to(torch.float8_e4m3fn)}, r"\[96, 32\], the model's \[96, 64\]"),
        ({"model.layers.1.other": torch.ones(2)}, "holds 'model.layers.1.other', which the model has not"),
        ({"model.norm.weight": None}, "lacks 1 weights of the model, first 'model.norm.weight'"),
        ({"model.layers.2.self_attn.k_proj.k_scale": None}, "KV scales None in layer 2"),
        ({"model.layers.2.self_attn.k_proj.k_scale": torch.tensor(0.0)}, r"KV scales \(0.0"),
    ],
)
def test_an_export_that_is_not_what_was_planned_is_not_published(
    changes: Mapping[str, torch.Tensor | None],
    named: str,
    job: QuantizeJob,
    backend: ModelOptBackend,
    double: Double,
    reporter: Reporter,
) -> None:
    backend.quantize(job, backend.plan(job), reporter)
    before = read_manifest(job.out).content_digest
    double.export(job.model.path, changes)
    with pytest.raises(WorkFailed, match=named):
        backend.quantize(job, backend.plan(job), reporter)
    assert read_manifest(job.out).content_digest == before and not partial_path(job.out).exists()


def test_another_algorithm_other_tokens_or_no_result_is_not_published(
    job: QuantizeJob, backend: ModelOptBackend, double: Double, reporter: Reporter
) -> None:
    double.export_config(quant_algo="W8A16", kv_cache_quant_algo="FP8")
    with pytest.raises(WorkFailed, match=r"'W8A16', 'FP8'\).*'FP8', 'FP8'\) was planned"):
        backend.quantize(job, backend.plan(job), reporter)
    double.behave(result={"token_digest": "0"})
    with pytest.raises(WorkFailed, match="tokens with digest 0"):
        backend.quantize(job, backend.plan(job), reporter)
    assert not job.out.exists()


def test_a_tied_head_may_be_stored_once_or_twice(
    make_job: JobMaker,
    make_model: Callable[..., Path],
    backend: ModelOptBackend,
    double: Double,
    reporter: Reporter,
    tmp_path: Path,
) -> None:
    tied = make_model(tie_word_embeddings=True)
    double.export(tied, {"lm_head.weight": torch.ones(260, 64)})
    job = make_job("w8a8-fp8", kv_cache="fp8", model=tied)
    backend.quantize(job, backend.plan(job), reporter)
    assert "lm_head.weight" not in CheckpointReader(job.out)

    twice = tmp_path / "twice"
    shutil.copytree(tied, twice)
    tensors = load_file(twice / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, twice / "model.safetensors", metadata={"format": "pt"})
    double.export(twice, {"lm_head.weight": None})
    job = make_job("w8a8-fp8", kv_cache="fp8", model=twice)
    assert "lm_head.weight" not in backend.quantize(job, backend.plan(job), reporter).details["changed"]


def test_awq_as_modelopt_writes_it_says_which_norms_took_a_scale_in(
    make_job: JobMaker,
    make_model: Callable[..., Path],
    backend: ModelOptBackend,
    double: Double,
    tmp_path: Path,
) -> None:
    model = tmp_path / "dense"
    shutil.copytree(GOLDEN / "mo_hf_llama_bf16", model)
    for file in make_model().glob("tokenizer*"):
        shutil.copy(file, model)
    shutil.copytree(GOLDEN / "mo_hf_llama_int4awq_kvfp8", double.home / "export")
    job = make_job("w4a16-awq", kv_cache="fp8", model=model, group_size=128)
    manifest = backend.quantize(job, backend.plan(job), Reporter(quiet=True))
    request = json.loads((double.home / "request.json").read_text())
    assert request["group_size"] == 128 and request["presets"] == ["INT4_AWQ_CFG", "FP8_KV_CFG"]
    norms = ("input_layernorm", "post_attention_layernorm")
    changed = [f"model.layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in norms]
    assert manifest.details["changed"] == changed
    records = manifest.details["modules"]
    assert {(r["num_bits"], r["group_size"], r["sqnr_db"]) for r in records} == {(4, 128, None)}
    written, golden = (load_file(path / "model.safetensors") for path in (job.out, double.home / "export"))
    assert written.keys() == golden.keys()
    for name, tensor in golden.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("w4a16-gptq", {}, "'w4a16-gptq'. It does w8a8-fp8, w8a8-fp8-dynamic, w8a16-rtn"),
        ("w4a16-rtn", {}, "'w4a16-rtn'. It does w8a8-fp8"),
        ("none", {}, "'none' with --kv-cache none. It does .* and none with --kv-cache fp8"),
        ("w8a16-rtn", {"symmetric": False}, "--asymmetric"),
        ("w8a16-rtn", {"group_size": 64}, "one scale per output channel"),
        ("w8a16-rtn", {"refine_steps": 5}, "--refine"),
        ("w8a8-fp8", {"act_order": True}, "--act-order"),
        ("w8a8-fp8", {"kv_cache": "int8"}, "does not do --kv-cache int8"),
        ("w4a16-awq", {"group_size": "channel"}, "groups of columns"),
        ("w8a8-fp8", {"group_size": 64}, "group_size is 64"),
    ],
)
def test_what_it_does_not_do_is_refused_with_what_it_does(
    name: str, settings: dict[str, Any], named: str
) -> None:
    nowhere = ModelOptBackend(ModelOptEnvironment(Path("/nowhere/python")))
    with pytest.raises(Refused, match=named):
        nowhere.check(QuantizationScheme(name, *parse_scheme_name(name), **settings))


def test_eight_bit_weights_get_a_scale_for_each_channel(make_job: JobMaker, backend: ModelOptBackend) -> None:
    plan = backend.plan(make_job("w8a16-rtn", group_size="auto"))
    assert plan.scheme.group_size == "channel" and plan.windows is None
    assert plan.config["backend"]["presets"] == ["INT8_WEIGHT_ONLY_CFG"]
    cache_only = backend.plan(make_job("none", kv_cache="fp8"))
    assert cache_only.config["backend"]["presets"] == ["FP8_KV_CFG"] and cache_only.windows is not None


def test_unfinished_runs_of_its_own_start_over_and_those_of_others_are_kept(
    job: QuantizeJob, backend: ModelOptBackend, make_job: JobMaker, reporter: Reporter
) -> None:
    with pytest.raises(Refused, match="cannot go on with an unfinished run"):
        backend.plan(make_job("w8a8-fp8", kv_cache="fp8", resume=True))
    partial = partial_path(job.out)
    partial.mkdir()
    with pytest.raises(Refused, match="unfinished run of another backend"):
        backend.plan(job)
    (partial / "modelopt-export").mkdir()
    (partial / "stale").write_text("of a killed run")
    manifest = backend.quantize(job, backend.plan(job), reporter)
    assert "stale" not in manifest.files


def test_a_budget_is_refused(job: QuantizeJob, backend: ModelOptBackend) -> None:
    with pytest.raises(Refused, match=r"bits_budget 5 with --backend modelopt: .* one width"):
        backend.plan(replace(job, budget=Budget(bits=5.0)))


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"nvidia-modelopt": None, "requests": None}, "lacks nvidia-modelopt, requests. Install nvidia-"),
        ({"nvidia-modelopt": "0.48.0"}, "has nvidia-modelopt 0.48.0.*as 0.47.0 writes them"),
    ],
)
def test_an_environment_without_the_right_modelopt_is_refused(
    versions: dict[str, Any], named: str, job: QuantizeJob, backend: ModelOptBackend, double: Double
) -> None:
    double.behave(versions=VERSIONS | versions)
    with pytest.raises(Refused, match=named):
        backend.plan(job)


def test_what_is_no_python_is_refused(job: QuantizeJob) -> None:
    for program in ("/nowhere/python", "/bin/true"):
        with pytest.raises(Refused, match=f"--backend-python {program} does not run as a Python"):
            choose_backend("modelopt", program).plan(job)
    with pytest.raises(Refused, match="belongs to --backend modelopt"):
        choose_backend("bitsmith", "/usr/bin/python3")
    assert choose_backend("bitsmith", None) == NativeBackend()


@pytest.fixture
def own_environment(double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelOptEnvironment:
    """No Python is given; the one that makes environments is the double."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(double.python))
    return ModelOptEnvironment()


def test_an_environment_of_our_own_is_made_once_and_pinned(
    own_environment: ModelOptEnvironment, double: Double, job: QuantizeJob, reporter: Reporter
) -> None:
    backend = ModelOptBackend(own_environment)
    plan = backend.plan(job)
    assert double.calls == [], "a plan makes nothing"
    for _ in range(2):
        backend.quantize(job, plan, reporter)
    installs = [call for call in double.calls if call[:2] == ["-m", "pip"]]
    assert len(installs) == 1 and double.num_runs == 2
    assert installs[0][-len(PINS) :] == [f"{name}=={version}" for name, version in PINS.items()]
    (made,) = (path for path in (cache.cache_dir() / "environments").iterdir() if path.is_dir())
    assert own_environment.ready(reporter) == made / "bin" / "python"
    assert plan.versions["modelopt"] == PINS["nvidia-modelopt"]


def test_an_environment_that_cannot_be_installed_leaves_its_log_only(
    own_environment: ModelOptEnvironment, double: Double, job: QuantizeJob, reporter: Reporter
) -> None:
    double.behave(pip_fails=True)
    with pytest.raises(WorkFailed, match=r"No matching distribution(.|\n)*--backend-python") as failure:
        own_environment.ready(reporter)
    names = [p.name for p in (cache.cache_dir() / "environments").iterdir() if not p.name.startswith(".")]
    assert len(names) == 1 and names[0].endswith(".log") and names[0] in str(failure.value)
    assert not job.out.exists()
