"""`bitsmith generate`: one answer on the terminal, streamed."""

import argparse
import sys
import time
from pathlib import Path

from bitsmith.compile.engine import Engine, leave_threads_to_operators
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.sampling import SamplingParams
from bitsmith.core.tokenizer import load_tokenizer, render_chat
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.serve.generator import EngineGenerator
from bitsmith.serve.serve_settings import RuntimeSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = SamplingParams()
    parser.add_argument("engine", metavar="ENGINE", type=Path, help="a directory that `compile` wrote")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, no chat template")
    parser.add_argument("--max-tokens", type=int, default=defaults.max_tokens, help="default %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, help="0, the default, is greedy"
    )
    parser.add_argument("--seed", type=int, help="for a temperature above 0")
    parser.add_argument("--speculate", choices=["none", "ngram"], default="none", help="default %(default)s")
    parser.add_argument("--trust-engine", action="store_true", help="load an engine that was not built here")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    if args.max_tokens < 1 or not 0 <= args.temperature <= 100:
        raise Refused(
            f"--max-tokens {args.max_tokens} must be at least 1 and --temperature {args.temperature} "
            "between 0 and 100."
        )
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        raise Refused("--prompt is not valid UTF-8.") from None
    engine = Engine.load(args.engine, trust=args.trust_engine)
    leave_threads_to_operators()
    tokenizer = load_tokenizer(engine.tokenizer_path)
    is_chat = bool(tokenizer.chat_template) and not args.raw
    prompt = (
        render_chat(tokenizer, [{"role": "user", "content": args.prompt}])
        if is_chat
        else list(tokenizer(args.prompt).input_ids)
    )
    longest = engine.limits.max_model_len
    if len(prompt) + args.max_tokens > longest:
        raise Refused(
            f"--max-tokens {args.max_tokens} and a prompt of {len(prompt)} tokens come to more than the "
            f"engine's context of {longest}. Ask for at most {max(0, longest - len(prompt))} tokens."
        )
    settings = RuntimeSettings(max_num_seqs=1, speculate=args.speculate)
    generator = EngineGenerator(engine, tokenizer, engine.tokenizer_path, settings)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    start = time.perf_counter()
    pieces: list[str] = []
    num_tokens, finish_reason = 0, None
    for delta in generator.stream(prompt, params):
        pieces.append(delta.text)
        num_tokens += len(delta.token_ids)
        finish_reason = delta.finish_reason
        if not args.json:
            print(delta.text, end="", flush=True, file=sys.stdout)
    if not args.json:
        print()
    seconds = time.perf_counter() - start
    reporter.say(f"{num_tokens} tokens in {seconds:.2f} s ({engine.arithmetic}); ended by {finish_reason}")
    return CommandResult({"text": "".join(pieces), "num_tokens": num_tokens, "finish_reason": finish_reason})
