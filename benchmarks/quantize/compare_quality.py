"""How far quantized checkpoints are from their source: one evaluator for everybody's.

    python benchmarks/quantize/compare_quality.py SOURCE CHECKPOINT... --text FILE

CHECKPOINT is any directory whose weights are compressed-tensors `pack-quantized` (ours, llm-compressor's,
AutoRound's) or dense. Weights are dequantized by hand into the source's own transformers model in fp32, so
that no tool's kernels take part. Windows follow one another from the text's beginning and share no tokens.
Printed for each checkpoint: perplexity, KL(source || checkpoint) in nats per token and top-1 agreement, each
with the standard error over windows, and the paired difference of KL to the first checkpoint. `--json FILE`
keeps the values of every window.
"""

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.quantize.weight_source import open_weights


@dataclass(slots=True)
class Windows:
    """One value for each window: mean over its tokens. nll: over all but the first."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    windows = _windows(args)
    source = _load(args.source, args.source)
    reference, results = Windows(), {}
    models = {str(path): _load(args.source, path) for path in args.checkpoint}
    for name in models:
        results[name] = Windows()
    for number, token_ids in enumerate(windows, start=1):
        expected = _log_probs(source, token_ids)
        _add(reference, expected, expected, token_ids)
        for name, model in models.items():
            _add(results[name], expected, _log_probs(model, token_ids), token_ids)
        print(f"window {number} of {len(windows)}", end="\r", flush=True)
    _print(str(args.source), reference, None)
    first = next(iter(results.values()), None)
    for name, result in results.items():
        _print(name, result, first)
    if args.json is not None:
        kept = {name: {"nll": r.nll, "kl": r.kl, "top1": r.top1} for name, r in results.items()}
        args.json.write_text(json.dumps(kept | {"source": {"nll": reference.nll}}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="directory of the unquantized model")
    parser.add_argument("checkpoint", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="evaluation text, UTF-8")
    parser.add_argument("--num-windows", type=int, default=40)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _windows(args: argparse.Namespace) -> Tensor:
    """[num_windows, seq_len]"""
    text = args.text.read_text(encoding="utf-8")
    ids = load_tokenizer(args.source)(text, add_special_tokens=False, verbose=False).input_ids
    needed = args.num_windows * args.seq_len
    if len(ids) < needed:
        raise SystemExit(f"{args.text} has {len(ids)} tokens; {needed} are needed.")
    return torch.tensor(ids[:needed]).view(args.num_windows, args.seq_len)


def _load(source: Path, checkpoint: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if checkpoint != source:
        weights = open_weights(checkpoint)
        state = {name: weights.dequantized(name).float() for name in weights.names}
        known = model.state_dict().keys()
        model.load_state_dict({name: value for name, value in state.items() if name in known}, strict=False)
    return model.eval()


@torch.no_grad()
def _log_probs(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """[seq_len, vocab]"""
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits.log_softmax(dim=-1)


def _add(result: Windows, expected: Tensor, found: Tensor, token_ids: Tensor) -> None:
    result.nll.append(-float(found[:-1].gather(1, token_ids[1:, None]).mean()))
    result.kl.append(float((expected.exp() * (expected - found)).sum(dim=-1).mean()))
    result.top1.append(float((expected.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()))


def _print(name: str, result: Windows, first: Windows | None) -> None:
    nll, nll_error = _mean(result.nll)
    line = f"{name}: perplexity {math.exp(nll):.3f} ± {math.exp(nll) * nll_error:.3f}"
    if first is not None:
        kl, top1 = _mean(result.kl), _mean(result.top1)
        line += f", KL {kl[0]:.4f} ± {kl[1]:.4f}, top-1 {top1[0]:.4f} ± {top1[1]:.4f}"
    if first is not None and first is not result:
        paired = _mean([a - b for a, b in zip(result.kl, first.kl, strict=True)])
        line += f", KL less the first's {paired[0]:+.4f} ± {paired[1]:.4f}"
    print(line, flush=True)


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error over windows."""
    tensor = torch.tensor(values, dtype=torch.float64)
    error = float(tensor.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(tensor.mean()), error


if __name__ == "__main__":
    main()
