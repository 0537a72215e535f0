"""What an FP8 TensorRT-LLM engine computes, simulated in torch from an exported checkpoint's own numbers.

Weights are the exported bytes times their scales; inputs of every FP8 linear are rounded to e4m3 with the
exported scale; keys and values are rounded to e4m3 with the exported KV scale, or with 1.0 as the PyTorch
backend does, or not at all, which leaves only what any FP8 engine of these numbers computes. All else is
fp32, where the engine has 16 bits. Not known here: kernels, GPUs.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bitsmith.compile.tensorrt_checkpoint import EngineCheckpoint, open_checkpoint
from bitsmith.compile.tensorrt_linear import Fp8Linear
from bitsmith.compile.tensorrt_names import hf_linear_names, kv_scale_name
from bitsmith.compile.tensorrt_release import Release
from bitsmith.core.errors import Refused
from bitsmith.core.protocols import ScoringRequest
from bitsmith.quantize.fp8_weight import FP8_MAX, to_fp8

KVScales = Literal["exported", "ones", "unrounded"]


class SimulatedEngine:
    """LogitsModel: one request at a time."""

    def __init__(
        self, path: Path, release: Release, hf_config: Mapping[str, Any], kv_scales: KVScales
    ) -> None:
        """path: the checkpoint of an export for one rank. Raises Refused for another."""
        checkpoint = open_checkpoint(path, release)
        if checkpoint.model.world_size != 1:
            raise Refused(f"{path} is for {checkpoint.model.world_size} ranks; only one can be simulated.")
        self._kv_choice = kv_scales
        self._kv_scales = _kv_scales(checkpoint, kv_scales)
        self.model = _load_model(checkpoint, hf_config)
        self._num_fp8 = _round_inputs(self.model, checkpoint)

    @property
    def name(self) -> str:
        kv = "fp32" if self._kv_scales is None else f"FP8 ({self._kv_choice} scales)"
        return f"simulated TensorRT-LLM engine ({self._num_fp8} FP8 linears, {kv} KV cache)"

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Tensor]:
        for request in requests:
            cache = None if self._kv_scales is None else _Fp8Cache(self.model.config, self._kv_scales)
            with torch.inference_mode():
                output = self.model(
                    torch.tensor([list(request.token_ids)]),
                    logits_to_keep=request.num_scored,
                    past_key_values=cache,
                    use_cache=cache is not None,
                )
            logits: Tensor = output.logits[0]
            yield logits


class _Fp8Cache(DynamicCache):
    """Keys and values as attention reads them back: e4m3 times a layer's scale."""

    def __init__(self, config: Any, scales: Sequence[float]) -> None:
        super().__init__(config=config)
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        scale = torch.tensor(self._scales[layer_idx])
        key, value = (_rounded(states, scale) for states in (key_states, value_states))
        return super().update(key, value, layer_idx, *args, **kwargs)


def _rounded(real: Tensor, scale: Tensor) -> Tensor:
    return to_fp8(real, scale).float() * scale


def _kv_scales(checkpoint: EngineCheckpoint, choice: KVScales) -> list[float] | None:
    """One for each layer; None where the cache is not FP8 or shall not be rounded."""
    model = checkpoint.model
    if model.quant.kv_cache_quant_algo is None or choice == "unrounded":
        return None
    if model.quant.kv_cache_quant_algo != "FP8":
        raise Refused(f"{checkpoint.path}: an {model.quant.kv_cache_quant_algo} KV cache is not simulated.")
    if choice == "ones":
        return [1.0] * model.num_layers
    return [float(checkpoint.ranks[0].tensor(kv_scale_name(layer))) for layer in range(model.num_layers)]


def _load_model(checkpoint: EngineCheckpoint, hf_config: Mapping[str, Any]) -> PreTrainedModel:
    given = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    make: Any = AutoModelForCausalLM.from_config  # has no types of its own
    model: PreTrainedModel = make(AutoConfig.for_model(**given), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dict(checkpoint.dequantized()), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    if missing:
        model.tie_weights()
    return model


def _round_inputs(model: PreTrainedModel, checkpoint: EngineCheckpoint) -> int:
    """Let every FP8 linear see rounded inputs; how many there are."""
    num_fp8 = 0
    for layer in range(checkpoint.model.num_layers):
        for shape in checkpoint.model.linears():
            linear = checkpoint.linear(0, layer, shape.name)
            if not isinstance(linear, Fp8Linear):
                continue
            for name in hf_linear_names(layer, shape.name):
                model.get_submodule(name).register_forward_pre_hook(_rounding(linear.input_scale))
                num_fp8 += 1
    return num_fp8


def _rounding(input_scale: Tensor | None) -> Any:
    def round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        (x,) = args
        scale = x.abs().amax(dim=-1, keepdim=True) / FP8_MAX if input_scale is None else input_scale
        return (_rounded(x, torch.where(scale == 0, torch.ones_like(scale), scale)),)

    return round_input
