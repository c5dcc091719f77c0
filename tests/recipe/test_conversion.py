"""Tables become typed values, or an error says in words where they do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from msgspec import Struct

from algm_deploy.errors import RecipeError
from algm_deploy.recipe.conversion import converted, described


@dataclass(frozen=True)
class Window:
    size: tuple[int, int]
    stride: int = 1


class Open(Struct, frozen=True):
    """Of another project, which may say more."""

    name: str = ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (float | None, "a finite number or null"),
        (Literal["fp32", "fp16"], "fp32 or fp16"),
        (list[str], "a list of a text"),
        (tuple[bool, ...], "a list of true or false"),
        (tuple[int, int, int], "3 whole numbers"),
        (tuple[str, float], "a list of a text and a finite number"),
        (dict[str, float], "a table of numbers"),
        (dict[str, str], "a table"),
        (Window, "a table"),
        (Open, "a table"),
    ],
)
def test_types_in_words(kind: Any, words: str) -> None:
    assert described(kind) == words


def test_what_fits_is_converted() -> None:
    assert converted(dict[str, float], {"a": 1}, "figures") == {"a": 1.0}
    assert isinstance(converted(float, 1, "figure"), float)
    assert converted(Window, {"size": [512, 512]}, "window") == Window((512, 512))
    assert converted(Window | None, None, "window") is None
    assert converted(Open, {"name": "a", "mood": "good"}, "row") == Open("a")


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, True, "expected a whole number as x, got True"),
        (int, "1", "expected a whole number as x, got '1'"),
        (int, 1 << 63, "expected a whole number as x, got 9223372036854775808"),
        (float, float("nan"), "expected a finite number as x, got nan"),
        (float, 1e300, "expected a finite number as x, got 1e\\+300"),
        (list[float], [1, "2"], "expected a finite number as x.1, got '2'"),
        (Any, {"deep": [{"er": float("inf")}]}, "expected a finite number as x.deep.0.er, got inf"),
        (Window, {"stride": 2}, "expected 2 whole numbers as x.size, found none"),
        (Window, {"size": [1, 2, 3]}, r"expected 2 whole numbers as x.size, got \[1, 2, 3\]"),
        (Window, {"size": [1, 2], "mood": 1}, "expected no entry in x that this release does not know, got 'mood'"),
        (dict[str, Window], {"a": {"size": [1, "2"]}}, "expected a whole number as x.a.size.1, got '2'"),
        (dict[str, Window | None], {"a": None, "b": 3}, "expected a table or null as x.b, got 3"),
        (Open, {"\udcff": 1}, r"expected entries named in whole characters, got '\\udcff'"),
        (Open, [], r"expected a table as x, got \[\]"),
    ],
)
def test_what_does_not_fit_is_named(kind: Any, value: object, message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{message}$"):
        converted(kind, value, "x")
