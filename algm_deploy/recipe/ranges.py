"""The numbers between which settings have to lie."""

from __future__ import annotations

from typing import Any

from algm_deploy.errors import RecipeError


def check_ranges(section: str, facts: object, **ranges: tuple[float, float]) -> None:
    """Holds fields of `facts`, numbers or tuples of them at any depth, to (lowest, highest), both included.

    Raises:
        RecipeError: one lies outside; it is named as `section.field`.
    """
    for name, (low, high) in ranges.items():
        if not all(low <= number <= high for number in _numbers(getattr(facts, name))):
            raise RecipeError(f"expected {section}.{name} between {low} and {high}, got {getattr(facts, name)}")


def _numbers(value: Any) -> list[float]:
    return [number for part in value for number in _numbers(part)] if isinstance(value, tuple) else [value]
