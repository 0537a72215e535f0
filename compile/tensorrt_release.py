"""Releases of TensorRT-LLM: which of them has which flow and which rules.

Facts come from docs/tensorrt-llm.md; what was established for 0.14 and for the 1.x generation only is kept
apart here. Nothing here looks at the machine.
"""

import re
from dataclasses import dataclass

from bitsmith.core.errors import Refused

_RELEASE = re.compile(r"^v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(rc|dev)(\d+))?$")
_FINAL = 1 << 30  # sorts a release after its own candidates


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """A release of TensorRT-LLM; candidates sort before the release itself."""

    major: int
    minor: int
    patch: int
    candidate: int = _FINAL

    def __str__(self) -> str:
        text = f"{self.major}.{self.minor}.{self.patch}"
        return text if self.candidate == _FINAL else f"{text}rc{self.candidate}"

    @property
    def has_engine_flow(self) -> bool:
        """Has `trtllm-build` and the C++ engine runtime."""
        return FIRST_ENGINE <= self <= LAST_ENGINE

    @property
    def has_pytorch_flow(self) -> bool:
        return self >= FIRST_PYTORCH

    @property
    def is_legacy(self) -> bool:
        """Older than 1.0: the rules read in 0.14 apply."""
        return self < FIRST_PYTORCH

    @property
    def is_meta_rowwise(self) -> bool:
        """FP8 rowwise quantizes only the MLPs between the first and the last layer (read in 0.14)."""
        return self < Release(0, 15, 0, 0)


FIRST_ENGINE = Release(0, 14, 0)
LAST_ENGINE = Release(1, 2, 1)
FIRST_PYTORCH = Release(1, 0, 0, 0)
DEFAULT_RELEASE = LAST_ENGINE


def parse_release(text: str) -> Release:
    """`0.14`, `1.2.1`, `1.3.0rc21` -> Release. Raises Refused for anything else.

    >>> str(parse_release("1.2"))
    '1.2.0'
    >>> parse_release("1.3.0rc21") < parse_release("1.3.0")
    True
    """
    match = _RELEASE.match(text.strip())
    if match is None:
        raise Refused(f"TensorRT-LLM version {text!r} is not understood; write for example 1.2.1 or 0.21.0.")
    major, minor, patch, _, candidate = match.groups()
    number = _FINAL if candidate is None else int(candidate)
    return Release(int(major), int(minor), int(patch or 0), number)


def require_engine_release(text: str) -> Release:
    """A release whose `trtllm-build` can be used. Raises Refused naming the flow that a newer one needs."""
    release = parse_release(text)
    if release > LAST_ENGINE:
        raise Refused(
            f"TensorRT-LLM {release} is newer than {LAST_ENGINE}, the last stable release with trtllm-build "
            "(the engine flow was removed during the 1.3.0 candidates). Use --target tensorrt-llm-pytorch."
        )
    if release < FIRST_ENGINE:
        raise Refused(f"TensorRT-LLM {release} is older than {FIRST_ENGINE}; its formats are not known here.")
    return release


def require_pytorch_release(text: str) -> Release:
    release = parse_release(text)
    if not release.has_pytorch_flow:
        raise Refused(
            f"TensorRT-LLM {release} has no PyTorch backend of this kind (1.0 and newer have). "
            "Use --target tensorrt-llm, or a newer --trtllm-version."
        )
    return release
