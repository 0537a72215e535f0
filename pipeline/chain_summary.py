"""What the whole chain came to: the table at the end of `bitsmith run`, and the document behind `--json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bitsmith.core.digest import canonical_json, sha256_bytes

SUMMARY_NAME = "summary.json"


@dataclass(frozen=True, slots=True)
class Pair:
    """One number before and after."""

    baseline: float
    engine: float


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """verdict None: the recipe has no gate. served: the answer to one real request; "" if none was made."""

    key: str
    verdict: str | None
    report: str
    serve_command: str
    size_bytes: Pair
    perplexity: Pair
    decode_tokens_per_s: Pair
    gigabytes_per_s: Pair
    baseline: str
    engine: str
    served: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summary_key(parts: Mapping[str, Any]) -> str:
    """Digest of what a summary was made from; a summary with another key is measured again."""
    return sha256_bytes(canonical_json(parts))


def read_summary(root: Path, key: str) -> ChainSummary | None:
    """The summary in `root` if it was made from the same things; unreadable ones count as none."""
    try:
        body = json.loads((root / SUMMARY_NAME).read_text(encoding="utf-8"))
        pairs = {name: Pair(**value) for name, value in body.items() if isinstance(value, dict)}
        summary = ChainSummary(**body | pairs)
    except (OSError, ValueError, TypeError):
        return None
    return summary if summary.key == key else None


def write_summary(root: Path, summary: ChainSummary) -> None:
    partial = root / f"{SUMMARY_NAME}.partial"
    partial.write_text(json.dumps(summary.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.rename(root / SUMMARY_NAME)


def summary_table(summary: ChainSummary) -> Table:
    """The last screen: one row for each number, before and after."""
    table = Table(title=None, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("baseline", justify="right")
    table.add_column("engine", justify="right")
    table.add_column("ratio", justify="right")
    for name, pair, shown in (
        ("size", summary.size_bytes, "{:.1f} MB"),
        ("perplexity", summary.perplexity, "{:.3f}"),
        ("decode, one stream", summary.decode_tokens_per_s, "{:.1f} tokens/s"),
        ("weights read", summary.gigabytes_per_s, "{:.1f} GB/s"),
    ):
        scale = 1e-6 if name == "size" else 1.0
        cells = (shown.format(value * scale) for value in (pair.baseline, pair.engine))
        table.add_row(name, *cells, f"{pair.engine / pair.baseline:.2f}")
    return table
