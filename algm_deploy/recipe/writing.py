"""A recipe as TOML text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from algm_deploy.recipe.reading import to_table
from algm_deploy.recipe.schema import Recipe

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def recipe_toml(recipe: Recipe, comments: Sequence[str] = ()) -> str:
    """A recipe that is complete in itself, `comments` on top; its name becomes that of the file it is written to."""
    table = {key: value for key, value in to_table(recipe).items() if key != "name"}
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines()]
    lines += _entries({key: value for key, value in table.items() if not isinstance(value, Mapping)})
    for name, section in table.items():
        if isinstance(section, Mapping) and section:
            lines += ["", f"[{name}]", *_entries(section)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{key if _BARE_KEY.fullmatch(key) else _value(key)} = {_value(value)}"


def _value(value: Any) -> str:
    """JSON of texts, numbers and lists is TOML as well, but for the one control character that JSON leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
