"""Proof that what was written is what was computed: read again by a process that computed nothing.

`python -m bitsmith.quantize.reread DIR` prints {module name: SHA-256 of its dequantized weight} as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitsmith.core.errors import WorkFailed
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.records import ModuleRecord
from bitsmith.quantize.weight import QuantizedWeight, tensor_sha256
from bitsmith.quantize.weight_source import open_weights


def reread_in_fresh_process(checkpoint: Path, records: Sequence[ModuleRecord]) -> None:
    """Raises WorkFailed naming the first module whose stored weights differ from those computed."""
    command = [sys.executable, "-m", "bitsmith.quantize.reread", str(checkpoint)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise WorkFailed(f"The checkpoint cannot be read again: {finished.stderr.strip()[-500:]}")
    check_digests(json.loads(finished.stdout), records)


def check_digests(found: Mapping[str, str], records: Sequence[ModuleRecord]) -> None:
    """found: as `dequantized_digests` gives it."""
    expected = {record.name: record.dequantized_sha256 for record in records}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise WorkFailed(
                f"{name}: the stored weights are not those that were computed; nothing was published."
            )


def dequantized_digests(checkpoint: Path) -> dict[str, str]:
    """Digest of every quantized module's dequantized weight."""
    source = open_weights(checkpoint)
    digests = {}
    for name in source.names:
        module_name = name.removesuffix(".weight")
        weight = source.linear(module_name) if name.endswith(".weight") else None
        if isinstance(weight, QuantizedWeight | Fp8Weight):
            digests[module_name] = tensor_sha256(weight.dequantize())
    return digests


if __name__ == "__main__":
    print(json.dumps(dequantized_digests(Path(sys.argv[1]))))
