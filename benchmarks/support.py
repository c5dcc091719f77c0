"""What runs where: docs/support.md, made from tests that passed and records of this folder. No cell is written by hand.

    python benchmarks/support.py collect          runs the tests that prove something, records what they proved, writes
    python benchmarks/support.py collect XML...   the same from JUnit files of such runs
    python benchmarks/support.py write            the table alone, from what is recorded

A test that proves something says so by pytest's `record_property("support", CLAIM)`. A claim is `layout DATASET` or
`METHOD FAMILY/DECODER RUNTIME STATE`, the state being `verified` (the parity chain passed), `equals` (the published
modules) or `builds`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from algm_deploy.environment import environment
from algm_deploy.recipe.families import architectures
from algm_deploy.recipe.plan import Method
from algm_deploy.recipe.reading import recipe, recipe_names
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.tables import markdown_table
from algm_deploy.runners.registry import RUNTIMES

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
TRAINED, FULL_SIZE = "trained_h200.json", "full_size_h200.json"
EVIDENCE, TABLE = RECORDS / "support.json", ROOT / "docs" / "support.md"
# Tests with claims, and what narrows them down.
TESTS = (
    "tests/test_families.py",
    "tests/test_tome.py",
    "tests/test_elvit.py",
    "tests/test_evit.py",
    "tests/test_g2tm.py",
    "tests/test_mpm.py",
    "tests/test_cts.py",
    "tests/test_dtop.py",
    "tests/models",
    "tests/parity",
    "tests/evaluation/test_datasets.py",
    "tests/runners",
)
SELECTION = " or ".join(
    (
        "chain_holds",
        "tome_holds",
        "equals_the_published",
        "scores_with_merging",
        "sound_bundle",
        "official_layouts",
        "other_families",
        "with_our_plugins",
        "constant_counts_are_built",
        "cts_is_built",
    )
)
Claims = Mapping[str, list[str]]  # claim -> tests that passed with it

HEAD = """\
# What runs where

Whether a network was ever seen on the runtime that you want, and by what evidence. Most of it was seen **at toy
size**: a few blocks of small width, of the row's family and decoder. `benchmarks/support.py` makes this page from tests
that passed and from committed records; a test fails where it says anything else.

