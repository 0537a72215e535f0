"""`bitsmith inspect`: what an artifact is, for a person or a program; with --verify, whether it is intact."""

import argparse
import dataclasses
import json
from pathlib import Path

from bitsmith.compile.kv_cache_row import KVCacheRow
from bitsmith.compile.tensorrt_inspect import check_against
from bitsmith.core.errors import EXIT_DONE, EXIT_REFUSED, Refused
from bitsmith.core.manifest import Manifest, read_manifest, verify_files
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.quantize.bit_planning import describe_bit_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="a checkpoint, an engine or a report")
    parser.add_argument("--verify", action="store_true", help="compare every file with its SHA-256")
    parser.add_argument(
        "--against",
        metavar="TARGET[=VERSION]",
        help="check any checkpoint against what tensorrt-llm or tensorrt-llm-pytorch accepts",
    )
    parser.add_argument("--source", metavar="MODEL", help="with --against: compare numbers with this model")
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    if args.accept_terms and args.source is None:
        raise Refused("--accept-terms applies to --source, which is not given.")
    if args.against is not None:
        return _check_against(args, reporter)
    if args.source is not None:
        raise Refused("--source applies to --against, which is not given.")
    manifest = read_manifest(args.directory)
    if args.verify:
        verify_files(args.directory, manifest)
    size_bytes = sum((args.directory / name).stat().st_size for name in manifest.files)
    for line in _describe(manifest, args.directory, size_bytes):
        reporter.say(line)
    if args.verify:
        reporter.say(f"verified: {len(manifest.files)} files match their SHA-256")
    document = dataclasses.asdict(manifest) | {
        "content_digest": manifest.content_digest,
        "size_bytes": size_bytes,
        "verified": args.verify,
    }
    return CommandResult(document)


def _check_against(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    """A foreign checkpoint has no manifest, so that none is read unless --verify asks for it."""
    if args.verify:
        verify_files(args.directory, read_manifest(args.directory))
    source: Path | None = None
    if args.source is not None:
        source = resolve_model(args.source, reporter=reporter, accept_terms=args.accept_terms).path
    report = check_against(args.directory, args.against, source)
    for line in report.lines():
        reporter.say(line)
    return CommandResult(report.to_json(), EXIT_DONE if report.is_accepted else EXIT_REFUSED)


def _describe(manifest: Manifest, directory: Path, size_bytes: int) -> list[str]:
    lines = [
        f"{directory}: {manifest.kind}, {size_bytes / 1e6:.1f} MB in {len(manifest.files)} files",
        f"made {manifest.made_at} on {manifest.made_on}",
        f"content digest {manifest.content_digest}",
        f"stage key      {manifest.stage_key}",
    ]
    lines += [f"parent {role}: {digest}" for role, digest in manifest.parents.items()]
    lines += [f"{key}: {_compact(value)}" for key, value in manifest.config.items()]
    lines += [f"version of {tool}: {version}" for tool, version in manifest.versions.items()]
    if manifest.details.get("bit_plan") is not None:
        lines += describe_bit_plan(manifest.details["bit_plan"])
    rows = (KVCacheRow.from_json(row) for row in manifest.details.get("kv_caches", ()))
    lines += [row.describe() for row in rows]
    lines += [
        f"not as asked: {fallback.where}: asked {fallback.asked}, did {fallback.done} ({fallback.reason})"
        for fallback in manifest.fallbacks
    ]
    return lines


def _compact(value: object, limit: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]}… (--json shows all)"
