"""Killed and interrupted runs: nothing looks finished, and going on ends in the same bytes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import MANIFEST_NAME
from bitsmith.core.progress import Reporter
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.resume_state import ResumeState

JobMaker = Callable[..., QuantizeJob]
Saboteur = Callable[[pytest.MonkeyPatch, int, BaseException], list[int]]

# Runs the job of the test in a process that stops for good before a given layer.
_VICTIM = """
import sys, time
from pathlib import Path
from bitsmith.core.model_ref import ModelSource
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize import layerwise
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model

model, text, out = map(Path, sys.argv[1:])
genuine = layerwise.LayerwiseQuantizer._do_layer
def do_layer(self, index, *args):
    if index == 2:
        print("reached", flush=True)
        time.sleep(600)
    return genuine(self, index, *args)
layerwise.LayerwiseQuantizer._do_layer = do_layer
scheme = QuantizationScheme("w4a16-gptq", 4, "gptq", group_size=32, kv_cache="fp8")
job = QuantizeJob(ModelSource("tiny", model), scheme, CalibrationSettings(str(text), 6, 32), out)
quantize_model(job, plan_quantize(job), Reporter(quiet=True))
"""


def run(job: QuantizeJob) -> str:
    return quantize_model(job, plan_quantize(job), Reporter(quiet=True)).content_digest


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("w4a16-gptq", {"kv_cache": "fp8"}),
        ("w4a16-rtn", {}),
        ("w4a16-gptq", {"refine_steps": 3}),
        ("w4a16-awq", {"kv_cache": "fp8"}),
        ("w4a16-awq-gptq", {"refine_steps": 3}),
    ],
)
def test_interrupted_before_any_layer_ends_in_the_same_bytes(
    layer: int,
    name: str,
    settings: dict[str, object],
    make_job: JobMaker,
    fail_at: Saboteur,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run(make_job(name, out="whole", **settings))
    with monkeypatch.context() as patch:
        fail_at(patch, layer, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(make_job(name, **settings))
    job = make_job(name, resume=True, **settings)
    assert not job.out.exists() and not (job.out.with_name("out.partial") / MANIFEST_NAME).exists()
    done = fail_at(monkeypatch, 99, KeyboardInterrupt())
    assert run(job) == expected
    assert done == list(range(layer, 3))


@pytest.mark.usefixtures("fresh_process")
def test_killed_process_is_resumed_to_the_same_bytes(make_job: JobMaker, text_file: Path) -> None:
    job = make_job(kv_cache="fp8")
    command = [sys.executable, "-c", _VICTIM, str(job.model.path), str(text_file), str(job.out)]
    # One thread count for both processes: it decides how sums are split.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as victim:
        assert victim.stdout is not None and victim.stdout.readline() == "reached\n"
        victim.send_signal(signal.SIGKILL)
    assert not job.out.exists()
    with pytest.raises(Refused, match="--resume"):
        plan_quantize(job)
    assert run(make_job(kv_cache="fp8", resume=True)) == run(make_job(kv_cache="fp8", out="whole"))


def test_other_data_or_settings_are_refused_and_named(
    make_job: JobMaker, fail_at: Saboteur, monkeypatch: pytest.MonkeyPatch, text_file: Path, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(make_job())
    changed = tmp_path / "changed.txt"
    changed.write_text(text_file.read_text().replace("a", "b"))
    with pytest.raises(Refused, match=r"config\.calibration\.token_digest was '.*' and is now"):
        run(make_job(resume=True, calibration={"source": str(changed)}))
    with pytest.raises(Refused, match=r"config\.scheme\.act_order was True and is now False"):
        run(make_job(resume=True, act_order=False))
    run(make_job(resume=True))


def test_a_damaged_state_is_refused(
    make_job: JobMaker, fail_at: Saboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(make_job())
    job = make_job(resume=True)
    path = next(job.out.with_name("out.partial").rglob("hidden-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"Remove .*out\.partial to start over"):
        run(job)


def test_a_full_disk_keeps_finished_layers_and_says_how_to_go_on(
    make_job: JobMaker, fail_at: Saboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = ResumeState.save

    def save(self: ResumeState, index: int, *args: object) -> None:
        if index == 1:
            raise OSError(28, "No space left on device")
        genuine(self, index, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ResumeState, "save", save)
        with pytest.raises(WorkFailed, match=r"No space left on device.*--resume"):
            run(make_job())
    done = fail_at(monkeypatch, 99, KeyboardInterrupt())
    run(make_job(resume=True))
    assert done == [1, 2]


def test_a_failed_run_leaves_the_older_artifact(
    make_job: JobMaker, fail_at: Saboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    digest = run(job)
    before = time.time_ns(), (job.out / MANIFEST_NAME).read_bytes()
    fail_at(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(make_job(act_order=False))
    assert (job.out / MANIFEST_NAME).read_bytes() == before[1] and digest.encode() in before[1]
