"""Text generation by TensorRT-LLM's own LLM API, behind the same protocol as the native engine.

The LLM object is handed in, made by `load_llm` where TensorRT-LLM is installed; everything here uses only
the calls and fields that docs/tensorrt-llm.md lists, so that a double with those can stand in.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bitsmith.core.errors import Refused
from bitsmith.core.protocols import GeneratedText
from bitsmith.core.sampling import FinishReason, SamplingParams


class LlmResult(Protocol):
    """What `generate_async` returns, as far as it is used here."""

    def result(self) -> Any: ...


class Llm(Protocol):
    """TensorRT-LLM's LLM class, as far as it is used here."""

    def generate_async(
        self, inputs: Sequence[int], sampling_params: Any = None, *, streaming: bool = False
    ) -> LlmResult: ...

    def shutdown(self) -> None: ...


class LlmApiGenerator:
    """core's TextGenerator over an LLM object. make_params: TensorRT-LLM's SamplingParams class."""

    def __init__(self, llm: Llm, make_params: Any) -> None:
        self._llm = llm
        self._make_params = make_params

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[GeneratedText]:
        """All prompts are submitted before the first result is waited for; the LLM API batches them."""
        running = [
            self._llm.generate_async(list(prompt), self._make_params(**sampling_arguments(chosen)))
            for prompt, chosen in zip(prompts, params, strict=True)
        ]
        for result in running:
            output = result.result().outputs[0]
            yield GeneratedText(output.text, tuple(output.token_ids), finish_reason(output.finish_reason))

    def close(self) -> None:
        self._llm.shutdown()


def sampling_arguments(params: SamplingParams) -> dict[str, Any]:
    """Keyword arguments of TensorRT-LLM's SamplingParams. Raises Refused for what it has no field for."""
    if params.logit_bias:
        raise Refused("logit_bias cannot be passed to TensorRT-LLM; leave it out.")
    arguments: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
        "add_special_tokens": False,  # prompts are token ids already
    }
    optional: Mapping[str, Any] = {
        "top_p": params.top_p if params.top_p < 1 else None,
        "top_k": params.top_k or None,
        "min_p": params.min_p or None,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
        "seed": params.seed,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "logprobs": params.num_logprobs,
    }
    if params.temperature == 0:
        arguments["top_k"] = 1  # greedy, whatever else is said
        optional = {
            name: value for name, value in optional.items() if name not in ("top_k", "top_p", "min_p")
        }
    return arguments | {name: value for name, value in optional.items() if value is not None}


def finish_reason(given: str | None) -> FinishReason:
    """TensorRT-LLM ends a finished output with 'stop' or 'length'."""
    if given == "stop":
        return "stop"
    return "length" if given == "length" else "error"


def load_llm(artifact: Path, target: str, arguments: Mapping[str, Any]) -> LlmApiGenerator:
    """The generator of an artifact that `compile` wrote. Raises Refused where TensorRT-LLM is missing."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise Refused(
            f"TensorRT-LLM is not installed in this Python ({error}); serve.sh has the command."
        ) from error
    if target == "tensorrt-llm-pytorch":
        return LlmApiGenerator(
            package.LLM(model=str(artifact / "model"), **arguments), package.SamplingParams
        )
    if not (artifact / "engine" / "config.json").is_file():
        raise Refused(
            f"{artifact} is exported, not built: run its build.sh on a machine with TensorRT-LLM first."
        )
    try:
        made = importlib.import_module("tensorrt_llm._tensorrt_engine").LLM
    except ImportError:  # releases before 1.0
        made = package.LLM
    llm = made(model=str(artifact / "engine"), tokenizer=str(artifact / "tokenizer"), **arguments)
    return LlmApiGenerator(llm, package.SamplingParams)
