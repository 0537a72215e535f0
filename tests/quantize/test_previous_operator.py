"""The operator before a stage is found by structure, and dividing its outputs changes no function."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.layer_stages import Stage, find_stages
from bitsmith.quantize.previous_operator import (
    LayerProbe,
    LinearRows,
    NormGain,
    PreviousOperator,
    find_previous,
)

ModelMaker = Callable[..., Path]


def open_layer(model: Path, index: int = 1) -> tuple[LayerProbe, dict[str, Stage], list[str]]:
    """(probe, stages by their first module's kind, linear modules in order of execution)."""
    stack = DecoderStack(CheckpointReader(model))
    stack.fill_embedding()
    calls = stack.layer_calls(torch.arange(8).view(1, 8) * 7)
    layer = stack.materialise(index)
    probe = LayerProbe(layer, calls.hidden_states, calls.keywords[index])
    stages = find_stages(layer, calls.hidden_states, probe.keywords, list(stack.linear_shapes(index)))
    order = [name for stage in stages for name in stage.modules]
    return probe, {stage.modules[0].rpartition(".")[2]: stage for stage in stages}, order


def previous(
    probe: LayerProbe, stage: Stage, order: list[str], dtype: torch.dtype = torch.bfloat16
) -> PreviousOperator | None:
    return find_previous(probe, stage, order[: order.index(stage.modules[0])], lambda _name: dtype)


def fold(probe: LayerProbe, stage: Stage, operator: PreviousOperator, scale: Tensor) -> dict[str, Tensor]:
    scale = operator.representable(scale)
    changed = operator.divide(scale)
    for name in stage.modules:
        probe.layer.get_parameter(f"{name}.weight").data *= scale[operator.rows]
    return changed


FUSED = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}
APART = {"q_proj": "input_layernorm", "gate_proj": "post_attention_layernorm"}
SANDWICH = {"q_proj": "input_layernorm", "gate_proj": "pre_feedforward_layernorm"}
BEFORE = {
    "llama": APART | {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"},
    "qwen2": APART | {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"},
    "qwen3": APART | {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"},
    "gemma2": SANDWICH | {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"},
    "gemma3_text": SANDWICH | {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"},
    "phi3": FUSED | {"o_proj": "self_attn.qkv_proj", "down_proj": "mlp.gate_up_proj"},
}


@pytest.mark.parametrize("architecture", BEFORE)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_every_stage_of_known_architectures_can_be_folded(
    architecture: str, num_kv_heads: int, make_model: ModelMaker
) -> None:
    probe, stages, order = open_layer(make_model(architecture, num_key_value_heads=num_kv_heads))
    expected = probe.output()
    generator = torch.Generator().manual_seed(0)
    assert stages.keys() == BEFORE[architecture].keys()
    for kind, stage in stages.items():
        operator = previous(probe, stage, order)
        assert operator is not None and operator.name == BEFORE[architecture][kind]
        fold(probe, stage, operator, torch.exp(torch.randn(operator.num_rows, generator=generator)))
        difference = (probe.output() - expected).norm() / expected.norm()
        assert float(difference) < 1e-5, kind


def test_repeated_heads_share_the_scales_of_the_head_that_is_repeated(make_model: ModelMaker) -> None:
    probe, stages, order = open_layer(make_model("llama"))  # 4 heads over 2 KV heads of 16
    operator = previous(probe, stages["o_proj"], order)
    assert operator is not None and operator.num_rows == 32
    channel = torch.arange(16)
    assert torch.equal(operator.rows, torch.cat([channel, channel, channel + 16, channel + 16]))


def test_a_fused_projection_gives_only_its_value_rows(make_model: ModelMaker) -> None:
    probe, stages, order = open_layer(make_model("phi3"))
    operator = previous(probe, stages["o_proj"], order)
    assert operator is not None and operator.num_rows == 32
    before = probe.layer.get_parameter("self_attn.qkv_proj.weight").clone()
    fold(probe, stages["o_proj"], operator, torch.full((32,), 2.0))
    after = probe.layer.get_parameter("self_attn.qkv_proj.weight")
    assert torch.equal(after[:-32], before[:-32]) and torch.equal(after[-32:], before[-32:] / 2)


@pytest.mark.parametrize(("architecture", "offset"), [("llama", 0.0), ("gemma3_text", 1.0)])
def test_a_folded_norm_is_exact_in_the_type_it_is_stored_in(
    architecture: str, offset: float, make_model: ModelMaker
) -> None:
    probe, stages, order = open_layer(make_model(architecture))
    operator = previous(probe, stages["q_proj"], order)
    assert isinstance(operator, NormGain) and operator.offset == offset
    wanted = torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(1)))
    gain = operator.weight.clone() + offset
    scale = operator.representable(wanted)
    assert torch.allclose(scale, wanted, rtol=0.02 if offset == 0 else 0.2)
    changed = operator.divide(scale)
    (stored,) = changed.values()
    assert list(changed) == ["input_layernorm.weight"] and stored.dtype == torch.bfloat16
    assert torch.allclose((stored.float() + offset) * scale, gain, rtol=1e-6)


def test_gains_of_zero_and_gains_that_would_vanish_are_left_alone() -> None:
    weight = torch.tensor([0.0, 1.0, -1.0, 1e-30])
    norm = NormGain("norm", torch.arange(4), 4, weight, 0.0, torch.float16)
    scale = norm.representable(torch.full((4,), 1e9))
    assert scale.tolist() == [1.0, 1.0, 1.0, 1.0]
    norm.divide(scale)
    assert norm.weight.tolist() == pytest.approx([0.0, 1.0, -1.0, 1e-30])
    scale = norm.representable(torch.full((4,), 3.0))
    assert scale[0] == 1 and scale[1] == pytest.approx(3, rel=1e-3)


def test_a_bias_that_is_stored_takes_powers_of_two(make_model: ModelMaker) -> None:
    model = make_model("llama", mlp_bias=True, attention_bias=True)
    probe, stages, order = open_layer(model)
    bias = probe.layer.get_parameter("mlp.up_proj.bias").data
    bias.copy_(torch.randn(96, generator=torch.Generator().manual_seed(2)).bfloat16().float())
    expected = probe.output()
    operator = previous(probe, stages["down_proj"], order)
    assert isinstance(operator, LinearRows)
    scale = operator.representable(torch.tensor([0.3, 1.0, 3.1] * 32))
    assert set(scale.tolist()) == {0.25, 1.0, 4.0}
    changed = fold(probe, stages["down_proj"], operator, scale)
    assert changed.keys() == {"mlp.up_proj.bias"}
    assert torch.equal(changed["mlp.up_proj.bias"].float(), bias)
    assert torch.allclose(probe.output(), expected, rtol=1e-5, atol=1e-5)


class _Ungated(nn.Module):
    """A layer whose parts cannot be folded: a norm with a bias, and a nonlinearity between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.down(torch.nn.functional.silu(self.up(self.norm(hidden_states))))
        return result


def test_what_cannot_be_folded_is_not_found() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, hidden = _Ungated().requires_grad_(False), torch.randn(1, 5, 16)
    probe = LayerProbe(layer, hidden, {})
    up, down = find_stages(layer, hidden, {}, ["up", "down"])
    assert up.producer == "norm" and down.producer is None
    assert previous(probe, up, ["up", "down"]) is None
    assert previous(probe, down, ["up", "down"]) is None


def test_rows_that_are_zero_on_the_probe_are_no_evidence(make_model: ModelMaker) -> None:
    probe, stages, order = open_layer(make_model("llama"))
    probe.layer.get_parameter("mlp.up_proj.weight").data[5] = 0
    assert previous(probe, stages["down_proj"], order) is None
