"""ToMe, the baseline, as a merge plan: what it is called, what it costs, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from toys import CONSTANT_COUNTS, outputs_of

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.errors import BundleError, PlanError
from algm_deploy.evaluation.evaluate import merge_names
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.onnxruntime import write_onnxruntime_onnx
from algm_deploy.lowering.portable import operator_of
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.merging import insert_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import network_class
from algm_deploy.models.vit import VitNetwork
from algm_deploy.parity.chain import verify
from algm_deploy.parity.decisions import map_problem
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.merges.tome import tome_facts, tome_problems
from algm_deploy.parity.replay import Replays
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import flatten, recipe
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import plan_in_force
from algm_deploy.runners.torch.packed import why_not
from algm_deploy.timing.variants import variant_network
from algm_deploy.wording import merge_titles

PLAN, AROUND = CONSTANT_COUNTS["tome"], CONSTANT_COUNTS["tome_blockwise"]
NETWORK = Network("segmenter", 64, 4, 1, 5, (96, 96))


@pytest.fixture(scope="module")
def bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    return tiny_export(flatten(PLAN, "merging."))


@pytest.fixture(scope="module")
def around(tiny_export: Callable[..., Bundle]) -> Bundle:
    return tiny_export(flatten(AROUND, "merging."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tome_share": (0.3,)}, r"merging.tome_share is read by method tome_blockwise, got \(0.3,\) for tome"),
        ({"method": "tome_blockwise"}, r"merging.tome_r is read by method tome, got \(8, 0, 4\) for tome_blockwise"),
        ({"tome_share": (0.6,), "tome_r": (), "method": "tome_blockwise"}, "from 0 to 0.5, one a block, got .* half"),
        ({"clap": "budget", "clap_budget": 2}, "got a budget for them: set merging.tome_r instead"),
        ({"gbm_layers": (5,)}, "method tome has neither CLAP nor GBM, got layers .* set merging.clap_layers and"),
        ({"clap_layers": (1,)}, "method tome has neither CLAP nor GBM"),
        ({"method": "algm"}, r"merging.tome_r is read by method tome, got \(8, 0, 4\) for algm"),
        ({"tome_r": (8, -1)}, r"merging.tome_r counts the tokens that vanish in each block, got \(8, -1\)"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


def test_merges_have_names_and_no_thresholds() -> None:
    facts = Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96))
    signature = signature_of(facts)
    assert PLAN.layers == (1, 3)
    assert signature.merges == ("tome_1", "tome_3")
    assert [tensor.name for tensor in signature.inputs] == ["image"]
    assert merge_names(PLAN) == ("tome_1", "tome_3")
    assert merge_names(replace(PLAN, tome_r=(8,))) == ("tome_1",)


def test_merges_around_parts_have_their_names() -> None:
    assert AROUND.layers == (1, 1, 3, 3)
    names = signature_of(Recipe("tiny", NETWORK, AROUND, Protocol("camvid", 96, 96, 96))).merges
    assert names == ("tome_1_attention", "tome_1_mlp", "tome_3_attention", "tome_3_mlp")
    assert merge_titles(names) == {"tome_1_attention": "ToMe 1 attention", "tome_3_mlp": "ToMe 3 MLP"}


def test_a_report_names_shares() -> None:
    assert plan_name(AROUND, DENSE) == "ToMe, 30 %, 0 %, 50 %, each by itself"
    assert plan_name(replace(AROUND, tome_share=(0.2,) * 3), DENSE) == "ToMe, 20 % in 3 blocks, each by itself"
    assert plan_in_force(AROUND, {}) == AROUND
    assert plan_in_force(replace(AROUND, tome_share=()), {}) == DENSE


def test_a_report_names_r() -> None:
    assert plan_name(replace(PLAN, tome_r=(4,) * 3), DENSE) == "ToMe, r 4 in 3 blocks"
    assert plan_name(replace(PLAN, tome_r=(0, 9)), DENSE) == "ToMe, r 9 in block 2"
    assert plan_name(PLAN, DENSE) == "ToMe, r 8, 0, 4"
    assert plan_in_force(PLAN, {}) == PLAN
    assert plan_in_force(replace(PLAN, tome_r=()), {}) == DENSE


def test_multiply_adds_count_keys_and_a_full_decoder() -> None:
    facts = recipe("segmenter_vit_s16_ade20k").network
    dense, plan = multiply_adds(facts, DENSE), MergePlan((), (), method="tome", tome_r=(100,))
    merged = multiply_adds(facts, plan, [924])
    assert merged.decoder == dense.decoder
    assert merged.merging == 513 * 512 * 64  # one key of 64 channels for all heads
    assert merged.encoder < dense.encoder


def test_multiply_adds_around_parts() -> None:
    """By hand: attention and MLP of what is left, norms of all rows, similarities of full width twice a block."""
    facts = recipe("segmenter_vit_s16_ade20k").network
    dense, plan = multiply_adds(facts, DENSE), MergePlan((), (), method="tome_blockwise", tome_share=(0, 0.5))
    merged = multiply_adds(facts, plan, [512, 512])
    assert merged.decoder == dense.decoder
    assert merged.merging == 2 * 513 * 512 * 384
    rows, left, width = 1025, 513, 384
    block = 10 * rows * width + 12 * left * width**2 + 2 * left**2 * width
    assert merged.encoder == dense.encoder // 12 * 11 + block


def test_the_chain_holds_around_parts(around: Bundle, record_property: Callable[[str, object], None]) -> None:
    images = parity_windows(around.recipe, [], 2)
    report = verify(around, "onnxruntime-cpu", images, progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    found = outputs_of(around)
    assert found["token_counts"].tolist() == [[45, 45, 32, 32]] * 2
    assert not np.array_equal(found["token_map_tome_1_attention"], found["token_map_tome_1_mlp"])
    record_property("support", "tome_blockwise segmenter/mask_transformer onnxruntime-cpu verified")


@pytest.mark.parametrize("share", [(0.3, 0, 0.4), (0.3, 0.3, 0.5), (0.3,)])
def test_a_graph_of_another_share_is_found_out(around: Bundle, share: tuple[float, ...]) -> None:
    facts = graph_facts(around.file("model.onnx"))
    other = replace(around.recipe, merging=replace(AROUND, tome_share=share))
    assert not graph_problems(facts, around.recipe)
    assert any("encoder: expected" in problem for problem in graph_problems(facts, other))


def test_the_map_of_another_part_is_found_out(around: Bundle) -> None:
    """And one that a merge before it does not nest in is not, as all tokens come back in between."""
    images = parity_windows(around.recipe, [], 1)
    found = outputs_of(around, 1)
    maps = [found[f"token_map_{name}"][0] for name in around.signature.merges]
    assert "splits tokens" in (map_problem(maps, 1) or "")
    assert map_problem(maps, 1, (True,) * len(maps)) is None
    replayed, network = Replays(around, images, "fp32")(0, maps), around.recipe.network
    (facts,) = tome_facts([replayed], 1, AROUND, network)
    before = replayed.truth[1].map[0].numpy()
    assert tome_problems(facts, before, maps[1], 1) == []
    wrong = tome_problems(facts, before, maps[0], 1)  # what attention merges is not what the MLP has to
    assert any("less similar than the best" in problem for problem in wrong)


def test_dense_by_thresholds_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"merge.* constant number of tokens: export with --dense"):
        Predictor(bundle, "onnxruntime-cpu", dense=True)
    with pytest.raises(BundleError, match="merge plan reads no clap_threshold"):
        Predictor(bundle, "onnxruntime-cpu", tau=0.9)


def test_tensorrt_is_given_standard_operators(bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    """The mean of keys is a product of all projected rows there."""
    model = onnx.load(write_tensorrt_onnx(copied(bundle), "fp16")[0], load_external_data=False)
    assert {node.op_type for node in model.graph.node if node.domain} == {"unmerge"}
    table = next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name.startswith("mean_key_"))
    rows, (heads, side) = np.arange(192.0), (2, 32)
    np.testing.assert_allclose(rows @ table, rows[64:128].reshape(heads, side).mean(0), rtol=1e-3)


def test_the_graph_for_cuda_has_tome_in_standard_operators(bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    """The library has neither of its operators; nothing of it was executed on a GPU."""
    bundle = copied(bundle)
    write_onnxruntime_onnx(bundle, "cuda", True, "built.onnx", "part-*.onnx")
    model = onnx.load(bundle.file("built.onnx"), load_external_data=False)
    bodies = {operator_of(function.name) for function in model.functions}
    assert {"tome", "proportional_attention"} <= bodies
    assert "unmerge" not in bodies


def test_truncated_around_parts_gives_every_row_back() -> None:
    torch.manual_seed(0)
    model: VitNetwork = network_class(NETWORK)(NETWORK)
    facts = Recipe("tiny", NETWORK, AROUND, Protocol("camvid", 96, 96, 96))
    truncated: Any = variant_network(model, facts, "truncated", [25, 25, 18, 18])[0].model
    (last,), stages = truncated.encoder(torch.zeros(1, 3, 96, 96))
    assert [stage.length.tolist() for stage in stages] == [[26], [26], [19], [19]]
    assert last.values.shape[1] == 37


def test_packed_rows_do_not_merge_around_parts() -> None:
    model: VitNetwork = network_class(NETWORK)(NETWORK)
    assert why_not(Deployed(insert_merging(model, DENSE), NETWORK, "labels")) is None
    assert why_not(Deployed(insert_merging(model, AROUND), NETWORK, "labels")) is not None


def test_truncated_pays_for_all_but_the_merge() -> None:
    torch.manual_seed(0)
    model: VitNetwork = network_class(NETWORK)(NETWORK)
    facts = Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96))
    truncated: Any = variant_network(model, facts, "truncated", [28, 24])[0].model
    assert all(block.proportional for block in truncated.blocks)
    (last,), stages = truncated.encoder(torch.zeros(1, 3, 96, 96))
    assert [stage.size.shape[1] for stage in stages] == [29, 25]
    assert last.values.shape[1] == 37
