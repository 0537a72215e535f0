"""`bitsmith serve`: an engine over an OpenAI-compatible HTTP interface, until SIGTERM or Ctrl-C."""

import argparse
import json
import threading
from pathlib import Path

from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.serve.engine_choice import engine_command
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings
from bitsmith.serve.server import EngineServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server, runtime = ServeSettings(Path()), RuntimeSettings()
    parser.add_argument("engine", metavar="ENGINE", type=Path, help="a directory that `compile` wrote")
    parser.add_argument("--host", default=server.host, help=f"address to listen on (default {server.host})")
    parser.add_argument("--port", type=int, default=server.port, help="0: any free one (default %(default)s)")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the engine directory's name")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line; without: no key")
    parser.add_argument("--trust-engine", action="store_true", help="load an engine that was not built here")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: as the engine was compiled")
    parser.add_argument(
        "--speculate", choices=["none", "ngram"], default=runtime.speculate, help="default %(default)s"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", default=runtime.num_speculative_tokens,
        help="drafts of a step at most (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="requests that run at once")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one step")
    parser.add_argument("--kv-cache-bytes", type=int, metavar="N", help="default: from the machine's memory")
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt afresh")
    parser.add_argument(
        "--max-num-waiting", type=int, metavar="N", default=server.max_num_waiting,
        help="requests that may wait; more get 429 (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-timeout", type=float, metavar="SECONDS", default=server.drain_timeout_s,
        help="how long live answers may go on after a stop (default %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    settings = ServeSettings(
        engine_path=args.engine,
        host=args.host,
        port=args.port,
        served_model_name=args.served_model_name,
        api_key_file=args.api_key_file,
        trust_engine=args.trust_engine,
        num_threads=args.num_threads,
        runtime=RuntimeSettings(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_bytes=args.kv_cache_bytes,
            prefix_caching=not args.no_prefix_caching,
            speculate=args.speculate,
            num_speculative_tokens=args.num_speculative_tokens,
        ),
        max_num_waiting=args.max_num_waiting,
        drain_timeout_s=args.drain_timeout,
    )
    server = EngineServer(settings, reporter, engine_command(settings))
    if args.json:
        threading.Thread(target=_print_when_ready, args=(server, settings), daemon=True).start()
    server.run()
    return CommandResult(None)


def _print_when_ready(server: EngineServer, settings: ServeSettings) -> None:
    """A server's document is printed when it can be used, not when it has ended."""
    server.is_ready.wait()
    document = {"url": server.url, "model": settings.model_name, "engine": str(settings.engine_path)}
    print(json.dumps(document), flush=True)
