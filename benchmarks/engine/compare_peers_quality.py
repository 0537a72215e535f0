"""KL of each compared system's own logits to the source in fp32: the quality beside the speed.

    python benchmarks/engine/compare_peers_quality.py SOURCE PEERS.json [--windows 8] [--seq-len 256]

SOURCE: the model that all were made from; transformers in fp32 is the reference. Text is the built-in one's
evaluation part. Logits are those of a prefill; each system has its own arithmetic and cache. In nats per
token, with the standard error over windows.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path

import torch
from peer_process import PeerProcess, read_peers, running
from torch import Tensor

from bitsmith.compile.reference_model import load_reference, reference_logits
from bitsmith.core.text_source import load_text, pack_windows
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.quantize.weight_source import open_weights


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    source = Path(args.source)
    text = load_text("builtin", "evaluation")
    packed = pack_windows(
        text, load_tokenizer(source), num_windows=args.windows, seq_len=args.seq_len, seed=0
    )
    windows: list[list[int]] = packed.token_ids.tolist()
    model = load_reference(open_weights(source))
    expected = [torch.log_softmax(reference_logits(model, window, len(window)), -1) for window in windows]
    print(f"{len(windows)} windows of {args.seq_len} tokens")
    print("| kind | system | KL, nats/token | top-1 agreement |\n|---|---|---|---|")
    for peer in read_peers(args.peers):
        with running([peer], args.threads) as (process,):
            pairs = [
                compare(e, logits_of(process, w, e.shape[-1])) for e, w in zip(expected, windows, strict=True)
            ]
        kl = [pair[0] for pair in pairs]
        error = statistics.stdev(kl) / math.sqrt(len(kl))
        top1 = statistics.mean(pair[1] for pair in pairs)
        print(
            f"| {peer.kind} | {peer.label} | {statistics.mean(kl):.4f} ± {error:.4f} | {top1:.3f} |",
            flush=True,
        )


def logits_of(process: PeerProcess, token_ids: list[int], vocab_size: int) -> Tensor:
    """[tokens, vocab_size] fp32; rows that only pad a system's vocabulary are left out."""
    with tempfile.NamedTemporaryFile(suffix=".f32") as file:
        process.ask(do="logits", token_ids=token_ids, file=file.name)
        values = torch.from_file(file.name, size=Path(file.name).stat().st_size // 4)
        return values.reshape(len(token_ids), -1)[:, :vocab_size].clone()


def compare(expected: Tensor, logits: Tensor) -> tuple[float, float]:
    """expected: log-probabilities [tokens, vocab_size]. Mean KL to it, share of equal choices."""
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), expected, log_target=True, reduction="none")
    agree = (expected.argmax(-1) == logits.argmax(-1)).float()
    return float(kl.sum(-1).mean()), float(agree.mean())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="a directory")
    parser.add_argument("peers", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
