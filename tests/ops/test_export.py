"""The operators under torch.export and inside an AOTInductor package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitsmith.ops.packing import pack_quantized

HEADS, HEAD_SIZE, HIDDEN = 4, 16, 64
NUM_BLOCKS = 9


class Layer(nn.Module):
    """Every operator once, with something to fuse between them."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-8, 8, (3 * HIDDEN, HIDDEN), dtype=torch.int8)
        packed = pack_quantized(values, torch.rand(3 * HIDDEN, 2) * 0.1, None, 32, 4)
        self.register_buffer("weight", packed.weight)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("out_weight", torch.randn(HIDDEN, HIDDEN).bfloat16())

    def forward(
        self,
        x: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        table: Tensor,
        starts: Tensor,
        lens: Tensor,
    ) -> Tensor:
        ops: Any = torch.ops.bitsmith
        qkv = ops.linear_quantized(x, self.weight, self.scale, None, None, HIDDEN, 3 * HIDDEN, 32, 4, 2)
        query, key, value = (t.reshape(-1, HEADS, HEAD_SIZE) for t in qkv.split(HIDDEN, 1))
        ops.write_kv_cache(key, value, key_cache, value_cache, slots, 0.5, 0.5)
        mixed = ops.paged_attention(
            query * 1.5, key_cache, value_cache, table, starts, lens, 0.25, 0.5, 0.5, 0, 0.0
        )
        hidden = nn.functional.silu(mixed.reshape(-1, HIDDEN))
        result: Tensor = ops.linear_dense(hidden, self.out_weight, None, 1) + x
        return result


def inputs(num_tokens: int) -> tuple[Tensor, ...]:
    """Two requests over blocks 3, 1 and 2: all the tokens but one, and one token."""
    first = max(num_tokens - 1, 0)
    caches = [torch.zeros(NUM_BLOCKS, HEADS, 16, HEAD_SIZE).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = [(3 if t < 16 else 1) * 16 + t % 16 for t in range(first)] + [32] * min(num_tokens, 1)
    return (
        torch.randn(num_tokens, HIDDEN),
        *caches,
        torch.tensor(slots).long(),
        torch.tensor([[3, 1], [2, 0]]).int(),
        torch.tensor([0, first, num_tokens]).int(),
        torch.tensor([first, 1]).int(),
    )


@pytest.fixture(scope="module")
def package(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layer, Any]:
    layer = Layer()
    tokens = torch.export.Dim("num_tokens", min=0, max=4096)
    blocks = torch.export.Dim("num_blocks")
    shapes = ({0: tokens}, {0: blocks}, {0: blocks}, {0: tokens}, None, None, None)
    exported = torch.export.export(layer, inputs(5), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("package") / "layer.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    return layer, torch._inductor.aoti_load_package(str(path))


@pytest.mark.parametrize("num_tokens", [20, 2, 1, 0])
def test_package_equals_eager_and_writes_the_caches_it_was_given(
    package: tuple[Layer, Any], two_threads: None, num_tokens: int
) -> None:
    layer, compiled = package
    given = inputs(num_tokens)
    copies = tuple(t.clone() for t in given)
    before = [cache.data_ptr() for cache in given[1:3]]
    result, expected = compiled(*given), layer(*copies)
    assert torch.equal(result, expected)
    assert [cache.data_ptr() for cache in given[1:3]] == before
    for cache, copy in zip(given[1:3], copies[1:3], strict=True):
        assert torch.equal(cache.view(torch.uint8), copy.view(torch.uint8))
        assert (cache.float().abs().sum() > 0) == (num_tokens > 0)


def test_a_step_allocates_nothing_of_the_caches_size(package: tuple[Layer, Any]) -> None:
    _, compiled = package
    given = list(inputs(2))
    for i in (1, 2):
        given[i] = torch.zeros(4000, HEADS, 16, HEAD_SIZE).to(torch.float8_e4m3fn)  # 4 MB each
    compiled(*given)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(profile_memory=True, activities=[cpu]) as profile:
        compiled(*given)
    allocated = [event.cpu_memory_usage for event in profile.events() if event.name == "[memory]"]
    largest = max((int(size) for size in allocated), default=0)
    assert 0 < largest < 1 << 20


def test_fakes_have_the_shapes_and_strides_of_the_operators(ops: Any) -> None:
    x, *rest = inputs(5)
    packed = pack_quantized(torch.zeros(24, HIDDEN, dtype=torch.int8), torch.ones(24, 1), None, HIDDEN, 8)
    arguments = (packed.weight, packed.scale, None, None, HIDDEN, 24, HIDDEN, 8, 0)
    torch.library.opcheck(ops.linear_quantized.default, (x, *arguments))
    torch.library.opcheck(ops.linear_dense.default, (x, torch.randn(7, HIDDEN), torch.randn(7), 0))
    states = torch.randn(5, HEADS, HEAD_SIZE)
    caches = [torch.zeros(NUM_BLOCKS, HEADS, 16, HEAD_SIZE) for _ in range(2)]
    torch.library.opcheck(ops.write_kv_cache.default, (states, states, *caches, rest[2], 1.0, 1.0))
    query = torch.randn(HEADS, 5, HEAD_SIZE).transpose(0, 1)
    settings = (0.25, 1.0, 1.0, 0, 0.0)
    torch.library.opcheck(ops.paged_attention.default, (query, *caches, *rest[3:], *settings))
    torch.library.opcheck(ops.gated_activation.default, (torch.randn(5, 2 * HIDDEN), False))
