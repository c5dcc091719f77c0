"""From plain tables, as TOML and JSON give them, to typed values; msgspec converts, here its errors get their words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from algm_deploy.errors import RecipeError, shown

_WORDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", NoneType: "null"}
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_ABSENT = re.compile(r"Object missing required field `(\w+)`")


def converted(kind: Any, value: object, key: str) -> Any:
    """`value` as JSON or TOML gives it, in the type of its field; strict: no text is a number, no number a text.

    Lists become tuples where the field is one, whole numbers become floats.

    Raises:
        RecipeError: the value does not fit; it names the place, below `key`, what is expected there and what came.
    """
    try:
        _check(kind, value, key)
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RecipeError(_worded(str(error), kind, value, key)) from error
    except UnicodeEncodeError as error:  # in a table that takes any entry: half a character, which JSON may hold
        raise RecipeError(f"expected entries named in whole characters, got {shown(error.object)}") from error
    except RecursionError as error:
        raise RecipeError(f"expected {described(kind)} as {key}, got one of a thousand levels") from error


def described(kind: Any) -> str:
    """A type in words: `a list of a whole number`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(map(described, args))
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return f"a list of {described(args[0])}"
    if origin is tuple:
        return f"{len(args)} whole numbers" if set(args) == {int} else f"a list of {' and '.join(map(described, args))}"
    if origin is dict:
        return "a table of numbers" if args[1] is float else "a table"
    return _WORDS.get(kind, "a table")


def _check(kind: Any, value: object, key: str) -> None:
    """Refuses what msgspec takes: NaN, infinity, numbers of any length, entries that a dataclass does not have."""
    if isinstance(value, float) and not abs(value) < 1e300:
        raise RecipeError(f"expected a finite number as {key}, got {value}")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise RecipeError(f"expected a whole number as {key}, got {shown(value)}")
    if isinstance(value, dict):
        kind = _tagged(kind, value, key)
        known = next((_fields(one) for one in _alternatives(kind) if _is_closed(one)), value)
        if unknown := [name for name in value if name not in known]:
            place = key or "the table"
            raise RecipeError(f"expected no entry in {place} that this release does not know, got {shown(unknown[0])}")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in parts:
        _check(_part_kind(kind, name), part, _place(key, name))


def _worded(said: str, kind: Any, value: Any, key: str) -> str:
    """msgspec's error, such as "Expected `int`, got `str` - at `$.links[0].number`", as one of this package's."""
    problem, _, path = said.partition(" - at `$")
    for match in _STEP.finditer(path):
        step = match[1] or (int(match[2]) if match[2] else _failing(kind, value))
        kind, value, key = _part_kind(_tagged(kind, value, key), step), value[step], _place(key, step)
    kind = _tagged(kind, value, key)
    if absent := _ABSENT.fullmatch(problem):
        return f"expected {described(_part_kind(kind, absent[1]))} as {_place(key, absent[1])}, found none"
    if problem.startswith("expected "):  # a type's own check
        return f"{problem} as {key}"
    return f"expected {described(kind)} as {key}, got {shown(value)}"


def _place(key: str, step: object) -> str:
    return f"{key}.{step}" if key else str(step)


def _failing(kind: Any, table: Mapping[str, Any]) -> str:
    """The first entry of a table that does not convert: msgspec does not tell which one it means."""
    for name, part in table.items():
        try:
            msgspec.convert(part, _part_kind(kind, name))
        except msgspec.ValidationError:
            return name
    raise AssertionError("msgspec refused a table and takes all of its entries")


@lru_cache(1024)
def _part_kind(kind: Any, step: str | int) -> Any:
    """The type of one entry of a value of type `kind`, Any where it has none."""
    for one in _alternatives(kind):
        origin, args = get_origin(one), get_args(one)
        if origin is dict:
            return args[1]
        if origin in (list, tuple) and isinstance(step, int):
            items = args[:1] if origin is list or args[-1] is Ellipsis else args[step : step + 1]
            return items[0] if items else Any
        if _is_record(one):
            return _fields(one).get(step, Any)
    return Any


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _tagged(kind: Any, value: Any, key: str) -> Any:
    """Of a union of records that a tag tells apart the one that a table is; any other kind as it is."""
    records = {one.__struct_config__.tag: one for one in _alternatives(kind) if hasattr(one, "__struct_config__")}
    if len(records) < 2 or not isinstance(value, dict):
        return kind
    tag_field = next(iter(records.values())).__struct_config__.tag_field
    tag = value.get(tag_field)
    if not isinstance(tag, str) or tag not in records:
        raise RecipeError(f"expected {' or '.join(records)} as {_place(key, tag_field)}, got {shown(tag)}")
    return records[tag]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))


def _is_closed(kind: Any) -> bool:
    """Whether a record has the entries that it declares and no other: all but Structs that do not forbid others."""
    return _is_record(kind) and (is_dataclass(kind) or kind.__struct_config__.forbid_unknown_fields)


@cache
def _fields(record: Any) -> dict[Any, Any]:
    """Types of a record's fields by name."""
    names = [item.name for item in fields(record)] if is_dataclass(record) else record.__struct_fields__
    hints = get_type_hints(record)
    tag_field = None if is_dataclass(record) else record.__struct_config__.tag_field
    return {name: hints[name] for name in names} | ({tag_field: str} if tag_field else {})
