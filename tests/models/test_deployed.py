"""The deployed network: pixels in, labels or scores, counts and maps out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algm_deploy.merging import insert_merging, merge_inputs
from algm_deploy.models.deployed import NORMALIZATIONS, Deployed, PixelEmbedding
from algm_deploy.models.segmenter import Segmenter
from algm_deploy.models.vit import PatchEmbedding
from algm_deploy.recipe.plan import DENSE, MergePlan

Golden = Callable[[str], Segmenter]
PLAN = MergePlan(clap_layers=(1,), gbm_layers=(3,), clap_threshold=0.7)


def explicit(embedding: PatchEmbedding, image: Tensor, normalization: str) -> Tensor:
    """Normalised pixels through the original embedding."""
    mean, deviation = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in NORMALIZATIONS[normalization])
    pixels = (image.double() / 255 - mean) / deviation
    return embedding(pixels.to(embedding.proj.weight.dtype))


def embedding_and_image(dtype: torch.dtype) -> tuple[PatchEmbedding, Tensor]:
    torch.manual_seed(0)
    return PatchEmbedding(16, 32).requires_grad_(False).to(dtype), torch.randint(0, 256, (2, 3, 64, 32)).byte()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_folding_equals_normalising(normalization: str) -> None:
    embedding, image = embedding_and_image(torch.float32)
    folded = PixelEmbedding(embedding, normalization, (64, 32))
    for pixels in (image, image.float()):
        torch.testing.assert_close(folded(pixels), explicit(embedding, image, normalization), rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_folding_in_16_bits_costs_no_accuracy(normalization: str) -> None:
    """At most twice the error of normalised pixels in the same precision, both against fp64."""
    embedding, image = embedding_and_image(torch.float16)
    exact = explicit(embedding.double(), image, normalization)
    embedding.half()
    baseline = (explicit(embedding, image, normalization).double() - exact).abs().max()
    error = (PixelEmbedding(embedding, normalization, (64, 32))(image).double() - exact).abs().max()
    assert 0 < error <= 2 * baseline


def test_the_two_normalisations_differ() -> None:
    embedding, image = embedding_and_image(torch.float32)
    found = [PixelEmbedding(embedding, normalization, (64, 32))(image) for normalization in NORMALIZATIONS]
    assert (found[0] - found[1]).abs().max() > 0.1


def test_an_embedding_is_folded_where_its_weights_are() -> None:
    """On any other device than the CPU, for which one without memory stands."""
    embedding = PatchEmbedding(16, 8).to("meta")
    folded = PixelEmbedding(embedding, "vit", (64, 56))
    assert folded.weight.device == folded.bias.device == torch.device("meta")


def test_pixels_keep_their_fractions() -> None:
    """Float images are not rounded to whole numbers."""
    embedding, image = embedding_and_image(torch.float32)
    folded = PixelEmbedding(embedding, "vit", (64, 32))
    assert (folded(image.float() + 0.4) - folded(image.float())).abs().max() > 1e-4


@pytest.mark.parametrize("output", ["labels", "scores"])
def test_outputs(golden_segmenter: Golden, blob_images: Any, output: Any) -> None:
    model = golden_segmenter("mask_transformer")
    images = torch.from_numpy(blob_images(2))
    deployed = Deployed(insert_merging(model, PLAN), model.network, output)
    tail, counts, maps = deployed(images, merge_inputs(0.7, 1.0))
    assert (tail.dtype, tail.shape) == {
        "labels": (torch.uint8, (2, 128, 128)),
        "scores": (torch.float32, (2, 11, 128, 128)),
    }[output]
    assert (counts.dtype, counts.shape) == (torch.int64, (2, 2))
    assert [(m.dtype, m.shape) for m in maps] == [(torch.int64, (2, 64))] * 2
    # Counts are those of patch tokens: the cls row has number 0.
    assert [m.amax(1).tolist() for m in maps] == counts.T.tolist()
    assert bool((counts[:, 0] > counts[:, 1]).all() and (counts < 64).all())


def test_scores_are_those_of_the_network_on_normalised_pixels(golden_segmenter: Golden, blob_images: Any) -> None:
    model = golden_segmenter("linear")
    images = torch.from_numpy(blob_images(1))
    (tail, _, _) = Deployed(model, model.network, "scores")(images, merge_inputs(1, 1))
    patches = model(images.float() / 127.5 - 1).scores.mT.unflatten(2, (8, 8))
    expected = F.interpolate(patches, size=(128, 128), mode="bilinear", align_corners=False)
    torch.testing.assert_close(tail, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_labels_are_the_argmax_of_the_scores(golden_segmenter: Golden, blob_images: Any, dtype: torch.dtype) -> None:
    """In 16 bits too: both outputs interpolate in fp32."""
    model, images = golden_segmenter("mask_transformer").to(dtype), torch.from_numpy(blob_images(2))
    labels, scores = (
        Deployed(model, model.network, output)(images, merge_inputs(1, 1))[0] for output in ("labels", "scores")
    )
    best = scores.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > 1e-5
    assert torch.equal(labels[clear].long(), scores.argmax(1)[clear])
    assert clear.float().mean() > 0.99


def test_a_dense_network_counts_nothing(golden_segmenter: Golden, blob_images: Any) -> None:
    model = golden_segmenter("linear")
    deployed = Deployed(insert_merging(model, DENSE), model.network, "labels")
    _, counts, maps = deployed(torch.from_numpy(blob_images(3)), merge_inputs(1, 1))
    assert counts.shape == (3, 0)
    assert maps == ()


def test_the_wrapped_network_stays_as_it_was(golden_segmenter: Golden) -> None:
    model = golden_segmenter("linear")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deployed = Deployed(model, model.network, "labels")
    assert isinstance(model.encoder.patch_embed, PatchEmbedding)
    assert isinstance(deployed.model.encoder.patch_embed, PixelEmbedding)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert deployed.model.encoder.pos_embed is model.encoder.pos_embed


@pytest.mark.parametrize("output", ["labels", "scores"])
def test_fp16_is_close_to_fp32(golden_segmenter: Golden, blob_images: Any, output: Any) -> None:
    model, images = golden_segmenter("mask_transformer"), torch.from_numpy(blob_images(2))
    plan = replace(PLAN, gbm_layers=())
    full = Deployed(insert_merging(model, plan), model.network, output)(images, merge_inputs(0.7, 1.0))
    half_model = golden_segmenter("mask_transformer").half()
    half = Deployed(insert_merging(half_model, plan), model.network, output)(images, merge_inputs(0.7, 1.0))
    np.testing.assert_array_equal(half[1], full[1])  # no window lies near the threshold
    assert half[0].dtype == full[0].dtype
    if output == "scores":
        torch.testing.assert_close(half[0], full[0], rtol=0, atol=0.05)
    else:
        assert (half[0] == full[0]).float().mean() > 0.98
