"""Pictures for a report: what a bundle makes of some photos, step by step, as panels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from algm_deploy.bundle.signature import CLAP_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ImageError
from algm_deploy.evaluation.datasets import IGNORE, Classes, Dataset
from algm_deploy.pictures.preprocessing import read_photo
from algm_deploy.pictures.sliding import Labels, Prediction
from algm_deploy.predictor import Predictor
from algm_deploy.report.colors import classes_of, colored
from algm_deploy.report.pictures import TOKENS_CAPTION, final_tokens, token_panels, window_similarity_of
from algm_deploy.report.sheets import PAPER, Panel, Rgb, sheet

_WRONG = (213, 94, 0)


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

    `at_thresholds` show the same photos at several values of the threshold that was tuned last. `failures` tell of the
    photos that could not be read or predicted.
    """

    runtime: str
    examples: tuple[Example, ...]
    legend: tuple[tuple[str, tuple[int, int, int]], ...]
    at_thresholds: tuple[Example, ...] = ()
    failures: tuple[str, ...] = ()


def labelled_photos(dataset: Dataset, count: int) -> list[Photo]:
    """Up to `count` photos spread evenly over a data set, with their labels. Errors as `Dataset.read`."""
    samples = dataset.subset(count).samples
    return [Photo(sample.name, sample.image_path, dataset.read(sample)[1]) for sample in samples]


def draw_gallery(bundle: Bundle, runtime: str, photos: Sequence[Photo], progress: bool = True) -> Gallery:
    """Predicts each photo with merging and, where thresholds decide, without; draws that and the steps in between.

    Raises:
        RuntimeUnavailableError: the runtime is not installed or cannot run here.
    """
    classes, plan = classes_of(bundle.recipe), bundle.recipe.merging
    similarity_of = window_similarity_of(bundle)
    seen: set[int] = set()
    examples, drawn, failures = [], [], []
    with ExitStack() as opened:
        predictors = [opened.enter_context(Predictor(bundle, runtime))]
        if bundle.signature.defaults and not plan.budgeted:  # ToMe and budgets merge whatever the thresholds
            predictors.append(opened.enter_context(Predictor(bundle, runtime, dense=True)))
        for photo in tqdm(photos, "gallery", unit="photo", disable=None if progress else True):
            try:
                pixels = read_photo(photo.path)
                predictions = [one.prediction(pixels) for one in predictors]
            except ImageError as error:
                failures.append(f"{photo.path}: {str(error).removeprefix(f'{photo.path}: ')}")
                continue
            drawn.append(photo)
            panels = [Panel("Photo", _size(pixels), pixels)]
            if plan.layers and plan.row.standing:
                panels, _ = token_panels(predictors[0], pixels, predictions[0], similarity_of)
            panels += _results(pixels, predictions, photo.labels, classes)
            examples.append(Example(photo.name, tuple(panels)))
            seen |= {int(index) for p in predictions for index in np.unique(p.labels)}
    legend = tuple((classes.names[index], classes.palette[index]) for index in sorted(seen))
    tuned = next((one.pictured for one in reversed(bundle.manifest.tunings) if one.pictured), None)
    at_thresholds = draw_thresholds(bundle, runtime, drawn, *tuned, progress) if tuned else []
    return Gallery(runtime, tuple(examples), legend, tuple(at_thresholds), tuple(failures))


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
        photo.name: [Panel(photo.name, _size(one), one)] for photo, one in zip(photos, pixels.values(), strict=True)
    }
    for value in tqdm(values, "thresholds", disable=None if progress else True):
        tau, gbm = (value, None) if name == CLAP_THRESHOLD else (None, value)
        with Predictor(bundle, runtime, tau=tau, gbm=gbm) as predictor:
            for photo in photos:
                panels[photo.name].append(final_tokens(predictor, pixels[photo.name], f"{name} {value:g}"))
    return [Example(name, tuple(row)) for name, row in panels.items()]


def threshold_sheet(examples: Sequence[Example], heading: str) -> Image.Image:
    """The same as one picture: a row for each photo, a column for each threshold."""
    size = examples[0].panels[-1].picture.shape[1::-1]
    rows = [
        replace(panel, picture=np.asarray(cv2.resize(panel.picture, size, interpolation=cv2.INTER_AREA), np.uint8))
        for example in examples
        for panel in example.panels
    ]
    return sheet(heading, rows, TOKENS_CAPTION, len(examples[0].panels))


def _size(pixels: Rgb) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[0]} pixels"


def _results(
    pixels: Rgb, predictions: Sequence[Prediction], truth: NDArray[np.uint8] | None, classes: Classes
) -> list[Panel]:
    """Predictions with merging and maybe without; where the truth is known, also that and what is wrong."""
    merged, *dense = (prediction.labels for prediction in predictions)
    panels = [Panel("Prediction without merging", _wrong(one, truth), colored(one, classes)) for one in dense]
    differ = [f"{_share(merged != one)} of all pixels differ from the one without" for one in dense]
    said = "; ".join(filter(None, (_wrong(merged, truth), *differ)))
    panels.append(Panel("Prediction with merging" if dense else "Prediction", said, colored(merged, classes)))
    if truth is not None:
        unlabelled = f"{_share(truth == IGNORE)} unlabelled (white)"
        errors = "Errors of the prediction" + (" with merging" if dense else "")
        panels.append(Panel("Label", unlabelled, colored(truth, classes)))
        panels.append(Panel(errors, "orange: wrong; white: unlabelled", _errors(pixels, merged, truth)))
    return panels


def _errors(pixels: Rgb, labels: Labels, truth: NDArray[np.uint8]) -> Rgb:
    grey = 80 + cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY) // 2  # stays darker than white, which means unlabelled
    picture: Rgb = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    picture[truth == IGNORE] = PAPER
    picture[(labels != truth) & (truth != IGNORE)] = _WRONG
    return picture


def _wrong(labels: Labels, truth: NDArray[np.uint8] | None) -> str:
    if truth is None or (truth == IGNORE).all():
        return ""
    return f"{_share((labels != truth)[truth != IGNORE])} of the labelled pixels wrong"


def _share(flags: NDArray[np.bool_]) -> str:
    return f"{100 * flags.mean():.1f} %" if flags.size else "0 %"
