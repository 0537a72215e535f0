"""What a server over TensorRT-LLM's LLM API can take: read from the artifact, before anything is loaded."""

from pathlib import Path
from typing import Any

from bitsmith.compile.tensorrt_llm_api import PYTORCH_TARGET, engine_config, llm_arguments_of, target_of
from bitsmith.core.checkpoint import read_json_object
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.serve.engine_messages import EngineReady
from bitsmith.serve.engine_setup import RuntimeLimits

# TensorRT-LLM's own defaults.
_MAX_BATCH_SIZE, _MAX_NUM_TOKENS = 2048, 8192

_ECHO = "log-probabilities of a prompt are not read from TensorRT-LLM's LLM API. Leave echo out."
_LOGIT_BIAS = "TensorRT-LLM's LLM API has no field for single ids. Leave logit_bias out."
_NO_LOGPROBS = (
    "this engine was built without gather_generation_logits, so TensorRT-LLM gives no log-probabilities. "
    "Leave it out, or build the engine with it."
)


def describe_engine(artifact: Path, manifest: Manifest) -> EngineReady:
    """Limits, tokenizer and what requests may not ask. Raises Refused when a file cannot be read."""
    is_pytorch = target_of(manifest) == PYTORCH_TARGET
    tokenizer = artifact / ("model" if is_pytorch else "tokenizer")
    config = read_json_object(tokenizer, "config.json")
    arguments = llm_arguments_of(artifact)
    build: dict[str, Any] = {} if is_pytorch else dict(engine_config(artifact).get("build_config") or {})
    max_num_tokens = _first(build.get("max_num_tokens"), arguments.get("max_num_tokens"), _MAX_NUM_TOKENS)
    longest = (build.get("max_seq_len"), arguments.get("max_seq_len"), config.get("max_position_embeddings"))
    max_model_len = _first(*longest)
    is_chunked = bool(arguments.get("enable_chunked_prefill"))
    limits = RuntimeLimits(
        vocab_size=_first(config.get("vocab_size")),
        max_model_len=max_model_len,
        max_num_seqs=_first(build.get("max_batch_size"), arguments.get("max_batch_size"), _MAX_BATCH_SIZE),
        max_num_batched_tokens=max_num_tokens,
        num_kv_blocks=0,
        kv_cache_bytes=0,
        speculate="as compiled" if "speculative_config" in arguments else "none",
        max_prompt_len=max_model_len if is_chunked else min(max_num_tokens, max_model_len),
    )
    refused = {"echo": _ECHO, "logit_bias": _LOGIT_BIAS}
    if not is_pytorch and not build.get("gather_generation_logits"):
        refused |= {"logprobs": _NO_LOGPROBS, "top_logprobs": _NO_LOGPROBS}
    return EngineReady(limits, str(tokenizer), _arithmetic(manifest), refused)


def _first(*values: Any) -> int:
    for value in values:
        if isinstance(value, int) and value > 0:
            return value
    raise Refused("The artifact does not say its vocabulary size or context length; compile it again.")


def _arithmetic(manifest: Manifest) -> str:
    details = manifest.details
    kv_cache = (details.get("kv_cache") or {}).get("algo") or "unquantized"
    weights = details.get("quant_algo") or "unquantized"
    version = details.get("trtllm_version")
    return f"TensorRT-LLM {version} ({details['target']}), weights {weights}, KV cache {kv_cache}"
