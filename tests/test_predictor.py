"""One predictor for every runtime: photo in, label map of the photo's size out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from msgspec import structs
from PIL import Image

import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ImageError, RuntimeUnavailableError
from algm_deploy.pictures.shipped import scene
from algm_deploy.predictor import Predictor, network_anchors, network_canvas, takes_whole_frames

RUNTIMES = ["torch", "onnxruntime-cpu"]


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    """A drawn street scene (200, 320, 3)."""
    return np.asarray(cv2.resize(scene(7)[0], (320, 200), interpolation=cv2.INTER_AREA))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_label_map_has_the_size_of_the_photo(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    with Predictor(tiny_bundle, runtime) as predictor:
        prediction = predictor.prediction(photo)
    assert prediction.labels.shape == (200, 320)
    assert prediction.labels.dtype == np.uint8
    assert prediction.labels.max() < 11
    # Short side 128, long side 205: windows of 128 at 0 and at the right edge.
    assert prediction.anchors == [(0, 0), (0, 77)]
    assert prediction.token_counts.shape == (2, 2)


def test_runtimes_agree(tiny_bundle: Bundle, photo: np.ndarray) -> None:
    labels = []
    for runtime in RUNTIMES:
        with Predictor(tiny_bundle, runtime) as predictor:
            labels.append(predictor.predict(photo))
    assert (labels[0] == labels[1]).mean() > 0.999


def test_public_entry_takes_a_path(tiny_bundle: Bundle, photo: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    Image.fromarray(photo).save(path)
    with algm_deploy.load(tiny_bundle.path) as network:
        assert np.array_equal(network.predict(str(path)), network.predict(photo))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_tau_changes_the_tokens_of_one_executable(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    counts = {}
    for tau in (-1.0, 0.5, None, 1.5):
        with Predictor(tiny_bundle, runtime, tau=tau) as predictor:
            counts[tau] = predictor.prediction(photo).token_counts
    assert (counts[-1.0][:, 0] == 16).all()
    assert (counts[1.5][:, 0] == 64).all()
    assert (counts[-1.0][:, 0] <= counts[0.5][:, 0]).all()
    assert (counts[0.5][:, 0] < counts[None][:, 0]).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_dense_network_on_the_same_executable(tiny_bundle: Bundle, photo: np.ndarray, runtime: str) -> None:
    with Predictor(tiny_bundle, runtime, dense=True) as predictor:
        assert (predictor.prediction(photo).token_counts == 64).all()
        assert predictor.thresholds_in_force == {"clap_threshold": np.inf, "gbm_threshold": np.inf}


@pytest.mark.parametrize("tau", [np.nan])
def test_threshold_that_is_no_number(tiny_bundle: Bundle, photo: np.ndarray, tau: float) -> None:
    with (
        Predictor(tiny_bundle, "torch", tau=tau) as predictor,
        pytest.raises(BundleError, match="clap_threshold is one"),
    ):
        predictor.predict(photo)


def test_threshold_the_plan_does_not_read(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = replace(tiny_bundle.signature, defaults={"clap_threshold": 0.9})
    monkeypatch.setattr(tiny_bundle, "manifest", structs.replace(tiny_bundle.manifest, signature=signature))
    with pytest.raises(BundleError, match="reads no gbm_threshold"):
        Predictor(tiny_bundle, "torch", gbm=1.0)


def test_unknown_runtime(tiny_bundle: Bundle) -> None:
    with pytest.raises(RuntimeUnavailableError, match="unknown runtime 'abacus': choose from torch"):
        Predictor(tiny_bundle, "abacus")


def test_bundle_of_other_preprocessing_rules(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = structs.replace(tiny_bundle.manifest, preprocessing_sha256="0" * 64)
    monkeypatch.setattr(tiny_bundle, "manifest", changed)
    with pytest.raises(BundleError, match="made with other preprocessing rules"):
        Predictor(tiny_bundle)


@pytest.mark.parametrize(
    "photo", [np.zeros((8, 8)), np.zeros((8, 8, 3)), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8), np.uint8), None]
)
def test_photo_of_another_kind(tiny_bundle: Bundle, photo: object) -> None:
    with Predictor(tiny_bundle) as predictor, pytest.raises(ImageError, match=r"RGB array uint8 \(H, W, 3\)"):
        predictor.predict(photo)  # type: ignore[arg-type]


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_labels_for_a_photo_of_one_window(labels_bundle: Bundle, runtime: str) -> None:
    square = scene(3)[0][:256, :256]
    with Predictor(labels_bundle, runtime) as predictor:
        prediction = predictor.prediction(square)
        direct = predictor.infer(np.asarray(cv2.resize(square, (128, 128)))[None].transpose(0, 3, 1, 2))
    assert prediction.labels.shape == (256, 256)
    assert np.array_equal(prediction.labels[::2, ::2], direct["labels"][0])


def test_labels_for_a_larger_photo(labels_bundle: Bundle, photo: np.ndarray) -> None:
    with Predictor(labels_bundle) as predictor:
        with pytest.raises(ImageError, match=r"one window of 128x128 pixels, this photo becomes 128x205: crop it"):
            predictor.predict(photo)
        with pytest.raises(BundleError, match="export it with --scores"):
            predictor.scores_of(np.zeros((1, 3, 128, 128), np.uint8))


# --- whole frames ----------------------------------------------------------------------------------------------------


def test_square_windows_slide(tiny_bundle: Bundle, photo: np.ndarray) -> None:
    assert not takes_whole_frames(tiny_bundle.recipe)
    canvas = network_canvas(photo, tiny_bundle.recipe)
    assert canvas.shape == (128, 205, 3)
    assert network_anchors(canvas, tiny_bundle.recipe) == [(0, 0), (0, 77)]


def test_network_of_another_size_takes_the_photo_at_once(wide_bundle: Bundle, photo: np.ndarray) -> None:
    assert takes_whole_frames(wide_bundle.recipe)
    canvas = network_canvas(photo, wide_bundle.recipe)
    assert np.array_equal(canvas, cv2.resize(photo, (160, 96), interpolation=cv2.INTER_LINEAR))
    assert network_anchors(canvas, wide_bundle.recipe) == [(0, 0)]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("size", [(200, 320), (320, 200), (96, 160)])
def test_whole_frame(wide_bundle: Bundle, photo: np.ndarray, runtime: str, size: tuple[int, int]) -> None:
    resized = np.asarray(cv2.resize(photo, size[::-1]))
    with Predictor(wide_bundle, runtime) as predictor:
        prediction = predictor.prediction(resized)
        scores = predictor.infer(network_canvas(resized, wide_bundle.recipe).transpose(2, 0, 1)[None])["scores"][0]
    assert prediction.labels.shape == size
    assert prediction.anchors == [(0, 0)]
    assert prediction.token_counts.shape == (1, 2)
    planes = np.stack([cv2.resize(plane, size[::-1], interpolation=cv2.INTER_LINEAR) for plane in scores])
    assert np.array_equal(prediction.labels, planes.argmax(0))
