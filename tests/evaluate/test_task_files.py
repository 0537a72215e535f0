"""Which task files are accepted, and that nothing in a refused one has run."""

from pathlib import Path

import pytest

from bitsmith.core.errors import Refused
from bitsmith.evaluate.harness import load_tasks, sandboxed_templates
from bitsmith.evaluate.task_files import TaskSettings, select_tasks
from bitsmith.evaluate.task_scores import outline

PLAIN = """
task: plain
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text('{"question": "q", "choices": [" a", " b"], "label": 1}\n')
    (tmp_path / "plain.yaml").write_text(PLAIN.format(data=tmp_path / "data.jsonl"))
    return tmp_path


def _add(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_and_a_name_find_the_same_task(folder: Path) -> None:
    by_path = select_tasks(TaskSettings((str(folder / "plain.yaml"),)))
    by_name = select_tasks(TaskSettings(("plain",), (folder,)))
    assert [file.name for file in by_path.files] == [file.name for file in by_name.files] == ["plain"]
    assert by_path.files[0].sha256 == by_name.files[0].sha256
    names = [kind.name for kind in outline(by_path.files[0]).metric_kinds()]
    assert names == [
        "plain_acc",
        "baseline_plain_acc",
        "plain_acc_loss",
        "plain_acc_flips",
        "plain_logprob_drop",
    ]


@pytest.mark.parametrize(
    "line",
    ["doc_to_text: !function helper.text", "filter_list: [{name: x, filter: [{function: !function h.f}]}]"],
)
def test_code_runs_only_when_allowed(folder: Path, line: str) -> None:
    _add(
        folder,
        "helper.py",
        f"open({str(folder / 'ran')!r}, 'w').close()\ndef text(doc): return doc['question']\n",
    )
    base = (folder / "plain.yaml").read_text().replace("task: plain", "task: coded")
    path = _add(folder, "coded.yaml", f"{base}{line}\n")
    with pytest.raises(Refused, match=r"coded.yaml, line 11: the task runs Python code .*--allow-task-code"):
        select_tasks(TaskSettings((str(path),)))
    with pytest.raises(Refused, match="runs Python code"):
        select_tasks(TaskSettings(("coded",), (folder,)))
    assert not (folder / "ran").exists()


def test_allowed_code_runs(folder: Path) -> None:
    _add(folder, "helper.py", "def text(doc): return doc['question'] * 2\n")
    base = (folder / "plain.yaml").read_text().replace("task: plain", "task: coded")
    path = _add(folder, "coded.yaml", base + "doc_to_text: !function helper.text\n")
    selection = select_tasks(TaskSettings((str(path),), allow_task_code=True))
    task = load_tasks(selection)["tasks"]["coded"]
    assert task.doc_to_text({"question": "q"}) == "qq"


def test_code_in_an_included_file_is_found(folder: Path) -> None:
    _add(folder, "hidden_yaml", "doc_to_text: !function helper.text\n")
    path = _add(folder, "outer.yaml", "include: hidden_yaml\ntask: outer\n")
    with pytest.raises(Refused, match="hidden_yaml, line 1"):
        select_tasks(TaskSettings((str(path),)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("metric_list: !!python/object/apply:os.system ['true']", "never allowed"),
        ("class: !function helper.Task", "Python class"),
        ("class: /tmp/helper.Task", "Python class"),
    ],
)
def test_python_objects_are_refused(folder: Path, line: str, message: str) -> None:
    base = (folder / "plain.yaml").read_text().partition("metric_list")[0]
    path = _add(folder, "bad.yaml", f"{base}{line}\n")
    with pytest.raises(Refused, match=message):
        select_tasks(TaskSettings((str(path),)))


@pytest.mark.parametrize(
    ("line", "message"),
    [("unsafe_code: true", "answers as code"), ("dataset_path: pandas", "may hold pickles")],
)
def test_unsafe_tasks_are_refused_even_when_code_is_allowed(folder: Path, line: str, message: str) -> None:
    base = (folder / "plain.yaml").read_text().replace("dataset_path: json\n", "")
    path = _add(folder, "bad.yaml", f"{base}{line}\n")
    with pytest.raises(Refused, match=message):
        select_tasks(TaskSettings((str(path),), allow_task_code=True))


def test_templates_cannot_reach_python(folder: Path) -> None:
    base = (folder / "plain.yaml").read_text().partition("doc_to_text")
    rest = base[2].partition("\n")[2]
    path = _add(folder, "sly.yaml", f"{base[0]}doc_to_text: \"{{{{ ''.__class__.__mro__ }}}}\"\n{rest}")
    selection = select_tasks(TaskSettings((str(path),)))
    with sandboxed_templates(), pytest.raises(Refused, match=r"cannot be loaded.*unsafe"):
        task = load_tasks(selection)["tasks"]["plain"]
        task.doc_to_text({"question": "q"})


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("{metric: rouge, aggregation: mean}", "script fetched from the hub"),
        ("{metric: acc, hf_evaluate: true}", "script fetched from the hub"),
        ("{metric: accuracy, aggregation: mean}", "unknown metric 'accuracy'.*acc_norm"),
    ],
)
def test_metrics_are_checked_before_any_work(folder: Path, metric: str, message: str) -> None:
    base = (folder / "plain.yaml").read_text().partition("metric_list")[0]
    path = _add(folder, "bad.yaml", f"{base}metric_list: [{metric}]\n")
    (file,) = select_tasks(TaskSettings((str(path),))).files
    with pytest.raises(Refused, match=message):
        outline(file)


def test_missing_files_folders_and_data_are_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="does not exist"):
        select_tasks(TaskSettings((str(folder / "none.yaml"),)))
    with pytest.raises(Refused, match="does not exist"):
        select_tasks(TaskSettings(("plain",), (folder / "none",)))
    (folder / "data.jsonl").unlink()
    with pytest.raises(Refused, match="cannot be loaded"):
        load_tasks(select_tasks(TaskSettings(("plain",), (folder,))))


def test_a_limit_below_one_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="at least 1"):
        select_tasks(TaskSettings(("plain",), (folder,), limit=0))
