"""The compiled engine equals the module it was compiled from, for every size of a step."""

import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine
from bitsmith.compile.kv_cache import KVCache
from bitsmith.core.errors import Refused
from bitsmith.core.model_input import ModelInput

pytestmark = pytest.mark.usefixtures("_own_trust_list")


@pytest.fixture(scope="module", params=["dense", "quantized"])
def engines(request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """The same engine compiled and eager."""
    path: Path = request.getfixturevalue(f"{request.param}_engine_path")
    return Engine.load(path), Engine.load(path, enforce_eager=True)


def _token_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 301, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def _prompts(lengths: Sequence[int]) -> list[RequestStep]:
    steps, first_block = [], 0
    for index, length in enumerate(lengths):
        blocks = range(first_block, first_block + num_blocks_for(length))
        steps.append(RequestStep(_token_ids(length, index), 0, blocks, length))
        first_block += len(blocks)
    return steps


def _run(engine: Engine, steps: Sequence[RequestStep], kv_cache: KVCache | None = None) -> Tensor:
    return engine.execute(build_model_input(steps), kv_cache or engine.new_kv_cache(20))


@pytest.mark.parametrize("lengths", [[1], [2], [16], [17], [40], [1, 1], [5, 1, 9], [1, 30, 2, 1]])
def test_compiled_equals_eager(engines: tuple[Engine, Engine], lengths: list[int]) -> None:
    compiled, eager = engines
    steps = _prompts(lengths)
    actual, expected = _run(compiled, steps), _run(eager, steps)
    # Norms are summed in another order: an int8 or fp8 value at a rounding boundary may take the other side.
    is_rounding = compiled.plan.kv_cache == "fp8"
    limit = (1e-2 if is_rounding else 2e-5) * float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= limit


def test_one_token_and_one_request_are_rows_of_a_larger_batch(engines: tuple[Engine, Engine]) -> None:
    """Sizes 0 and 1 are not specialised, and a row's result does not depend on its company."""
    compiled, _ = engines
    steps = _prompts([5, 1, 9])
    together = torch.split(_run(compiled, steps), [5, 1, 9])
    for step, rows in zip(steps, together, strict=True):
        assert torch.equal(_run(compiled, [step]), rows)


def test_no_logits_and_no_tokens(engines: tuple[Engine, Engine]) -> None:
    compiled, _ = engines
    kv_cache = compiled.new_kv_cache(4)
    (step,) = _prompts([7])
    assert _run(compiled, [dataclasses.replace(step, num_logits=0)], kv_cache).shape == (0, 301)
    follower = RequestStep(_token_ids(1), 7, step.block_ids, 1)
    decoded = _run(compiled, [follower], kv_cache)  # the cache was filled although no logits were asked for
    whole = RequestStep([*step.token_ids, *follower.token_ids], 0, step.block_ids, 1)
    assert torch.equal(decoded, _run(compiled, [whole]))
    empty = build_model_input([])
    assert compiled.execute(empty, kv_cache).shape == (0, 301)


def test_chunks_and_scattered_blocks_change_nothing(engines: tuple[Engine, Engine]) -> None:
    compiled, _ = engines
    (step,) = _prompts([40])
    kv_cache = compiled.new_kv_cache(9)
    pieces = []
    for start, end in ((0, 3), (3, 20), (20, 21), (21, 40)):
        piece = RequestStep(step.token_ids[start:end], start, [8, 0, 5], end - start)
        pieces.append(_run(compiled, [piece], kv_cache))
    assert torch.equal(torch.cat(pieces), _run(compiled, [step]))


def test_a_step_writes_its_slots_and_allocates_nothing_of_the_caches_size(
    engines: tuple[Engine, Engine],
) -> None:
    compiled, _ = engines
    _run(compiled, _prompts([4]))
    num_blocks = (256 << 20) // (16 * compiled.kv_bytes_per_token)
    kv_cache = compiled.new_kv_cache(num_blocks)  # untouched zeros take no memory; a copy of them would
    addresses = [tensor.data_ptr() for tensor in (*kv_cache.keys, *kv_cache.values)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = RequestStep(_token_ids(4), 0, [num_blocks - 1], 1)
    _run(compiled, [step], kv_cache)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown_bytes < kv_cache.num_bytes / 16
    assert [tensor.data_ptr() for tensor in (*kv_cache.keys, *kv_cache.values)] == addresses
    for tensor in (*kv_cache.keys, *kv_cache.values):
        written = tensor[num_blocks - 1].float()
        assert bool(written[:, :4].any())
        assert not bool(written[:, 4:].any())


def test_two_caches_do_not_meet(engines: tuple[Engine, Engine]) -> None:
    compiled, _ = engines
    first, second = compiled.new_kv_cache(2), compiled.new_kv_cache(2)
    (step,) = _prompts([9])
    expected = _run(compiled, [step], first)
    _run(compiled, [RequestStep(_token_ids(9, 5), 0, step.block_ids, 0)], second)
    assert torch.equal(_run(compiled, [step], first), expected)


def test_limits_are_applied(dense_engine_path: Path) -> None:
    engine = Engine.load(dense_engine_path)
    assert (engine.max_batch_size, engine.max_num_tokens, engine.max_model_len) == (4, 64, 256)
    assert _run(engine, _prompts([1] * 4)).shape == (4, 301)
    with pytest.raises(Refused, match="5 requests; the engine was compiled for at most 4"):
        _run(engine, _prompts([1] * 5))
    assert _run(engine, _prompts([64])).shape == (64, 301)
    with pytest.raises(Refused, match=r"65 tokens; .* at most 64"):
        _run(engine, _prompts([65]))
    last = RequestStep([1], 255, range(16), 1)
    assert _run(engine, [last]).shape == (1, 301)
    with pytest.raises(Refused, match="257 tokens in one request"):
        _run(engine, [RequestStep([1], 256, range(17), 1)])


def _damaged(model_input: ModelInput, **changes: Tensor) -> ModelInput:
    return dataclasses.replace(model_input, **changes)


def test_bad_indices_raise_and_the_engine_lives_on(engines: tuple[Engine, Engine]) -> None:
    compiled, _ = engines
    steps = _prompts([3])
    good = build_model_input(steps)
    kv_cache = compiled.new_kv_cache(2)
    expected = compiled.execute(good, kv_cache)
    for bad in (
        _damaged(good, slot_mapping=torch.tensor([0, 1, 10_000])),
        _damaged(good, block_table=torch.tensor([[99]], dtype=torch.int32)),
        _damaged(good, token_ids=torch.tensor([0, 1, 301])),
        _damaged(good, logits_indices=torch.tensor([3])),
    ):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            compiled.execute(bad, kv_cache)
    assert torch.equal(compiled.execute(good, kv_cache), expected)


_THREADS_SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from bitsmith.compile.batch import RequestStep, build_model_input
from bitsmith.compile.engine import Engine
engine = Engine.load(Path(sys.argv[1]), trust=True, num_threads=int(sys.argv[2]))
engine.allocate_kv_cache(20)
count = lambda: len(os.listdir("/proc/self/task"))
def step():
    engine.execute(build_model_input([RequestStep(list(range(64)), 0, range(4), 64)]))
before = count()
for _ in range(5):
    step()
maps = Path("/proc/self/maps").read_text().splitlines()
runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}
print(json.dumps([torch.get_num_threads(), count() - before, len(runtimes)]))
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_thread_count_is_obeyed_by_one_runtime(dense_engine_path: Path, num_threads: int) -> None:
    command = [sys.executable, "-c", _THREADS_SCRIPT, str(dense_engine_path), str(num_threads)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch_threads, new_threads, num_runtimes = json.loads(output)
    assert torch_threads == num_threads
    assert new_threads <= num_threads - 1
    assert num_runtimes == 1


def test_weights_are_mapped_and_not_copied(quantized_engine_path: Path) -> None:
    engine = Engine.load(quantized_engine_path)
    assert engine.weight_bytes_per_token > 0
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(quantized_engine_path / "weights-00001.safetensors") in mapped
