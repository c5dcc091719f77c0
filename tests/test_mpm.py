"""MPM as a merge plan: what it is called, what it costs, that it is verified, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.errors import BundleError, ExportError, PlanError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.parity.chain import verify
from algm_deploy.parity.merges import differing
from algm_deploy.parity.merges.mpm import MpmFacts, mpm_problems
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import flatten
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name
from algm_deploy.report.records import plan_in_force

PLAN = MergePlan((), (), method="mpm", mpm_layers=(2, 3))
NETWORK = Network("segmenter", 64, 4, 1, 5, (96, 96))


@pytest.fixture(scope="module")
def bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    return tiny_export(flatten(PLAN, "merging."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "g2tm"}, r"merging.mpm_layers is read by method mpm, got \(2, 3\) for g2tm"),
        ({"mpm_layers": (5, 2)}, "ascending blocks from 1 as merging.mpm_layers"),
        ({"batch": "batch_min"}, "method mpm merges every image alone"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


def test_it_has_a_name_and_no_threshold() -> None:
    signature = signature_of(Recipe("tiny", NETWORK, PLAN, Protocol("camvid", 96, 96, 96)))
    assert signature.merges == ("mpm_2", "mpm_3")
    assert [tensor.name for tensor in signature.inputs] == ["image"]
    assert plan_name(PLAN, DENSE) == "MPM, after blocks 2, 3"
    assert plan_in_force(PLAN, {"clap_threshold": np.inf}) == PLAN
    assert not PLAN.static


def test_multiply_adds() -> None:
    """Blocks 3 and 4 run on 20 and 12 patches, the decoder on all 36; similarities are those of all pairs."""
    counted, dense = (multiply_adds(NETWORK, plan, tokens) for plan, tokens in ((PLAN, [20, 12]), (DENSE, [])))
    assert counted.merging == (36**2 + 20**2) * 64
    assert counted.decoder == dense.decoder
    assert counted.encoder < dense.encoder


def test_the_chain_holds(bundle: Bundle, record_property: Callable[[str, object], None]) -> None:
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "mpm segmenter/mask_transformer onnxruntime-cpu verified")


def test_wrong_pairs_are_found_out() -> None:
    """Rows 0 and 1 find each other; 2 and 3 as well, where 3 nearly prefers 0, whose own choice is clear."""
    facts = MpmFacts(
        np.array(
            [
                [-np.inf, 0.9, 0.1, 0.4],
                [0.9, -np.inf, 0.2, 0.1],
                [0.1, 0.2, -np.inf, 0.405],
                [0.4, 0.1, 0.405, -np.inf],
            ],
            np.float32,
        ),
        0.01,
    )
    before = np.array([1, 2, 3, 4])
    good = np.array([1, 1, 2, 2])
    assert mpm_problems(facts, before, good, 1) == []
    assert mpm_problems(facts, before, np.array([1, 1, 2, 3]), 1) == []  # noise explains that 3 took 0
    assert "left 2 tokens apart" in mpm_problems(facts, before, np.array([1, 2, 3, 3]), 1)[0]
    assert "8.0e-01 less similar" in mpm_problems(facts, before, np.array([1, 2, 1, 2]), 1)[0]
    assert "not one that joining pairs gives" in mpm_problems(facts, before, np.array([2, 2, 1, 1]), 1)[0]
    assert "not one that joining pairs gives" in mpm_problems(facts, before, np.array([1, 1, 1, 2]), 1)[0]
    network = replace(NETWORK, image_size=(16, 64))
    assert differing(before, good, np.array([1, 1, 2, 3]), 0, PLAN, network) == (2, 4)


def test_nothing_stops_it(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="MPM merges every pair that finds each other: export with --dense"):
        Predictor(bundle, "onnxruntime-cpu", dense=True)


def test_tensorrt_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ExportError, match=r"algm\.mpm, TensorRT has plugins for"):
        write_tensorrt_onnx(bundle, "fp32", [17, 12])
