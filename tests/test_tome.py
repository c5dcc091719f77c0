"""ToMe, the baseline, as a merge plan: what it is called, what it costs, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export
from algm_deploy.errors import BundleError, ExportError, PlanError
from algm_deploy.evaluation.evaluate import merge_names
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.onnxruntime import write_onnxruntime_onnx
from algm_deploy.lowering.portable import operator_of
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.models.loading import network_class
from algm_deploy.models.vit import VitNetwork
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import DENSE, MergePlan, Network, Protocol, Recipe
from algm_deploy.report.records import plan_in_force, plan_name
from algm_deploy.timing.variants import variant_network

PLAN = MergePlan((), (), method="tome", tome_r=(8, 0, 4))
NETWORK = Network("segmenter", 64, 4, 1, 5, (96, 96))
SETTINGS = {f"merging.{key}": getattr(PLAN, key) for key in ("method", "clap_layers", "gbm_layers", "tome_r")}


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tiny_checkpoint, tmp_path_factory.mktemp("tome") / "bundle", None, SETTINGS).bundle


@pytest.mark.parametrize(
    ("change", "message"),
    [
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


def test_dense_by_thresholds_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"merge.* constant number of tokens: export with --set merging.tome_r=\[\]"):
        Predictor(bundle, "onnxruntime-cpu", dense=True)
    with pytest.raises(BundleError, match="merge plan reads no clap_threshold"):
        Predictor(bundle, "onnxruntime-cpu", tau=0.9)


def test_tensorrt_is_refused_with_the_reason(bundle: Bundle) -> None:
    with pytest.raises(
        ExportError, match=r"is algm.proportional_attention, TensorRT has plugins for .* only: run this"
    ):
        write_tensorrt_onnx(bundle, "fp16")
    assert "model.tensorrt.onnx" not in bundle.files


def test_the_graph_for_cuda_has_tome_in_standard_operators(bundle: Bundle) -> None:
    """The library has neither of its operators; nothing of it was executed on a GPU."""
    write_onnxruntime_onnx(bundle, "cuda", True, "built.onnx", "part-*.onnx")
    model = onnx.load(bundle.file("built.onnx"), load_external_data=False)
    bodies = {operator_of(function.name) for function in model.functions}
    assert {"tome", "proportional_attention"} <= bodies
    assert "unmerge" not in bodies


def test_truncated_pays_for_all_but_the_merge() -> None:
    torch.manual_seed(0)
    model: VitNetwork = network_class(NETWORK)(NETWORK)
    facts = Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96))
    truncated: Any = variant_network(model, facts, "truncated", [28, 24])[0].model
    assert all(block.proportional for block in truncated.blocks)
    (last,), stages = truncated.encoder(torch.zeros(1, 3, 96, 96))
    assert [stage.size.shape[1] for stage in stages] == [29, 25]
    assert last.values.shape[1] == 37
