"""Find lm-evaluation-harness tasks by name or file, and refuse what must not or cannot run, before any work.

A task file can name Python functions, and its templates are a small programming language. Files of lm-eval
itself are trusted as the package is; any other file may run code only when the user allowed it, and its
templates run in a sandbox always (`harness`). Knows nothing of models.
"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from bitsmith.core.digest import sha256_file
from bitsmith.core.errors import Refused

_OWN_TASKS = Path(lm_eval.tasks.__file__).resolve().parent
_FUNCTION_TAG = "!function"
_PYTHON_TAG = "tag:yaml.org,2002:python/"
_PICKLE_DATASETS = ("pandas", "webdataset")  # these loaders of `datasets` can unpickle their files


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Which tasks to run and how.

    tasks: names (of tasks, groups, tags) or paths of YAML files. include_paths: folders whose task files are
    looked through before lm-eval's own. limit: the first so many items of each task, None for all.
    allow_task_code: let task files from outside lm-eval run the Python functions that they name.
    """

    tasks: tuple[str, ...]
    include_paths: tuple[Path, ...] = ()
    limit: int | None = None
    allow_task_code: bool = False
    use_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class TaskFile:
    """One task as its file describes it, functions unresolved. sha256: of the file itself."""

    name: str
    path: Path
    config: Mapping[str, Any]
    sha256: str


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """What is going to run. `specs` is what the manager is asked to load."""

    settings: TaskSettings
    manager: TaskManager
    specs: tuple[str, ...]
    files: tuple[TaskFile, ...]


def select_tasks(settings: TaskSettings) -> TaskSelection:
    """Raises Refused for unknown names, broken files, and code that was not allowed."""
    if settings.limit is not None and settings.limit < 1:
        raise Refused(f"The limit of items per task must be at least 1, found {settings.limit}.")
    for folder in settings.include_paths:
        if not folder.is_dir():
            raise Refused(f"The task folder {folder} does not exist.")
    manager = _manager(settings)
    specs = tuple(str(Path(name).resolve()) if _is_file(name) else name for name in settings.tasks)
    files: dict[str, TaskFile] = {}
    for spec in specs:
        for entry in _leaves(_entry(manager, spec), manager.task_index):
            files.setdefault(entry.name, _task_file(entry))
    if not settings.allow_task_code:
        for file in files.values():
            _refuse_code(file.path)
    for file in files.values():
        _refuse_unsafe(file)
    return TaskSelection(settings, manager, specs, tuple(files.values()))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or os.sep in name


def _manager(settings: TaskSettings) -> TaskManager:
    """lm-eval's own list of some ten thousand tasks takes long to read: only when a name needs it."""
    folders = [str(folder) for folder in settings.include_paths]
    manager = TaskManager(include_path=folders or None, include_defaults=False)
    names = [name for name in settings.tasks if not _is_file(name)]
    if all(name in manager.task_index for name in names):
        return manager
    return TaskManager(include_path=folders or None, include_defaults=True)


def _entry(manager: TaskManager, spec: str) -> Entry:
    if not _is_file(spec):
        entry = manager.task_index.get(spec)
        if entry is not None:
            return entry
        near = difflib.get_close_matches(spec, manager.all_tasks, n=3)
        hint = f" Close names: {', '.join(near)}." if near else ""
        raise Refused(f"Unknown task {spec!r}.{hint} Name a task, or the path of its YAML file.")
    path = Path(spec)
    if not path.is_file():
        raise Refused(f"The task file {path} does not exist.")
    _check_yaml(path)
    try:
        entry = TaskIndex.entry_from_path(path)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise Refused(f"The task file {path} cannot be read: {error}") from error
    if entry is None:
        raise Refused(f"The task file {path} names no task.")
    return entry


def _leaves(entry: Entry, index: Mapping[str, Entry]) -> Iterator[Entry]:
    """The tasks that a task, group or tag stands for."""
    match entry.kind:
        case Kind.TASK:
            yield entry
        case Kind.TAG:
            for name in sorted(entry.tags):
                yield from _leaves(index[name], index)
        case Kind.GROUP:
            for member in _members(entry):
                if member not in index:
                    raise Refused(f"Group {entry.name!r} names the task {member!r}, which is not known.")
                yield from _leaves(index[member], index)
        case _:
            raise Refused(
                f"Task {entry.name!r} is a Python class: what it measures is not known before it runs, "
                "so no gate can be checked. It is not supported."
            )


def _members(entry: Entry) -> Iterator[str]:
    for member in (entry.cfg or _load(entry.yaml_path)).get("task", []):
        name = member if isinstance(member, str) else member.get("task", member.get("group"))
        if not isinstance(name, str):
            raise Refused(f"Group {entry.name!r} has a member without a name: {member!r}.")
        yield name


def _load(path: Path | None) -> dict[str, Any]:
    assert path is not None, "an entry that is not a tag has a file"
    config = TaskIndex.entry_from_path(path)
    assert config is not None, path
    return dict(config.cfg or lm_eval.tasks._yaml_loader.load_yaml(path, resolve_func=False))


def _task_file(entry: Entry) -> TaskFile:
    path = entry.yaml_path
    assert path is not None, entry.name
    path = path.resolve()
    return TaskFile(entry.name, path, _load(path), sha256_file(path))


def _is_own(path: Path) -> bool:
    return path.resolve().is_relative_to(_OWN_TASKS)


def _refuse_code(path: Path, seen: frozenset[Path] = frozenset()) -> None:
    """Refuse a file from outside lm-eval that names functions, here or in a file that it includes."""
    path = path.resolve()
    if _is_own(path) or path in seen:
        return
    root = _check_yaml(path)
    for node in _nodes(root):
        if node.tag == _FUNCTION_TAG:
            line = node.start_mark.line + 1
            raise Refused(
                f"{path}, line {line}: the task runs Python code ({node.value}). If you trust this file and "
                "the code beside it, pass --allow-task-code."
            )
    for key, value in root.value:
        if key.value == "include":
            names = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for name in names:
                _refuse_code(path.parent / str(name.value), seen | {path})


def _check_yaml(path: Path) -> yaml.MappingNode:
    """The file's node tree; composing constructs nothing, so no tag in it can act."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"The task file {path} cannot be read: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise Refused(f"The task file {path} is not a mapping.")
    for node in _nodes(root):
        if node.tag.startswith(_PYTHON_TAG):
            raise Refused(f"{path}, line {node.start_mark.line + 1}: the tag {node.tag!r} is never allowed.")
    return root


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    children: Sequence[yaml.Node] = ()
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    for child in children:
        yield from _nodes(child)


def _refuse_unsafe(file: TaskFile) -> None:
    if file.config.get("unsafe_code"):
        raise Refused(f"Task {file.name!r} executes the model's answers as code. That is not supported.")
    if file.config.get("dataset_path") in _PICKLE_DATASETS:
        raise Refused(f"Task {file.name!r} reads {file.config['dataset_path']} data, which may hold pickles.")
