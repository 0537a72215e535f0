"""Perplexity of the native FP8 engine beside that of a simulated TensorRT-LLM engine of the same numbers.

    bitsmith quantize smollm2-135m --scheme w8a8-fp8 --kv-cache fp8 --out runs/q
    bitsmith compile runs/q --target cpu --out runs/e
    bitsmith compile runs/q --target tensorrt-llm --out runs/t
    python benchmarks/tensorrt/simulated_perplexity.py runs/e runs/t

The simulation reads only what was exported (weights, input scales, KV scales). Exit code 1 when a ratio is
further from 1 than --limit. Not run on a GPU: what an engine's kernels do beyond this arithmetic is not seen.
"""

import argparse
import json
import sys
from pathlib import Path

from bitsmith.compile.engine import Engine
from bitsmith.compile.engine_logits import EngineLogitsModel
from bitsmith.compile.tensorrt_release import DEFAULT_RELEASE
from bitsmith.compile.tensorrt_simulation import KVScales, SimulatedEngine
from bitsmith.core.progress import Reporter
from bitsmith.core.text_source import load_text, pack_windows
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.evaluate.token_level import score_windows, token_measurements


def main() -> int:
    args = _arguments()
    engine = EngineLogitsModel(Engine.load(args.engine))
    tokenizer = args.export / "tokenizer"
    windows = pack_windows(
        load_text(args.text, "evaluation"),
        load_tokenizer(tokenizer),
        num_windows=args.num_windows,
        seq_len=args.seq_len,
        seed=0,
    )
    hf_config = json.loads((tokenizer / "config.json").read_bytes())
    document = {"native": engine.name, "num_windows": windows.num_obtained, "seq_len": args.seq_len}
    is_within = True
    choices: tuple[KVScales, KVScales] = ("exported", "ones")
    for choice in choices:
        simulated = SimulatedEngine(args.export / "checkpoint", DEFAULT_RELEASE, hf_config, choice)
        scores = score_windows(engine, simulated, windows.token_ids, Reporter())
        found = {entry.metric.name: entry.metric for entry in token_measurements(scores)}
        names = ("baseline_perplexity", "perplexity", "perplexity_ratio", "kl_mean", "top1_agreement")
        document[f"simulated, KV scales {choice}"] = {name: found[name].value for name in names}
        ratio = found["perplexity_ratio"]
        is_within = is_within and abs(ratio.value - 1.0) <= args.limit
        print(f"{simulated.name}: ratio {ratio.value:.5f} ± {ratio.stderr}", file=sys.stderr)
    json.dump(document, sys.stdout, indent=2)
    print()
    return 0 if is_within else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="what `compile --target cpu` wrote")
    parser.add_argument("export", type=Path, help="what `compile --target tensorrt-llm` wrote")
    parser.add_argument("--text", default="builtin", help="evaluation text, as `evaluate --text` takes it")
    parser.add_argument("--num-windows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--limit", type=float, default=0.01, help="largest |ratio - 1| (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
