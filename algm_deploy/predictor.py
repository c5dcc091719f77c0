"""One object for every runtime: photo in, label map out."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cv2
import numpy as np
from numpy.typing import NDArray

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, ImageError
from algm_deploy.pictures.preprocessing import (
    Pixels,
    canvas_of,
    preprocessing_fingerprint,
    read_photo,
    window_anchors,
)
from algm_deploy.pictures.sliding import Labels, Prediction, best_labels, check_finite, predict_labels
from algm_deploy.recipe.schema import MergePlan, Recipe
from algm_deploy.runners.contract import runner


class Predictor:
    """A bundle opened on one runtime; use it in a `with` block, or call `close`.

    Windows of the protocol slide over a photo and their scores are averaged. A network of another size than the
    protocol's window takes the photo at once (`network_canvas`).

    Args:
        bundle: folder of the bundle, or the opened bundle.
        runtime: `torch`, `onnxruntime-cpu`, ...
        tau: CLAP's similarity threshold instead of the bundle's; higher merges less, infinity nothing.
        gbm_threshold: GBM's multiplier or threshold instead of the bundle's.
        merge: False runs the dense network, on the same executable: infinite thresholds merge nothing.

    Raises:
        BundleError: the bundle is incomplete, or a threshold is given that its plan does not read.
        RuntimeUnavailableError: the runtime is not installed or cannot run here.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        runtime: str = "torch",
        tau: float | None = None,
        gbm_threshold: float | None = None,
        merge: bool = True,
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        _check_preprocessing(self.bundle)
        self._runner = runner(self.bundle, runtime)
        self.signature = self._runner.signature
        given = {CLAP_THRESHOLD: tau, GBM_THRESHOLD: gbm_threshold}
        self.thresholds = {name: np.asarray(value, np.float32) for name, value in given.items() if value is not None}
        if unread := sorted(set(self.thresholds) - set(self.signature.defaults)):
            raise BundleError(f"this bundle's merge plan reads no {unread[0]}: leave it out or export with merging")
        if not merge:
            _check_thresholds(self.bundle.recipe.merging)
            self.thresholds = dict.fromkeys(self.signature.defaults, np.asarray(np.inf, np.float32))
        # Coupled windows would change each other's result: the bundle's batch semantics decide how many go at once.
        self.window_batch = self.signature.max_batch if self.bundle.recipe.merging.batch == "per_image" else 1
        self._runner.__enter__()

    @property
    def thresholds_in_force(self) -> dict[str, float]:
        """Every threshold the network reads, by input name: the bundle's, or the one given instead."""
        return {**self.signature.defaults, **{name: float(value) for name, value in self.thresholds.items()}}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the runtime."""
        self._runner.__exit__(None, None, None)

    def predict(self, photo: str | Path | NDArray[np.uint8]) -> Labels:
        """Label map (H, W) of a photo, uint8 up to 255 classes, else int32.

        `photo` is a file, or RGB uint8 (H, W, 3).

        Raises:
            ImageError: the photo cannot be read, or needs several windows of a bundle that gives labels only.
        """
        return self.prediction(photo).labels

    def prediction(self, photo: str | Path | NDArray[np.uint8]) -> Prediction:
        """Label map, token counts behind each merge for every window, and the windows' places; see `predict`."""
        pixels = read_photo(Path(photo)) if isinstance(photo, str | Path) else _checked(photo)
        recipe = self.bundle.recipe
        if recipe.output == "labels" or takes_whole_frames(recipe):
            return self._single_window(pixels)
        return predict_labels(pixels, self.scores_of, recipe.protocol, self.window_batch)

    def scores_of(self, windows: Pixels) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores (b, K, s, s) and token counts (b, M) of windows (b, 3, s, s), RGB 0..255, uint8 or float32."""
        outputs = self.infer(windows)
        if "scores" not in outputs:
            raise BundleError("this bundle gives labels: for averaged windows and mIoU export it with --scores")
        return outputs["scores"], outputs["token_counts"]

    def infer(self, windows: NDArray[Any], outputs: tuple[str, ...] | None = None) -> dict[str, NDArray[Any]]:
        """The network's outputs for windows, with this predictor's thresholds."""
        return self._runner.infer({"image": self._fitting(windows), **self.thresholds}, outputs)

    def _fitting(self, windows: NDArray[Any]) -> NDArray[Any]:
        """Pixels in the network's dtype; a photo longer than the protocol allows is interpolated, then rounded."""
        wanted = self.signature.image.dtype
        if wanted == "uint8" and windows.dtype != np.uint8:
            windows = np.clip(np.rint(windows), 0, 255)
        fitting: NDArray[Any] = windows.astype(wanted, copy=False)
        return fitting

    def _single_window(self, pixels: NDArray[np.uint8]) -> Prediction:
        canvas = network_canvas(pixels, self.bundle.recipe)
        expected = self.signature.image.shape[2:]
        if canvas.shape[:2] != expected:
            raise ImageError(
                f"a bundle with labels takes one window of {expected[0]}x{expected[1]} pixels, this photo becomes "
                f"{canvas.shape[0]}x{canvas.shape[1]}: crop it, or export the bundle with --scores"
            )
        outputs = self.infer(np.ascontiguousarray(canvas.transpose(2, 0, 1)[None]))
        if "scores" in outputs:
            check_finite(outputs["scores"])
            labels = best_labels(outputs["scores"][0], pixels.shape[:2])
        else:
            labels = cv2.resize(outputs["labels"][0], pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        return Prediction(labels, outputs["token_counts"], [(0, 0)])


def takes_whole_frames(recipe: Recipe) -> bool:
    """Whether a network sees a photo at once: its input is not the protocol's square window, so nothing can slide."""
    return recipe.network.image_size != (recipe.protocol.window, recipe.protocol.window)


def network_canvas(photo: NDArray[np.uint8], recipe: Recipe) -> Pixels:
    """The canvas (h, w, 3) that windows of the network's size are cut from: the protocol's (`canvas_of`).

    For a network that takes whole frames the photo (H, W, 3) becomes one window: bilinear (OpenCV) to the network's
    size, whatever its aspect; scores are interpolated back the same way.
    """
    if not takes_whole_frames(recipe):
        return canvas_of(photo, recipe.protocol)
    height, width = recipe.network.image_size
    return np.asarray(cv2.resize(photo, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def network_anchors(canvas: Pixels, recipe: Recipe) -> list[tuple[int, int]]:
    """(top, left) of every window on the canvas, row by row."""
    return [(0, 0)] if takes_whole_frames(recipe) else window_anchors(canvas.shape[:2], recipe.protocol)


def _check_preprocessing(bundle: Bundle) -> None:
    """Refuses a bundle whose pixels were prepared by other rules: nothing else would tell, only accuracy would fall."""
    ours = preprocessing_fingerprint(bundle.recipe.protocol)
    if (theirs := bundle.manifest.preprocessing_sha256) != ours:
        raise BundleError(
            f"{bundle.path}: made with other preprocessing rules ({theirs!s:.12} instead of {ours:.12}): export it "
            "again with this release"
        )


def _checked(photo: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if not isinstance(photo, np.ndarray) or photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3:
        came = f"{photo.dtype} {photo.shape}" if isinstance(photo, np.ndarray) else type(photo).__name__
        raise ImageError(f"a photo is a file or an RGB array uint8 (H, W, 3), got {came}")
    return photo


def _check_thresholds(plan: MergePlan) -> None:
    """Refuses to make a network dense by thresholds where it merges without any."""
    if plan.method == "tome" and plan.layers:
        raise BundleError(
            "expected merges that wait for a similarity, ToMe merges a constant number of tokens: export with --set "
            "merging.tome_r=[] for the dense network"
        )
