"""Link 3 on tables alone: which facts of a graph it holds against the recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError
from algm_deploy.parity.graph import graph_facts, graph_problems, signature_problems
from algm_deploy.recipe.plan import MergePlan

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts(tiny_bundle: Bundle) -> Facts:
    return graph_facts(tiny_bundle.file("model.onnx"))


def test_facts_name_what_the_graph_consists_of(facts: Facts) -> None:
    assert facts["opset"] == {"ai.onnx": 18, "algm": 1}
    assert [tensor["name"] for tensor in facts["inputs"]] == ["image", "clap_threshold", "gbm_threshold"]
    assert facts["outputs"][0] == {"name": "scores", "dtype": "float32", "shape": ["batch", 11, 128, 128]}
    assert [node["operator"] for node in facts["algm_nodes"]] == [
        *("attention", "clap", "attention", "attention", "gbm", "attention"),  # encoder
        *("attention", "attention", "unmerge"),
    ]
    assert facts["operators"]["algm.attention"] == 6


def test_exported_graph_has_no_problem(facts: Facts, tiny_bundle: Bundle) -> None:
    assert graph_problems(facts, tiny_bundle.recipe) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: f["opset"].update({"ai.onnx": 17}), "opset: expected 18, found 17"),
        (lambda f: f["inputs"].pop(), "inputs: expected"),
        (lambda f: f["outputs"][1].update(dtype="int32"), "outputs: expected"),
        (lambda f: f["algm_nodes"].pop(1), "encoder: expected {'operator': 'clap'"),
        (lambda f: f["algm_nodes"].insert(0, f["algm_nodes"].pop(1)), "encoder: expected {'operator': 'attention'"),
        (lambda f: f["algm_nodes"].append(f["algm_nodes"][4]), "decoder: expected no merging"),
        (lambda f: f["algm_nodes"].clear(), "found None"),
        (lambda f: f["algm_nodes"][0].update(scale=0.2), "'scale': 0.2"),
    ],
)
def test_problems(facts: Facts, tiny_bundle: Bundle, change: Callable[[Facts], Any], problem: str) -> None:
    changed = copy.deepcopy(facts)
    change(changed)
    found = graph_problems(changed, tiny_bundle.recipe)
    assert any(problem in text for text in found), found


def test_plan_decides_what_is_expected(facts: Facts, tiny_bundle: Bundle) -> None:
    other = replace(tiny_bundle.recipe, merging=MergePlan((1,), (4,)))
    assert any("'divisor': 4.0" in text for text in graph_problems(facts, other))


def test_signature_of_the_manifest(tiny_bundle: Bundle) -> None:
    signature = tiny_bundle.signature
    assert signature_problems(signature, tiny_bundle.recipe) == []
    assert "max_batch 8, found 9" in signature_problems(replace(signature, max_batch=9), tiny_bundle.recipe)[0]
    assert "merges" in signature_problems(replace(signature, merges=("clap_1",)), tiny_bundle.recipe)[0]


def test_file_that_is_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(BundleError, match="expected an ONNX file"):
        graph_facts(path)
    path.write_bytes(b"\xff" * 32)
    with pytest.raises(BundleError, match="cannot be decoded"):
        graph_facts(path)
