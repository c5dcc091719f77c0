"""Where GBM may stand: the earliest block that keeps the reference's mIoU, as the paper (CVPR 2024) places it.

Each position is another network graph, so this runs in PyTorch, in process: nothing is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, PlanError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.evaluation.evaluate import evaluate
from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.loading import load_network
from algm_deploy.models.vit import VitNetwork
from algm_deploy.pictures.preprocessing import Pixels
from algm_deploy.pictures.sliding import ScoresOf
from algm_deploy.recipe.schema import MergePlan, Recipe
from algm_deploy.tuning.ablations import ALGM, Variant, apply_variant
from algm_deploy.tuning.objective import Goal, Record, Tuned, search

EvaluatePlan = Callable[[MergePlan, Dataset], Record]


class PlanEvaluator:
    """Evaluates merge plans on the weights of one bundle, in a `variant` of them; every evaluation can be resumed.

    Raises:
        BundleError: the bundle gives labels, which cannot be averaged over windows.
    """

    def __init__(self, bundle: Bundle, variant: Variant = ALGM, progress: bool = True) -> None:
        if bundle.recipe.output != "scores":
            raise BundleError("this bundle gives labels: for averaged windows and mIoU export with --output scores")
        self._bundle, self._variant, self._progress = bundle, variant, progress
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network: VitNetwork = load_network(bundle).to(self._device)

    def __call__(self, plan: MergePlan, dataset: Dataset, variant: Variant | None = None) -> Record:
        """The record of an evaluation with a plan, thresholds included, instead of the bundle's."""
        bundle, variant = self._bundle, variant or self._variant
        recipe = replace(bundle.recipe, merging=plan)
        weights = bundle.files["weights.safetensors"].sha256
        result = evaluate(
            dataset,
            self._scores_of(recipe, variant),
            recipe,
            artifact=f"{weights} {recipe.precision} torch in process {plan} {variant}",
            state_folder=bundle.path / "reports",
            window_batch=recipe.max_batch if plan.batch == "per_image" else 1,
            progress=self._progress,
        )
        return result.record()

    def _scores_of(self, recipe: Recipe, variant: Variant) -> ScoresOf:
        plan = recipe.merging
        model = deployed(self._network, recipe)
        apply_variant(model.model, plan, variant)
        inputs = merge_inputs(plan.clap_threshold, plan.gbm_threshold, device=self._device)

        @torch.inference_mode()
        def scores_of(windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            scores, counts, _ = model(torch.from_numpy(windows).to(self._device), inputs)
            return scores.cpu().numpy(), counts.cpu().numpy()

        return scores_of


def earliest_gbm(
    evaluate_plan: EvaluatePlan, plan: MergePlan, depth: int, goal: Goal, dataset: Dataset, fixed: Sequence[int] = ()
) -> Tuned:
    """Looks for the earliest block for one GBM behind those in `fixed` and behind CLAP; others of the plan are dropped.

    Raises:
        PlanError: no block is left.
    """
    first = max((*plan.clap_layers, *fixed, 0)) + 1
    if first > depth:
        raise PlanError(f"expected a block behind {first - 1} for GBM, the network has {depth}: place fewer")
    layers = [float(layer) for layer in range(first, depth + 1)]

    def measure(layer: float) -> Record:
        return evaluate_plan(replace(plan, gbm_layers=(*fixed, int(layer))), dataset)

    return search(goal, "layer", layers, measure)