| word | meaning |
|---|---|
| verified | exported, and all six links of the [parity chain](parity.md) passed |
| equals | PyTorch gives what the published modules give on the same weights, with merging |
| builds | an engine was built from the export; it was **not** executed |
| layout test only | the data set's folders were read in miniature, no picture of it ever was |
| none | nothing shows it in what this page is made from; [results.md](results.md) may, of other methods |
"""
TAIL = """
`verified`, `equals`, `builds` and `layout` are tests, which [support.json](../benchmarks/records/support.json) names;
with onnxruntime-cuda `verified` is a trained checkpoint, [trained_h200.json](../benchmarks/records/trained_h200.json),
or a network of full size with random weights, [full_size_h200.json](../benchmarks/records/full_size_h200.json). Photos
are those of [camvid_miou.json](../benchmarks/records/camvid_miou.json).
"""

OTHERS: dict[Method, str] = {
    "tome": "ToMe, the baseline",
    "tome_blockwise": "ToMe around attention and MLP",
    "elvit": "ELViT",
    "evit": "EViT",
    "g2tm": "G2TM",
    "mpm": "MPM",
    "cts": "CTS",
    "dtop": "DToP",
}


def claims_in(files: Iterable[Path]) -> dict[str, list[str]]:
    """The claims of tests that passed, from JUnit files."""
    found = defaultdict(set)
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):  # noqa: S314  written by pytest
            if any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped")):
                continue
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            for entry in case.iter("property"):
                if entry.get("name") == "support":
                    found[str(entry.get("value"))].add(test)
    return {claim: sorted(tests) for claim, tests in sorted(found.items())}


def page(claims: Claims) -> str:
    """The whole page."""
    recipes = [facts for facts in map(recipe, recipe_names()) if facts.merging.method == "algm"]
    rows = [(r.name, r.protocol.dataset, _pictures(r, claims), *_cells("algm", r, claims)) for r in recipes]
    networks = sorted({row.name for row in architectures()} | {claim.split()[1] for claim in claims if "/" in claim})

    def others(method: str) -> str:
        rows = [(n, *(_cell(method, n, runtime, claims) for runtime in RUNTIMES)) for n in networks]
        return markdown_table(("network", *RUNTIMES), [row for row in rows if set(row[1:]) != {"none"}])

    return "\n".join(
        (
            HEAD,
            "## ALGM\n",
            markdown_table(("recipe", "data set", "pictures", *RUNTIMES), rows),
            *(part for method, title in OTHERS.items() for part in (f"\n## {title}\n", others(method))),
            TAIL,
        )
    )


def _pictures(facts: Recipe, claims: Claims) -> str:
    """How far the data set itself was used: evaluated, or its layout alone."""
    dataset = facts.protocol.dataset
    rows = [row for row in _record("camvid_miou.json")["rows"] if row["dataset"] == dataset]
    if any(row["checkpoint"] == facts.name for row in rows):
        return f"mIoU of {rows[0]['images']} photos"
    return "layout test only" if f"layout {dataset}" in claims else "none"


def _cells(method: str, facts: Recipe, claims: Claims) -> list[str]:
    cells = {runtime: _cell(method, facts.network.architecture.name, runtime, claims) for runtime in RUNTIMES}
    if _verified_on_a_gpu(facts):
        cells["onnxruntime-cuda"] = "verified"
    return list(cells.values())


def _cell(method: str, network: str, runtime: str, claims: Claims) -> str:
    states = ("verified", "equals", "builds")
    found = [state for state in states if f"{method} {network} {runtime} {state}" in claims]
    if (method, network) in _passed_at_full_size(runtime):
        found = ["verified"]
    return found[0] if found else "none"


def _verified_on_a_gpu(facts: Recipe) -> bool:
    """Whether a trained checkpoint of the recipe, whose folder begins with its name, passed on ONNX Runtime there."""
    record = _record(TRAINED)
    chains = [run["parity"]["passed"] for name, run in record["runs"].items() if name.startswith("onnxruntime-cuda ")]
    return record["checkpoint"].startswith(facts.name) and bool(chains) and all(chains)


def _passed_at_full_size(runtime: str) -> set[tuple[str, str]]:
    """Methods and families whose networks of full size all passed the parity chain in a runtime on a GPU, merging."""
    passed: dict[tuple[str, str], bool] = {}
    for name, row in _record(FULL_SIZE)["rows"].items():
        of, _, where, *dense = name.split()
        if where == runtime and not dense:
            facts = recipe(of)
            case = facts.merging.method, facts.network.architecture.name
            links = [link["passed"] for link in row.get("links", {}).values()]
            passed[case] = passed.get(case, True) and bool(links) and all(links)
    return {case for case, all_passed in passed.items() if all_passed}


def _record(name: str) -> Any:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def collect(files: list[Path]) -> None:
    """Writes the evidence from JUnit files, or from a run of the tests where there are none."""
    with tempfile.TemporaryDirectory() as folder:
        if not files:
            files = [Path(folder) / "tests.xml"]
            properties = "-o", "junit_family=xunit1"  # the other kind has none
            command = [sys.executable, "-m", "pytest", *TESTS, "-k", SELECTION, *properties, f"--junitxml={files[0]}"]
            subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603  a test that fails proves nothing
        claims = claims_in(files)
    facts = {"schema_version": 1, "environment": asdict(environment(devices=False)), "claims": claims}
    EVIDENCE.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("collect", "write"))
    parser.add_argument("files", nargs="*", type=Path, metavar="XML")
    options = parser.parse_args()
    if options.step == "collect":
        collect(options.files)
    TABLE.write_text(page(json.loads(EVIDENCE.read_text(encoding="utf-8"))["claims"]), encoding="utf-8")


if __name__ == "__main__":
    main()
