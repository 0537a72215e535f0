"""Triton's `config.pbtxt`: values as protobuf text. Knows no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorPort:
    """An input or output. dims: -1 for any size. is_scalar: [1] on the wire, no axis for the backend."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (-1,)
    is_optional: bool = False
    is_scalar: bool = False

    def to_text(self) -> str:
        lines = [f'    name: "{self.name}"', f"    data_type: {self.data_type}"]
        lines.append(f"    dims: [ {', '.join(map(str, self.dims))} ]")
        if self.is_scalar:
            lines.append("    reshape: { shape: [ ] }")
        if self.is_optional:
            lines.append("    optional: true")
        return "  {\n" + "\n".join(lines) + "\n  }"


def quoted(text: str) -> str:
    """A protobuf string: backslashes and quotes escaped.

    >>> quoted('a "b"')
    '"a \\\\"b\\\\""'
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def ports(field: str, entries: Sequence[TensorPort]) -> str:
    """`input [ ... ]` or `output [ ... ]`."""
    return f"{field} [\n" + ",\n".join(entry.to_text() for entry in entries) + "\n]\n"


def parameters(values: Mapping[str, str]) -> str:
    return "".join(
        f"parameters: {{\n  key: {quoted(key)}\n  value: {{ string_value: {quoted(value)} }}\n}}\n"
        for key, value in values.items()
    )


def ensemble_step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """One step; inputs and outputs: the model's name -> the ensemble's name."""
    lines = [f"    model_name: {quoted(model)}", "    model_version: -1"]
    for kind, mapping in (("input_map", inputs), ("output_map", outputs)):
        lines += [f"    {kind} {{ key: {quoted(k)} value: {quoted(v)} }}" for k, v in mapping.items()]
    return "    {\n" + "\n".join(f"  {line}" for line in lines) + "\n    }"
