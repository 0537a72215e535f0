"""Which process runs an engine directory, and what can be refused before it is started."""

import sys
from collections.abc import Sequence
from dataclasses import fields

from bitsmith.compile.tensorrt_llm_api import require_llm_api, target_of
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.serve.engine_client import ENGINE_COMMAND
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings

LLM_API_COMMAND = (sys.executable, "-m", "bitsmith.serve.llm_api_process")


def engine_command(settings: ServeSettings) -> Sequence[str]:
    """Raises Refused for a directory without a manifest, and for what TensorRT-LLM cannot do here."""
    manifest = read_manifest(settings.engine_path)
    if target_of(manifest) is None:
        return ENGINE_COMMAND
    _refuse_native_settings(settings)
    require_llm_api(settings.engine_path, manifest, trust=settings.trust_engine)
    return LLM_API_COMMAND


def _refuse_native_settings(settings: ServeSettings) -> None:
    """TensorRT-LLM has its own scheduler and cache: what they shall do was said when it was compiled."""
    default = RuntimeSettings()
    names = [field.name for field in fields(RuntimeSettings)]
    wrong = [name for name in names if getattr(settings.runtime, name) != getattr(default, name)]
    if settings.num_threads is not None:
        wrong.append("num_threads")
    if wrong:
        raise Refused(
            f"{', '.join(wrong)}: of the native engine only. TensorRT-LLM takes limits, KV reuse and "
            "speculation from `bitsmith compile` (--max-batch-size, --max-num-tokens, --kv-reuse, "
            "--speculation); compile again with what you want and leave it out here."
        )
