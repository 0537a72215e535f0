"""Per-item log-likelihoods of an engine against lm-eval's own Hugging Face backend, on the same weights.

    python benchmarks/evaluate/compare_with_hflm.py CHECKPOINT ENGINE --include-path DIR --tasks NAME...

CHECKPOINT is what the engine was compiled from: a model directory or a quantized checkpoint, which is
dequantized in fp32 for the backend. Three runs answer the same requests: the backend (`HFLM`), our reference
(`TransformersLogitsModel`) through our lm-eval model, and the engine through the same. Printed for each pair:
mean, 99th percentile and greatest difference of log-likelihoods, and every changed answer with its margins.
Needs `accelerate`, which lm-eval's backend imports. Task files may run the code that they name.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from bitsmith.compile.engine import Engine
from bitsmith.compile.engine_logits import EngineLogitsModel
from bitsmith.compile.reference_model import TransformersGenerator, TransformersLogitsModel
from bitsmith.core.progress import Reporter
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.harness import HarnessRun, load_tasks, run_tasks, sandboxed_templates
from bitsmith.evaluate.lm_eval_model import AnswerNotes, HarnessModel
from bitsmith.evaluate.task_comparison import compare_task
from bitsmith.evaluate.task_files import TaskSelection, TaskSettings, select_tasks
from bitsmith.evaluate.task_scores import outline
from bitsmith.serve.generator import EngineGenerator


def main() -> int:
    args = _arguments()
    reporter = Reporter()
    settings = TaskSettings(tuple(args.tasks), tuple(args.include_path), args.limit, allow_task_code=True)
    selection = select_tasks(settings)
    encoder = TextEncoder(load_tokenizer(args.checkpoint))

    engine = Engine.load(args.engine, trust=args.trust_engine)
    engine_model = EngineLogitsModel(engine)
    engine_generator = EngineGenerator(engine, encoder.tokenizer, engine.tokenizer_path)
    reference = TransformersLogitsModel(args.checkpoint)
    reference_generator = TransformersGenerator(reference, encoder.tokenizer)

    # Prompts must be equal, so all are held to the shorter context: the engine's.
    context_len = min(engine_model.max_model_len, reference.max_model_len)
    backend = HFLM(
        pretrained=reference.model,
        tokenizer=encoder.tokenizer,
        batch_size=1,
        max_length=context_len,
    )
    runs = {
        "hflm": _backend_run(backend, selection),
        "reference": run_tasks(
            HarnessModel(reference, encoder, context_len, reporter, reference_generator), selection
        ),
        "engine": run_tasks(
            HarnessModel(engine_model, encoder, context_len, reporter, engine_generator), selection
        ),
    }
    worst = 0.0
    document: dict[str, Any] = {"arithmetic": engine.arithmetic, "limit": args.limit}
    for name in ("reference", "engine"):
        document[name] = {}
        for file in selection.files:
            details = compare_task(outline(file), runs["hflm"], runs[name]).details
            document[name][file.name] = details
            difference = details["logprob_difference"]
            counts = f"{details['num_items']} items, {details['num_changed']} changed answers"
            _say(f"{name} against hflm, {file.name}: {counts}")
            if difference is not None:
                _say(
                    "  |difference| nats: mean {mean:.3g}, p99 {p99:.3g}, max {max:.3g}".format(**difference)
                )
                worst = max(worst, difference["max"]) if name == "engine" else worst
            for row in details["changed"]:
                margins = f"margins {row['baseline_margin']} -> {row['candidate_margin']}"
                _say(f"  item {row['item']}: {row['baseline']!r} -> {row['candidate']!r}, {margins}")
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0 if args.max_difference is None or worst <= args.max_difference else 1


def _backend_run(backend: HFLM, selection: TaskSelection) -> HarnessRun:
    with sandboxed_templates():
        loaded = load_tasks(selection)
        results: Any = evaluate(
            lm=backend, task_dict=loaded, limit=selection.settings.limit, bootstrap_iters=0, log_samples=True
        )
    return HarnessRun(results["samples"], results["results"], results["n-shot"], AnswerNotes())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include-path", nargs="+", type=Path, default=[])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-difference", type=float, help="exit 1 when the engine differs by more nats")
    parser.add_argument("--trust-engine", action="store_true")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
