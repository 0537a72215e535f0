"""Our FP8 quantization beside ModelOpt's: the same calibration tokens, both exported for TensorRT-LLM.

    python benchmarks/tensorrt/compare_with_modelopt.py smollm2-135m --directory runs/modelopt \\
        [--backend-python PATH] [--num-samples 8] [--seq-len 128]

Scheme w8a8-fp8 with an FP8 KV cache. Prints, for each kind of tensor in the engine checkpoints: how many
there are, how many are equal bit by bit, and the largest relative difference (of a weight: ||ours - theirs||
/ ||theirs|| of what it dequantizes to). Exit code 1 when names, dtypes or shapes differ, or a tensor that is
not quantized. Nothing of TensorRT-LLM is run.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bitsmith.core.manifest import read_manifest
from bitsmith.pipeline.main import main as bitsmith

SCALES = ("weights_scaling_factor", "activation_scaling_factor", "kv_cache_scaling_factor")
# The target has one scale for what it fuses; ModelOpt's file has one for each projection.
FUSED = ("qkv", "fc", "gate")


def main() -> int:
    args = _arguments()
    ours, theirs = (_exported(args, backend) for backend in ("bitsmith", "modelopt"))
    layouts = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in (ours, theirs)]
    if layouts[0] != layouts[1]:
        differing = sorted(layouts[0].items() ^ layouts[1].items(), key=str)
        print(f"names, dtypes or shapes differ: {differing[:6]}")
        return 1
    equal: dict[str, list[bool]] = defaultdict(list)
    difference: dict[str, float] = defaultdict(float)
    for name, tensor in ours.items():
        kind = _kind(name, tensor)
        equal[kind].append(_is_same(tensor, theirs[name]))
        left, right = _real(name, ours), _real(name, theirs)
        relative = float((left - right).norm() / right.norm()) if right.any() else float(left.norm())
        difference[kind] = max(difference[kind], relative)
    print("| tensors of the engine checkpoint | how many | equal bit by bit | largest relative difference |")
    print("|---|---|---|---|")
    for kind, flags in equal.items():
        print(f"| {kind} | {len(flags)} | {sum(flags)} | {difference[kind]:.2e} |")
    return 0 if all(equal["not quantized"]) else 1


def _exported(args: argparse.Namespace, backend: str) -> dict[str, Tensor]:
    """Tensors of the engine checkpoint that this backend's quantization comes to."""
    checkpoint, engine = args.directory / backend, args.directory / f"{backend}-export"
    quantize = ["quantize", args.model, "--scheme", "w8a8-fp8", "--kv-cache", "fp8", "--out", str(checkpoint)]
    quantize += ["--num-samples", str(args.num_samples), "--seq-len", str(args.seq_len), "--backend", backend]
    if backend == "modelopt" and args.backend_python is not None:
        quantize += ["--backend-python", args.backend_python]
    for command in (quantize, ["compile", str(checkpoint), "--target", "tensorrt-llm", "--out", str(engine)]):
        _run(command)
    print(f"{backend}: tokens {read_manifest(checkpoint).config['calibration']['token_digest'][:16]}")
    return load_file(engine / "checkpoint" / "rank0.safetensors")


def _run(command: Sequence[str]) -> None:
    exit_code = bitsmith(command)
    if exit_code:
        raise SystemExit(exit_code)


def _kind(name: str, tensor: Tensor) -> str:
    suffix = name.rpartition(".")[2]
    if suffix in SCALES:
        return suffix
    if tensor.dtype != torch.float8_e4m3fn:
        return "not quantized"
    return "weights, fused" if name.split(".")[-2] in FUSED else "weights, not fused"


def _real(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """A tensor in fp32; of a quantized weight what it dequantizes to."""
    tensor = tensors[name].float()
    scale = tensors.get(f"{name.removesuffix('.weight')}.weights_scaling_factor")
    return tensor if scale is None or not name.endswith(".weight") else tensor * scale


def _is_same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--directory", type=Path, required=True, help="where the artifacts go")
    parser.add_argument("--backend-python", metavar="PATH", help="a Python that has nvidia-modelopt 0.47.0")
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
