"""ELViT as a merge plan: what it is called, what it costs, that it is verified, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from toys import CONSTANT_COUNTS, outputs_of

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.errors import BundleError, PlanError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.parity.chain import verify
from algm_deploy.parity.comparison import output_problem
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.merges.elvit import elvit_facts, elvit_problems
from algm_deploy.parity.replay import Replays
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import flatten, recipe
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import plan_in_force
from algm_deploy.runners.contract import Array
from algm_deploy.wording import merge_titles

PLAN = CONSTANT_COUNTS["elvit"]
NETWORK = Network("segmenter", 64, 4, 1, 5, (96, 96))


@pytest.fixture(scope="module")
def bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    return tiny_export(flatten(PLAN, "merging."))


@pytest.fixture(scope="module")
def outputs(bundle: Bundle) -> dict[str, Array]:
    return outputs_of(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "algm"}, "merging.elvit_layer is read by method elvit, got 2 for algm"),
        ({"elvit_layer": -1}, "merging.elvit_layer from 1"),
        ({"elvit_grid": (4, 0)}, r"rows and columns of tokens, such as \[28, 28\], got \(4, 0\)"),
        ({"elvit_window": 4}, "odd number as merging.elvit_window, got 4"),
        ({"elvit_neighbours": 0}, "merging.elvit_neighbours from 1"),
        ({"elvit_temperature": 0.0}, "positive merging.elvit_temperature"),
        ({"clap_layers": (1,)}, "method elvit has neither CLAP nor GBM"),
        ({"tome_r": (1,)}, "merging.tome_r is read by method tome"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"elvit_grid": (6, 6)}, r"smaller than the grid \(6, 6\)"),
        ({"elvit_grid": (3, 7)}, r"smaller than the grid \(6, 6\), got \(3, 7\)"),
        ({"elvit_neighbours": 17}, "up to the 16 tokens"),
        ({"elvit_layer": 5}, "merging layers up to 4"),
    ],
)
def test_plans_that_do_not_fit_the_network_are_refused(change: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe("tiny", NETWORK, replace(PLAN, **change), Protocol("camvid", 96, 96, 96))


def test_it_has_a_name_and_no_thresholds() -> None:
    signature = signature_of(Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96)))
    assert signature.merges == ("elvit_2",)
    assert [tensor.name for tensor in signature.inputs] == ["image"]
    assert merge_titles(signature.merges) == {"elvit_2": "ELViT"}
    assert plan_name(PLAN, DENSE) == "ELViT, 4 x 4 tokens after block 2"
    assert plan_in_force(PLAN, {}) == PLAN
    assert plan_in_force(replace(PLAN, elvit_layer=0), {}) == DENSE


def test_multiply_adds() -> None:
    """By hand: ten blocks of all patches, fourteen of centroids, five iterations, one restoration."""
    facts = recipe("segmenter_vit_l16_ade20k").network
    plan = MergePlan((), (), method="elvit", elvit_layer=10, elvit_grid=(28, 28))
    dense, found = multiply_adds(facts, DENSE), multiply_adds(facts, plan, [784])
    assert found.decoder == dense.decoder
    assert found.merging == 11 * 1600 * 784 * 1024 + 1600 * 784 * 1024

    def block(rows: int) -> int:
        return 10 * rows * 1024 + 12 * rows * 1024**2 + 2 * rows**2 * 1024

    assert found.encoder == 10 * block(1601) + 14 * block(785)


def test_the_chain_holds(bundle: Bundle, record_property: Callable[[str, object], None]) -> None:
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "elvit segmenter/mask_transformer onnxruntime-cpu verified")


@pytest.mark.parametrize("change", [{"elvit_grid": (4, 5)}, {"elvit_layer": 3}, {"semantics": "paper"}], ids=str)
def test_another_graph_is_found_out(bundle: Bundle, change: Any) -> None:
    facts = graph_facts(bundle.file("model.onnx"))
    assert not graph_problems(facts, bundle.recipe)
    other = replace(bundle.recipe, merging=replace(bundle.recipe.merging, **change))
    assert any("encoder: expected" in problem for problem in graph_problems(facts, other))


def test_a_wrong_centroid_is_found_out(bundle: Bundle, outputs: dict[str, Array]) -> None:
    network, plan, name = bundle.recipe.network, bundle.recipe.merging, "token_map_elvit_2"
    token_map = outputs[name][0]
    replays = Replays(bundle, parity_windows(bundle.recipe, [], 2), bundle.recipe.precision)
    replayed = replays(0, [token_map])
    (facts,) = elvit_facts([replayed], 0, plan, network)
    assert elvit_problems(facts, token_map, network.prefix) == []
    wrong = token_map.copy()
    wrong[5] = network.prefix + (wrong[5] + 5) % 16
    assert "farthest centroid is" in elvit_problems(facts, wrong, network.prefix)[0]
    beyond = outputs | {name: np.where(np.arange(token_map.size) == 3, network.prefix + 16, outputs[name])}
    assert output_problem(outputs, bundle.signature, 2, network, plan) is None
    assert "names tokens that" in (output_problem(beyond, bundle.signature, 2, network, plan) or "")


def test_tensorrt_is_given_standard_operators(bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    model = onnx.load(write_tensorrt_onnx(copied(bundle), "fp32", [17])[0], load_external_data=False)
    assert {node.op_type for node in model.graph.node if node.domain} == {"unmerge"}  # the tail
    assert not model.functions


def test_counts_are_the_same_in_every_picture(outputs: dict[str, Array]) -> None:
    assert outputs["token_counts"].tolist() == [[16], [16]]


def test_dense_by_thresholds_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="constant number of tokens: export with --dense"):
        Predictor(bundle, "onnxruntime-cpu", dense=True)
