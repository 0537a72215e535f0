"""Read a recipe file. Every mistake in it is told at once: where it is, what stands there, what may."""

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from bitsmith.core.errors import Refused
from bitsmith.core.recipe_sections import Recipe
from bitsmith.core.scheme import parse_scheme_name, resolve_refine_steps
from bitsmith.core.strict_yaml import load_yaml

__all__ = ["Recipe", "load_recipe"]

_ADAPTER = TypeAdapter(Recipe)


def load_recipe(path: Path) -> Recipe:
    """Read and validate. Raises Refused with one line for each key that is wrong.

    Relative paths of files (gate, texts, backend_python, and a model written with a slash or ending in .gguf)
    are taken from the recipe's own directory, so that a recipe can be run from anywhere.
    """
    body = load_yaml(path)
    if not isinstance(body, dict):
        raise Refused(f"{path} must hold a mapping with `version`, `model` and the stages' sections.")
    body = {"name": path.stem} | body
    try:
        recipe = _ADAPTER.validate_json(json.dumps(body))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise Refused(
                f"{path} holds a value that is no text, number, list or mapping: {error}."
            ) from None
        lines = dict.fromkeys(_sentence(body, problem["loc"]) for problem in error.errors())
        raise Refused(
            "\n".join([f"{path} is not a valid recipe:", *(f"  {line}" for line in lines)])
        ) from None
    parse_scheme_name(recipe.quantize.scheme)
    resolve_refine_steps(recipe.quantize.refine, recipe.quantize.refine_steps)
    return _with_paths_from(recipe, path.parent)


def _with_paths_from(recipe: Recipe, directory: Path) -> Recipe:
    calibration = recipe.quantize.calibration
    calibration = replace(calibration, source=_text_path(calibration.source, directory))
    evaluate = replace(recipe.evaluate, source=_text_path(recipe.evaluate.source, directory))
    if isinstance(evaluate.gate, str):
        evaluate = replace(evaluate, gate=_from(directory, evaluate.gate))
    python = recipe.quantize.backend_python
    python = None if python is None else _from(directory, python)
    is_path = ("/" in recipe.model or recipe.model.endswith(".gguf")) and not recipe.model.startswith("hf:")
    return replace(
        recipe,
        model=_from(directory, recipe.model) if is_path else recipe.model,
        quantize=replace(recipe.quantize, calibration=calibration, backend_python=python),
        evaluate=evaluate,
    )


def _text_path(source: str, directory: Path) -> str:
    return _from(directory, source) if source.endswith((".jsonl", ".txt")) else source


def _from(directory: Path, path: str) -> str:
    return str(directory / Path(path).expanduser())


def _sentence(body: Mapping[str, Any], loc: Sequence[int | str]) -> str:
    """One line on one mistake. `loc` ends in pydantic's own words for a union's member; those are cut off."""
    kind_here: Any = Recipe
    value: Any = body
    path: list[str] = []
    for step in loc:
        if not dataclasses.is_dataclass(kind_here):
            break
        hints = get_type_hints(kind_here, include_extras=True)
        names = [f.name for f in dataclasses.fields(kind_here)]
        path.append(str(step))
        where = ".".join(path)
        if step not in names:
            return f"{where}: unknown key. Valid keys: {', '.join(names)}."
        if isinstance(value, Mapping) and step not in value:
            return f"{where}: missing. Give {_accepted(hints[str(step)])}."
        kind_here, value = hints[str(step)], value[step]
    where = ".".join(path) or "the recipe"
    return f"{where}: {value!r} is not accepted. Give {_accepted(kind_here)}."


def _accepted(hint: Any) -> str:
    """A type hint in words, for example: an integer of at least 1, 'auto' or 'channel'."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        words = [_accepted(member) for member in get_args(hint) if member is not type(None)]
        return " or ".join(words)
    if origin is Literal:
        return " or ".join(repr(value) for value in get_args(hint))
    if origin is Annotated:
        base, *notes = get_args(hint)
        return _accepted(base) + _limits(notes)
    if origin is tuple:
        return f"a list, each entry {_accepted(get_args(hint)[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[hint]


def _limits(notes: Sequence[Any]) -> str:
    words: list[str] = []
    for note in (n for info in notes if isinstance(info, FieldInfo) for n in info.metadata):
        match note:
            case Ge(ge=least):
                words.append(f" of at least {least}")
            case Gt(gt=least):
                words.append(f" above {least}")
            case Le(le=most):
                words.append(f" and at most {most}")
            case MinLen():
                words.append(", not empty")
            case MaxLen(max_length=most):
                words.append(f" of at most {most} characters")
            case _:
                words.append(" of letters, digits, dots, dashes and underscores, letter or digit first")
    return "".join(words)
