"""Files that appear whole: written beside their place, then renamed to it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path to write to; what is there becomes `path` when the block ends without an exception."""
    partial = path.with_name(f".partial-{path.name}")  # its suffix is kept: writers choose by it
    yield partial
    partial.replace(path)
