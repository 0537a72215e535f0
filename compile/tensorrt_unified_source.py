"""A unified checkpoint against the dense model it came from: every linear turned back to floats."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bitsmith.compile.decoder_config import read_decoder_config
from bitsmith.compile.tensorrt_check_source import ERROR_LIMITS
from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_names import LINEARS
from bitsmith.compile.tensorrt_quantization import W4A8_AWQ, W4A16_AWQ
from bitsmith.compile.tensorrt_rounding import relative_error
from bitsmith.compile.tensorrt_source import ExportSource, open_source
from bitsmith.core.errors import Refused

# What follows a norm is compared together with it, as smoothing moves factors between them.
_AFTER_NORM = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 1, "up_proj": 1}


def check_unified_source(path: Path, source_path: Path) -> Iterator[Finding]:
    """Only for algorithms that an export reads too; NVFP4 and block scales are refused by name."""
    try:
        checkpoint, source = open_source(path), open_source(source_path)
    except Refused as error:
        yield refuse("source-unreadable", path.name, str(error))
        return
    decoder = read_decoder_config(checkpoint.config)
    is_awq = checkpoint.scheme.quant_algo in (W4A16_AWQ, W4A8_AWQ)
    limit = ERROR_LIMITS[checkpoint.scheme.quant_algo]
    second = "pre_feedforward_layernorm" if decoder.post_norms else "post_attention_layernorm"
    for layer in range(decoder.num_layers):
        norms = (f"model.layers.{layer}.input_layernorm.weight", f"model.layers.{layer}.{second}.weight")
        for parts in LINEARS.values():
            for part in parts:
                module, leaf = f"model.layers.{layer}.{part}", part.rpartition(".")[2]
                norm = norms[_AFTER_NORM[leaf]] if leaf in _AFTER_NORM and is_awq else None
                try:
                    ours = _effective(checkpoint, module, norm, decoder.norm_plus_one)
                except Refused as error:
                    yield warn("source-not-compared", module, f"was not compared: {error}")
                    continue
                theirs = _effective(source, module, norm, decoder.norm_plus_one)
                distance = relative_error(ours, theirs) if ours.shape == theirs.shape else float("inf")
                if distance > limit:
                    text = f"differs from the source by {distance:.3g} (limit {limit:g}); export it again."
                    yield refuse("source-weight", module, text)


def _effective(model: ExportSource, module: str, norm: str | None, norm_plus_one: bool) -> Tensor:
    """[out, in]: the weight, times the gain of the norm before it."""
    weight = model.linear(module).dequantize()
    if norm is None:
        return weight
    gain = model.tensor(norm).float()
    return weight * (gain + torch.ones_like(gain) if norm_plus_one else gain)
