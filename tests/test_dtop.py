"""DToP as a merge plan: what it is called, what it costs, that it is verified, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import segmenter_checkpoint, toy

from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, parity_windows
from algm_deploy.errors import CheckpointError, ExportError, PlanError, RecipeError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.lowering.tensorrt import write_tensorrt_onnx
from algm_deploy.models.checkpoints.reading import read_checkpoint
from algm_deploy.models.checkpoints.variant import network_from_variant
from algm_deploy.models.quantized import products_of
from algm_deploy.models.segvit import SegvitPrune
from algm_deploy.parity.chain import verify
from algm_deploy.parity.graph import graph_facts, graph_problems
from algm_deploy.parity.merges import MERGES
from algm_deploy.parity.merges.dtop import DtopFacts, dtop_problems
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.report.plans import plan_name, told_merges
from algm_deploy.report.records import plan_in_force
from algm_deploy.runners.torch.packed import PackedNetwork
from algm_deploy.runners.torch.runner import TorchRunner
from algm_deploy.wording import merge_titles

PLAN = MergePlan((), (), method="dtop", dtop_layers=(1, 2), dtop_keep=2, clap_threshold=0.4)
NETWORK = Network("segmenter", 64, 3, 1, 5, (96, 96), auxiliary=(1, 2), decoder_depth=1)
PROTOCOL = Protocol("camvid", 96, 96, 96)
SETTINGS = {
    "merging.method": "dtop",
    "merging.dtop_layers": PLAN.dtop_layers,
    "merging.dtop_keep": PLAN.dtop_keep,
    "merging.clap_threshold": PLAN.clap_threshold,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Segmenter with heads, as `benchmarks/dtop_heads.py` writes it."""
    return segmenter_checkpoint(tmp_path_factory.mktemp("dtop"), NETWORK, auxiliary_layers=[1, 2])


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, made_once: Callable[..., Path]) -> Bundle:
    return Bundle.open(made_once("dtop", lambda target: export(checkpoint, target, None, SETTINGS)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "g2tm"}, r"merging.dtop_layers is read by method dtop, got \(1, 2\) for g2tm"),
        ({"dtop_layers": (2, 1)}, r"ascending blocks from 1 as merging.dtop_layers, got \(2, 1\)"),
        ({"dtop_keep": 0}, "merging.dtop_keep, the tokens of each class that stay for the others, from 1, got 0"),
        ({"batch": "batch_min"}, "merges every image alone"),
        ({"clap": "budget", "clap_budget": 3}, "set merging.clap_threshold instead"),
    ],
)
def test_impossible_plans_are_refused(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)


def test_plans_and_networks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"has them after blocks \(2,\), not all of \(1, 2\): choose"):
        Recipe("tiny", replace(NETWORK, auxiliary=(2,)), PLAN, PROTOCOL)
    with pytest.raises(RecipeError, match=r"ascending blocks from 1 to 2 as network.auxiliary, .* got \(1, 3\)"):
        replace(NETWORK, auxiliary=(1, 3))
    other, _ = toy("setr", "naive")
    with pytest.raises(RecipeError, match="family whose checkpoints may hold some, got setr with decoder naive"):
        replace(other, auxiliary=(1,))
    with pytest.raises(RecipeError, match=r"network.decoder_heads to divide network.decoder_dim 512 .* got 7"):
        replace(recipe("segvit_prune_vit_l16_ade20k").network, decoder_heads=7)


def test_heads_that_are_not_there_are_missed(checkpoint: Path) -> None:
    found = read_checkpoint(checkpoint)
    assert network_from_variant(found) == NETWORK
    assert found.variant is not None
    found.variant["net_kwargs"]["auxiliary_layers"] = [1]
    with pytest.raises(CheckpointError, match=r"net_kwargs.auxiliary_layers is 1 in variant.yml, tensors have 2"):
        network_from_variant(found)


def test_it_has_a_name_and_a_threshold() -> None:
    signature = signature_of(Recipe("tiny", NETWORK, PLAN, PROTOCOL))
    assert signature.merges == ("dtop_1", "dtop_2")
    assert [tensor.name for tensor in signature.inputs] == ["image", "clap_threshold"]
    assert merge_titles(signature.merges) == {"dtop_1": "DToP 1", "dtop_2": "DToP 2"}
    assert plan_name(PLAN, DENSE) == "DToP after blocks 1, 2, confidence 0.4"
    assert told_merges(PLAN).startswith("DToP after blocks 1, 2: tokens whose class an auxiliary head is sure of leave")
    assert plan_in_force(PLAN, {"clap_threshold": 0.5}) == replace(PLAN, clap_threshold=0.5)
    assert plan_in_force(PLAN, {"clap_threshold": np.inf}) == DENSE
    assert not PLAN.static


def test_multiply_adds() -> None:
    """By hand: 36 patches in the first block, 30 in the second, 20 in the last and the decoder, and two heads."""
    found, dense = multiply_adds(NETWORK, PLAN, [30, 20]), multiply_adds(NETWORK, DENSE)
    dim = 64
    assert found.patch_embedding == dense.patch_embedding
    assert found.encoder == sum(10 * rows * dim + 12 * rows * dim**2 + 2 * rows**2 * dim for rows in (37, 31, 21))
    assert found.merging == sum(5 * tokens * dim + tokens * dim * 5 for tokens in (36, 30))
    assert found.decoder < dense.decoder


