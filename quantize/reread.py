"""Proof that what was written is what was computed: read again by a process that computed nothing.

`python -m bitsmith.quantize.reread DIR` prints {name: SHA-256} as JSON: of the dequantized weight by module
name, and of other tensors as they are stored, of those names that come as a JSON list on standard input.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bitsmith.core.errors import WorkFailed
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.records import LayerReport
from bitsmith.quantize.weight import QuantizedWeight, tensor_sha256
from bitsmith.quantize.weight_source import open_weights


def reread_in_fresh_process(checkpoint: Path, expected: Mapping[str, str]) -> None:
    """expected: as `expected_digests` gives it. Raises WorkFailed naming the first difference."""
    command = [sys.executable, "-m", "bitsmith.quantize.reread", str(checkpoint)]
    names = json.dumps(list(expected))
    finished = subprocess.run(command, input=names, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise WorkFailed(f"The checkpoint cannot be read again: {finished.stderr.strip()[-500:]}")
    check_digests(json.loads(finished.stdout), expected)


def expected_digests(reports: Sequence[LayerReport]) -> dict[str, str]:
    """Of everything that was computed: quantized modules, and tensors that folding changed."""
    expected: dict[str, str] = {}
    for report in reports:
        expected |= {record.name: record.dequantized_sha256 for record in report.modules}
        expected |= report.changed
    return expected


def check_digests(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """found: as `stored_digests` gives it."""
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise WorkFailed(
                f"{name}: the stored weights are not those that were computed; nothing was published."
            )


def stored_digests(checkpoint: Path, names: Collection[str]) -> dict[str, str]:
    """Digest of every quantized module's dequantized weight, and of the other tensors among `names`."""
    source = open_weights(checkpoint)
    digests = {}
    for name in source.names:
        module_name = name.removesuffix(".weight")
        weight = source.linear(module_name) if name.endswith(".weight") else None
        if isinstance(weight, QuantizedWeight | Int8Weight | Fp8Weight):
            digests[module_name] = tensor_sha256(weight.dequantize())
        elif name in names:
            digests[name] = tensor_sha256(source.tensor(name))
    return digests


if __name__ == "__main__":
    print(json.dumps(stored_digests(Path(sys.argv[1]), frozenset(json.load(sys.stdin)))))
