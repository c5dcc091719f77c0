"""EViT as a merge plan: what it is called, what it costs, that it is verified, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from toys import CONSTANT_COUNTS, outputs_of, toy

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.errors import PlanError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.ops import reference
from algm_deploy.parity.chain import verify
from algm_deploy.parity.comparison import output_problem
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.merges import differing, on_grounds, torch_maps
from algm_deploy.parity.merges.evit import evit_facts, evit_problems
from algm_deploy.parity.replay import Replays
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.reading import flatten
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import plan_in_force
from algm_deploy.runners.contract import Array
from algm_deploy.wording import merge_titles

PLAN = CONSTANT_COUNTS["evit"]
NETWORK = Network("segmenter", 64, 4, 1, 5, (96, 96))
NAME = "token_map_evit_2"


@pytest.fixture(scope="module")
def bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    return tiny_export(flatten(PLAN, "merging."))


@pytest.fixture(scope="module")
def outputs(bundle: Bundle) -> dict[str, Array]:
    return outputs_of(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "algm"}, "merging.evit_layers is read by method evit, got"),
        ({"evit_layers": (3, 2)}, r"ascending blocks from 1 as merging.evit_layers, got \(3, 2\)"),
        ({"evit_keep": 1.0}, "a share between 0 and 1, got 1.0"),
        ({"clap": "budget", "clap_budget": 3}, "set merging.evit_layers instead"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


def test_plans_that_do_not_fit_the_network_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"leaves out one of the 36 tokens of block 2, got 0\.99"):
        Recipe("tiny", NETWORK, replace(PLAN, evit_keep=0.99), Protocol("camvid", 96, 96, 96))
    network = replace(NETWORK, family="setr", decoder="mla", stages=(1, 2, 3, 4))
    with pytest.raises(RecipeError, match="the decoder mla has a network without cls"):
        Recipe("tiny", network, PLAN, Protocol("camvid", 96, 96, 96))
    network, _ = toy("eva", "mask2former")
    with pytest.raises(RecipeError, match="between its groups of blocks the eva reads every patch"):
        Recipe("tiny", network, PLAN, Protocol("camvid", 64, 96, 64))


def test_it_has_a_name_and_no_thresholds() -> None:
    signature = signature_of(Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96)))
    assert signature.merges == ("evit_2", "evit_3")
    assert [tensor.name for tensor in signature.inputs] == ["image"]
    assert merge_titles(signature.merges) == {"evit_2": "EViT 2", "evit_3": "EViT 3"}
    assert plan_name(PLAN, DENSE) == "EViT, 60 % in blocks 2, 3"
    assert plan_in_force(PLAN, {}) == PLAN
    assert PLAN.static


def test_multiply_adds() -> None:
    """By hand: 36 patches, of which 22 stay, and of 23 tokens 14."""
    assert PLAN.evit_counts(36) == {2: (36, 22), 3: (23, 14)}
    found, dense = multiply_adds(NETWORK, PLAN, [23, 15]), multiply_adds(NETWORK, DENSE)
    assert found.decoder == dense.decoder
    assert found.merging == 64 * (37 + 14 * 22 + 14 + 24 + 9 * 14 + 9)

    def attention(rows: int) -> int:
        return 5 * rows * 64 + 4 * rows * 64**2 + 2 * rows**2 * 64

    def mlp(rows: int) -> int:
        return 5 * rows * 64 + 8 * rows * 64**2

    parts = [attention(37) * 2, mlp(37), mlp(24), attention(24), mlp(16), attention(16), mlp(16)]
    assert found.encoder == sum(parts)


def test_the_chain_holds(bundle: Bundle, record_property: Callable[[str, object], None]) -> None:
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "evit segmenter/mask_transformer onnxruntime-cpu verified")


@pytest.mark.parametrize("change", [{"evit_keep": 0.5}, {"evit_layers": (2, 4)}], ids=str)
def test_another_graph_is_found_out(bundle: Bundle, change: Any) -> None:
    facts = graph_facts(bundle.file("model.onnx"))
    assert not graph_problems(facts, bundle.recipe)
    other = replace(bundle.recipe, merging=replace(bundle.recipe.merging, **change))
    assert any("encoder: expected" in problem for problem in graph_problems(facts, other))


def test_wrong_choices_are_found_out(bundle: Bundle, outputs: dict[str, Array]) -> None:
    network, plan, prefix = bundle.recipe.network, bundle.recipe.merging, bundle.recipe.network.prefix
    told = [outputs[f"token_map_evit_{layer}"] for layer in plan.layers]
    replays = Replays(bundle, parity_windows(bundle.recipe, [], 2), bundle.recipe.precision)
    (facts,) = evit_facts([replays(0, [one[0] for one in told])], 0, plan, network)
    record = told[0][0]
    assert evit_problems(facts, record, prefix) == []
    source, index = record - prefix, np.arange(len(record))
    stays, leaves = np.flatnonzero(source == index), np.flatnonzero(source != index)
    farther = record.copy()
    farther[leaves[0]] = prefix + next(row for row in stays if row != source[leaves[0]])
    assert "farther than the nearest" in evit_problems(facts, farther, prefix)[0]
    swapped = record.copy()
    least = stays[facts.attention[stays].argmin()]
    most = leaves[facts.attention[leaves].argmin()]
    swapped[record == prefix + least] = prefix + most
    swapped[most] = prefix + most
    assert any("more attention than one that stays" in one for one in evit_problems(facts, swapped, prefix))


def test_a_token_that_stays_instead_of_another_counts_once_and_not_for_all_that_are_near(
    bundle: Bundle, outputs: dict[str, Array]
) -> None:
    plan, prefix = bundle.recipe.merging, bundle.recipe.network.prefix
    place = 0, plan, bundle.recipe.network
    told = [outputs[f"token_map_evit_{layer}"][0] for layer in plan.layers]
    replayed = Replays(bundle, parity_windows(bundle.recipe, [], 2), bundle.recipe.precision)(0, told)
    truth, rows = replayed.truth[0], len(told[0])
    x, index, (exact,) = truth.values[:, prefix:].numpy(), prefix + np.arange(rows), torch_maps([truth], *place)

    def restored(stays: np.ndarray) -> np.ndarray:
        return prefix + reference.evit_sources(x, stays[None].astype(np.float32), int(stays.sum()))[0]

    def swapped(one: int, other: int) -> np.ndarray:
        stays = exact == index
        stays[[one, other]] = stays[[other, one]]
        return restored(stays)

    def difference(ours: np.ndarray) -> tuple[int, int]:
        return differing(truth.map[0].numpy(), ours, on_grounds(truth, exact, ours, *place), *place)

    stay, leave = np.flatnonzero(exact == index), np.flatnonzero(exact != index)
    assert difference(exact) == (0, rows)
    swaps = [swapped(one, other) for one in stay for other in leave[::4]]
    assert max((ours != exact).sum() for ours in swaps) > 4
    assert {difference(ours) for ours in swaps} == {(2, rows)}
    # A token that is restored from another than the nearest of those that stay counts, near to the swapped or not.
    ours = max(swaps, key=lambda one: (one != exact).sum())
    for row in np.flatnonzero((ours != index) & (exact != index)):
        wrong = ours.copy()
        wrong[row] = next(one for one in ours[ours == index] if one != ours[row])
        assert difference(wrong) == (3, rows)


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (0, 0, "names tokens that do not reach block 3"),
        (-1, 1, "names tokens that do not reach block 3"),
        (None, None, "that did not stay"),
    ],
)
def test_records_that_cannot_be_are_found_out(
    bundle: Bundle, outputs: dict[str, Array], row: int | None, value: int | None, message: str
) -> None:
    network, plan = bundle.recipe.network, bundle.recipe.merging
    prefix = network.prefix
    assert output_problem(outputs, bundle.signature, 2, network, plan) is None
    changed = outputs["token_map_evit_3"].copy()
    if row is None:
        own = prefix + np.arange(len(changed[1]))
        left = np.flatnonzero(changed[1] != own)
        changed[1, left[0]] = prefix + left[1]
    else:
        changed[1, row] = value
    problem = output_problem(outputs | {"token_map_evit_3": changed}, bundle.signature, 2, network, plan)
    assert message in (problem or "")
    counts = output_problem(outputs | {"token_counts": outputs["token_counts"] + 1}, bundle.signature, 2, network, plan)
    assert "instead of" in (counts or "")


def test_tensorrt_is_given_standard_operators(bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    model = onnx.load(write_tensorrt_onnx(copied(bundle), "fp16", [23, 16])[0], load_external_data=False)
    assert {node.op_type for node in model.graph.node if node.domain} == {"unmerge"}
    assert not model.functions