def test_heads_cost_what_a_decoder_like_them_does() -> None:
    """And the published figures without pruning are those of a network whose auxiliary heads are left out."""
    known = recipe("segvit_prune_vit_b16_ade20k")
    nothing = multiply_adds(known.network, known.merging, [1024, 1024])
    assert nothing.merging == 2 * SegvitPrune.decoder_multiply_adds(known.network, [1024])
    assert multiply_adds(known.network, DENSE).merging == 0


def test_heads_are_not_quantised() -> None:
    from algm_deploy.models.loading import network_class

    with torch.device("meta"):
        model = network_class(NETWORK)(NETWORK)
    assert len(dict(products_of(model))) == 4 * (NETWORK.depth + NETWORK.decoder_depth)


def test_the_chain_holds(bundle: Bundle, record_property: Callable[[str, object], None]) -> None:
    assert bundle.recipe.merging == PLAN
    report = verify(bundle, "onnxruntime-cpu", parity_windows(bundle.recipe, [], 2), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    record_property("support", "dtop segmenter/mask_transformer onnxruntime-cpu verified")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp8"])
def test_the_chain_holds_on_packed_rows(precision: str, checkpoint: Path, made_once: Callable[..., Path]) -> None:
    """Batches of 1, 2, 3 and 8 mixed pictures, with token maps forced and decided freely."""
    settings = SETTINGS | {"precision": precision}
    bundle = Bundle.open(made_once(f"dtop_{precision}", lambda target: export(checkpoint, target, None, settings)))
    report = verify(bundle, "torch", parity_windows(bundle.recipe, [], 3), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    with TorchRunner(bundle) as run:
        assert run.execution["rows"] == "packed"


@pytest.mark.parametrize("tau", [-2.0, 0.4, 2.0])
def test_packed_rows_tell_what_the_modules_tell(bundle: Bundle, tau: float) -> None:
    """The runner's scores, token counts and maps, in which patches whose token has left are -1."""
    names = [tensor.name for tensor in bundle.signature.outputs]
    given = {"image": parity_windows(bundle.recipe, [], 3), "clap_threshold": np.array(tau, np.float32)}
    with TorchRunner(bundle, device="cpu") as run:
        expected = run.infer(given, names)
        assert run._model is not None
        run._packed = PackedNetwork(run._model, getattr(torch, bundle.signature.image.dtype))
        found = run.infer(given, names)
    assert names == ["scores", "token_counts", "token_map_dtop_1", "token_map_dtop_2"]
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=0, atol=1e-4)
    for name in names[1:]:
        np.testing.assert_array_equal(found[name], expected[name])
    assert (np.asarray(found["token_map_dtop_2"]) < 0).any() == (tau < 2)


def test_the_threshold_may_change(bundle: Bundle) -> None:
    image = np.transpose(parity_windows(bundle.recipe, [], 1)[0], (1, 2, 0))
    counts = []
    for tau in (-2.0, 0.4, 2.0):
        with Predictor(bundle, "onnxruntime-cpu", tau=tau) as predictor:
            counts.append(predictor.prediction(image).token_counts[0].tolist())
    assert all(count <= 5 * PLAN.dtop_keep for count in counts[0])
    assert counts[0][0] < counts[1][1] < counts[1][0] < 36
    assert counts[2] == [36, 36]


def test_another_graph_is_found_out(bundle: Bundle) -> None:
    facts = graph_facts(bundle.file("model.onnx"))
    assert not graph_problems(facts, bundle.recipe)
    for change in ({"dtop_keep": 3}, {"dtop_layers": (2,)}):
        other = replace(bundle.recipe, merging=replace(PLAN, **change))
        assert any("encoder: expected" in problem for problem in graph_problems(facts, other))


def test_tensorrt_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ExportError, match=r"algm\.dtop, TensorRT has plugins for"):
        write_tensorrt_onnx(bundle, "fp32", [17])


FACTS = DtopFacts(np.array([[0.9, 0], [0.8, 0], [0.7, 0], [0.1, 0.6], [0.3, 0.2]], np.float64), 0.5, 0.01, 2)
BEFORE = np.array([1, 2, 3, 4, 5, -1])


@pytest.mark.parametrize(
    ("facts", "stays", "problem"),
    [
        (FACTS, "11011", None),
        (replace(FACTS, noise=0.11), "10111", None),  # noise explains it
        (FACTS, "10111", "1 tokens left of whose class fewer than 2 surer ones stay"),
        (FACTS, "11010", "a token left that is 2.0e-01 below the threshold"),
        (FACTS, "11111", "3 tokens stay that are sure of one class, instead of 2"),
        (replace(FACTS, noise=np.nan), "11011", "confidences are not finite"),
    ],
)
def test_wrong_choices_are_found_out(facts: DtopFacts, stays: str, problem: str | None) -> None:
    kept = np.array([int(flag) for flag in stays])
    after = np.append(np.where(kept, kept.cumsum(), -1), -1)
    found = dtop_problems(facts, BEFORE, after, 1)
    assert not found if problem is None else problem in "; ".join(found)


def test_maps_of_no_choice_are_found_out() -> None:
    assert "not one that tokens leave" in dtop_problems(FACTS, BEFORE, np.array([2, 1, -1, 3, 4, -1]), 1)[0]
    counts, one, other = np.array([[4, 3]]), np.array([[1, 2, -1, 3, 4]]), np.array([[1, 2, -1, 3, -1]])
    check = MERGES["dtop"].maps_problem
    assert check([one, other], counts, PLAN, NETWORK) is None
    assert "does not number the 4 tokens" in str(check([other, other], counts, PLAN, NETWORK))
    back = check([one, one[:, [0, 2, 1, 3, 4]]], np.array([[4, 4]]), PLAN, NETWORK)
    assert "a token is in a token map that has left" in str(back)
