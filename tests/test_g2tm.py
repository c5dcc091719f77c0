"""G2TM as a merge plan: what it is called, what it costs, that it is verified, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.errors import ExportError, PlanError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.parity.chain import verify
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.merges.g2tm import G2tmFacts, g2tm_problems
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import flatten
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import plan_in_force

PLAN = MergePlan((), (), method="g2tm", g2tm_layer=2, clap_threshold=0.4)
NETWORK = Network("segmenter", 64, 4, 1, 5, (96, 96))


@pytest.fixture(scope="module")
def bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    return tiny_export(flatten(PLAN, "merging."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "tome"}, "merging.g2tm_layer is read by method g2tm, got 2 for tome"),
        ({"g2tm_layer": -1}, "merging.g2tm_layer from 1"),
        ({"batch": "batch_min"}, "merges every image alone"),
        ({"clap": "budget", "clap_budget": 3}, "set merging.clap_threshold instead"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


def test_it_has_a_name_and_a_threshold() -> None:
    signature = signature_of(Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96)))
    assert signature.merges == ("g2tm_2",)
    assert [tensor.name for tensor in signature.inputs] == ["image", "clap_threshold"]
    assert plan_name(PLAN, DENSE) == "G2TM in block 2, tau 0.4"
    assert plan_in_force(PLAN, {"clap_threshold": 0.5}) == replace(PLAN, clap_threshold=0.5)
    assert plan_in_force(PLAN, {"clap_threshold": np.inf}) == DENSE
    assert not PLAN.static


def test_multiply_adds() -> None:
    """As of a merge that costs nothing: attention of block 2 on 36 patches, its MLP on 20."""
    clap = MergePlan((2,), ())
    assert multiply_adds(NETWORK, PLAN, [20]) == multiply_adds(NETWORK, clap, [20])
    assert multiply_adds(NETWORK, PLAN, [20]).merging == 0


def test_the_chain_holds(bundle: Bundle, record_property: Callable[[str, object], None]) -> None:
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "g2tm segmenter/mask_transformer onnxruntime-cpu verified")


def test_the_threshold_may_change(bundle: Bundle) -> None:
    image = np.transpose(parity_windows(bundle.recipe, [], 1)[0], (1, 2, 0))
    counts = []
    for tau in (-2.0, 0.4, 2.0):
        with Predictor(bundle, "onnxruntime-cpu", tau=tau) as predictor:
            counts.append(int(predictor.prediction(image).token_counts[0, 0]))
    assert counts[0] == 1
    assert 1 < counts[1] < counts[2] == 64


def test_another_graph_is_found_out(bundle: Bundle) -> None:
    facts = graph_facts(bundle.file("model.onnx"))
    assert not graph_problems(facts, bundle.recipe)
    other = replace(bundle.recipe, merging=replace(bundle.recipe.merging, g2tm_layer=3))
    assert any("encoder: expected" in problem for problem in graph_problems(facts, other))


def test_wrong_groups_are_found_out() -> None:
    """A row of four: the first two are similar enough, the next pair is one noise below."""
    facts = G2tmFacts(np.array([0.9, 0.495, 0.1], np.float32), 0.5, 0.01)
    good = np.array([1, 1, 2, 3])
    assert g2tm_problems(facts, good, (1, 4), 1) == []
    assert g2tm_problems(facts, np.array([1, 1, 1, 2]), (1, 4), 1) == []  # noise explains it
    assert "joining similar neighbours" in g2tm_problems(facts, np.array([1, 1, 2, 2]), (1, 4), 1)[0]
    assert "joining similar neighbours" in g2tm_problems(facts, np.array([2, 2, 1, 3]), (1, 4), 1)[0]
    assert "4.0e-01 above the threshold" in g2tm_problems(facts, np.array([1, 2, 3, 4]), (1, 4), 1)[0]


def test_tensorrt_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ExportError, match=r"algm\.g2tm, TensorRT has plugins for"):
        write_tensorrt_onnx(bundle, "fp32", [17])
