"""Engines with 8-bit weights and inputs compiled for real, whatever the numbers are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine
from bitsmith.compile.job import CompileJob, compile_engine, plan_compile
from bitsmith.core.progress import Reporter

ModelMaker = Callable[..., Path]


def _logits(engine: Engine, *lengths: int) -> Tensor:
    """Each request has the first tokens of the same list and blocks of its own."""
    token_ids = torch.randint(0, 301, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    steps, first = [], 0
    for length in lengths:
        steps.append(RequestStep(token_ids[:length], 0, range(first, first + num_blocks_for(length)), length))
        first += num_blocks_for(length)
    return engine.execute(build_model_input(steps), engine.new_kv_cache(20))


@pytest.mark.usefixtures("_own_trust_list")
@pytest.mark.parametrize("scheme", [("w8a8-fp8",), ("w8a8-int8", "llama", "token")], ids=["fp8", "int8"])
def test_compiled_for_real_equals_eager_and_batched_equals_alone(
    scheme: tuple[str, ...], make_fp8: ModelMaker, tmp_path: Path, reporter: Reporter
) -> None:
    job = CompileJob(make_fp8(*scheme), tmp_path / "engine", max_batch_size=4, max_num_tokens=64)
    compile_engine(job, plan_compile(job), reporter)
    compiled, eager = Engine.load(job.out), Engine.load(job.out, enforce_eager=True)
    together = torch.split(_logits(compiled, 5, 1, 9), [5, 1, 9])
    for rows, length in zip(together, (5, 1, 9), strict=True):
        assert torch.equal(_logits(compiled, length), rows)
    expected = _logits(eager, 40)
    # Norms are summed in another order: an input at a rounding boundary may take the other side.
    assert float((_logits(compiled, 40) - expected).abs().max()) < 2e-2 * float(expected.abs().max())
