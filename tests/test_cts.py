"""CTS as a merge plan: what it is called, what it costs, that it is verified, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import outputs_of, segmenter_checkpoint, toy

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, parity_windows
from algm_deploy.errors import PlanError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.models.checkpoints.reading import read_checkpoint
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.models.policy import PolicyNet, policy_multiply_adds
from algm_deploy.parity.chain import verify
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.merges import differing
from algm_deploy.parity.merges.cts import cts_facts, cts_problems
from algm_deploy.parity.replay import Replays
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import resolve, with_method
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import plan_in_force
from algm_deploy.wording import merge_titles

PLAN = MergePlan((), (), method="cts", cts_shared=3)
NETWORK = Network("segmenter", 64, 3, 1, 5, (96, 96), policy=True)
PROTOCOL = Protocol("camvid", 96, 96, 96)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as tue-mps/cts-segmenter writes it."""
    facts = {"policy_method": "policy_net", "policy_schedule": [24, 3]}
    return segmenter_checkpoint(tmp_path_factory.mktemp("cts"), NETWORK, **facts)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, made_once: Callable[..., Path]) -> Bundle:
    return Bundle.open(made_once("cts", lambda target: export(checkpoint, target, None, {})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "algm"}, "merging.cts_shared is read by method cts, got 3 for algm"),
        ({"cts_shared": -1}, "merging.cts_shared counts the superpatches that share a token, got -1"),
        ({"gbm": "budget", "gbm_budget": 3}, "set merging.cts_shared instead"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


def test_plans_and_networks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"up to the 9 superpatches of the grid \(6, 6\), got 10"):
        Recipe("tiny", NETWORK, replace(PLAN, cts_shared=10), PROTOCOL)
    with pytest.raises(RecipeError, match="and this network has none: export a checkpoint that was trained with CTS"):
        Recipe("tiny", replace(NETWORK, policy=False), PLAN, PROTOCOL)
    with pytest.raises(RecipeError, match=r"network.image_size in multiples of 32, .* got 16 and \(96, 80\)"):
        replace(NETWORK, image_size=(96, 80))
    other, _ = toy("setr", "naive")
    with pytest.raises(RecipeError, match="family whose checkpoints may hold one, got setr: leave it out"):
        replace(other, policy=True)


def test_it_has_a_name_and_no_thresholds() -> None:
    signature = signature_of(Recipe("tiny", NETWORK, PLAN, PROTOCOL))
    assert signature.merges == ("cts_1",)
    assert [tensor.name for tensor in signature.inputs] == ["image"]
    assert merge_titles(signature.merges) == {"cts_1": "CTS"}
    assert plan_name(PLAN, DENSE) == "CTS, 3 superpatches"
    assert plan_in_force(PLAN, {}) == PLAN
    assert PLAN.static
    assert PLAN.row.standing
    assert not replace(PLAN, cts_shared=0).layers


def test_a_recipe_over_a_checkpoint_of_cts_merges_as_it_says(checkpoint: Path) -> None:
    below = settings_from_variant(read_checkpoint(checkpoint))
    above = {"merging.clap_layers": (1,), "merging.gbm_layers": (2,)}
    found, conflicts = resolve([("variant.yml", below), ("recipe x", with_method(above, below))])
    assert found.merging == MergePlan((1,), (2,))
    assert found.network == NETWORK
    assert "merging.method: recipe x says algm, variant.yml says cts; recipe x wins" in conflicts
    assert with_method({"output": "labels"}, below) == {"output": "labels"}
    own = {**above, "merging.method": "tome"}
    assert with_method(own, below)["merging.method"] == "tome"


def test_multiply_adds() -> None:
    """By hand: 27 of 36 patches' tokens in all blocks and the decoder, and what chooses them."""
    found, dense = multiply_adds(NETWORK, PLAN, [27]), multiply_adds(NETWORK, DENSE)
    assert found.patch_embedding == dense.patch_embedding == 36 * 64 * 3 * 256
    assert found.merging == policy_multiply_adds((96, 96)) + 9 * 64 * 3 * 256
    rows, dim = 28, 64
    assert found.encoder == 3 * (10 * rows * dim + 12 * rows * dim**2 + 2 * rows**2 * dim)
    assert found.decoder < dense.decoder


def test_multiply_adds_of_the_policy_network() -> None:
    """Those of its convolutions as they run."""
    total = 0

    def count(conv: torch.nn.Module, _: Any, made: torch.Tensor) -> None:
        nonlocal total
        assert isinstance(conv, torch.nn.Conv2d)
        total += conv.weight[0].numel() * made[0].numel()

    policy = PolicyNet().eval()
    for module in policy.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(count)
    with torch.inference_mode():
        policy(torch.zeros(1, 3, 64, 96))
    assert total == policy_multiply_adds((64, 96))


def test_the_chain_holds(bundle: Bundle, record_property: Callable[[str, object], None]) -> None:
    assert bundle.recipe.merging == PLAN
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "cts segmenter/mask_transformer onnxruntime-cpu verified")


def test_another_graph_is_found_out(bundle: Bundle) -> None:
    facts = graph_facts(bundle.file("model.onnx"))
    assert not graph_problems(facts, bundle.recipe)
    other = replace(bundle.recipe, merging=replace(PLAN, cts_shared=2))
    assert any("encoder: expected" in problem for problem in graph_problems(facts, other))


def test_wrong_choices_are_found_out(bundle: Bundle) -> None:
    network, prefix = bundle.recipe.network, bundle.recipe.network.prefix
    images = parity_windows(bundle.recipe, [], 1)
    told = outputs_of(bundle, 1)["token_map_cts_1"][0]
    (facts,) = cts_facts([Replays(bundle, images, "fp32")(0, [told])], 0, PLAN)
    assert cts_problems(facts, told, network.grid, prefix) == []
    best = facts.score.argmax()
    lowest = replace(facts, score=np.where(np.arange(9) == best, facts.score.min() - 1, facts.score))
    assert "above one that merged" in cts_problems(lowest, told, network.grid, prefix)[0]
    assert "instead of 4" in cts_problems(replace(facts, least=4), told, network.grid, prefix)[0]
    blurred = replace(facts, noise=np.nan)
    assert cts_problems(blurred, told, network.grid, prefix) == ["CTS: scores are not finite"]
    shifted = np.where(told == told.max(), prefix, np.where(told == prefix, told.max(), told))
    assert "sharing whole superpatches" in cts_problems(facts, shifted, network.grid, prefix)[0]
    assert differing(told, shifted, told, 0, PLAN, network) == (1, 9)
