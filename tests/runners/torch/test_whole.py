"""Networks whose shapes no picture changes run whole: as their modules do, results in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from toys import deployed_toy, toy

from algm_deploy.merging import merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.runners.torch import whole
from algm_deploy.runners.torch.whole import WholeNetwork

INPUTS = merge_inputs(0.0, 0.0)
PLANS = {
    "evit": replace(DENSE, method="evit", evit_layers=(1, 2), evit_keep=0.6),
    "elvit": replace(DENSE, method="elvit", elvit_layer=1, elvit_grid=(2, 3), elvit_neighbours=2),
    "tome": replace(DENSE, method="tome", tome_r=(3, 2)),
    "tome_blockwise": replace(DENSE, method="tome_blockwise", tome_share=(0.3, 0.2)),
}


class Recorded:
    """In place of CUDA graphs: work is done when it comes first, and once more as a capture would."""

    def __init__(self, *_: object) -> None:
        self.keys: list[tuple[int, ...]] = []

    def run(self, key: tuple[int, ...], work: Callable[[], None]) -> None:
        work()
        self.keys.append(key)
        work()


def network(plan: MergePlan) -> Deployed:
    shape, _ = toy("segmenter", "mask_transformer")
    return deployed_toy(shape, plan)


def pictures(made: Deployed, count: int) -> torch.Tensor:
    size = made.network.image_size
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def assert_as_modules(made: Deployed, run: WholeNetwork, images: torch.Tensor, device: str, atol: float) -> None:
    inputs = merge_inputs(0.0, 0.0, device=device)
    with torch.inference_mode():
        tail, counts, maps = made(images.to(device), inputs)
        for ours, theirs in zip(run.run(images), [tail, counts, *maps], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_results_are_those_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "Graphs", Recorded)
    made = network(PLANS["evit"])
    run = WholeNetwork(made, INPUTS, torch.device("cpu"))
    for count in (1, 3, 1):
        assert_as_modules(made, run, pictures(made, count), "cpu", 0)
    assert run.graphs.keys == [(1,), (3,), (1,)]  # type: ignore[attr-defined]


def test_the_next_call_leaves_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "Graphs", Recorded)
    made = network(PLANS["evit"])
    run = WholeNetwork(made, INPUTS, torch.device("cpu"))
    first = run.run(pictures(made, 2))
    kept = [one.clone() for one in first]
    run.run(pictures(made, 2).flip(3))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_memory_grows_with_the_largest_batch_and_not_with_the_number_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "Graphs", Recorded)
    made = network(PLANS["evit"])
    run = WholeNetwork(made, INPUTS, torch.device("cpu"))
    for count in (4, 3, 2, 1, 3):
        assert_as_modules(made, run, pictures(made, count), "cpu", 0)
    assert sum(len(one) for one in run._images.values()) == 4 + 2 + 1
    assert [sum(map(len, kept)) for kept in zip(*run._results.values(), strict=True)] == [7] * len(run._results[1])


@pytest.mark.gpu
@pytest.mark.parametrize("method", PLANS)
def test_each_method_is_captured(method: str) -> None:
    made = network(PLANS[method]).cuda()
    run = WholeNetwork(made, merge_inputs(0.0, 0.0, device="cuda"), torch.device("cuda"))
    for seed in (2, 2, 3, 2):
        assert_as_modules(made, run, pictures(made, seed), "cuda", 1e-4)
    assert run.graphs.captures == len(run.graphs) == 2
