"""What PyTorch computes for the digest of an engine, and which differences from it are no rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from algm_deploy.bundle.records import Evaluation, TokenHistograms, storable
from algm_deploy.bundle.store import Bundle
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.contract import Array
from algm_deploy.runners.tensorrt.digest import (
    LEAST_APART,
    Digest,
    first_difference,
    keep_digest,
    kept_digest,
    make_digest,
    output_names,
    usual_rows,
)
from algm_deploy.runners.torch.runner import TorchRunner

BATCHES = (1, 2, 2)
Outputs = Mapping[str, Array]


@pytest.fixture(scope="module")
def digest(tiny_bundle: Bundle) -> Digest:
    return make_digest(tiny_bundle, BATCHES)


def test_two_pictures_that_differ(tiny_bundle: Bundle, digest: Digest) -> None:
    patches = 64
    assert digest.image.shape == (2, 3, 128, 128)
    assert {name: value.shape for name, value in digest.outputs.items()} == {
        "labels": (2, 128, 128),
        "token_counts": (2, 2),
        "token_map_clap_1": (2, patches),
        "token_map_gbm_3": (2, patches),
    }
    first, second = digest.outputs["token_counts"]
    assert (first != second).all(), "the same counts would hide a count that is another picture's"
    assert (digest.outputs["token_counts"] < patches).all()
    assert len(make_digest(tiny_bundle, (1, 1, 1)).image) == 1  # an engine for single pictures


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rounding_is_no_difference(tiny_bundle: Bundle, digest: Digest, precision: Precision) -> None:
    with TorchRunner(tiny_bundle, precision) as run:
        found = run.infer({"image": digest.image}, output_names(tiny_bundle))
    assert first_difference(digest, found, tiny_bundle.signature.merges) is None


def swapped(name: str) -> Callable[[Outputs], Outputs]:
    return lambda outputs: {**outputs, name: outputs[name][::-1]}


def renumbered(outputs: Outputs) -> Outputs:
    """The same groups of patches, their tokens in another order."""
    return {name: 99 - value if "map" in name else value for name, value in outputs.items()}


def more_tokens(count: int) -> Callable[[Outputs], Outputs]:
    """As many more in the second picture's last count."""
    return lambda outputs: {**outputs, "token_counts": outputs["token_counts"] + np.array([[0, 0], [0, count]])}


def one_picture(outputs: Outputs) -> Outputs:
    return {name: value[:1] for name, value in outputs.items()}


@pytest.mark.parametrize(
    ("change", "link"),
    [
        (dict, "no link"),
        (renumbered, "no link"),
        (more_tokens(LEAST_APART), "no link"),
        (more_tokens(LEAST_APART + 1), "the token counts after gbm_3, of picture 2"),
        (swapped("token_counts"), "the token counts after clap_1, of picture 1"),
        (swapped("token_map_clap_1"), "the token map of clap_1, of picture 1"),
        (swapped("token_map_gbm_3"), "the token map of gbm_3, of picture 1"),
        (swapped("labels"), "the labels, of picture 1"),
        (one_picture, "the shape of token_counts, (1, 2) where PyTorch has (2, 2)"),
    ],
    ids=[
        "equal",
        "renumbered",
        "a decision or two",
        "some decisions",
        "counts",
        "first map",
        "second map",
        "labels",
        "shape",
    ],
)
def test_the_first_link_that_differs_is_named(digest: Digest, change: Callable[[Outputs], Outputs], link: str) -> None:
    found = first_difference(digest, change(digest.outputs), ("clap_1", "gbm_3"))
    assert (found or "no link").startswith(link)


def test_it_is_kept_beside_the_engine(tiny_bundle: Bundle, digest: Digest, copied: Callable[..., Bundle]) -> None:
    bundle = copied(tiny_bundle)
    keep_digest(bundle, "tensorrt-rtx", digest)
    again = kept_digest(Bundle.open(bundle.path), "tensorrt-rtx")
    np.testing.assert_array_equal(again.image, digest.image)
    assert again.outputs.keys() == digest.outputs.keys()
    for name, value in digest.outputs.items():
        np.testing.assert_array_equal(again.outputs[name], value)


def test_rows_to_tune_for_come_from_what_was_measured(
    tiny_bundle: Bundle, digest: Digest, copied: Callable[..., Bundle]
) -> None:
    """A batch is as long as its longest picture."""
    counts = digest.outputs["token_counts"]
    single, source = usual_rows(tiny_bundle, digest, 1)
    assert source == "2 drawn scenes"
    prefix = tiny_bundle.recipe.network.prefix
    assert [*single.values()] == [prefix + round(float(np.median(column))) for column in counts.T]
    many, _ = usual_rows(tiny_bundle, digest, 1000)
    assert [*many.values()] == (prefix + counts.max(0)).tolist()
    bundle = copied(tiny_bundle)
    of_merge = {"clap_1": (0, 4), "gbm_3": (4, 0)}  # windows that kept at most 32 tokens, and more
    bundle.record(
        Evaluation(
            runtime="torch",
            dataset="camvid",
            split="test",
            protocol=bundle.recipe.protocol,
            images=4,
            windows=4,
            thresholds=storable(bundle.signature.defaults),
            miou_percent=70.0,
            pixel_accuracy_percent=90.0,
            token_histograms=TokenHistograms(token_edges=(0, 32, 64), windows_by_merge=of_merge),
        )
    )
    measured = usual_rows(bundle, digest, 1)
    assert measured == ({"clap_1": prefix + 48, "gbm_3": prefix + 16}, "4 pictures of camvid")
