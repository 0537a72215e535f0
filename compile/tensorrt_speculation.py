"""Speculative decoding for TensorRT-LLM: which kinds each flow takes, and how they are written."""

from dataclasses import dataclass
from typing import Any, Literal

from bitsmith.compile.tensorrt_release import Release
from bitsmith.core.errors import Refused

SpeculationKind = Literal["ngram", "draft-target", "eagle3", "lookahead"]
_MAX_DRAFT = 256


@dataclass(frozen=True, slots=True)
class Speculation:
    """max_draft_len: tokens drafted per step. model: the draft's directory, where the kind has one.

    ngram_size: longest matching n-gram (ngram), or the n-gram of lookahead decoding.
    """

    kind: SpeculationKind
    max_draft_len: int = 4
    model: str | None = None
    ngram_size: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_len <= _MAX_DRAFT:
            raise Refused(f"Speculation drafts 1 to {_MAX_DRAFT} tokens, not {self.max_draft_len}.")
        if (self.kind in ("draft-target", "eagle3")) != (self.model is not None):
            need = "needs" if self.model is None else "takes no"
            raise Refused(f"Speculation {self.kind} {need} draft model directory.")


def speculative_config(speculation: Speculation, release: Release) -> dict[str, Any]:
    """`speculative_config` of the PyTorch backend's LLM arguments, and what must stand beside it."""
    kind = speculation.kind
    if kind == "lookahead":
        raise Refused("Lookahead decoding belongs to the engine flow; the PyTorch backend has ngram, eagle3.")
    body: dict[str, Any] = {"max_draft_len": speculation.max_draft_len}
    if kind == "ngram":
        body = {"decoding_type": "NGram", **body, "max_matching_ngram_size": speculation.ngram_size}
    else:
        is_1_2 = (release.major, release.minor) == (1, 2)
        draft_target = "Draft_Target" if is_1_2 else "DraftTarget"
        name = "Eagle3" if kind == "eagle3" else draft_target
        body = {"decoding_type": name, **body, "speculative_model": speculation.model}
    arguments: dict[str, Any] = {"speculative_config": body}
    if kind in ("ngram", "draft-target"):
        arguments["disable_overlap_scheduler"] = True  # these draft on the host, between two steps
    return arguments


def build_flags(speculation: Speculation) -> tuple[str, ...]:
    """Flags of trtllm-build. EAGLE and Medusa need an architecture of their own and are refused."""
    modes = {"lookahead": "lookahead_decoding", "draft-target": "draft_tokens_external"}
    if speculation.kind not in modes:
        raise Refused(
            f"Engines do not take speculation {speculation.kind!r} from this checkpoint; lookahead and "
            "draft-target are possible, or use --target tensorrt-llm-pytorch."
        )
    mode = modes[speculation.kind]
    return ("--speculative_decoding_mode", mode, "--max_draft_len", str(speculation.max_draft_len))
