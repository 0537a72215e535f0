"""Calibration settings, and the token windows they come to for a model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bitsmith.core.digest import sha256_bytes
from bitsmith.core.errors import Refused
from bitsmith.core.text_source import TokenWindows, load_text, pack_windows
from bitsmith.core.tokenizer import load_tokenizer

MAX_SEED = 2**63 - 1  # what torch's generator takes


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """source: "builtin", a .jsonl or .txt file, or hf:DATASET. num_samples rows of seq_len tokens each."""

    source: str = "builtin"
    num_samples: int = 128
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("num_samples", self.num_samples), ("seq_len", self.seq_len)):
            if value < 1:
                raise Refused(f"calibration.{name} is {value}; it must be at least 1.")
        if not 0 <= self.seed <= MAX_SEED:
            raise Refused(f"calibration.seed is {self.seed}; it must lie between 0 and {MAX_SEED}.")


def load_windows(settings: CalibrationSettings, model_path: Path) -> TokenWindows:
    """Raises Refused when the text gives not even one window."""
    return pack_windows(
        load_text(settings.source, "calibration"),
        load_tokenizer(model_path),
        num_windows=settings.num_samples,
        seq_len=settings.seq_len,
        seed=settings.seed,
    )


def token_digest(token_ids: torch.Tensor) -> str:
    """SHA-256 over the ids as int64: what calibration data a result rests on."""
    return sha256_bytes(token_ids.to(torch.int64).contiguous().numpy().tobytes())
