"""Run selected lm-evaluation-harness tasks on one model and keep what each item gave.

Knows nothing of pairing, gates or reports. Templates of task files are rendered in Jinja's sandbox: lm-eval
itself renders them in an environment that lets a template reach any Python object.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval.utils
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.evaluate.lm_eval_model import AnswerNotes, HarnessModel
from bitsmith.evaluate.task_files import TaskSelection

# lm-eval and `datasets` raise whatever they meet; these are what a file or a missing network causes.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    TemplateError,
)


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """items: task -> what lm-eval logged per document and filter. aggregates: task -> its own figures."""

    items: Mapping[str, Sequence[Mapping[str, Any]]]
    aggregates: Mapping[str, Mapping[str, Any]]
    num_shots: Mapping[str, int]
    notes: AnswerNotes


def load_tasks(selection: TaskSelection) -> dict[str, Any]:
    """lm-eval's loaded tasks, their documents included. Raises Refused when data or functions are missing."""
    try:
        loaded: dict[str, Any] = selection.manager.load(list(selection.specs))
    except _LOADING_ERRORS as error:
        raise Refused(
            f"The tasks {', '.join(selection.settings.tasks)} cannot be loaded: {error}. A task from "
            "lm-eval's own list fetches its data from the hub; a local YAML file can name local data."
        ) from error
    for task in loaded["tasks"].values():
        _settle(task)
    return loaded


def _settle(task: Task) -> None:
    """What `simple_evaluate` does to a task before it runs: no few-shot count means none, and fixed seeds."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def run_tasks(model: HarnessModel, selection: TaskSelection) -> HarnessRun:
    """Tasks are loaded anew for each run: lm-eval's keep their requests and the state of their seeds."""
    with sandboxed_templates():
        loaded = load_tasks(selection)
        use_template = selection.settings.use_chat_template
        try:
            results: Any = evaluate(
                lm=model,
                task_dict=loaded,
                limit=selection.settings.limit,
                bootstrap_iters=0,  # its errors ignore the pairing; ours are computed from the items
                log_samples=True,
                apply_chat_template=use_template,
                fewshot_as_multiturn=use_template,
            )
        except TemplateError as error:
            raise WorkFailed(f"A template of the tasks could not be rendered: {error}.") from error
    return HarnessRun(results["samples"], results["results"], results["n-shot"], model.notes)


@contextlib.contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Have lm-eval render templates in a sandbox with the settings and filters of its own environment."""
    own = lm_eval.utils.env
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters.update(own.filters)
    lm_eval.utils.env = sandbox
    try:
        yield
    finally:
        lm_eval.utils.env = own
