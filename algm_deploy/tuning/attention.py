"""How much attention each class receives, without and with merging: why the paper (CVPR 2024) says merging can help.

A large class has many tokens, and softmax shares attention out among tokens: what is large drowns what is small.
Merging leaves a large, uniform class fewer tokens. Measured here is where the attention of an encoder block goes: the
probabilities of all heads, averaged over the patches that ask, summed over the tokens of a class. A token that stands
for patches of several classes counts for each by its share of patches; the cls token and unlabelled patches are left
out, and what remains is made to sum to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from algm_deploy.bundle.records import AttentionTuning, storable
from algm_deploy.bundle.signature import threshold_defaults
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import DatasetError, ImageError, PlanError
from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.loading import load_network
from algm_deploy.models.vit import Block, KeepTokens, Merged, Tokens, VisionTransformer
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Recipe
from algm_deploy.tuning.photos import check_all_measured
from algm_deploy.tuning.similarity import windows_of

Array = NDArray[np.float64]


def measure_attention(bundle: Bundle, plan: MergePlan, dataset: Dataset, progress: bool = True) -> AttentionTuning:
    """Measures a bundle's network with a merge plan and without, in fp32, on every labelled window of the protocol.

    Raises:
        PlanError: the plan merges nothing, or in the last block.
        DatasetError: no label at all; or, when the others are measured, photos or labels that cannot be read or do not
            fit.
    """
    if not plan.layers:
        raise PlanError("expected a plan that merges, got one without: there is nothing to compare with dense")
    last = plan.layers[-1]
    if last >= bundle.recipe.network.encoder_depth:
        raise PlanError(f"expected a block after the last merge in {last}, there is none to look at")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load_network(bundle, torch.float32).to(device)
    recipes = [replace(bundle.recipe, merging=one) for one in (DENSE, plan)]
    probes = [_Probe(deployed(network, recipe).model.encoder, recipe.merging) for recipe in recipes]
    found, failures = [], []
    for sample in tqdm(dataset.samples, "attention", unit="image", disable=None if progress else True):
        try:
            found += _of_photo(sample, dataset, probes, bundle.recipe, device)
        except (ImageError, DatasetError) as error:
            failures.append(str(error))
    check_all_measured(dataset.title, failures)
    if not found:
        raise DatasetError(f"{dataset.title}: expected labelled pixels, got none")
    patches, tokens, dense, merged, classes_dense, classes_merged = (
        np.mean(part, axis=0) for part in zip(*found, strict=True)
    )
    return AttentionTuning(
        title="Attention by class",
        dataset=dataset.name,
        split=dataset.split,
        images=len(dataset.samples),
        windows=len(found),
        last_merge=last,
        thresholds=storable(threshold_defaults(plan)),
        class_names=dataset.class_names,
        patches_percent=_tuples(100 * patches),
        tokens_percent=_tuples(100 * tokens),
        attention_dense_percent_by_block=_tuples(100 * dense),
        attention_merged_percent_by_block=_tuples(100 * merged),
        classes_attended_dense_by_block=_tuples(classes_dense),
        classes_attended_merged_by_block=_tuples(classes_merged),
    )


def _tuples(array: Array) -> tuple[Any, ...]:
    return tuple(map(_tuples, array)) if array.ndim > 1 else tuple(array.tolist())


class _Probe:
    """An encoder that tells, block by block, where attention goes."""

    def __init__(self, encoder: VisionTransformer, plan: MergePlan) -> None:
        self.encoder = encoder.eval()
        self.inputs = merge_inputs(plan.clap_threshold, plan.gbm_threshold, device=encoder.pos_embed.device)
        self._qkv = torch.empty(0)
        self._blocks = [cast(Block, block) for block in encoder.blocks]
        self._entering: list[Tokens] = []
        for block in self._blocks:
            block.register_forward_pre_hook(lambda _, given: self._entering.append(given[0]))
            block.attn.qkv.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._qkv = output

    @torch.inference_mode()
    def __call__(self, image: Tensor, classes: Tensor) -> tuple[Array, Array]:
        """Attention (blocks, K) by class of one window (1, 3, H, W), and shares (K,) of tokens after the last block.

        `classes` (N, K) fp64: 1 for the class of every patch, nothing for unlabelled ones.
        """
        self._entering.clear()
        rows = []
        for block, tokens in zip(self._blocks, self.encoder.run(image, self.inputs), strict=True):
            attending = self._entering[-1].merged
            if not isinstance(block.attention_merge, KeepTokens):
                attending = tokens.within[0]
            rows.append(class_mass(self._qkv, attending, classes, block, self.encoder.prefix))
        return torch.stack(rows).cpu().numpy(), _shares(token_classes(tokens.merged, classes)).cpu().numpy()


def token_classes(tokens: Merged, classes: Tensor) -> Tensor:
    """The share (S, K) of each class among the patches of every token of a single image; zero for cls."""
    rows = tokens.size.shape[1]
    held = classes.new_zeros(rows, classes.shape[1]).index_add_(0, tokens.map[0], classes)
    return held / tokens.size[0, :, None].double().clamp(min=1)


def class_mass(qkv: Tensor, tokens: Merged, classes: Tensor, block: Block, prefix: int) -> Tensor:
    """Shares (K,) of a single image's attention in a block by class, from its queries, keys and values (1, S, 3D).

    Every patch asks once: a token does so as often as it stands for patches.
    """
    query, key, _ = qkv[0].reshape(len(qkv[0]), 3, block.attn.heads, -1).permute(1, 2, 0, 3)
    scores = query @ key.mT * block.attn.scale
    if block.proportional:
        scores = scores + tokens.size[0].log()
    given = scores.softmax(-1).mean(0).double()
    asks = tokens.size[0].double().clone()
    asks[:prefix] = 0
    return _shares(asks @ given @ token_classes(tokens, classes))


def _shares(mass: Tensor) -> Tensor:
    total = mass.reshape(-1, mass.shape[-1]).sum(0)
    return total / total.sum()


def _of_photo(
    sample: Sample, dataset: Dataset, probes: Sequence[_Probe], recipe: Recipe, device: torch.device
) -> list[Any]:
    """Of each labelled window: shares (K,) of patches and tokens, those of attention (blocks, K), and their spread."""
    found = []
    for pixels, indices in windows_of(sample, recipe, dataset):
        if indices is None or not (indices >= 0).any():
            continue
        known = torch.from_numpy(indices).to(device)
        classes = (known[:, None] == torch.arange(recipe.network.classes, device=device)).double()
        image = torch.from_numpy(pixels)[None].to(device)
        (dense, _), (merged, tokens) = (probe(image, classes) for probe in probes)
        found.append((_shares(classes).cpu().numpy(), tokens, dense, merged, _spread(dense), _spread(merged)))
    return found


def _spread(shares: Array) -> Array:
    """Number of equally frequent classes (...) that would be as mixed as `shares` (..., K)."""
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return np.asarray(np.exp(-(shares * logs).sum(-1)))
