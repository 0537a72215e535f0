"""Who quantizes: this program itself, or another tool. A backend plans a job and carries the plan out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.job import quantize_model
from bitsmith.quantize.modelopt_backend import ModelOptBackend
from bitsmith.quantize.modelopt_environment import ModelOptEnvironment
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan, plan_quantize
from bitsmith.quantize.scheme_checks import check_scheme

BackendName = Literal["bitsmith", "modelopt"]
BACKENDS: Sequence[BackendName] = ("bitsmith", "modelopt")


class Backend(Protocol):
    """can_resume: whether an unfinished run is gone on with, or started over."""

    @property
    def can_resume(self) -> bool: ...

    def check(self, scheme: QuantizationScheme) -> None:
        """Raises Refused, without looking at any model, for a scheme that this backend does not do."""
        ...

    def plan(self, job: QuantizeJob) -> QuantizePlan:
        """Everything resolved, nothing written. Raises Refused for whatever can be known to fail."""
        ...

    def quantize(self, job: QuantizeJob, plan: QuantizePlan, reporter: Reporter) -> Manifest:
        """The finished artifact at `job.out`. Raises WorkFailed."""
        ...


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """This program's own methods, layer by layer."""

    can_resume: bool = True

    def check(self, scheme: QuantizationScheme) -> None:
        check_scheme(scheme)

    def plan(self, job: QuantizeJob) -> QuantizePlan:
        return plan_quantize(job)

    def quantize(self, job: QuantizeJob, plan: QuantizePlan, reporter: Reporter) -> Manifest:
        return quantize_model(job, plan, reporter)


def choose_backend(name: BackendName, python: str | None) -> Backend:
    """python: the interpreter of another tool's environment, if the user has one."""
    if name == "modelopt":
        return ModelOptBackend(ModelOptEnvironment(None if python is None else Path(python).expanduser()))
    if python is not None:
        raise Refused(
            f"--backend-python {python} belongs to --backend modelopt; {name} runs in this program's own "
            "Python. Leave it out, or name the backend too."
        )
    return NativeBackend()
