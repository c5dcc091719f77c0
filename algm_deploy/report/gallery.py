"""Pictures for a report: what a bundle makes of some photos, step by step, as panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from algm_deploy.bundle.signature import CLAP_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.evaluation.datasets import IGNORE, Classes, Dataset
from algm_deploy.pictures.preprocessing import read_photo
from algm_deploy.pictures.sliding import Labels, Prediction
from algm_deploy.predictor import Predictor
from algm_deploy.report.colors import classes_of
from algm_deploy.report.pictures import SimilarityOf, final_tokens, token_panels, window_similarity_of
from algm_deploy.report.sheets import Panel, Rgb, sheet

_WRONG, _UNLABELLED = (213, 94, 0), (255, 255, 255)


@dataclass(frozen=True)
class Photo:
    """A photo to show; `labels` (H, W) uint8 are its true classes, `IGNORE` where a pixel does not count."""

    name: str
    path: Path
    labels: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Example:
    """One photo's panels in reading order."""

    name: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Gallery:
    """Examples as one runtime computed them, and the colours of the classes that occur in them.

    `at_thresholds` show the same photos at several values of the threshold that was tuned last.
    """

    runtime: str
    examples: tuple[Example, ...]
    legend: tuple[tuple[str, tuple[int, int, int]], ...]
    at_thresholds: tuple[Example, ...] = ()


def labelled_photos(dataset: Dataset, count: int) -> list[Photo]:
    """Up to `count` photos spread evenly over a data set, with their labels."""
    samples = dataset.subset(count).samples
    return [Photo(sample.name, sample.image_path, dataset.labels_of(sample)) for sample in samples]


def draw_gallery(bundle: Bundle, runtime: str, photos: Sequence[Photo], progress: bool = True) -> Gallery:
    """Predicts each photo with and without merging, and draws both beside the steps in between.

    Raises:
        ImageError: a photo cannot be read or does not fit the bundle.
        RuntimeUnavailableError: the runtime is not installed or cannot run here.
    """
    classes, plan = classes_of(bundle.recipe), bundle.recipe.merging
    similarity_of = window_similarity_of(bundle) if plan.clap_layers else None
    seen: set[int] = set()
    examples = []
    with Predictor(bundle, runtime) as merged, Predictor(bundle, runtime, merge=False) as dense:
        for photo in tqdm(photos, "gallery", unit="photo", disable=None if progress else True):
            pixels = read_photo(photo.path)
            predictions = [merged.prediction(pixels), *([dense.prediction(pixels)] if plan.layers else [])]
            panels = _steps(merged, pixels, predictions[0], similarity_of)
            panels += _results(pixels, predictions, photo.labels, classes)
            examples.append(Example(photo.name, tuple(panels)))
            seen |= {int(index) for p in predictions for index in np.unique(p.labels)}
    legend = tuple((classes.names[index], classes.palette[index]) for index in sorted(seen))
    tuned = [one.pictured for one in bundle.manifest.tunings if one.pictured][-1:]
    rows = [draw_thresholds(bundle, runtime, photos, *one, progress) for one in tuned]
    return Gallery(runtime, tuple(examples), legend, tuple(row for part in rows for row in part))


def draw_thresholds(
    bundle: Bundle, runtime: str, photos: Sequence[Photo], name: str, values: Sequence[float], progress: bool = True
) -> list[Example]:
    """Each photo, and beside it the tokens that are left at each of some values of the threshold called `name`.

    Raises:
        ImageError: a photo cannot be read or does not fit the bundle.
        RuntimeUnavailableError: the runtime is not installed or cannot run here.
    """
    pixels = {photo.name: read_photo(photo.path) for photo in photos}
    panels: dict[str, list[Panel]] = {
        photo.name: [Panel(photo.name, f"{one.shape[1]} x {one.shape[0]} pixels", one)]
        for photo, one in zip(photos, pixels.values(), strict=True)
    }
    for value in tqdm(values, "thresholds", disable=None if progress else True):
        tau, gbm = (value, None) if name == CLAP_THRESHOLD else (None, value)
        with Predictor(bundle, runtime, tau, gbm) as predictor:
            for photo in photos:
                panels[photo.name].append(final_tokens(predictor, pixels[photo.name], f"{name} {value:g}"))
    return [Example(name, tuple(row)) for name, row in panels.items()]


def threshold_sheet(examples: Sequence[Example], heading: str) -> Image.Image:
    """The same as one picture: a row for each photo, a column for each threshold."""
    caption = (
        "Each token has the mean colour of its patches. White lines surround neighbours that share a token, which may "
        "have patches elsewhere too; a patch with dark borders is a token of its own."
    )
    size = examples[0].panels[-1].picture.shape[1::-1]
    rows = [
        replace(panel, picture=np.asarray(cv2.resize(panel.picture, size, interpolation=cv2.INTER_AREA), np.uint8))
        for example in examples
        for panel in example.panels
    ]
    return sheet(heading, rows, caption, len(examples[0].panels))


def _steps(
    predictor: Predictor, pixels: Rgb, prediction: Prediction, similarity_of: SimilarityOf | None
) -> list[Panel]:
    """The photo and, where the network merges, its window similarity and the tokens behind each merge."""
    if predictor.signature.merges:
        return token_panels(predictor, pixels, prediction, similarity_of)[0]
    return [Panel("Photo", f"{pixels.shape[1]} x {pixels.shape[0]} pixels", pixels)]


def _results(
    pixels: Rgb, predictions: Sequence[Prediction], truth: NDArray[np.uint8] | None, classes: Classes
) -> list[Panel]:
    merged = predictions[0].labels
    dense = predictions[1].labels if len(predictions) > 1 else None
    panels = [] if dense is None else [Panel("Prediction without merging", _wrong(dense, truth), _map(dense, classes))]
    title = "Prediction" if dense is None else "Prediction with merging"
    about = [_wrong(merged, truth)]
    if dense is not None:
        about.append(f"{_share(merged != dense)} of all pixels differ from the one without")
    panels.append(Panel(title, "; ".join(filter(None, about)), _map(merged, classes)))
    if truth is not None:
        panels.append(Panel("Label", f"{_share(truth == IGNORE)} unlabelled (white)", _map(truth, classes)))
        panels.append(Panel("Errors of the prediction" + (" with merging" if dense is not None else ""),
                            "orange: wrong; white: unlabelled", _errors(pixels, merged, truth)))  # fmt: skip
    return panels


def _map(labels: Labels, classes: Classes) -> Rgb:
    palette = np.full((256 if labels.dtype == np.uint8 else len(classes.palette), 3), 255, np.uint8)
    palette[: len(classes.palette)] = classes.palette
    colors: Rgb = palette[labels]
    return colors


def _errors(pixels: Rgb, labels: Labels, truth: NDArray[np.uint8]) -> Rgb:
    grey = 80 + cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY) // 2  # stays darker than white, which means unlabelled
    picture: Rgb = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    picture[truth == IGNORE] = _UNLABELLED
    picture[(labels != truth) & (truth != IGNORE)] = _WRONG
    return picture


def _wrong(labels: Labels, truth: NDArray[np.uint8] | None) -> str:
    return "" if truth is None else f"{_share((labels != truth)[truth != IGNORE])} of the labelled pixels wrong"


def _share(flags: NDArray[np.bool_]) -> str:
    return f"{100 * flags.mean():.1f} %" if flags.size else "0 %"
