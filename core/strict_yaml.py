"""YAML as plain data, with one more rule than the language has: a key given twice is refused."""

from pathlib import Path
from typing import Any

import yaml

from bitsmith.core.errors import Refused


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader (no objects, no code) that refuses what YAML would silently resolve to the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first_line:
                raise _DuplicateKeyError(
                    f"line {line}: key {key!r} is given twice (first in line {first_line[key]})"
                )
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


class _DuplicateKeyError(Exception):
    pass


def load_yaml(path: Path) -> Any:
    """The document in a file. Raises Refused when it is missing, malformed, or has a duplicate key."""
    try:
        loader = _StrictLoader(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Refused(f"{path} cannot be read: {reason}.") from error
    try:
        return loader.get_single_data()
    except _DuplicateKeyError as error:
        raise Refused(f"{path}, {error}.") from None
    except yaml.YAMLError as error:
        raise Refused(f"{path} is not valid YAML: {error}.") from error
    finally:
        loader.dispose()
