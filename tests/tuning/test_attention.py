"""Where attention goes equals a sum over all pairs of tokens written out, and merging moves it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from algm_deploy.bundle.records import AttentionTuning
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import DatasetError, PlanError
from algm_deploy.evaluation.datasets import Dataset
from algm_deploy.models.vit import Block, Merged
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.report.tuning import tuning_page
from algm_deploy.tuning.attention import class_mass, measure_attention, token_classes

PLAN = MergePlan(clap_layers=(1,), gbm_layers=(2,), clap_threshold=0.9)
# Five patches after one cls token: the first two share row 1, the others have rows 3, 2 and 3.
MAP = torch.tensor([[1, 1, 3, 2, 3]])
CLASSES = torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0], [0, 0]], dtype=torch.float64)  # the last one is unlabelled


def merged_tokens() -> Merged:
    return Merged(torch.tensor([[1.0, 2, 1, 2]]), MAP, torch.tensor([4]))


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


def measured(bundle: Bundle, dataset: Dataset, plan: MergePlan) -> AttentionTuning:
    return measure_attention(bundle, plan, dataset, progress=False)


def by_block(found: AttentionTuning) -> tuple[np.ndarray, np.ndarray]:
    """Shares of attention in percent (blocks, classes), without and with merging."""
    return np.array(found.attention_dense_percent_by_block), np.array(found.attention_merged_percent_by_block)


def test_without_a_merge_both_networks_attend_alike(tiny_bundle: Bundle, dataset: Dataset) -> None:
    nothing = replace(PLAN, clap_threshold=1.5, gbm="fixed", gbm_threshold=1.5)
    found = measured(tiny_bundle, dataset, nothing)
    dense, merged = by_block(found)
    assert (found.windows, found.images, found.last_merge) == (4, 4, 2)
    np.testing.assert_allclose(merged, dense, rtol=1e-6)
    np.testing.assert_allclose(found.tokens_percent, found.patches_percent, rtol=1e-12)
    np.testing.assert_allclose(dense.sum(1), 100)
    assert all(1 <= classes <= 11 for classes in found.classes_attended_dense_by_block)


def test_merging_moves_attention_after_it_only(tiny_bundle: Bundle, dataset: Dataset) -> None:
    found = measured(tiny_bundle, dataset, PLAN)
    dense, merged = by_block(found)
    assert dense.shape == (4, 11)
    np.testing.assert_array_equal(merged[0], dense[0])  # block 1 merges after its attention
    assert (np.abs(merged[1:] - dense[1:]).max(1) > 0.1).all()
    assert np.abs(np.subtract(found.tokens_percent, found.patches_percent)).max() > 0.1
    assert found.thresholds == {"clap_threshold": 0.9, "gbm_threshold": 1.0}
    page = tuning_page(found)
    shares = np.array([[float(cell) for cell in row[1:5]] for row in page.tables[0].rows])
    np.testing.assert_allclose(shares.sum(0), 100, atol=0.1)
    np.testing.assert_allclose(shares[:, 2:].sum(0), (dense[2:].mean(0).sum(), merged[2:].mean(0).sum()), atol=0.1)
    assert list(shares[:, 2]) == sorted(shares[:, 2], reverse=True)
    assert "of blocks 3 to 4); CLAP threshold 0.9" in page.lines[0]
    assert msgspec.json.decode(msgspec.json.encode(found), type=AttentionTuning) == found


def test_tome_moves_attention_too(tiny_bundle: Bundle, dataset: Dataset) -> None:
    found = measured(tiny_bundle, dataset, MergePlan(clap_layers=(), gbm_layers=(), method="tome", tome_r=(24, 16)))
    assert (found.last_merge, found.thresholds) == (2, {})
    dense, merged = by_block(found)
    assert np.abs(merged[2:] - dense[2:]).max() > 0.01
    assert tuning_page(found).lines[0].endswith("of blocks 3 to 4)")


def test_there_has_to_be_something_to_compare(tiny_bundle: Bundle, dataset: Dataset) -> None:
    with pytest.raises(PlanError, match="expected a plan that merges"):
        measured(tiny_bundle, dataset, DENSE)
    last = replace(PLAN, clap_layers=(), gbm_layers=(4,))
    with pytest.raises(PlanError, match="expected a block after the last merge in 4"):
        measured(tiny_bundle, dataset, last)


def test_pictures_without_a_label_tell_nothing(tiny_bundle: Bundle, dataset: Dataset) -> None:
    Image.fromarray(np.full((128, 128), 255, np.uint8)).save(dataset.samples[0].label_path)
    with pytest.raises(DatasetError, match="expected labelled pixels"):
        measured(tiny_bundle, replace(dataset, samples=dataset.samples[:1]), PLAN)


def test_photos_that_cannot_be_read_are_named_when_the_others_are_measured(
    tiny_bundle: Bundle, dataset: Dataset
) -> None:
    for index in (0, 2):
        dataset.samples[index].image_path.write_bytes(b"no picture")
    with pytest.raises(DatasetError, match=r"2 cannot be \(.*0\.png: expected a picture.*; .*2\.png: expected"):
        measured(tiny_bundle, dataset, PLAN)
