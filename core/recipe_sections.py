"""A recipe: the whole chain in one YAML file. Here are its fields, their defaults and their kinds.

What a combination means (a group size that does not divide, the metrics of a gate) each stage checks for
itself. Reading a recipe from a file is `recipe`'s part.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
WindowLength = Annotated[int, Field(ge=2)]
Port = Annotated[int, Field(ge=0, le=65535)]
PositiveNumber = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]

# Strict: YAML tells 16 from "16" and 1 from true already, so nothing is converted here.
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSection:
    """source: `builtin`, FILE.jsonl, FILE.txt or hf:DATASET."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    source: Text = "builtin"
    num_samples: Positive = 128
    seq_len: WindowLength = 512
    seed: NotNegative = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSection:
    """group_size: columns per scale, `auto`, or `channel` for one scale per output channel.

    target, tensor_parallel: where the checkpoint will run, as `quantize --for` takes it.
    backend, backend_python: who quantizes, and the Python that has it, as `quantize --backend` takes them.
    act_order: left out, on where the scheme is GPTQ. refine_steps: of `refine`, for each layer.
    activation_scale: of w8a8-int8; left out, `token`.
    format: of the checkpoint; left out, the backend's own.
    bits_budget, size_budget: of which at most one is given, as `quantize` takes them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    scheme: Text = "w4a16-gptq"
    group_size: Positive | Literal["auto", "channel"] = "auto"
    symmetric: bool = True
    act_order: bool | None = None
    kv_cache: Literal["none", "fp8", "int8"] = "none"
    format: Literal["compressed-tensors", "gptq", "gptq_v2", "awq"] | None = None
    target: Literal["cpu", "tensorrt-llm", "tensorrt-llm-pytorch", "vllm"] | None = None
    tensor_parallel: Positive | None = None
    activation_scale: Literal["token", "tensor"] | None = None
    bits_budget: PositiveNumber | None = None
    size_budget: Text | None = None
    refine: bool = False
    refine_steps: Positive | None = None
    backend: Literal["bitsmith", "modelopt"] = "bitsmith"
    backend_python: Text | None = None
    calibration: CalibrationSection = field(default_factory=CalibrationSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSection:
    """None: chosen by the compile stage, from the model or the machine."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    target: Literal["cpu"] = "cpu"
    kv_cache: Literal["auto", "fp8", "int8", "bf16", "fp32"] = "auto"
    activations: Literal["auto", "int8", "bf16", "fp32"] = "auto"
    max_batch_size: Positive = 32
    max_num_tokens: Positive = 1024
    max_model_len: Positive | None = None
    kv_scale: Literal["calibrated", "ones"] = "calibrated"
    num_threads: Positive | None = None
    lm_head: Literal["checkpoint", "int8"] = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSection:
    """gate: rules, the path of a file that holds them, or none. task_limit: first items of each task."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    suite: Literal["quick"] = "quick"
    source: Text = "builtin"
    num_windows: Annotated[int, Field(ge=2)] = 40
    seq_len: WindowLength = 512
    num_cloze_items: Annotated[int, Field(ge=2)] = 100
    seed: NotNegative = 0
    tasks: tuple[Text, ...] = ()
    task_limit: Positive | None = None
    allow_task_code: bool = False
    gate: dict[str, Any] | Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSection:
    """How the engine is served once it is made."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    speculate: Literal["none", "ngram"] = "none"
    host: Text = "127.0.0.1"
    port: Port = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """name: of the run and its directory, by default the file's stem. model: as `quantize` takes it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    model: Text
    quantize: QuantizeSection = field(default_factory=QuantizeSection)
    compile: CompileSection = field(default_factory=CompileSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    serve: ServeSection = field(default_factory=ServeSection)
