"""Quantizing with nvidia-modelopt, in a Python of its own, on the calibration tokens of our own methods."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bitsmith.core.artifact import ArtifactSpec, partial_path, read_finished, write_artifact
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.logged_process import run_logged
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.checkpoint_output import copy_side_files
from bitsmith.quantize.job import check_finite
from bitsmith.quantize.manifest_details import calibration_fallbacks, manifest_details
from bitsmith.quantize.modelopt_adoption import adopt_export
from bitsmith.quantize.modelopt_environment import ModelOptEnvironment
from bitsmith.quantize.modelopt_plan import plan_modelopt
from bitsmith.quantize.modelopt_presets import check_preset, preset_names
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan
from bitsmith.quantize.scheme_checks import check_scheme

_SCRIPT = Path(__file__).with_name("modelopt_script.py")
_SCRATCH = "modelopt-export"  # inside the partial directory
_TOKENS_PER_BATCH = 2048
# The model is local; nothing is to be looked up elsewhere.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class ModelOptBackend:
    """A killed run is started over: ModelOpt has no state to go on from."""

    environment: ModelOptEnvironment
    can_resume: bool = False

    def check(self, scheme: QuantizationScheme) -> None:
        check_preset(scheme)
        check_scheme(scheme)

    def plan(self, job: QuantizeJob) -> QuantizePlan:
        self.check(job.scheme)
        _check_out(job)
        return plan_modelopt(job, self.environment.versions())

    def quantize(self, job: QuantizeJob, plan: QuantizePlan, reporter: Reporter) -> Manifest:
        """Raises WorkFailed with the end of ModelOpt's log; nothing is then at `job.out`."""
        reader = CheckpointReader(job.model.path)
        check_finite(reader)
        python = self.environment.ready(reporter)
        spec = ArtifactSpec.of(job.out, "quantized-checkpoint", plan)
        log = job.out.with_name(f"{job.out.name}.modelopt.log")
        with write_artifact(spec) as pending:
            scratch = pending.partial / _SCRATCH
            scratch.mkdir()
            result = _run(python, job, plan, scratch, log, reporter)
            reports = adopt_export(scratch / "export", reader, plan, pending.partial, result["seconds"])
            shutil.rmtree(scratch)
            not_copied = copy_side_files(job.model.path, pending.partial)
            pending.details = manifest_details(job, plan, reports) | {
                "files_not_copied": not_copied,
                "backend_versions": result["versions"],
            }
            pending.fallbacks = calibration_fallbacks(plan)
        log.unlink()
        return read_finished(job.out, "quantized-checkpoint")


def _check_out(job: QuantizeJob) -> None:
    if job.resume:
        raise Refused(
            "--resume: ModelOpt cannot go on with an unfinished run. Leave it out; the run starts over."
        )
    partial = partial_path(job.out)
    if partial.exists() and not (partial / _SCRATCH).is_dir():
        raise Refused(
            f"An unfinished run of another backend is in {partial}. Finish it by --resume, or remove it."
        )


def _run(
    python: Path, job: QuantizeJob, plan: QuantizePlan, scratch: Path, log: Path, reporter: Reporter
) -> dict[str, Any]:
    """Has the script write `scratch/export`; returns what it says of it."""
    tokens = None
    if plan.windows is not None:
        tokens = scratch / "tokens.safetensors"
        save_file({"token_ids": plan.windows.token_ids.to(torch.int64).contiguous()}, tokens)
    request = _request(job, plan, scratch, tokens)
    request_path = scratch / "request.json"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    log.unlink(missing_ok=True)
    # Isolated: neither this program's modules nor the user's packages are on its path.
    command = (str(python), "-I", str(_SCRIPT), str(request_path.resolve()))
    reporter.say(f"nvidia-modelopt: {', '.join(request['presets'])}, by {python}")
    try:
        run_logged(command, log, reporter, variables=_OFFLINE)
        result: dict[str, Any] = json.loads(Path(request["result"]).read_bytes())
    except WorkFailed as error:
        raise WorkFailed(f"ModelOpt failed: {error}\nThe whole log is {log}.") from error
    except (OSError, ValueError) as error:
        raise WorkFailed(f"ModelOpt said nothing of its result ({error}); its log is {log}.") from error
    _check_tokens(result, plan)
    return result


def _request(job: QuantizeJob, plan: QuantizePlan, scratch: Path, tokens: Path | None) -> dict[str, Any]:
    group_size = plan.scheme.group_size
    row_length = 1 if plan.windows is None else plan.windows.token_ids.shape[1]
    return {
        "model": str(job.model.path.resolve()),
        "tokens": None if tokens is None else str(tokens.resolve()),
        "presets": preset_names(plan.scheme),
        "group_size": group_size if isinstance(group_size, int) else None,
        "rows_per_batch": max(1, _TOKENS_PER_BATCH // row_length),
        "out": str((scratch / "export").resolve()),
        "result": str((scratch / "result.json").resolve()),
    }


def _check_tokens(result: dict[str, Any], plan: QuantizePlan) -> None:
    asked = None if plan.config["calibration"] is None else plan.config["calibration"]["token_digest"]
    if result.get("token_digest") != asked:
        raise WorkFailed(
            f"ModelOpt calibrated on tokens with digest {result.get('token_digest')}, not on {asked}."
        )
