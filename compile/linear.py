"""One product with packed weights, through the operator that reads their layout."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bitsmith.compile.decoder_plan import ACTIVATION_CODES, LinearSpec


class Linear(nn.Module):
    """x @ weight.T + bias. The packed tensors are named `NAME.weight`, `.scale`, `.zero_point`, `.bias`."""

    weight: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    bias: Tensor | None

    def __init__(self, name: str, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.spec = spec
        for part in ("weight", "scale", "zero_point", "bias"):
            self.register_buffer(part, tensors.get(f"{name}.{part}"))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [T, in] fp32 -> [T, out] fp32."""
        spec = self.spec
        code = ACTIVATION_CODES[spec.activations]
        if not spec.is_quantized:
            dense: Tensor = torch.ops.bitsmith.linear_dense(hidden, self.weight, self.bias, code)
            return dense
        if spec.is_fp8:
            input_scale = spec.input_scale or 0.0
            fp8: Tensor = torch.ops.bitsmith.linear_fp8(
                hidden, self.weight, self.scale, self.bias, spec.in_features, input_scale, code
            )
            return fp8
        quantized: Tensor = torch.ops.bitsmith.linear_quantized(
            hidden,
            self.weight,
            self.scale,
            self.zero_point,
            self.bias,
            spec.in_features,
            spec.out_features,
            spec.group_size,
            spec.num_bits,
            code,
        )
        return quantized
