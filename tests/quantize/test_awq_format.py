"""AWQ checkpoints read as weights, and what is refused."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from bitsmith.core.errors import Refused
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_come_back(symmetric: bool, packed: ModuleType, model: Path, tmp_path: Path) -> None:
    weights = packed.rounded_weights(model, symmetric=symmetric)
    source = open_weights(packed.write_packed(tmp_path / "awq", model, weights, "awq"))
    assert set(source.names) == set(open_weights(model).names)
    for module, weight in weights.items():
        found = source.linear(module)
        assert isinstance(found, QuantizedWeight) and found.is_symmetric == symmetric
        assert torch.equal(found.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "gemv"}, "kind 'gemv'; 'gemm' can be read"),
        ({"bits": 3}, "3 bits; 4 can be read"),
        ({"group_size": None}, "group_size None"),
    ],
)
def test_other_kinds_are_refused(
    change: dict[str, object], named: str, packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    path = packed.write_packed(tmp_path / "awq", model, packed.rounded_weights(model, symmetric=False), "awq")
    packed.change_settings(path, lambda settings: settings.update(change))
    with pytest.raises(Refused, match=named):
        open_weights(path)


def test_groups_that_do_not_belong_to_the_columns_are_refused(
    packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    path = packed.write_packed(tmp_path / "awq", model, packed.rounded_weights(model, symmetric=False), "awq")
    packed.change_tensors(path, lambda t: t.update({f"{QUERY}.scales": t[f"{QUERY}.scales"][:1]}))
    with pytest.raises(Refused, match=f"{QUERY}.*damaged"):
        open_weights(path).linear(QUERY)
