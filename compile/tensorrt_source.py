"""What an export reads from: a dense model, or a ModelOpt, compressed-tensors, GPTQ or AWQ checkpoint.

Every source gives its linears as tensorrt_linear kinds and says in TensorRT-LLM's words how it is quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bitsmith.compile.tensorrt_compressed_source import CompressedTensorsSource
from bitsmith.compile.tensorrt_linear import DenseLinear, SourceLinear
from bitsmith.compile.tensorrt_modelopt_source import ModelOptSource
from bitsmith.compile.tensorrt_packed_source import PackedSource
from bitsmith.compile.tensorrt_source_scheme import SourceScheme
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.quantize.gptq_format import gptq_section
from bitsmith.quantize.modelopt_config import modelopt_section
from bitsmith.quantize.weight_source import WeightSource


class ExportSource(Protocol):
    """Read one tensor at a time; nothing is kept."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Hugging Face's config.json."""
        ...

    @property
    def scheme(self) -> SourceScheme: ...

    def __contains__(self, name: object) -> bool:
        """Whether there is a stored tensor of this name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor that is stored as it is: norms, embeddings, biases."""
        ...

    def is_quantized(self, module: str) -> bool: ...

    def linear(self, module: str) -> SourceLinear: ...

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """(key, value) scale of a layer's cache, real / stored, for the type that the scheme names."""
        ...


@dataclass(frozen=True, slots=True)
class DenseSource:
    """A model as it was trained."""

    reader: CheckpointReader
    scheme: SourceScheme = field(default_factory=SourceScheme)

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.reader.config

    def __contains__(self, name: object) -> bool:
        return name in self.reader

    def tensor(self, name: str) -> Tensor:
        return self.reader.tensor(name)

    def is_quantized(self, module: str) -> bool:
        return False

    def linear(self, module: str) -> SourceLinear:
        return DenseLinear(self.reader.tensor(f"{module}.weight"))

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        return None


def open_source(path: Path) -> ExportSource:
    """Raises Refused for a quantization that cannot be read."""
    reader = CheckpointReader(path)
    if modelopt_section(reader) is not None:
        return ModelOptSource(reader)
    quantization = reader.config.get("quantization_config")
    if gptq_section(reader) is not None or (quantization or {}).get("quant_method") == "awq":
        return PackedSource(WeightSource(reader))
    if quantization is None:
        return DenseSource(reader)
    if quantization.get("quant_method") == "compressed-tensors":
        return CompressedTensorsSource(reader)
    raise Refused(
        f"{path} is quantized with {quantization.get('quant_method')!r}; dense models, compressed-tensors, "
        "GPTQ, AWQ and ModelOpt checkpoints can be exported. Quantize it again from the dense model."
    )
