"""Windows stream through a network, overlap by their mean, and become a label map of the photo's size."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from algm_deploy.errors import GateError
from algm_deploy.pictures.preprocessing import Pixels, canvas_of, window_anchors
from algm_deploy.pictures.sliding import best_labels, predict_labels
from algm_deploy.recipe.schema import Protocol

PROTOCOL = Protocol("x", short_side=32, window=32, stride=20)
CLASSES = 5


def photo_of(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


class Network:
    """Scores that depend on every pixel of the window and on where the pixel lies in it; counts windows it saw."""

    def __init__(self) -> None:
        self.batches: list[Pixels] = []
        self.weights = np.random.default_rng(1).standard_normal((CLASSES, 3, 32, 32)).astype(np.float32)

    def __call__(self, windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        self.batches.append(windows)
        pixels = windows.astype(np.float32)
        scores = np.einsum("kchw,bchw->bkhw", self.weights, pixels) + pixels.mean((1, 2, 3))[:, None, None, None]
        return scores, pixels.sum((1, 2, 3)).astype(np.int64)[:, None]


def expected_labels(photo: NDArray[np.uint8], protocol: Protocol) -> NDArray[np.int64]:
    """The published rule written out in torch, one window at a time."""
    network, canvas = Network(), canvas_of(photo, protocol)
    pixels = torch.from_numpy(canvas.astype(np.float32)).permute(2, 0, 1)
    sums, cover = torch.zeros(CLASSES, *canvas.shape[:2]), torch.zeros(canvas.shape[:2])
    for top, left in window_anchors(canvas.shape[:2], protocol):
        area = slice(top, top + 32), slice(left, left + 32)
        sums[:, *area] += torch.from_numpy(network(pixels[None, :, *area].numpy())[0][0])
        cover[area] += 1
    scores = torch.nn.functional.interpolate((sums / cover)[None], photo.shape[:2], mode="bilinear")
    return scores[0].softmax(0).argmax(0).numpy()


@pytest.mark.parametrize("size", [(48, 90), (90, 48), (32, 32), (20, 75), (64, 64)])
@pytest.mark.parametrize("window_batch", [1, 3, 64])
def test_prediction_equals_the_published_rule(size: tuple[int, int], window_batch: int) -> None:
    photo, network = photo_of(*size), Network()
    prediction = predict_labels(photo, network, PROTOCOL, window_batch)
    assert prediction.labels.dtype == np.uint8
    assert (prediction.labels == expected_labels(photo, PROTOCOL)).mean() > 0.999
    sizes = [len(batch) for batch in network.batches]
    assert sum(sizes) == len(prediction.anchors) == len(prediction.token_counts)
    assert all(count == window_batch for count in sizes[:-1])


def test_windows_keep_the_canvas_dtype_and_order() -> None:
    photo, network = photo_of(48, 90), Network()
    prediction = predict_labels(photo, network, PROTOCOL, 2)
    windows, canvas = np.concatenate(network.batches), canvas_of(photo, PROTOCOL)
    assert windows.dtype == np.uint8
    for (top, left), window, count in zip(prediction.anchors, windows, prediction.token_counts, strict=True):
        assert (window.transpose(1, 2, 0) == canvas[top : top + 32, left : left + 32]).all()
        assert count == window.sum()
    predict_labels(photo, network, Protocol("x", short_side=24, window=32, stride=20), 2)
    assert network.batches[-1].dtype == np.float32


def test_labels_come_from_interpolated_scores_with_ties_to_the_lower_class() -> None:
    scores = np.random.default_rng(2).standard_normal((7, 20, 30)).astype(np.float32)
    resized = torch.nn.functional.interpolate(torch.from_numpy(scores)[None], (45, 51), mode="bilinear")[0]
    assert (best_labels(scores, (45, 51)) == resized.argmax(0).numpy()).mean() > 0.999
    assert best_labels(np.zeros((3, 2, 2), np.float32), (4, 4)).max() == 0
    for classes, dtype in ((255, np.uint8), (256, np.int32)):
        many = np.zeros((classes, 2, 2), np.float32)
        many[-1] = 1
        labels = best_labels(many, (2, 2))
        assert labels.dtype == dtype
        assert (labels == classes - 1).all()


def test_scores_of_another_shape_are_refused() -> None:
    def too_small(windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return np.zeros((len(windows), 2, 16, 16), np.float32), np.zeros((len(windows), 0), np.int64)

    def too_few(windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return np.zeros((1, 2, 32, 32), np.float32), np.zeros((1, 0), np.int64)

    for broken in (too_small, too_few):
        with pytest.raises(GateError, match="image size"):
            predict_labels(photo_of(48, 90), broken, PROTOCOL, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_never_become_labels(value: float) -> None:
    def broken(windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores = np.zeros((len(windows), 2, 32, 32), np.float32)
        scores[-1, 1, 31, 31] = value
        return scores, np.zeros((len(windows), 0), np.int64)

    with pytest.raises(GateError, match="not finite"):
        predict_labels(photo_of(32, 32), broken, PROTOCOL, 1)


def test_memory_stays_within_what_the_module_states() -> None:
    classes, window, batch, photo = 40, 64, 2, photo_of(100, 800)
    protocol = Protocol("x", short_side=64, window=window, stride=48, max_ratio=8)

    def network(windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return np.zeros((len(windows), classes, window, window), np.float32), np.zeros((len(windows), 0), np.int64)

    canvas = np.prod(canvas_of(photo, protocol).shape[:2])
    tracemalloc.start()
    predict_labels(photo, network, protocol, batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Fresh scores count twice: a network returns a new batch while the last one is still named.
    stated = 4 * classes * canvas + 2 * 4 * batch * classes * window**2 + 16 * canvas + 10 * photo[..., 0].size
    assert peak < 1.1 * stated
