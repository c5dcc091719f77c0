"""From plain tables, as TOML and JSON give them, to typed values; msgspec converts, here its errors get their words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from algm_deploy.errors import RecipeError, shown

_WORDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", NoneType: "null"}
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]|(\[\.\.\.\])")
_ABSENT = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)


def converted(kind: Any, value: object, key: str) -> Any:
    """`value` as JSON or TOML gives it, in the type of its field; strict: no text is a number, no number a text.

    Lists become tuples where the field is one, whole numbers become floats.

    Raises:
        RecipeError: the value does not fit; it names `key`, the place inside the value, what is expected and what came.
    """
    _check_finite(value, key)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RecipeError(_worded(str(error), kind, value, key)) from error
    except RecursionError as error:
        raise RecipeError(f"expected {described(kind)} as {key}, got {shown(value)}") from error


def described(kind: Any) -> str:
    """A type in words: `a list of 3 whole numbers`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(map(described, args))
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return f"a list of {described(args[0])}"
    if origin is tuple:
        return f"{len(args)} whole numbers"
    if origin is dict:
        return "a table of numbers" if args[1] is float else "a table"
    return _WORDS.get(kind, "a table")


def _check_finite(value: object, key: str) -> None:
    """TOML and Python's JSON have NaN and infinity, which no setting and no figure may be."""
    if isinstance(value, float) and not isfinite(value):
        raise RecipeError(f"expected a finite number as {key}, got {value}")
    for name, part in _parts(value):
        _check_finite(part, f"{key}.{name}")


def _parts(value: object) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _worded(said: str, kind: Any, value: Any, key: str) -> str:
    """msgspec's error, such as "Expected `int`, got `str` - at `$.links[0].number`", as one of this package's."""
    problem, _, path = said.partition(" - at `$")
    for name, index, any_key in _STEP.findall(path):
        step = _failing_key(kind, value) if any_key else name or int(index)
        kind, value, key = _part_kind(kind, step), value[step], f"{key}.{step}".removeprefix(".")
    if absent := _ABSENT.match(problem):
        return f"expected {described(_part_kind(kind, absent[1]))} as {key}.{absent[1]}, found none".replace(
            " as .", " as "
        )
    if unknown := _UNKNOWN.match(problem):
        return f"expected no other entry in {key or 'the table'} than this release knows, got {shown(unknown[1])}"
    if problem.startswith("expected "):  # of a type's own check
        return f"{problem} in {key}" if key else problem
    return f"expected {described(kind)} as {key}, got {shown(value)}"


def _failing_key(kind: Any, table: Mapping[str, Any]) -> str:
    """msgspec does not tell which value of a table it means: the first that does not convert."""
    for name, part in table.items():
        try:
            msgspec.convert(part, _part_kind(kind, name))
        except (msgspec.ValidationError, RecipeError):
            return name
    return next(iter(table))


def _part_kind(kind: Any, step: str | int) -> Any:
    """The type of one entry of a value of type `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return next((_part_kind(one, step) for one in args if _is_container(one, step)), Any)
    if origin is dict:
        return args[1]
    if origin in (list, tuple):
        return args[0] if origin is list or args[-1] is Ellipsis else args[int(step)]
    return get_type_hints(kind).get(str(step), Any) if _is_record(kind) else Any


def _is_container(kind: Any, step: str | int) -> bool:
    origin = get_origin(kind)
    return origin in (list, tuple) if isinstance(step, int) else origin is dict or _is_record(kind)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
