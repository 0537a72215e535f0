"""TensorRT-LLM's own LLM API: whether it can run an artifact here, loading it, and its sampling parameters.

Everything uses only the calls and fields that docs/tensorrt-llm.md lists, so that a double with those can
stand in. What `tensorrt_llm` is imported is the environment's; nothing here imports it before `load_llm`.
"""

import importlib
import importlib.util
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from bitsmith.compile.trusted_engines import require_trusted
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.core.sampling import SamplingParams
from bitsmith.core.verified_hashes import verify_files_cached

ENGINE_TARGET, PYTORCH_TARGET = "tensorrt-llm", "tensorrt-llm-pytorch"
_ENGINE_CONFIG = "engine/config.json"


class LlmResult(Protocol):
    """What `generate_async` returns, as far as it is used here: it yields itself, with longer outputs."""

    outputs: Sequence[Any]

    def __aiter__(self) -> AsyncIterator["LlmResult"]: ...

    def abort(self) -> None: ...


class Llm(Protocol):
    """TensorRT-LLM's LLM class, as far as it is used here."""

    def generate_async(
        self, inputs: Sequence[int], sampling_params: Any = None, *, streaming: bool = False
    ) -> LlmResult: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedLlm:
    """make_params: TensorRT-LLM's SamplingParams class."""

    llm: Llm
    make_params: Any


def target_of(manifest: Manifest) -> str | None:
    """The TensorRT-LLM target that an artifact was compiled for, None for another engine."""
    target = manifest.details.get("target")
    return target if target in (ENGINE_TARGET, PYTORCH_TARGET) else None


def require_llm_api(artifact: Path, manifest: Manifest, *, trust: bool) -> None:
    """Raises Refused, without importing anything heavy, when the artifact cannot be run here."""
    target = target_of(manifest)
    assert target is not None, artifact
    if target == ENGINE_TARGET and not (artifact / _ENGINE_CONFIG).is_file():
        raise Refused(
            f"{artifact} is exported, not built: it holds no engine. On the machine that shall serve, where "
            f"TensorRT-LLM {manifest.details.get('trtllm_version')} is installed, run {artifact}/build.sh."
        )
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise Refused(
            f"tensorrt_llm is not installed in this Python; it needs an NVIDIA GPU. Where TensorRT-LLM "
            f"{manifest.details.get('trtllm_version')} and bitsmith are installed, the same line serves: "
            f"bitsmith serve {artifact}. With TensorRT-LLM alone: {artifact}/serve.sh."
        )
    if target == ENGINE_TARGET and not trust:
        if _ENGINE_CONFIG not in manifest.files:  # build.sh made it, so no digest covers it
            raise Refused(
                f"The engine in {artifact} was built by build.sh, outside of `bitsmith compile`, and an "
                "engine is machine code that runs with your rights. Give --trust-engine if you built it."
            )
        require_trusted(artifact, manifest.content_digest)


def load_llm(artifact: Path, manifest: Manifest) -> LoadedLlm:
    """Load what `require_llm_api` let through. Raises Refused when a file was changed or releases differ.

    What build.sh added is in no manifest, so such an artifact cannot be verified: it was trusted by name.
    """
    if target_of(manifest) == PYTORCH_TARGET or _ENGINE_CONFIG in manifest.files:
        verify_files_cached(artifact, manifest)
    package = importlib.import_module("tensorrt_llm")
    arguments = llm_arguments_of(artifact)
    if target_of(manifest) == PYTORCH_TARGET:
        return LoadedLlm(package.LLM(model=str(artifact / "model"), **arguments), package.SamplingParams)
    built, here = engine_config(artifact).get("version"), package.__version__
    if built != here:
        raise Refused(
            f"{artifact} was built by TensorRT-LLM {built}; here is {here}. An engine runs only with the "
            "release that built it: build it again, or use that release."
        )
    try:
        made = importlib.import_module("tensorrt_llm._tensorrt_engine").LLM
    except ImportError:  # releases before 1.0
        made = package.LLM
    llm = made(model=str(artifact / "engine"), tokenizer=str(artifact / "tokenizer"), **arguments)
    return LoadedLlm(llm, package.SamplingParams)


def llm_arguments_of(artifact: Path) -> dict[str, Any]:
    """Arguments of the LLM class that `compile` wrote; none for releases before 1.0."""
    path = artifact / "llm_args.yaml"
    return dict(yaml.safe_load(path.read_bytes())) if path.is_file() else {}


def engine_config(artifact: Path) -> dict[str, Any]:
    """The built engine's configuration: version, pretrained_config, build_config."""
    try:
        return dict(json.loads((artifact / _ENGINE_CONFIG).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise Refused(
            f"{artifact / _ENGINE_CONFIG} cannot be read ({error}); build the engine again."
        ) from error


def sampling_arguments(
    params: SamplingParams, max_tokens: int, seed: int, end_token_ids: Iterable[int]
) -> dict[str, Any]:
    """Keyword arguments of TensorRT-LLM's SamplingParams. Stop strings are the caller's: it sees the text.

    The class has one end id; further ones are stop ids, whose effect is the same.
    """
    assert not params.logit_bias, "refused at the door"
    ends = sorted(end_token_ids)
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
        "add_special_tokens": False,  # prompts are token ids already
        "detokenize": False,  # text is made by the server, byte by byte
    }
    if ends and not params.ignore_eos:
        arguments |= {"end_id": ends[0], "pad_id": ends[0]}
    further = () if params.ignore_eos else ends[1:]
    optional: dict[str, Any] = {
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
        "stop_token_ids": sorted({*params.stop_token_ids, *further}) or None,
        # 0 asks for the chosen token only; releases differ in whether they take it so.
        "logprobs": None if params.num_logprobs is None else max(1, params.num_logprobs),
    }
    if params.temperature == 0:
        optional |= {"top_k": 1}  # greedy, whatever else is said
    else:
        optional |= {
            "top_p": params.top_p if params.top_p < 1 else None,
            "top_k": params.top_k or None,
            "min_p": params.min_p or None,
            "seed": seed % (1 << 63),  # it takes no negative ones
        }
    return arguments | {name: value for name, value in optional.items() if value is not None}
