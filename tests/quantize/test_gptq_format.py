"""GPTQ checkpoints read as weights: both zero-point conventions, labels, act-order, damage."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bitsmith.core.errors import Refused
from bitsmith.quantize.gptq_layout import pack_gptq
from bitsmith.quantize.reordered_weight import ReorderedWeight
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

Weights = dict[str, QuantizedWeight]
Change = Callable[[torch.Tensor], torch.Tensor]
QUERY = "model.layers.0.self_attn.q_proj"
LABELS = ("gptq", "gptq_v2")


def assert_same(path: Path, weights: Weights, *, strict: bool = False) -> tuple[str, ...]:
    source = open_weights(path, strict=strict)
    for module, weight in weights.items():
        assert torch.equal(source.dequantized(f"{module}.weight"), weight.dequantize()), module
    return source.notes


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("num_bits", "group_size"), [(4, 32), (8, 16)])
@pytest.mark.parametrize("label", LABELS)
def test_both_conventions_come_back_and_the_values_confirm_them(
    label: str,
    num_bits: int,
    group_size: int,
    symmetric: bool,
    packed: ModuleType,
    model: Path,
    tmp_path: Path,
) -> None:
    weights = packed.rounded_weights(model, symmetric=symmetric, num_bits=num_bits, group_size=group_size)
    path = tmp_path / "gptq"
    if label == "gptq" and not symmetric:  # written by others; only refused to be written by a stage
        packed.write_packed(path, model, weights, "gptq_v2")
        packed.change_settings(path, lambda settings: settings.update(checkpoint_format="gptq"))
        ones = 0x11111111 if num_bits == 4 else 0x01010101
        packed.change_tensors(path, lambda t: [t[n].sub_(ones) for n in t if n.endswith("qzeros")])
    else:
        packed.write_packed(path, model, weights, "gptq" if label == "gptq" else "gptq_v2")
    # Eight-bit values with zero points of their own do not tell.
    assert assert_same(path, weights, strict=symmetric or num_bits == 4) == ()
    names = set(open_weights(path).names)
    assert names == set(open_weights(model).names)
    assert open_weights(path).kv_scales(0) is None


def zero_points_at_both_ends(packed: ModuleType, model: Path) -> Weights:
    """Zero points 0, 7, 8 and 15, unsigned, in every module."""
    weights: Weights = packed.rounded_weights(model, symmetric=True)
    shift = torch.tensor([-8, -1, 0, 7])
    return {
        name: packed.with_zero_points(weight, shift.repeat(weight.out_features // 4))
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("label", LABELS)
def test_zero_points_0_7_8_and_15_come_back_and_what_the_values_do_not_tell_needs_its_label(
    label: str, packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    weights = zero_points_at_both_ends(packed, model)
    path = packed.write_packed(tmp_path / "gptq", model, weights, "gptq" if label == "gptq" else "gptq_v2")
    assert assert_same(path, weights) == ()
    # Half of each module is clipped at one end or the other, as no model's weights are.
    with pytest.raises(Refused, match="values do not confirm"):
        open_weights(path, strict=True)
    packed.change_settings(path, lambda settings: settings.pop("checkpoint_format"))
    with pytest.raises(Refused, match=r"no checkpoint_format.*Add the label"):
        open_weights(path)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("written", LABELS)
def test_a_missing_or_wrong_label_is_found_out_from_the_values(
    written: str, symmetric: bool, packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    weights = packed.rounded_weights(model, symmetric=symmetric)
    path = packed.write_packed(tmp_path / "gptq", model, weights, "gptq" if written == "gptq" else "gptq_v2")
    packed.change_settings(path, lambda settings: settings.pop("checkpoint_format"))
    (note,) = assert_same(path, weights)
    assert f"values are those of {written!r}" in note
    (wrong,) = set(LABELS) - {written}
    packed.change_settings(path, lambda settings: settings.update(checkpoint_format=wrong))
    (note,) = assert_same(path, weights)
    assert f"is labelled {wrong!r}, but its values are those of {written!r}" in note
    with pytest.raises(Refused, match="Correct checkpoint_format"):
        open_weights(path, strict=True)


def test_a_label_that_nobody_knows_is_refused(packed: ModuleType, model: Path, tmp_path: Path) -> None:
    path = packed.write_packed(
        tmp_path / "gptq", model, packed.rounded_weights(model, symmetric=True), "gptq"
    )
    packed.change_settings(path, lambda settings: settings.update(checkpoint_format="marlin"))
    with pytest.raises(Refused, match="checkpoint_format 'marlin'; gptq and gptq_v2 can be read"):
        open_weights(path)


def test_an_older_checkpoint_says_what_it_is_in_a_file_of_its_own(
    packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    weights = packed.rounded_weights(model, symmetric=True)
    path = packed.write_packed(tmp_path / "gptq", model, weights, "gptq")
    (path / "config.json").write_text((model / "config.json").read_text())
    assert_same(path, weights, strict=True)


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(
    packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    path = packed.write_packed(
        tmp_path / "gptq", model, packed.rounded_weights(model, symmetric=True), "gptq"
    )
    bias = f"{QUERY}.bias"
    packed.change_tensors(path, lambda tensors: tensors.update({bias: torch.zeros(64)}))
    assert bias not in open_weights(path)
    packed.change_tensors(path, lambda tensors: tensors.update({bias: torch.ones(64)}))
    assert bias in open_weights(path)  # not to be lost: whoever has no place for it says so


def test_act_order_without_static_groups_is_put_back_in_order(
    packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    weights = packed.rounded_weights(model, symmetric=False)
    path = packed.write_packed(tmp_path / "gptq", model, weights, "gptq_v2")
    grouped = weights[QUERY]
    order = torch.randperm(grouped.in_features, generator=torch.Generator().manual_seed(3))
    shuffled = QuantizedWeight(
        grouped.values[:, order], grouped.scale, grouped.zero_point, grouped.num_bits, grouped.group_size
    )

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{QUERY}.qweight"] = pack_gptq(shuffled, "gptq_v2")["qweight"]
        tensors[f"{QUERY}.g_idx"] = tensors[f"{QUERY}.g_idx"][order]

    packed.change_tensors(path, shuffle)
    source = open_weights(path)
    assert isinstance(source.linear(QUERY), ReorderedWeight)
    assert torch.equal(source.dequantized(f"{QUERY}.weight"), grouped.dequantize()[:, order])


def test_a_last_group_that_is_not_full_is_read(packed: ModuleType, model: Path, tmp_path: Path) -> None:
    # 96 columns in groups of 64: the second group has 32.
    name = "model.layers.0.mlp.down_proj"
    weights = packed.rounded_weights(model, symmetric=True)
    path = packed.write_packed(tmp_path / "gptq", model, weights, "gptq")
    packed.change_settings(path, lambda settings: settings.update(group_size=64))
    packed.change_tensors(path, lambda tensors: _merge_groups(tensors, set(weights)))
    weight = open_weights(path).linear(name)
    assert isinstance(weight, QuantizedWeight) and weight.group_size == 32
    scale = weights[name].scale
    assert torch.equal(weight.scale, torch.stack([scale[:, 0], scale[:, 0], scale[:, 2]], dim=1))
    assert torch.equal(weight.values, weights[name].values)


def _merge_groups(tensors: dict[str, torch.Tensor], modules: set[str]) -> None:
    """Every other group of 32 goes, so that those left have 64 columns, the last one perhaps fewer."""
    for module in modules:
        for suffix in ("qzeros", "scales"):
            tensors[f"{module}.{suffix}"] = tensors[f"{module}.{suffix}"][::2]
        tensors[f"{module}.g_idx"] = tensors[f"{module}.g_idx"] // 2


@pytest.mark.parametrize(
    ("suffix", "change", "named"),
    [
        ("qzeros", lambda t: t[:, :1], "do not belong together"),
        ("scales", lambda t: t[:, :-8], "do not belong together"),
        ("scales", lambda t: t[:-1], "same groups"),
        ("scales", lambda t: t.fill_(torch.inf), "not finite"),
        ("qweight", lambda t: t.float(), "int32"),
        ("g_idx", lambda t: t + 100, "damaged"),
        ("qzeros", None, "has no qzeros"),
    ],
)
def test_a_damaged_module_is_refused_by_name(
    suffix: str, change: Change | None, named: str, packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    path = packed.write_packed(
        tmp_path / "gptq", model, packed.rounded_weights(model, symmetric=True), "gptq"
    )
    name = f"{QUERY}.{suffix}"
    packed.change_tensors(
        path, lambda t: t.pop(name) if change is None else t.update({name: change(t[name])})
    )
    with pytest.raises(Refused, match=named) as caught:
        open_weights(path).linear(QUERY)
    assert QUERY in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 5}, "GPTQ weights of 5 bits; 2, 3, 4, 8"),
        ({"bits": 3}, "of 3 bits with checkpoint_format 'gptq'.*gptq_v2 can be read"),
        ({"group_size": 0}, "group_size 0"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "settings of their own"),
    ],
)
def test_settings_that_are_not_understood_are_refused(
    change: dict[str, object], named: str, packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    path = packed.write_packed(
        tmp_path / "gptq", model, packed.rounded_weights(model, symmetric=True), "gptq"
    )
    packed.change_settings(path, lambda settings: settings.update(change))
    with pytest.raises(Refused, match=named):
        open_weights(path)
