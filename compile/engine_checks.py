"""What must hold before anything of an engine is loaded: versions, processor, layouts, hashes, trust."""

from pathlib import Path
from typing import Any

import torch

from bitsmith.compile.kv_cache import BLOCK_LAYOUT
from bitsmith.compile.trusted_engines import require_trusted
from bitsmith.core.artifact import read_finished
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.core.verified_hashes import verify_files_cached
from bitsmith.ops.isa import missing_isa
from bitsmith.ops.library import OPERATORS_INTERFACE
from bitsmith.ops.packing import LAYOUT_ROWS16


def check_engine(path: Path, *, trust: bool) -> Manifest:
    """The manifest of an engine that may be loaded here. Raises Refused with both values and the remedy."""
    manifest = read_finished(path, "engine")
    config = manifest.config
    rebuild = _rebuild_line(path, manifest)
    _same("torch", config.get("torch"), torch.__version__, path, rebuild)
    _same("KV block layout", config.get("block_layout"), BLOCK_LAYOUT, path, rebuild)
    _same("operator interface", config.get("operators_interface"), OPERATORS_INTERFACE, path, rebuild)
    _same("weight layout", config.get("weight_layout"), LAYOUT_ROWS16, path, rebuild)
    if missing := missing_isa(config.get("isa", ())):
        raise Refused(
            f"{path} uses {', '.join(missing)}, which this processor does not have. Rebuild: {rebuild}"
        )
    verify_files_cached(path, manifest)
    if not trust:
        require_trusted(path, manifest.content_digest)
    return manifest


def _same(what: str, built: Any, here: str | int, path: Path, rebuild: str) -> None:
    if built != here:
        raise Refused(f"{path} was built for {what} {built}; here is {here}. Rebuild: {rebuild}")


def _rebuild_line(path: Path, manifest: Manifest) -> str:
    checkpoint = manifest.details.get("checkpoint", "CHECKPOINT")
    options = manifest.details.get("asked", {})
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sorted(options.items()))
    return f"bitsmith compile {checkpoint} --target cpu {flags} --out {path}"
