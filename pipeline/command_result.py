"""What every command returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitsmith.core.errors import EXIT_DONE


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`document` is what `--json` prints; a person has read the same on stderr."""

    document: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_DONE
