"""Files of a model directory: found by name, and only inside it."""

from pathlib import Path, PurePosixPath

from bitsmith.core.errors import Refused


def resolve_inside(root: Path, name: str) -> Path:
    """`root / name`, refused when the name or a symbolic link leads out of `root`.

    One layout links out by design: the hub cache keeps `snapshots/<revision>/<file>` as links into the
    `blobs` folder of the same repository, so for a snapshot that folder counts as inside.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise Refused(f"{root} names a file {name!r}, which is not a plain path inside the directory.")
    base = root.resolve()
    target = (base / pure).resolve()
    allowed = [base]
    if base.parent.name == "snapshots":
        allowed.append(base.parent.parent / "blobs")
    if not any(target.is_relative_to(directory) for directory in allowed):
        raise Refused(
            f"{root / pure} is a symbolic link out of its directory, to {target}. Copy the file instead."
        )
    return target


def weight_bytes(directory: Path) -> int:
    """Of the safetensors files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
