"""`benchmarks/runtimes.py` compares labels that could differ, and times what fits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import toy

from algm_deploy.errors import GateError
from algm_deploy.merging import merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.vit import MergeInputs
from algm_deploy.recipe.schema import Protocol, Recipe

LABELS = ["dense", "dense cudnn", "merged", "truncated"]


@pytest.fixture
def runtimes(script: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("onnxruntime")
    return script("runtimes.py")


def recipe_of(family: str, decoder: str) -> Recipe:
    network, plan = toy(family, decoder)
    return Recipe("toy", network, plan, Protocol("camvid", 64, 64, 64), output="labels")


def labels_of(model: Any, recipe: Recipe, images: Tensor) -> Tensor:
    inputs = MergeInputs(*merge_inputs(0.0, 0.0)[:2], ())
    with torch.no_grad():
        found: Tensor = Deployed(model, recipe.network, "labels").eval()(images, inputs)[0]
    return found


@pytest.mark.parametrize("kind", [("segvit", "atm"), ("eomt", "queries"), ("segmenter", "linear")])
def test_random_networks_tell_several_classes_apart(
    runtimes: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, str]
) -> None:
    """Where queries answer, those whose answers are as faint as all else tell one."""
    facts = recipe_of(*kind)
    images = runtimes.pictures(1, facts.network.image_size)
    assert len(labels_of(runtimes.random_network(facts), facts, images).unique()) > 1
    if kind != ("segmenter", "linear"):
        monkeypatch.setattr(runtimes, "ANSWERS", {})
        assert len(labels_of(runtimes.random_network(facts), facts, images).unique()) == 1


def test_one_label_compares_nothing(runtimes: ModuleType) -> None:
    facts = recipe_of("segmenter", "linear")
    model = runtimes.random_network(facts)
    images = runtimes.pictures(2, facts.network.image_size)
    labels = labels_of(model, facts, images)

    def compared() -> dict[str, Any]:
        found: dict[str, Any] = runtimes.Modules(model, facts, ()).compared("toy", "dense", labels, images, (), "fp32")
        return found

    found = compared()
    assert found["labels"] == len(labels.unique()) > 1
    assert found["pixels_differ"] == [0, 0]
    labels[0] = (labels[0] + 1) % 5
    with pytest.raises(GateError, match="nothing is timed"):
        compared()
    with torch.no_grad():
        model.decoder.head.bias[3] += 1e3
    labels[:] = 3
    with pytest.raises(GateError, match=r"'labels': 1, .*expected several labels"):
        compared()


# --- what fits -------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(
    runtimes: ModuleType, ort_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> argparse.Namespace:
    """Of a network that is exported, small in every way but for how it merges."""
    monkeypatch.setattr(runtimes, "require_library", lambda _: ort_library)
    whole = runtimes.recipe_of

    def small(*asked: Any) -> Recipe:
        found: Recipe = whole(*asked)
        return replace(found, network=replace(found.network, classes=5, image_size=(128, 128)))

    monkeypatch.setattr(runtimes, "recipe_of", small)
    told = {"networks": ["toy"], "batches": [1, 2], "precision": "fp32", "repeats": 1, "beside": []}
    options = argparse.Namespace(folder=tmp_path / "graphs", **told)
    runtimes.export("toy", options)
    return options


def test_every_batch_opens_its_own_sessions(
    runtimes: ModuleType, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the batch before are closed by then."""
    closed, before = [], []
    keep, configurations = runtimes.Bench.keep, runtimes.Bench.configurations

    def kept(self: Any, *sessions: object) -> None:
        count = len(self.opened)
        keep(self, *sessions)
        closed.append(count - len(self.opened))

    def made(self: Any, row: dict[str, Any], batch: int) -> Any:
        before.append(len(self.opened))
        return configurations(self, row, batch)

    monkeypatch.setattr(runtimes.Bench, "keep", kept)
    monkeypatch.setattr(runtimes.Bench, "configurations", made)
    record = runtimes.network_record("toy", options)
    assert record["failed"] == {}
    assert [row["failed"] for row in record["batches"].values()] == [{}, {}]
    assert list(record["batches"]["2"]["parity"]) == [*LABELS, "mixed"]
    assert all(found["labels"] > 1 for row in record["batches"].values() for found in row["parity"].values())
    assert before == [0, 0]
    assert [count for count in closed if count] == [4, 4]
    assert not list(options.folder.glob("*.data"))


def test_what_fails_does_not_take_the_rest_with_it(
    runtimes: ModuleType, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One does not fit; of another, what it has opened is closed, so that the next ones have its memory."""
    segmented, parity = runtimes.Bench.segmented, runtimes.Bench.parity
    whole: list[str] = []

    def refused(self: Any, kind: str) -> Any:
        if kind == "merged":
            raise MemoryError("no room")
        return segmented(self, kind)

    def wrong(self: Any, label: str, each: Any) -> Any:
        whole.append(f"{label}: {len(self.opened)}")
        if label == "dense cudnn":
            raise GateError("wrong")
        return parity(self, label, each)

    monkeypatch.setattr(runtimes.Bench, "segmented", refused)
    monkeypatch.setattr(runtimes.Bench, "parity", wrong)
    options.batches = [1]
    row = runtimes.network_record("toy", options)["batches"]["1"]
    assert row["failed"] == {"dense cudnn": "GateError: wrong", "merged": "MemoryError: no room"}
    assert list(row["parity"]) == ["dense", "truncated"]
    assert whole == ["dense: 1", "dense cudnn: 2", "truncated: 2"]


@pytest.mark.parametrize("missing", [{"merged"}, {"truncated"}, {"dense"}, {"dense", "dense cudnn"}, set(LABELS)])
def test_times_of_what_is_there(runtimes: ModuleType, monkeypatch: pytest.MonkeyPatch, missing: set[str]) -> None:
    """And what they say of merging, as far as they do."""
    ms = {"dense": 6.0, "dense cudnn": 5.0, "merged": 4.0, "truncated": 3.0}
    found = {
        label: SimpleNamespace(run=label, session=None, variant="merged") for label in LABELS if label not in missing
    }
    monkeypatch.setattr(runtimes, "measured", lambda work, _: {label: [ms[run]] for label, run in work.items()})
    for name in ("host", "stream", "kernels"):
        monkeypatch.setattr(runtimes, name, lambda *_, name=name: name)
    bench = object.__new__(runtimes.Bench)
    bench.options, bench.thresholds = argparse.Namespace(repeats=1, beside=["kernels"]), {}
    bench.pictures = lambda count: None
    row: dict[str, Any] = {}
    bench.timed(row, found, 1)
    assert list(row["ms"]) == list(row["host_ms"]) == list(found)
    assert ("photos_ms" in row) == ("kernels_merged" in row) == ("merged" in found)
    dense = {"dense", "dense cudnn"} - missing
    assert row.get("faster_dense") == (min(dense, key=lambda label: ms[label]) if dense else None)
    assert ("speedup" in row) == bool(dense and "merged" in found)
    assert ("merge_efficiency" in row) == bool(dense and "merged" in found and "truncated" in found)
    assert runtimes.line("toy", 1, row | {"failed": {}})
