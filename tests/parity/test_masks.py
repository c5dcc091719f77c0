"""Masks by which queries choose the cells they attend to: choices are replayed, and held to PyTorch's, like merges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from toys import deployed_toy, pictures, toy

from algm_deploy.bundle.records import Link
from algm_deploy.bundle.signature import mask_names, signature_of
from algm_deploy.merging import merge_inputs, replay_merging
from algm_deploy.models.mask2former import MaskedLayer
from algm_deploy.parity.comparison import Decided, Decisions, output_problem
from algm_deploy.parity.decisions import MaskFacts, mask_problems
from algm_deploy.parity.replay import Error, Replayed
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.reading import recipe
from algm_deploy.recipe.schema import Recipe

TRUE = np.array([[2.0, -3.0, 1e-7, -1e-7]])
CHOSEN = np.array([[1, 0, 1, 0]], np.uint8)


def eva() -> Recipe:
    network, _ = toy("eva", "mask2former")
    return replace(recipe("demo"), network=replace(network, decoder_depth=2), merging=DENSE, class_names=(), palette=())


def flipped(*cells: int) -> np.ndarray:
    chosen = CHOSEN.copy()
    chosen[0, list(cells)] ^= 1
    return chosen


@pytest.mark.parametrize(
    ("cells", "noise", "problem"),
    [
        ((), 1e-6, None),
        ((2, 3), 1e-6, None),
        ((2,), 1e-8, "mask 3: a cell is 1.0e-07 on the other side of zero"),
        ((1, 2), 1e-6, "mask 3: a cell is 3.0e+00 on the other side of zero"),
        ((2,), np.nan, "mask 3: masks are not finite"),
    ],
)
def test_noise_excuses_cells_near_zero_alone(cells: tuple[int, ...], noise: float, problem: str | None) -> None:
    found = mask_problems(MaskFacts(TRUE, TRUE >= 0, noise), flipped(*cells), 3)
    assert found == ([] if problem is None else [problem])


def decided(masks: Sequence[np.ndarray], true: Sequence[np.ndarray], error: float) -> Decided:
    """One image without merges whose PyTorch masks are all off by `error`."""
    exact, none = tuple(torch.from_numpy(array) for array in true), Error(0.0, 0.0)
    rounded = tuple(array + error for array in exact)
    replayed = Replayed((), (), none, none, lambda: np.zeros((1, 1, 1)), exact, rounded)
    return Decided("image 0", [], replayed, masks)


def link(masks: Sequence[np.ndarray], error: float = 1e-8, true: Sequence[np.ndarray] = (TRUE, TRUE)) -> Link:
    facts = eva()
    decisions = Decisions(facts)
    decisions.compare([decided(masks, true, error)], facts.merging, counted=True)
    return decisions.link(1, 0)


def test_equal_choices_pass() -> None:
    found = link([CHOSEN, CHOSEN])
    assert found.passed
    assert found.measured == "1 of 1 images equal, 0 excused by noise, 0 % of cells of masks not as in fp64"
    assert found.gate == "0 unexcused, 1 % of cells of masks"
    assert found.facts["mask_decisions"] == 8


def test_a_choice_within_noise_is_excused_and_counted() -> None:
    many = np.concatenate([TRUE, np.full((1, 396), -1.0)], 1)
    chosen = (many >= 0).astype(np.uint8)
    chosen[0, 2] = 0
    found = link([chosen], error=5e-8, true=[many])
    assert found.passed
    assert found.facts["images_equal"] == 0
    assert found.facts["mask_decisions_otherwise_than_fp64"] == 1
    # Of eight cells one is more than the gate allows, even where noise explains it.
    assert not link([np.concatenate([flipped(2, 3)] * 2, 1)], 5e-8, [np.concatenate([TRUE] * 2, 1)]).passed


def test_a_choice_beyond_noise_fails() -> None:
    found = link([CHOSEN, flipped(0)])
    assert not found.passed
    assert found.measured == "image 0: mask 2: a cell is 2.0e+00 on the other side of zero"


def test_a_mask_that_is_no_number_fails() -> None:
    assert not link([CHOSEN, CHOSEN], true=[TRUE, np.where(TRUE > 1, np.nan, TRUE)]).passed


def test_a_query_without_a_mask_attends_to_all_cells() -> None:
    """So it does not become NaN, and it is recorded as one that chose none."""
    torch.manual_seed(0)
    layer = MaskedLayer(eva().network).eval()
    queries, own, cells = torch.randn(1, 6, 64), torch.randn(6, 64), torch.randn(1, 9, 64)
    masks = torch.randn(1, 6, 9)
    masks[0, 1] = -1
    with torch.no_grad():
        found, chosen = layer(queries, own, cells, cells, masks, None)
        masks[0, 1] = 1
        everywhere, all_chosen = layer(queries, own, cells, cells, masks, None)
    assert found.isfinite().all()
    assert torch.equal(found, everywhere)
    assert chosen[0, 1].tolist() == [0] * 9
    assert all_chosen[0, 1].tolist() == [1] * 9


def test_choices_are_replayed() -> None:
    """Forced to what it chose itself the network is the same; forced otherwise it is another."""
    network, plan = toy("eva", "mask2former")
    network = replace(network, decoder_depth=2)
    model = deployed_toy(network, plan).model
    images = torch.from_numpy(pictures(network, 1))
    with torch.no_grad():
        free = model(images, merge_inputs(plan.clap_threshold, plan.gbm_threshold))
        maps, masks = tuple(stage.map for stage in free.stages), free.chosen
        assert [tuple(mask.shape) for mask in masks] == [(1, 6, 6), (1, 6, 24)]
        assert {0, 1} == {int(value) for mask in masks for value in mask.unique()}
        replaying = replay_merging(model, plan)
        same = replaying(images, merge_inputs(0.0, 0.0, maps, masks=masks))
        exact = replay_merging(deployed_toy(network, plan, dtype=torch.float64).model, plan)
        true = exact(images, merge_inputs(0.0, 0.0, maps, masks=masks)).scores
        other = replaying(images, merge_inputs(0.0, 0.0, maps, masks=(masks[0], 1 - masks[1])))
    noise = (free.scores - true).abs().max()  # what fp32 does to the network
    assert noise < 1e-3 * true.abs().max()
    assert (same.scores - true).abs().max() <= 2 * noise
    assert torch.equal(other.chosen[1], 1 - masks[1])
    assert (other.scores - free.scores).abs().max() > 100 * noise


def test_outputs_that_are_no_choice_are_refused() -> None:
    facts = eva()
    signature, network = signature_of(facts), facts.network
    outputs: dict[str, Any] = {
        tensor.name: np.zeros((1, *tensor.shape[1:]), tensor.dtype) for tensor in signature.outputs
    }
    assert mask_names(network) == ("mask_1", "mask_2")
    assert output_problem(outputs, signature, 1, network, DENSE) is None
    outputs["mask_2"][0, 0, 0] = 2
    assert output_problem(outputs, signature, 1, network, DENSE) == "expected zeros and ones in mask_2, got 2"
    del outputs["mask_2"]
    assert "expected mask_2 uint8 (1, 6, 24), got nothing" in (
        output_problem(outputs, signature, 1, network, DENSE) or ""
    )
