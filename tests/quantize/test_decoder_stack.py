"""Layers one at a time give what the whole model gives, for every supported architecture."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.quantize.decoder_stack import DecoderStack, cache_argument
from bitsmith.quantize.kv_scales import KV_GRID_END, KVObserver
from bitsmith.quantize.layer_runner import LayerRunner
from bitsmith.quantize.layer_stages import Block, find_stages

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
LINEARS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]


def token_ids(rows: int = 2, columns: int = 24) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layer_by_layer_equals_the_whole_model(architecture: str, make_model: Callable[..., Path]) -> None:
    path = make_model(architecture)
    form = "eager" if architecture == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=form)
    with torch.no_grad():
        expected = model.model(token_ids(), output_hidden_states=True).hidden_states
    stack = DecoderStack(CheckpointReader(path))
    stack.fill_embedding()
    calls = stack.layer_calls(token_ids())
    stack.release_embedding()
    hidden = calls.hidden_states
    for index in range(stack.num_layers - 1):  # after the last one transformers reports the normed states
        assert torch.allclose(hidden, expected[index], atol=1e-5)
        layer = stack.materialise(index)
        runner = LayerRunner(layer, [hidden], [calls.keywords[index]])
        (hidden,) = runner.outputs()
    assert torch.allclose(hidden, expected[-2], atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_are_found_and_running_by_stages_changes_nothing(
    architecture: str, make_model: Callable[..., Path]
) -> None:
    stack = DecoderStack(CheckpointReader(make_model(architecture)))
    stack.fill_embedding()
    calls = stack.layer_calls(token_ids())
    layer = stack.materialise(1)
    stages = find_stages(layer, calls.hidden_states, calls.keywords[1], LINEARS)
    assert [stage.modules for stage in stages] == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ]
    assert [stage.block for stage in stages] == [None, Block("self_attn", True), None, Block("mlp", False)]
    whole = LayerRunner(layer, [calls.hidden_states], [calls.keywords[1]])
    staged = LayerRunner(layer, [calls.hidden_states], [calls.keywords[1]])
    for stage in stages:
        (inputs,) = staged.stage_inputs(stage)
        assert inputs.shape == (2 * 24, layer.get_submodule(stage.modules[0]).in_features)
        staged.finish_stage(stage)
    assert torch.equal(next(staged.outputs()), next(whole.outputs()))


def test_every_product_is_computed_once(make_model: Callable[..., Path]) -> None:
    stack = DecoderStack(CheckpointReader(make_model()))
    stack.fill_embedding()
    calls = stack.layer_calls(token_ids())
    layer = stack.materialise(0)
    stages = find_stages(layer, calls.hidden_states, calls.keywords[0], LINEARS)
    counts = dict.fromkeys(LINEARS, 0)
    for name in LINEARS:

        def count(*_: object, name: str = name) -> None:
            counts[name] += 1

        layer.get_submodule(name).register_forward_hook(count)
    runner = LayerRunner(layer, [calls.hidden_states], [calls.keywords[0]])
    for stage in stages:
        list(runner.stage_inputs(stage))
        runner.finish_stage(stage)
    list(runner.outputs())
    assert counts == dict.fromkeys(LINEARS, 1)


def test_kv_observer_sees_what_the_cache_would_hold(make_model: Callable[..., Path]) -> None:
    path = make_model("qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        output = model(token_ids(), use_cache=True)
    cache = getattr(output, "cache", None) or output.past_key_values
    stack = DecoderStack(CheckpointReader(path))
    stack.fill_embedding()
    calls = stack.layer_calls(token_ids())
    layer, observer = stack.materialise(0), KVObserver()
    keywords = {**calls.keywords[0], cache_argument(layer): observer}
    list(LayerRunner(layer, [calls.hidden_states], [keywords]).outputs())
    key_amax, value_amax = (float(t.abs().max()) for t in (cache.layers[0].keys, cache.layers[0].values))
    for kv_cache, end in KV_GRID_END.items():
        assert observer.scales(kv_cache) == pytest.approx((key_amax / end, value_amax / end), rel=1e-5)
    assert KV_GRID_END == {"fp8": 448, "int8": 127}


def test_the_random_state_of_the_caller_is_untouched(make_model: Callable[..., Path]) -> None:
    before = torch.random.get_rng_state()
    stack = DecoderStack(CheckpointReader(make_model("gemma3_text")))
    stack.fill_embedding()
    stack.materialise(0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_one_layer_holds_memory_for_itself_only(make_model: Callable[..., Path]) -> None:
    stack = DecoderStack(CheckpointReader(make_model()))
    layer = stack.materialise(1)
    assert all(parameter.device.type == "cpu" for parameter in layer.parameters())
    assert all(parameter.device.type == "meta" for parameter in stack._model.parameters())
