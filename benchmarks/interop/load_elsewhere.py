"""Checkpoints that `quantize` writes, loaded by other tools: their weights and logits beside ours.

    python benchmarks/interop/load_elsewhere.py MODEL --python OTHER/bin/python --directory runs/interop \\
        [--scheme w4a16-gptq] [--group-size 32]

OTHER is a Python with transformers 5 and what it needs for a format: compressed-tensors, or optimum and
gptqmodel (for gptq, gptq_v2 and awq). Every format is written from MODEL with the same scheme, and read by
`other_reader.py` in that Python. Printed for each: in how many modules the dequantized weights are equal bit
for bit, the largest difference in units of the last place of the type that the reader computes in, and
||their logits - ours|| / ||ours||, ours in fp32, with the share of positions whose largest logit is the same.
Exit code 1 where a weight differs by more than one such unit, or logits by more than 1e-4 (3e-2, or less than
97 % of the largest the same, where the reader computes in fp16).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from bitsmith.compile.reference_model import load_reference, reference_logits
from bitsmith.pipeline.main import main as bitsmith
from bitsmith.quantize.weight_source import open_weights

READER = Path(__file__).with_name("other_reader.py")
# (format, further options). Version 1 of GPTQ is symmetric only.
CASES = (
    ("compressed-tensors", "--symmetric"),
    ("gptq", "--symmetric"),
    ("gptq_v2", "--asymmetric"),
    ("awq", "--symmetric"),
    ("awq", "--asymmetric"),
)
NUM_TOKENS = 64
MAX_LOGIT_DIFFERENCE = {True: 1e-4, False: 3e-2}  # whether the reader computes in fp32
MIN_TOP1 = 0.97


def main() -> int:
    args = _arguments()
    print("| format | read as | modules equal bit for bit | largest difference, ulp | logits | top-1 |")
    print("|---|---|---|---|---|---|")
    is_good = True
    for form, grid in CASES:
        checkpoint = args.directory / f"{form}{grid.removeprefix('-')}"
        _quantize(args, form, grid, checkpoint)
        expected = args.directory / f"{checkpoint.name}.expected.safetensors"
        _save_expected(checkpoint, expected)
        command = [args.python, str(READER), str(checkpoint), str(expected)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {form} {grid} | not loaded: {done.stderr.strip().splitlines()[-1]} | | | | |")
            is_good = False
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        difference, top1 = found["logits"], found["top1"]
        print(
            f"| {form} {grid} | {found['reader']} | {found['num_equal']} of {found['num_modules']} | "
            f"{found['max_ulp']:g} | {difference:.1e} | {top1:.0%} |"
        )
        limit = MAX_LOGIT_DIFFERENCE[found["is_fp32"]]
        is_good = is_good and found["max_ulp"] <= 1 and difference <= limit and top1 >= MIN_TOP1
    return 0 if is_good else 1


def _quantize(args: argparse.Namespace, form: str, grid: str, out: Path) -> None:
    command = ["quantize", args.model, "--scheme", args.scheme, "--group-size", args.group_size, grid]
    if bitsmith([*command, "--format", form, "--out", str(out)]):
        raise SystemExit(f"{out} was not made.")


def _save_expected(checkpoint: Path, path: Path) -> None:
    """Our dequantized weights, [out, in] fp32, by module, and our logits for a few tokens."""
    source = open_weights(checkpoint)
    names = [name for name in source.names if name.endswith("_proj.weight")]
    linears = {name: source.linear(name.removesuffix(".weight")) for name in names}
    tensors = {name: weight.dequantize() for name, weight in linears.items() if not torch.is_tensor(weight)}
    token_ids = torch.arange(1, NUM_TOKENS + 1) * 7 % int(source.config["vocab_size"])
    tensors["token_ids"] = token_ids
    tensors["logits"] = reference_logits(load_reference(source), token_ids.tolist(), NUM_TOKENS)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--python", required=True, help="of the other tools")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--scheme", default="w4a16-gptq")
    parser.add_argument("--group-size", default="32")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
