"""Speed of engines side by side: ours and other projects', on the same model, each in its own environment.

    python benchmarks/engine/compare_peers.py PEERS.json --samples FILE.json [--rounds 3] [--cases NAME ...]

PEERS.json names the systems: see `peer_process.py`. Every case is run by every system in turn, round after
round; only one of them works at a time, the others are stopped. Samples are added to FILE.json, so that a
comparison can be taken in several sittings; with --rounds 0 it is only printed. Medians, as Markdown.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_cases import CASE_NAMES, NUM_OUTPUT_TOKENS, REQUESTS_CASE, STEP_CASES, workload
from peer_process import Peer, PeerProcess, Refusal, read_peers, running

Samples = dict[str, Any]  # {"systems": {label: facts}, "seconds": {case: {label: [seconds]}}}


def main() -> None:
    args = _arguments()
    peers = read_peers(args.peers)
    samples: Samples = {"num_threads": args.threads, "systems": {}, "seconds": {}}
    if args.samples.exists():
        samples = json.loads(args.samples.read_text(encoding="utf-8"))
        if samples["num_threads"] != args.threads:
            raise SystemExit(f"{args.samples} is of {samples['num_threads']} threads, not {args.threads}.")
    if args.rounds:
        measure(peers, args, samples)
    print_tables(peers, samples)


def measure(peers: list[Peer], args: argparse.Namespace, samples: Samples) -> None:
    """Samples are written out after every case."""
    with running(peers, args.threads) as processes:
        for peer, process in zip(peers, processes, strict=True):
            samples["systems"][peer.label] = {"version": process.version, "num_bytes": process.num_bytes}
            process.ask(do="steps", num_prompt_tokens=96, num_sequences=2, num_steps=3)  # warms up
        for number in range(args.rounds):
            for case in args.cases:
                for peer, process in zip(peers, processes, strict=True):
                    kept = samples["seconds"].setdefault(case, {}).setdefault(peer.label, [])
                    kept += run_case(process, case)
                args.samples.write_text(json.dumps(samples, indent=1), encoding="utf-8")
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)


def run_case(process: PeerProcess, name: str) -> list[float]:
    """Seconds of each timed step, or of all requests; empty where the system cannot."""
    try:
        if name == REQUESTS_CASE:
            prompts, num_output_tokens = workload()
            return [process.ask(do="requests", prompts=prompts, num_output_tokens=num_output_tokens)]
        case = next(case for case in STEP_CASES if case.name == name)
        request = {
            "num_prompt_tokens": case.num_prompt_tokens,
            "num_sequences": case.num_sequences,
            "num_steps": case.num_steps,
        }
        return [s for _ in range(case.repeats) for s in process.ask(do="steps", **request)]
    except Refusal:
        return []


def rate(samples: Samples, case: str, label: str) -> float | None:
    """Tokens per second, of the median."""
    seconds = samples["seconds"].get(case, {}).get(label)
    if not seconds:
        return None
    num_tokens = {c.name: c.num_tokens for c in STEP_CASES} | {REQUESTS_CASE: NUM_OUTPUT_TOKENS}
    return num_tokens[case] / float(statistics.median(seconds))


def print_tables(peers: Sequence[Peer], samples: Samples) -> None:
    cases = [name for name in CASE_NAMES if name in samples["seconds"]]
    print(f"{samples['num_threads']} threads, medians, tokens/s\n")
    _print_row(["kind", "system", "MB", *cases])
    _print_row(["---"] * (3 + len(cases)))
    for peer in peers:
        facts = samples["systems"][peer.label]
        rates = [rate(samples, case, peer.label) for case in cases]
        cells = [peer.kind, peer.label, f"{facts['num_bytes'] / 1e6:.0f}"]
        _print_row(cells + [f"{r:.1f}" if r else "" for r in rates])
    print("\nratio to the best peer of its kind\n")
    _print_row(["kind", "ours", *cases])
    _print_row(["---"] * (2 + len(cases)))
    for ours in peers:
        if ours.is_ours:
            rivals = [p.label for p in peers if p.kind == ours.kind and not p.is_ours]
            _print_row([ours.kind, ours.label, *(_ratio(samples, c, ours.label, rivals) for c in cases)])
    print("\n" + "\n".join(f"{label}: {facts['version']}" for label, facts in samples["systems"].items()))


def _ratio(samples: Samples, case: str, label: str, rivals: Sequence[str]) -> str:
    rates = {r: value for r in rivals if (value := rate(samples, case, r)) is not None}
    mine = rate(samples, case, label)
    if mine is None or not rates:
        return ""
    best = max(rates, key=lambda name: rates[name])
    return f"{mine / rates[best]:.2f} ({best.split(',')[0]})"


def _print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASE_NAMES, default=list(CASE_NAMES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
