"""From the decoder module to a compiled package: torch.export, then AOTInductor, weights left outside.

Pointwise code between the operators is compiled without threads of its own: a decode step has some 150
such loops, each far shorter than the barrier that would end it. The operators bring the parallelism.
"""

import contextlib
import dataclasses
import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.batch import RequestStep, build_model_input
from bitsmith.compile.decoder import Decoder
from bitsmith.compile.decoder_plan import DecoderPlan
from bitsmith.core.errors import WorkFailed
from bitsmith.core.model_input import BLOCK_SIZE

_INDUCTOR_OPTIONS: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": None,
    # Rejects nothing at run time: sizes 0 and 1 are proved to work by tests instead of being specialised.
    "aot_inductor.check_lowerbound": False,
    "cpp.threads": 1,
    # A value used by several consumers is stored, not computed in each: cosines of every position
    # would otherwise be computed again in every layer and head.
    "realize_reads_threshold": 0,
}
_NUM_EXAMPLE_BLOCKS = 7


def compile_package(decoder: Decoder, plan: DecoderPlan, path: Path) -> None:
    """Write the compiled package of this decoder to `path` (ends in .pt2). Raises WorkFailed."""
    inputs, shapes = _example_inputs(plan), _dynamic_shapes(plan)
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(decoder, inputs, dynamic_shapes=shapes, strict=False)
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=_INDUCTOR_OPTIONS
            )
    except Exception as error:  # the compiler raises whatever its passes raise
        raise WorkFailed(f"The native compiler failed: {type(error).__name__}: {error}") from error


def _example_inputs(plan: DecoderPlan) -> tuple[Any, ...]:
    """Inputs with every dynamic size different and at least 2, so that none is taken for a constant."""
    config = plan.config
    steps = [
        RequestStep([1, 2, 3, 4], 14, [0, 1], 1),
        RequestStep([5, 6, 7], 0, [2], 1),
        RequestStep([8, 9, 10, 11], 40, [3, 4, 5], 3),
    ]
    model_input = build_model_input(steps)
    step_tensors = [getattr(model_input, field.name) for field in dataclasses.fields(model_input)]
    shape = (_NUM_EXAMPLE_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_size)

    def caches() -> list[Tensor]:
        return [torch.zeros(shape, dtype=plan.kv_cache_dtype) for _ in range(config.num_layers)]

    return (*step_tensors, caches(), caches())


def _dynamic_shapes(plan: DecoderPlan) -> tuple[Any, ...]:
    num_tokens, num_requests = torch.export.Dim("num_tokens"), torch.export.Dim("num_requests")
    max_blocks, num_logits = torch.export.Dim("max_blocks"), torch.export.Dim("num_logits")
    num_blocks = torch.export.Dim("num_blocks")
    caches = [{0: num_blocks} for _ in range(plan.config.num_layers)]
    return (
        {0: num_tokens},
        {0: num_tokens},
        {0: num_tokens},
        {0: num_requests, 1: max_blocks},
        {0: num_requests + 1},
        {0: num_requests},
        {0: num_logits},
        caches,
        caches,
    )


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the compiler's remarks off the terminal; what matters comes as an exception."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(previous)
