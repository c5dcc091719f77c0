"""Where attention goes equals a sum over all pairs of tokens written out, and merging moves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import DatasetError, PlanError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.models.vit import Block, Tokens
from algm_deploy.recipe.schema import DENSE, MergePlan
from algm_deploy.tuning.attention import AttentionMass, class_mass, measure_attention, token_classes
from algm_deploy.tuning.findings import find_attention

PLAN = MergePlan(clap_layers=(1,), gbm_layers=(2,), clap_threshold=0.9)
# Five patches behind one cls token: the first two share row 1, the others have rows 3, 2 and 3.
MAP = torch.tensor([[1, 1, 3, 2, 3]])
CLASSES = torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0], [0, 0]], dtype=torch.float64)  # the last one is unlabelled


def merged_tokens() -> Tokens:
    values = torch.zeros(1, 4, 8)
    return Tokens(values, torch.tensor([[1.0, 2, 1, 2]]), MAP, torch.tensor([4]), padded=False)


def test_tokens_count_for_the_classes_of_their_patches() -> None:
    expected = [[0, 0], [0.5, 0.5], [1, 0], [0, 0.5]]
    assert token_classes(merged_tokens(), CLASSES).tolist() == expected


@pytest.mark.parametrize("proportional", [False, True])
def test_attention_is_summed_over_heads_patches_and_tokens(proportional: bool) -> None:
    heads, width = 2, 8
    block = Block(width, heads)
    block.proportional = proportional
    qkv = torch.randn(1, 4, 3 * width, generator=torch.Generator().manual_seed(0))
    size, part = [1, 2, 1, 2], width // heads
    expected = np.zeros(2)
    for head in range(heads):
        for asking in range(1, 4):  # cls does not ask
            query = qkv[0, asking, head * part : (head + 1) * part]
            keys = qkv[0, :, width + head * part : width + (head + 1) * part]
            weights = np.exp((keys @ query).numpy() * part**-0.5) * (size if proportional else 1)
            given = size[asking] * weights / weights.sum()
            for row in range(4):
                expected += given[row] * token_classes(merged_tokens(), CLASSES)[row].numpy()
    found = class_mass(qkv, merged_tokens(), CLASSES, block, prefix=1)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)


@pytest.fixture
def dataset(blob_images: Callable[[int], np.ndarray], tmp_path: Path) -> Dataset:
    """Three photos of the tiny network's size; the label is how bright a pixel is, a third of the last has none."""
    for index, pixels in enumerate(blob_images(3)):
        labels = pixels[0] // 24
        labels[: 44 * (index == 2)] = 255
        for kind, content in (("images", pixels.transpose(1, 2, 0)), ("labels", labels)):
            path = tmp_path / kind / f"{index}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(content).save(path)
    names = ", ".join(f'"{index}"' for index in range(11))
    (tmp_path / "classes.json").write_text(f'{{"names": [{names}]}}')
    return open_dataset("folder", tmp_path)


def measured(bundle: Bundle, dataset: Dataset, plan: MergePlan) -> AttentionMass:
    return measure_attention(bundle, plan, dataset, progress=False)


def test_without_a_merge_both_networks_attend_alike(tiny_bundle: Bundle, dataset: Dataset) -> None:
    nothing = replace(PLAN, clap_threshold=1.5, gbm_mode="fixed", gbm_threshold=1.5)
    found = measured(tiny_bundle, dataset, nothing)
    assert found.windows == 3
    np.testing.assert_allclose(found.merged, found.dense, rtol=1e-6)
    np.testing.assert_allclose(found.tokens, found.patches, rtol=1e-12)
    np.testing.assert_allclose(found.dense.sum(1), 1)
    assert (found.classes_dense >= 1).all()
    assert (found.classes_dense <= 11).all()


def test_merging_moves_attention_behind_it_only(tiny_bundle: Bundle, dataset: Dataset) -> None:
    found = measured(tiny_bundle, dataset, PLAN)
    assert found.dense.shape == (4, 11)
    np.testing.assert_array_equal(found.merged[0], found.dense[0])  # block 1 merges behind its attention
    assert (np.abs(found.merged[1:] - found.dense[1:]).max(1) > 1e-3).all()
    assert np.abs(found.tokens - found.patches).max() > 1e-3
    finding = find_attention(tiny_bundle, PLAN, dataset, progress=False)
    assert finding.recipe is None
    assert finding.reached
    shares = np.array([[float(cell) for cell in row[1:5]] for row in finding.page.tables[0].rows])
    np.testing.assert_allclose(shares.sum(0), 100, atol=0.1)
    assert list(shares[:, 2]) == sorted(shares[:, 2], reverse=True)
    assert finding.record["attention_merged_percent_by_block"][0] == (100 * found.merged[0]).tolist()


def test_there_has_to_be_something_to_compare(tiny_bundle: Bundle, dataset: Dataset) -> None:
    with pytest.raises(PlanError, match="expected a plan that merges"):
        measured(tiny_bundle, dataset, DENSE)
    last = replace(PLAN, clap_layers=(), gbm_layers=(4,))
    with pytest.raises(PlanError, match="expected a block behind the last merge in 4"):
        find_attention(tiny_bundle, last, dataset, progress=False)


def test_pictures_without_a_label_tell_nothing(tiny_bundle: Bundle, dataset: Dataset, tmp_path: Path) -> None:
    Image.fromarray(np.full((128, 128), 255, np.uint8)).save(tmp_path / "labels" / "0.png")
    with pytest.raises(DatasetError, match="expected labelled pixels"):
        measured(tiny_bundle, replace(dataset, samples=dataset.samples[:1]), PLAN)
