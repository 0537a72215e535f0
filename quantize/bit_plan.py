"""The plan of a budget: which module gets how many bits, and what that is expected to cost.

It is a file of the artifact, `bit_plan.json`, and holds everything that was measured, so that a plan for
another budget can be made from it without measuring again.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitsmith.core.errors import Refused
from bitsmith.quantize.allocation import Option, Unit, allocate
from bitsmith.quantize.bit_choice import BitChoice

BIT_PLAN_NAME = "bit_plan.json"


@dataclass(frozen=True, slots=True)
class BitPlan:
    """key: of what was measured; equal keys mean equal units. chosen: one option of each unit."""

    key: str
    units: tuple[Unit, ...]
    chosen: tuple[Option, ...]
    limit_bytes: int

    @classmethod
    def of(cls, key: str, units: Sequence[Unit], limit_bytes: int) -> "BitPlan":
        return cls(key, tuple(units), tuple(allocate(units, limit_bytes)), limit_bytes)

    @property
    def choices(self) -> dict[str, BitChoice]:
        """Module -> how its integers are stored."""
        pairs = zip(self.units, self.chosen, strict=True)
        return {module: option.choice for unit, option in pairs for module in unit.modules}

    @property
    def num_bytes(self) -> int:
        return sum(option.num_bytes for option in self.chosen)

    @property
    def num_weights(self) -> int:
        return sum(unit.num_weights for unit in self.units)

    @property
    def average_bits(self) -> float:
        """Scales and zero points counted."""
        return 8 * self.num_bytes / self.num_weights

    @property
    def error(self) -> float:
        return math.fsum(option.error for option in self.chosen)

    def best_uniform(self) -> tuple[BitChoice, float] | None:
        """The choice of least error that, taken for every unit, is within the same budget; None where none
        is that every unit has."""
        found = []
        for choice in sorted({option.choice for unit in self.units for option in unit.options}):
            options = [_option(unit, choice) for unit in self.units]
            taken = [option for option in options if option is not None]
            if len(taken) == len(options) and sum(o.num_bytes for o in taken) <= self.limit_bytes:
                found.append((math.fsum(option.error for option in taken), choice))
        return (min(found)[1], min(found)[0]) if found else None

    def summary(self) -> dict[str, Any]:
        """For manifests and reports. parts: one entry for each choice that was taken."""
        uniform = self.best_uniform()
        return {
            "average_bits": self.average_bits,
            "num_bytes": self.num_bytes,
            "limit_bytes": self.limit_bytes,
            "error": self.error,
            "best_uniform": None if uniform is None else {"choice": str(uniform[0]), "error": uniform[1]},
            "parts": [self._part(choice) for choice in sorted({option.choice for option in self.chosen})],
        }

    def _part(self, choice: BitChoice) -> dict[str, Any]:
        pairs = [(u, o) for u, o in zip(self.units, self.chosen, strict=True) if o.choice == choice]
        kinds = sorted({module.rpartition(".")[2] for unit, _ in pairs for module in unit.modules})
        return {
            "choice": str(choice),
            "num_modules": sum(len(unit.modules) for unit, _ in pairs),
            "num_weights": sum(unit.num_weights for unit, _ in pairs),
            "num_bytes": sum(option.num_bytes for _, option in pairs),
            "kinds": kinds,
        }

    def write(self, directory: Path) -> None:
        units = [
            {**asdict(unit), "chosen": unit.options.index(option)}
            for unit, option in zip(self.units, self.chosen, strict=True)
        ]
        body = {"key": self.key, **self.summary(), "units": units}
        (directory / BIT_PLAN_NAME).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_units(path: Path) -> tuple[str, list[Unit]]:
    """(key, units) of a plan that was written. Raises Refused for a damaged file."""
    try:
        body = json.loads(path.read_bytes())
        return str(body["key"]), [unit_from_json(entry) for entry in body["units"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path} cannot be read ({error!r}). Make the checkpoint again.") from error


def unit_from_json(body: Mapping[str, Any]) -> Unit:
    options = tuple(
        Option(BitChoice(**option["choice"]), option["num_bytes"], option["error"])
        for option in body["options"]
    )
    return Unit(tuple(body["modules"]), body["num_weights"], options)


def _option(unit: Unit, choice: BitChoice) -> Option | None:
    return next((option for option in unit.options if option.choice == choice), None)
