"""What `benchmarks/full_size.py` runs for a command line, and what its record keeps. The commands are stand-ins."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from algm_deploy.bundle.records import Link, Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.recipe.families import architectures
from algm_deploy.recipe.reading import recipe

TAKEN = {"exit_code": 0, "seconds": 1.0, "cpu_seconds": 1.0, "peak_memory_gib": 1.0}
DEIT, SETR, PRUNED = "deit_vit_b16_ade20k", "setr_naive_vit_b16_cityscapes", "segvit_prune_vit_b16_ade20k"


@pytest.fixture
def full_size(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as it is left by whoever sets it
    return script("full_size.py")


@pytest.fixture
def run(full_size: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the script on these words with a stand-in for its commands; returns the rows of its record."""

    def rows(step: Callable[[list[str]], dict[str, Any]], *words: str) -> dict[str, Any]:
        monkeypatch.setattr(full_size, "checkpoint_apart", lambda _, target: (target, 7))
        monkeypatch.setattr(full_size, "step", step)
        monkeypatch.setattr(sys, "argv", ["full_size.py", *words, "-o", str(tmp_path / "record.json")])
        full_size.main()
        found: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
        assert found["schema_version"] == 2
        return found["rows"]  # type: ignore[no-any-return]

    return rows


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_without_recipes_there_is_one_of_each_family(full_size: ModuleType) -> None:
    options = full_size.arguments([])
    families = {recipe(name).network.architecture.name for name in options.recipes}
    assert families == {row.name for row in architectures()} - {"dinov2/linear_ms"}  # which has no recipe
    assert len(options.recipes) == len(families)
    assert "demo" not in options.recipes
    assert options.clap_threshold == "0.6"


@pytest.mark.parametrize(
    ("words", "recipes", "precisions"),
    [
        ([f"{DEIT}=0.6", SETR], [f"{DEIT}=0.6", SETR], ["fp32"]),
        (["--runtime", "torch", "--precision", "fp16", DEIT, "--dense"], [DEIT], ["fp16"]),
        ([DEIT, "--precision", "fp32", "bf16", f"{SETR}=0.7"], [DEIT, f"{SETR}=0.7"], ["fp32", "bf16"]),
    ],
)
def test_recipes_and_precisions_are_told_apart(
    full_size: ModuleType, words: list[str], recipes: list[str], precisions: list[str]
) -> None:
    options = full_size.arguments(words)
    assert (options.recipes, options.precision) == (recipes, precisions)
    assert options.clap_threshold is None


@pytest.mark.parametrize("words", [["--precision", "fp8"], ["--precision", DEIT], [DEIT, "--jobs", "0"], ["deit"]])
def test_what_is_neither_is_refused(full_size: ModuleType, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        full_size.arguments(words)


def test_rows_run_at_a_time_each_in_its_own_folder(run: Callable[..., dict[str, Any]]) -> None:
    both = threading.Barrier(2)
    folders: list[str] = []

    def step(command: list[str]) -> dict[str, Any]:
        if command[0] == "export":
            folders.append(after(command, "-o"))
            both.wait(timeout=30)  # breaks where one row waits for the other
        return TAKEN

    rows = run(step, DEIT, SETR, "--jobs", "2", "--runtime", "onnxruntime-cuda", "--precision", "bf16")
    assert set(rows) == {f"{name} bf16 onnxruntime-cuda" for name in (DEIT, SETR)}
    assert len(set(folders)) == 2
    assert all(list(row["steps"]) == ["export", "build", "verify"] for row in rows.values())
    assert run(step, DEIT, SETR, "--jobs", "2") | rows == run(step, DEIT, SETR, "--jobs", "2")  # others stay


def test_thresholds_are_the_rows_own_before_those_of_all(run: Callable[..., dict[str, Any]]) -> None:
    rows = run(lambda _: TAKEN, f"{DEIT}=0.7", SETR, PRUNED, "--clap-threshold", "0.5")
    assert rows[f"{DEIT} fp32"]["settings"] == ["merging.clap_threshold=0.7"]
    assert rows[f"{SETR} fp32"]["settings"] == ["merging.clap_threshold=0.5"]
    assert rows[f"{PRUNED} fp32"]["settings"] == "recipe's"  # DToP has no such threshold


def test_a_row_keeps_links_and_where_the_time_went(run: Callable[..., dict[str, Any]], tiny_bundle: Bundle) -> None:
    link = Link(number=1, name="network", passed=True, measured="equal", gate="bit for bit")

    def step(command: list[str]) -> dict[str, Any]:
        if command[0] == "export":
            shutil.copytree(tiny_bundle.path, after(command, "-o"))
        elif command[0] == "verify":
            seconds = {"network": 3.0, "fp64": 40.0}
            record = Parity(runtime="onnxruntime-cpu", images=2, batches=(1,), links=(link,), seconds=seconds)
            Bundle.open(Path(command[1])).record(record)
        return TAKEN

    row = run(step, DEIT, "--runtime", "onnxruntime-cpu")[f"{DEIT} fp32 onnxruntime-cpu"]
    assert row["links"] == {"network": {"passed": True, "measured": "equal", "gate": "bit for bit"}}
    assert row["verify_seconds"] == {"network": 3.0, "fp64": 40.0}
    assert (row["scenes"], row["parameters"]) == (2, 7)


def test_a_step_that_fails_ends_its_recipe_alone(run: Callable[..., dict[str, Any]]) -> None:
    def step(command: list[str]) -> dict[str, Any]:
        return TAKEN | {"exit_code": int(command[0] == "export" and after(command, "--recipe") == DEIT)}

    rows = run(step, DEIT, SETR)
    assert [list(row["steps"]) for row in rows.values()] == [["export"], ["export", "verify", "build"]]


def test_random_weights_are_made_in_a_process_of_their_own(full_size: ModuleType, tmp_path: Path) -> None:
    path, parameters = full_size.checkpoint_apart(recipe("demo").network, tmp_path / "checkpoint")
    assert path.is_file()
    assert parameters > 1e6
