"""What every command returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitsmith.core.errors import EXIT_DONE


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`document` is what `--json` prints; a person has read the same on stderr. None: printed already."""

    document: Mapping[str, Any] | None
    exit_code: int = EXIT_DONE
