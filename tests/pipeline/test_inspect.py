"""`inspect`: what a finished artifact says of itself, on the terminal and in its document."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bitsmith.compile.kv_cache_row import DecodeQuality, KVCacheRow
from bitsmith.core.artifact import ArtifactSpec, write_artifact
from bitsmith.pipeline.main import main


def test_the_kv_cache_types_of_an_engine_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality = DecodeQuality(252, 8.25, -0.0011, 0.0113, 0.0106, 0.0126)
    rows = [
        KVCacheRow("fp8", "no calibrated scales", 11520.0, None),
        KVCacheRow("int8", "calibrated scales", 11520.0, quality),
    ]
    spec = ArtifactSpec(tmp_path / "engine", "engine", "key", {}, {}, {})
    with write_artifact(spec) as pending:
        (pending.partial / "file").write_text("x")
        pending.details = {"kv_caches": [asdict(row) for row in rows]}
    assert main(["inspect", str(tmp_path / "engine"), "--json"]) == 0
    shown = capsys.readouterr()
    said = " ".join(shown.err.split())
    assert "KV cache fp8 (no calibrated scales): 11,520 bytes a token, quality not measured" in said
    assert "perplexity 8.250 (-0.11% ± 1.13% against bf16), KL 1.06e-02 to transformers" in said
    assert json.loads(shown.out)["details"]["kv_caches"][1]["quality"]["num_rows"] == 252
