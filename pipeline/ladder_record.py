"""The tries of a ladder on disk, so that an interrupted one goes on and a finished one is not redone."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from bitsmith.core.whole_file import whole_file
from bitsmith.evaluate.ladder import LadderTry

LADDER_NAME = "ladder.json"
WEIGHTS = ("quantized", "engine")


def read_tries(root: Path, key: str) -> list[LadderTry]:
    """In the order in which they were made. Those of another key, or unreadable ones, count as none."""
    try:
        body = json.loads((root / LADDER_NAME).read_bytes())
        return [LadderTry.from_json(entry) for entry in body["tries"]] if body["key"] == key else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_tries(root: Path, key: str, tries: Sequence[LadderTry]) -> None:
    body = {"key": key, "tries": [made.to_json() for made in tries]}
    with whole_file(root / LADDER_NAME) as path:
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def drop_weights(directory: Path) -> None:
    """Of a try that is on record and not wanted: its report stays."""
    for name in WEIGHTS:
        shutil.rmtree(directory / name, ignore_errors=True)


def move_weights(directory: Path, root: Path) -> None:
    """A try's checkpoint and engine become the run's own. One that is not there was moved already."""
    for name in WEIGHTS:
        if (directory / name).is_dir():
            shutil.rmtree(root / name, ignore_errors=True)
            (directory / name).rename(root / name)
