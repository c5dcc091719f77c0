"""The table of what runs where says what its evidence says, and the evidence names tests that exist."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CASE = """<testsuites><testsuite>
<testcase classname="tests.test_x" name="test_a[1]"><properties><property name="support" value="layout a"/></properties>
</testcase>
<testcase classname="tests.test_x" name="test_b"><properties><property name="support" value="layout b"/></properties>
<failure/></testcase>
<testcase classname="tests.test_x" name="test_c"><properties><property name="support" value="layout c"/></properties>
<skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def support(root_dir: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("support", root_dir / "benchmarks" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def claims(support: ModuleType) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(support.EVIDENCE.read_text())["claims"]
    return found


def test_the_committed_table_is_what_the_evidence_makes(support: ModuleType, claims: dict[str, list[str]]) -> None:
    assert support.TABLE.read_text() == support.page(claims), "run python benchmarks/support.py write"


def test_every_piece_of_evidence_is_a_test_that_exists(root_dir: Path, claims: dict[str, list[str]]) -> None:
    for tests in claims.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (root_dir / file).read_text(), test


def test_only_passed_tests_are_evidence(support: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(CASE)
    assert support.claims_in([tmp_path / "tests.xml"]) == {"layout a": ["tests/test_x.py::test_a[1]"]}


def test_a_claim_changes_the_cells_of_its_networks_alone(support: ModuleType, claims: dict[str, list[str]]) -> None:
    def rows(more: dict[str, list[str]]) -> set[str]:
        return set(support.page(claims | more).splitlines())

    new = rows({"algm setr/pup tensorrt verified": ["tests/test_x.py::test_a"]}) - rows({})
    place = 3 + list(support.RUNTIMES).index("tensorrt")  # after recipe, data set and pictures
    assert new
    assert all("setr_pup" in row and row.strip("| ").split(" | ")[place] == "verified" for row in new)


def with_rows(support: ModuleType, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Lets the record of networks at full size be read with its rows changed."""
    read = support._record

    def changed(name: str) -> Any:
        record = read(name)
        if name == support.FULL_SIZE:
            change(record["rows"])
        return record

    monkeypatch.setattr(support, "_record", changed)


def test_a_failed_link_on_a_gpu_takes_the_family_back(
    support: ModuleType, claims: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(rows: dict[str, Any]) -> None:
        rows["eva_vit_g16_ade20k fp16 onnxruntime-cuda"]["links"]["numbers"]["passed"] = False

    before = set(support.page(claims).splitlines())
    with_rows(support, monkeypatch, failing)
    new = set(support.page(claims).splitlines()) - before
    place = 3 + list(support.RUNTIMES).index("onnxruntime-cuda")
    assert [row.strip("| ").split(" | ")[place] for row in new] == ["none"]
    assert "eva_vit_g16_ade20k" in new.pop()


def test_a_network_of_full_size_counts_for_the_method_it_merged_by(
    support: ModuleType, claims: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_dtop(rows: dict[str, Any]) -> None:
        rows["segvit_prune_vit_b16_ade20k bf16 onnxruntime-cuda"] = {"links": {"numbers": {"passed": True}}}

    with_rows(support, monkeypatch, with_dtop)
    place = 1 + list(support.RUNTIMES).index("onnxruntime-cuda")
    (row,) = (row for row in support.page(claims).splitlines() if row.startswith("| segvit/prune |"))
    assert row.strip("| ").split(" | ")[place] == "verified"
