"""How a ModelOpt unified checkpoint says what it is: `hf_quant_config.json`, or config.json inline."""

from collections.abc import Mapping
from typing import Any

from bitsmith.core.checkpoint import CheckpointReader, read_json_object
from bitsmith.core.errors import Refused

QUANT_CONFIG_NAME = "hf_quant_config.json"


def modelopt_section(reader: CheckpointReader) -> dict[str, Any] | None:
    """The `quantization` section, from hf_quant_config.json or from the flat form in config.json.

    As the PyTorch backend reads it: the file decides, unless only the inline form has a quant_algo.
    """
    inline = inline_section(reader.config)
    if not (reader.path / QUANT_CONFIG_NAME).is_file():
        return inline
    section = read_json_object(reader.path, QUANT_CONFIG_NAME).get("quantization")
    if not isinstance(section, dict):
        raise Refused(f"{reader.path / QUANT_CONFIG_NAME} has no `quantization` object; write it again.")
    if section.get("quant_algo") is None and inline is not None and inline.get("quant_algo") is not None:
        return inline
    return section


def modelopt_kv_scales(reader: CheckpointReader, layer_index: int) -> tuple[float, float] | None:
    """(key scale, value scale) of a layer's cache: stored = real / scale. None: not in the checkpoint."""
    prefix = f"model.layers.{layer_index}.self_attn"
    names = (f"{prefix}.k_proj.k_scale", f"{prefix}.v_proj.v_scale")
    if any(name not in reader for name in names):
        return None
    key, value = (float(reader.tensor(name)) for name in names)
    return key, value


def inline_section(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of config.json in the legacy file's words, if ModelOpt wrote it."""
    flat = config.get("quantization_config")
    if not isinstance(flat, dict) or flat.get("quant_method") != "modelopt":
        return None
    section = {key: flat[key] for key in ("quant_algo", "group_size", "quantized_layers") if key in flat}
    section["exclude_modules"] = flat.get("ignore", [])
    kv_scheme = flat.get("kv_cache_scheme")
    if isinstance(kv_scheme, dict):
        is_fp8 = kv_scheme.get("type") == "float" and kv_scheme.get("num_bits") == 8
        section["kv_cache_quant_algo"] = "FP8" if is_fp8 else "unknown"
    elif kv_scheme is not None:
        section["kv_cache_quant_algo"] = kv_scheme
    return section
