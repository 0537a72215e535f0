"""Loads one checkpoint with transformers and compares it. Run by the other tools' Python, without ours.

    python other_reader.py CHECKPOINT EXPECTED.safetensors

EXPECTED holds weights, [out, in] fp32, by state-dict name, token_ids and logits. Prints one line of JSON.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


def main(checkpoint: str, expected_path: str) -> None:
    expected = load_file(expected_path)
    token_ids, logits = expected.pop("token_ids"), expected.pop("logits")
    config = AutoConfig.from_pretrained(checkpoint)
    method = config.quantization_config["quant_method"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, device_map="cpu")
    if method == "compressed-tensors":  # unpacks at the first forward; other readers repack then
        logits_of(model, token_ids)
    num_equal, max_ulp, readers = 0, 0.0, set()
    is_fp32 = True
    for name, weight in expected.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        found = dequantized(module, method)
        readers.add(type(module).__name__)
        is_fp32 = is_fp32 and found.dtype == torch.float32
        # What is computed in fp16 is compared with our weights rounded to it.
        ours = weight.to(found.dtype).float()
        found = found.float()
        num_equal += int(torch.equal(found, ours))
        step = torch.finfo(torch.float32 if is_fp32 else torch.float16).eps
        spacing = step * torch.exp2(torch.floor(torch.log2(ours.abs().clamp(min=1e-7))))
        max_ulp = max(max_ulp, float(((found - ours).abs() / spacing).max()))
    theirs = logits_of(model, token_ids)
    result = {
        "reader": ", ".join(sorted(readers)) + (" (fp32)" if is_fp32 else " (fp16)"),
        "num_modules": len(expected),
        "num_equal": num_equal,
        "max_ulp": max_ulp,
        "is_fp32": is_fp32,
        "logits": float((theirs - logits).norm() / logits.norm()),
        "top1": float((theirs.argmax(dim=1) == logits.argmax(dim=1)).float().mean()),
    }
    print(json.dumps(result))


def logits_of(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(token_ids[None]).logits[0].float()


def dequantized(module: nn.Module, method: str) -> torch.Tensor:
    """[out, in], as the reader itself computes it."""
    if method == "compressed-tensors":
        return module.weight.detach()
    if method == "awq":
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        words = (module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
        return dequantize_gemm(*words).T
    return module.dequantize_weight().T


if __name__ == "__main__":
    main(*sys.argv[1:])
