"""Writing the cache, and the e4m3 and int8 codecs on the way in and out."""

import math
from typing import Any

import pytest
import torch

from bitsmith.ops import reference

CACHE_TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def stored_as_e4m3(ops: Any, values: torch.Tensor) -> torch.Tensor:
    """[n] fp32 -> the n bytes that the cache gets."""
    rows = values.reshape(-1, 1, 8)
    caches = [torch.zeros(-(-len(rows) // 16), 1, 16, 8).to(torch.float8_e4m3fn) for _ in range(2)]
    ops.write_kv_cache(rows, rows, caches[0], caches[1], torch.arange(len(rows)), 1.0, 1.0)
    return bits(caches[0]).flatten()[: values.numel()]


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=str)
def test_cells_equal_reference(form: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for num_tokens in (0, 1, 33):
        states = torch.randn(num_tokens, 5 * 24 * 2).view(-1, 2, 5, 24) * 10
        key, value = states[:, 0], states[:, 1]  # not contiguous
        slots = torch.randperm(6 * 16)[:num_tokens]
        caches = [(torch.randn(6, 5, 16, 24) * 30).to(dtype) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        form.write_kv_cache(key, value, caches[0], caches[1], slots, 0.37, 2.5)
        reference.write_kv_cache(key, expected[0], slots, 0.37)
        reference.write_kv_cache(value, expected[1], slots, 2.5)
        assert torch.equal(bits(caches[0]), bits(expected[0]))
        assert torch.equal(bits(caches[1]), bits(expected[1]))


def test_every_e4m3_value_is_stored_as_itself(form: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    padded = torch.cat((finite, torch.zeros(2, dtype=torch.uint8)))
    values = padded.view(torch.float8_e4m3fn).float()
    assert torch.equal(stored_as_e4m3(form, values), padded)


def test_e4m3_rounds_to_nearest_even_and_saturates(form: Any) -> None:
    torch.manual_seed(0)
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2
    near_ties = [torch.nextafter(ties, torch.tensor(to)) for to in (0.0, 1e9)]
    spread = torch.randn(40000) * torch.exp(torch.randn(40000) * 4)
    inputs = torch.cat((ties, *near_ties, spread))
    inputs = torch.cat((inputs, -inputs, torch.zeros(-2 * len(inputs) % 8)))
    expected = bits(inputs.clamp(-448, 448).to(torch.float8_e4m3fn))
    assert torch.equal(stored_as_e4m3(form, inputs), expected)


def stored_as_int8(ops: Any, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """[n] fp32, n a multiple of 8 -> int8 [n]."""
    rows = values.reshape(-1, 1, 8)
    caches = [torch.zeros(-(-len(rows) // 16), 1, 16, 8, dtype=torch.int8) for _ in range(2)]
    ops.write_kv_cache(rows, rows, caches[0], caches[1], torch.arange(len(rows)), scale, scale)
    assert torch.equal(caches[0], caches[1])
    return caches[0].flatten()[: values.numel()]


def test_int8_rounds_to_nearest_even_and_saturates(form: Any) -> None:
    torch.manual_seed(0)
    ties = torch.arange(-130, 130) + 0.5
    near_ties = [torch.nextafter(ties, torch.tensor(to)) for to in (-1e9, 1e9)]
    spread = torch.randn(40000) * torch.exp(torch.randn(40000) * 4)
    inputs = torch.cat((ties, *near_ties, spread))
    inputs = torch.cat((inputs, torch.zeros(-len(inputs) % 8)))
    expected = inputs.round().clamp(-127, 127).to(torch.int8)
    assert torch.equal(stored_as_int8(form, inputs), expected)
    far = torch.tensor([math.inf, -math.inf, math.nan, 127.6, -127.6, 1e30, -1e30, -0.0])
    assert stored_as_int8(form, far).tolist() == [127, -127, 127, 127, -127, 127, -127, 0]


def test_the_int8_error_is_at_most_half_a_step(form: Any) -> None:
    """With scale = amax / 127 nothing saturates, and what is read back is within scale / 2."""
    torch.manual_seed(1)
    values = torch.randn(4096) * 3
    scale = float(values.abs().max()) / 127
    read = stored_as_int8(form, values, scale).float() * scale
    assert float((read - values).abs().max()) <= scale * 0.5001


def test_no_byte_is_a_nan(form: Any) -> None:
    inputs = torch.tensor([math.inf, -math.inf, math.nan, 449.0, -1e30, 480.0, 448.0, -448.0])
    stored = stored_as_e4m3(form, inputs).view(torch.float8_e4m3fn).float()
    assert stored.abs().tolist() == [448.0] * 8


def test_every_byte_is_read_as_torch_reads_it(form: Any) -> None:
    """One visible position: attention returns that position's value."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    value_cache = torch.zeros(1, 1, 16, 256, dtype=torch.uint8)
    value_cache[0, 0, 0, : len(finite)] = finite
    value_cache = value_cache.view(torch.float8_e4m3fn)
    assert torch.equal(read_back(form, value_cache), value_cache[0, 0, 0].float())
    integers = torch.zeros(1, 1, 16, 256, dtype=torch.int8)
    integers[0, 0, 0] = codes.view(torch.int8)
    assert torch.equal(read_back(form, integers), integers[0, 0, 0].float())


def read_back(ops: Any, value_cache: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = ops.paged_attention(
        torch.randn(1, 1, 256),
        value_cache,
        value_cache,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        0.1,
        1.0,
        1.0,
        0,
        0.0,
    )
    return output.flatten()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"slot_mapping": torch.tensor([0, 32])},
            IndexError,
            "slot 32 of token 1 is outside the cache of 2 blocks",
        ),
        ({"slot_mapping": torch.tensor([-1, 0])}, IndexError, "slot -1"),
        ({"slot_mapping": torch.tensor([0, 1]).int()}, ValueError, "slot_mapping must be contiguous int64"),
        ({"key": torch.randn(2, 3, 4)}, ValueError, "key is .* need"),
        ({"value": torch.randn(3, 2, 4)}, ValueError, "value is .* need"),
        ({"key_scale": 0.0}, ValueError, "scales must be positive"),
        ({"key_cache": torch.zeros(2, 2, 8, 4)}, ValueError, "key_cache must be"),
        ({"value_cache": torch.zeros(3, 2, 16, 4)}, ValueError, "one shape and dtype"),
        (
            {"key_cache": torch.zeros(2, 2, 16, 4).half(), "value_cache": torch.zeros(2, 2, 16, 4).half()},
            ValueError,
            "must be float32, bfloat16, float8_e4m3fn or int8",
        ),
    ],
)
def test_wrong_arguments_are_named(
    ops: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "key": torch.randn(2, 2, 4),
        "value": torch.randn(2, 2, 4),
        "key_cache": torch.zeros(2, 2, 16, 4),
        "value_cache": torch.zeros(2, 2, 16, 4),
        "slot_mapping": torch.tensor([0, 1]),
        "key_scale": 1.0,
        "value_scale": 1.0,
    }
    with pytest.raises(error, match=message):
        ops.write_kv_cache(**(arguments | change))
