"""docs/field-cases.md: every row names what proves it, or says why it cannot occur."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def rows(root_dir: Path) -> list[list[str]]:
    """Cells of every row below a heading."""
    lines = (root_dir / "docs" / "field-cases.md").read_text().split("## Versions")[0].splitlines()
    tables = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in tables if row[0].strip() not in ("seen in", "---")]


def test_every_row_is_complete(rows: list[list[str]]) -> None:
    assert len(rows) > 50
    for row in rows:
        assert len(row) == 4, row
        assert all(row[:3]), row
        assert re.search(r"#\d+", row[0]), row


def test_a_row_without_a_test_says_why(rows: list[list[str]]) -> None:
    for row in rows:
        assert row[3] or "cannot occur" in row[2], row


def test_every_named_test_exists(rows: list[list[str]], root_dir: Path) -> None:
    named = {name for row in rows for name in re.findall(r"`(tests/[^`]+)`", row[3])}
    assert all(cell == "" or cell.startswith("`tests/") for *_, cell in rows)
    assert len(named) > 40
    assert named - known_tests(root_dir) == set()


def known_tests(root: Path) -> set[str]:
    return {
        f"{file.relative_to(root).as_posix()}::{node.name}"
        for file in (root / "tests").rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_check_can_fail(root_dir: Path) -> None:
    known = known_tests(root_dir)
    assert "tests/hardening/test_field_cases.py::test_the_check_can_fail" in known
    assert "tests/hardening/test_field_cases.py::test_the_check_cannot_fail" not in known
