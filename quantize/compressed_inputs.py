"""What the compressed-tensors formats with 8-bit weights and 8-bit inputs have in common.

How a config group declares them, and the scale of an input as it is stored. Not known here: the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale


@dataclass(frozen=True, slots=True)
class InputFormat:
    """format, number_type: the format's words. name: ours. needs_symmetric: a grid may have zero points."""

    format: str
    number_type: str
    name: str
    needs_symmetric: bool = False

    def args(self, strategy: str, *, dynamic: bool) -> dict[str, Any]:
        """An entry of a config group, for weights, inputs or the KV cache."""
        return eight_bit_args(self.number_type, strategy, dynamic=dynamic)

    def input_args(self, activations: ActivationScale) -> dict[str, Any]:
        """The `input_activations` entry."""
        return self.args(activations, dynamic=activations == "token")

    def declared(self, config: Mapping[str, Any]) -> ActivationScale | None:
        """How a checkpoint's modules of this format round their inputs; None where it declares none.

        Raises Refused for a kind that is not known, or for several kinds.
        """
        quantization = config.get("quantization_config") or {}
        groups = (quantization.get("config_groups") or {}).items()
        kinds = {
            self._group_activations(name, group)
            for name, group in groups
            if (group.get("format") or quantization.get("format")) == self.format
        }
        if len(kinds) > 1:
            raise Refused(
                f"The checkpoint has {self.name} modules with static and with dynamic inputs; one kind can "
                "be read."
            )
        return next(iter(kinds), None)

    def _group_activations(self, name: str, group: Mapping[str, Any]) -> ActivationScale:
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        kinds: dict[tuple[Any, bool], ActivationScale] = {
            ("tensor", False): "tensor",
            ("token", True): "token",
        }
        activations = kinds.get((inputs.get("strategy"), bool(inputs.get("dynamic"))))
        is_known = all(self._is_own(args) for args in (weights, inputs))
        if not is_known or weights.get("strategy") not in ("tensor", "channel") or activations is None:
            reach = "dynamic" if inputs.get("dynamic") else "static"
            own = f"symmetric {self.name}" if self.needs_symmetric else self.name
            raise Refused(
                f"Config group {name} has {weights.get('type')} weights of {weights.get('num_bits')} bits "
                f"per {weights.get('strategy')} and {reach} inputs per {inputs.get('strategy')}; of "
                f"{self.format!r}, {own} weights per tensor or channel with static inputs per tensor or "
                "dynamic ones per token can be read."
            )
        if group.get("output_activations"):
            raise Refused(f"Config group {name} quantizes outputs; quantized weights and inputs can be read.")
        return activations

    def _is_own(self, args: Mapping[str, Any]) -> bool:
        is_kind = (args.get("type"), args.get("num_bits")) == (self.number_type, 8)
        return is_kind and (not self.needs_symmetric or bool(args.get("symmetric", True)))


def eight_bit_args(number_type: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    """How a group says that numbers are of 8 bits; strategy: how far one scale reaches."""
    return {
        "num_bits": 8,
        "type": number_type,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }


def load_input_scale(
    module_name: str, read: Callable[[str], Tensor], activations: ActivationScale
) -> float | None:
    """The static scale of a module's inputs; None where each token has its own. Raises Refused."""
    if activations == "token":
        return None
    stored = read(f"{module_name}.input_scale").float()
    if stored.numel() != 1 or not 0.0 < float(stored) < float("inf"):
        raise Refused(f"{module_name}: input_scale is {stored.tolist()}; it must be one positive number.")
    return float(stored)
