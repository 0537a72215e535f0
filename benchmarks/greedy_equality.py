"""Greedy text of a served engine against transformers in fp32 on the same dequantized weights.

    python benchmarks/greedy_equality.py CHECKPOINT ENGINE --max-margin 1e-3
    python benchmarks/greedy_equality.py CHECKPOINT ENGINE --max-margin-rms 4

The engine is served over HTTP and asked by the stock `openai` client, in token ids. Where the texts differ,
the first differing token's margin is printed: how much lower the reference's logit of the token that the
engine chose is than that of its own choice. Exit 1 when a margin is above the limit.
"""

import argparse
import json
import sys
import threading
from pathlib import Path

import openai
import torch
from transformers import PreTrainedTokenizerBase

from bitsmith.compile.reference_model import TransformersLogitsModel
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import ScoringRequest
from bitsmith.core.tokenizer import load_tokenizer, render_chat
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings
from bitsmith.serve.server import EngineServer

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child.",
    "List five uses of a paper clip.",
    "What does the Python function sorted return?",
)


def main() -> int:
    args = _arguments()
    tokenizer = load_tokenizer(args.checkpoint)
    prompts = [render_chat(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    served = _ask_server(args.engine, prompts, args.num_tokens)
    reference = TransformersLogitsModel(args.checkpoint)
    limit = _limit(args)
    worst = 0.0
    for question, prompt, tokens in zip(QUESTIONS, prompts, served, strict=True):
        num_equal, margin = _follow(reference, tokenizer, prompt, tokens)
        worst = max(worst, margin)
        equal = num_equal == len(tokens)
        note = "equal" if equal else f"first difference after {num_equal} tokens, margin {margin:.3g}"
        print(f"{len(tokens):3} tokens, {note}: {question}")
    print(f"largest margin {worst:.3g}, limit {limit:.3g}")
    return int(worst > limit)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--num-tokens", type=int, default=64)
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--max-margin", type=float)
    limit.add_argument("--max-margin-rms", type=float, help="in units of the parity record's RMS difference")
    return parser.parse_args()


def _limit(args: argparse.Namespace) -> float:
    if args.max_margin is not None:
        return float(args.max_margin)
    parity = json.loads((args.engine / "parity.json").read_text(encoding="utf-8"))
    return float(args.max_margin_rms * parity["overall"]["rms"])


def _ask_server(engine: Path, prompts: list[list[int]], num_tokens: int) -> list[list[str]]:
    """The text of each new token, as the server gives it beside its log-probability."""
    server = EngineServer(ServeSettings(engine, port=0, runtime=RuntimeSettings()), Reporter())
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    server.is_ready.wait()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    answers = []
    for prompt in prompts:
        completion = client.completions.create(
            model=engine.resolve().name, prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=1
        )
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None
        answers.append(list(logprobs.tokens))
    server.stop()
    thread.join()
    return answers


def _follow(
    reference: TransformersLogitsModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    tokens: list[str],
) -> tuple[int, float]:
    """(tokens that are the reference's own choice, margin of the first that is not; 0 where all are)."""
    token_ids = list(prompt)
    for index, token in enumerate(tokens):
        (logits,) = reference.score([ScoringRequest(tuple(token_ids), 1)])
        choice = int(logits[0].argmax())
        if tokenizer.decode([choice]) != token:
            return index, _margin(logits[0], tokenizer, token)
        token_ids.append(choice)
    return len(tokens), 0.0


def _margin(logits: torch.Tensor, tokenizer: PreTrainedTokenizerBase, token: str) -> float:
    order = logits.argsort(descending=True)
    for candidate in order.tolist():
        if tokenizer.decode([candidate]) == token:
            return float(logits[order[0]] - logits[candidate])
    raise ValueError(f"no token id has the text {token!r}")


if __name__ == "__main__":
    sys.exit(main())
