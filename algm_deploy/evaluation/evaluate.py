"""mIoU, token statistics and arithmetic of a network over a data set, resumable image by image.

Every finished image is one line of a state file: its confusion counts and token counts. A run that stops continues with
the images that have no line yet; a photo that cannot be read is named in the result and tried again by the next run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, ValidationError, convert, structs
from numpy.typing import NDArray
from tqdm import tqdm

from algm_deploy.bundle.records import Evaluation, Figures, MergeTokens, Record, TokenHistograms, storable
from algm_deploy.bundle.signature import merge_names
from algm_deploy.errors import BundleError, DatasetError, ImageError
from algm_deploy.evaluation.datasets import IGNORE, Dataset, Sample
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.evaluation.metrics import Confusion, confusion_matrix, quality
from algm_deploy.pictures.preprocessing import preprocessing_fingerprint
from algm_deploy.pictures.sliding import Prediction, ScoresOf, predict_labels
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Recipe
from algm_deploy.wording import first_few

STATE_VERSION = 3
HISTOGRAM_BINS = 32
_LOG = logging.getLogger("algm_deploy")
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class ImageResult(Record, frozen=True, kw_only=True):
    """One evaluated image: the flat cells of its confusion matrix that are not zero, their pixels, (windows, M) tokens.

    The hash of its photo's and its label's bytes tells a later run whether the image is still the same.
    """

    name: str
    files_sha256: str
    cells: list[Count]
    pixels: list[Count]
    tokens: list[list[Count]]

    def __post_init__(self) -> None:
        if len(self.cells) != len(self.pixels):
            raise ValueError("expected as many pixels as cells")


Found = ImageResult | str | None
"""An image's result, why it has none, or None where the result that is there still holds."""

Measure = Callable[[Sequence[tuple[Sample, str | None]]], Iterable[tuple[Sample, Found]]]
"""Measures images, each with the hash of its files in an earlier result where there is one, and gives what it found for
each, in any order."""


@dataclass(frozen=True)
class Measurer:
    """Measures one image at a time by a network. Of `dataset` the samples are not read.

    Raises:
        GateError: as `predict_labels`.
        BundleError: the token counts do not fit the plan.
    """

    dataset: Dataset
    scores_of: ScoresOf
    recipe: Recipe
    window_batch: int

    def __call__(self, sample: Sample, known_sha256: str | None) -> Found:
        """What is found for an image; see `Measure`."""
        try:
            files = _files_sha256(sample)
            if files == known_sha256:
                return None
            photo, labels = self.dataset.read(sample)
            prediction = predict_labels(photo, self.scores_of, self.recipe.protocol, self.window_batch)
        except (ImageError, DatasetError) as error:
            return str(error)
        _check_tokens(prediction, self.recipe.merging)
        counts = confusion_matrix(labels, prediction.labels, len(self.dataset.class_names), IGNORE)
        return image_result(sample.name, files, counts, prediction.token_counts)

    def all_of(self, tasks: Sequence[tuple[Sample, str | None]]) -> Iterator[tuple[Sample, Found]]:
        """Images one after the other, in their order; a `Measure`."""
        return ((sample, self(sample, known)) for sample, known in tasks)


def evaluate(
    dataset: Dataset,
    scores_of: ScoresOf,
    recipe: Recipe,
    *,
    window_batch: int = 1,
    **facts: Any,
) -> Evaluation:
    """Evaluates a network in this process; arguments as those of `evaluate_by`."""
    measure = Measurer(dataset, scores_of, recipe, window_batch).all_of
    return evaluate_by(dataset, measure, recipe, window_batch=window_batch, **facts)


def evaluate_by(
    dataset: Dataset,
    measure: Measure,
    recipe: Recipe,
    *,
    artifact: str,
    state_folder: Path,
    runtime: str,
    device: str = "not recorded",
    thresholds: Mapping[str, float] = {},
    window_batch: int = 1,
    progress: bool = True,
) -> Evaluation:
    """Evaluates a network over a data set.

    `measure` measures images, here or elsewhere; what it finds is added up in the order of the data set, so figures do
    not depend on who measured. `artifact` identifies what computes the scores: weights, plan, thresholds in force,
    runtime, precision. Together with the protocol, the data set and `window_batch` it keys the state file in
    `state_folder`, so results of different networks never mix. `window_batch` is explained at `predict_labels`.
    `runtime`, `device` and `thresholds` go into the record.

    Raises:
        DatasetError: the data set's classes are not the network's, or no image could be evaluated.
        GateError: the network returned no finite scores of the right shape.
        BundleError: the state file cannot be used, or the token counts do not fit the plan.
    """
    if len(dataset.class_names) != recipe.network.classes:
        raise DatasetError(
            f"{dataset.name} has {len(dataset.class_names)} classes and the network {recipe.network.classes}: "
            "choose the data set the checkpoint was trained for"
        )
    facts = {
        "state_version": STATE_VERSION,
        "artifact": artifact,
        "preprocessing_sha256": preprocessing_fingerprint(recipe.protocol),
        "dataset": dataset.name,
        "split": dataset.split,
        "class_names": list(dataset.class_names),
        "label_values": dataset.lookup.tolist(),
        "window_batch": window_batch,
    }
    fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    state = StateFile(state_folder / f"evaluation-{fingerprint[:16]}.jsonl", facts)
    results, failures = dict(state.results), {}
    known = {name: result.files_sha256 for name, result in results.items()}
    found = measure([(sample, known.get(sample.name)) for sample in dataset.samples])
    with tqdm(found, dataset.title, len(dataset.samples), unit="image", disable=None if progress else True) as bar:
        for sample, one in bar:
            if isinstance(one, str):
                failures[sample.name] = one
                bar.set_postfix(failed=len(failures))
            elif one is not None:
                results[sample.name] = one
                state.append(one)
    failures = {sample.name: failures[sample.name] for sample in dataset.samples if sample.name in failures}
    done = [results[sample.name] for sample in dataset.samples if sample.name not in failures]
    unlabelled = tuple(result.name for result in done if not result.cells)
    if len(unlabelled) == len(done):
        raise DatasetError(_nothing_evaluated(dataset, failures, unlabelled))
    _tell_masks(dataset, done)
    return evaluation_of(
        done,
        dataset,
        recipe,
        runtime=runtime,
        device=device,
        thresholds=storable(thresholds),
        fingerprint_sha256=fingerprint,
        window_batch=window_batch,
        failures=failures,
        unlabelled=unlabelled,
    )


def evaluation_of(results: Sequence[ImageResult], dataset: Dataset, recipe: Recipe, **facts: Any) -> Evaluation:
    """The figures of a data set's images, as a whole and by slice; `facts` are the record's other fields.

    Raises:
        PlanError: token counts that the recipe's plan does not leave.
    """
    return Evaluation(
        dataset=dataset.name,
        split=dataset.split,
        preprocessing_sha256=preprocessing_fingerprint(recipe.protocol),
        protocol=recipe.protocol,
        **structs.asdict(_figures(results, dataset.class_names, recipe.merging)),
        gmacs_per_window_mean=_mean_gmacs(results, recipe),
        gmacs_per_window_dense=multiply_adds(recipe.network, DENSE).gmacs,
        token_histograms=_histograms(_tokens(results, recipe.merging), recipe),
        slices={
            name: _figures(part, dataset.class_names, recipe.merging)
            for name, part in _by_slice(results, dataset).items()
        },
        **facts,
    )


class StateFile:
    """Append-only JSON lines: a header with the facts that key the file, then one `ImageResult` a line.

    A line is written and synced at once. A torn last line, left by a run that was killed, is cut off; any other line
    that cannot be read is an error.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.results: dict[str, ImageResult] = {}
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole:
                os.truncate(path, len(whole))
                self._read(whole, facts)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_line(facts))
        except OSError as error:
            raise BundleError(f"{path}: the evaluation cannot keep its state here: {error}") from error

    def append(self, result: ImageResult) -> None:
        """Adds one image, durably.

        Raises:
            BundleError: the file cannot be written; what was written before stays valid.
        """
        try:
            with self.path.open("ab") as stream:
                stream.write(_line(structs.asdict(result)))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise BundleError(f"{self.path}: cannot add a result, free space and run again: {error}") from error

    def _read(self, content: bytes, facts: dict[str, Any]) -> None:
        number = 0
        try:
            for number, line in enumerate(content.splitlines(), start=1):
                entry = json.loads(line)
                if number == 1 and entry != facts:
                    raise ValueError("it belongs to another evaluation")
                if number > 1:
                    result = convert(entry, ImageResult)
                    if max(result.cells, default=0) >= len(facts["class_names"]) ** 2:
                        raise ValueError("its cells are of other classes")
                    self.results[result.name] = result
        except (ValueError, RecursionError, ValidationError) as error:
            raise BundleError(
                f"{self.path} line {number}: expected a saved result, delete the file ({error})"
            ) from error


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _files_sha256(sample: Sample) -> str:
    """Of the photo's hash and the label's. Sizes and times would miss a label that was repaired in place."""
    both = hashlib.sha256()
    try:
        for path in (sample.image_path, sample.label_path):
            with path.open("rb") as stream:
                both.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise ImageError(f"{error.filename}: expected a photo or its labels, got {error.strerror}") from error
    return both.hexdigest()


def image_result(name: str, files_sha256: str, confusion: Confusion, tokens: NDArray[np.int64]) -> ImageResult:
    """An image's result from its confusion matrix (K, K) and the tokens (windows, M) that merges left."""
    counts = confusion.ravel()
    cells = np.flatnonzero(counts)
    return ImageResult(
        name=name,
        files_sha256=files_sha256,
        cells=cells.tolist(),
        pixels=counts[cells].tolist(),
        tokens=tokens.tolist(),
    )


def _nothing_evaluated(dataset: Dataset, failures: Mapping[str, str], unlabelled: Sequence[str]) -> str:
    reasons = [*failures.values(), *(f"{name}: no pixel has a label" for name in unlabelled)]
    return (
        f"{dataset.title}: expected images with labels, none of {len(reasons)} can be evaluated "
        f"({first_few(reasons)}): mend these files and run it again"
    )


def _tell_masks(dataset: Dataset, results: Iterable[ImageResult]) -> None:
    """Says it where labels look like masks of a foreground: they hold no class but the first, or the first two."""
    names = dataset.class_names
    present = np.flatnonzero(_summed(results, len(names)).sum(axis=1))
    if len(names) > 2 and present.max() < 2:
        _LOG.warning(
            "%s: expected labels of %d classes, got %s alone: if they are masks of a foreground, with 0 and 255 or 0 "
            "and 1 as values, these figures mean nothing",
            *(dataset.title, len(names), " and ".join(names[index] for index in present)),
        )


def _check_tokens(prediction: Prediction, plan: MergePlan) -> None:
    if prediction.token_counts.shape[1:] != (len(plan.layers),):
        raise BundleError(
            f"expected a token count for each merging layer {plan.layers}, got {prediction.token_counts.shape[1:]}"
        )


def _by_slice(results: Iterable[ImageResult], dataset: Dataset) -> dict[str, list[ImageResult]]:
    slice_of = {sample.name: sample.slice for sample in dataset.samples}
    slices: dict[str, list[ImageResult]] = {}
    for result in results:
        slices.setdefault(slice_of[result.name], []).append(result)
    return dict(sorted(slices.items()))


def _figures(results: Sequence[ImageResult], class_names: Sequence[str], plan: MergePlan) -> Figures:
    """Quality and tokens; a figure without a pixel behind it is None."""
    found = quality(_summed(results, len(class_names)))
    tokens = _tokens(results, plan)
    return Figures(
        images=len(results),
        windows=len(tokens),
        labelled_pixels=found.labelled_pixels,
        miou_percent=_number(found.miou_percent),
        pixel_accuracy_percent=_number(found.pixel_accuracy_percent),
        majority_guess_miou_percent=_number(found.majority_guess_miou_percent),
        iou_percent_by_class=dict(zip(class_names, map(_number, found.iou_percent), strict=True)),
        tokens=tuple(
            MergeTokens(merge=name, mean=float(counts.mean()), min=int(counts.min()), max=int(counts.max()))
            for name, counts in zip(merge_names(plan), tokens.T, strict=True)
            if len(counts)
        ),
    )


def _summed(results: Iterable[ImageResult], classes: int) -> Confusion:
    total = np.zeros(classes * classes, np.int64)
    for result in results:
        total[np.array(result.cells, np.int64)] += np.array(result.pixels, np.int64)
    return total.reshape(classes, classes)


def _tokens(results: Iterable[ImageResult], plan: MergePlan) -> NDArray[np.int64]:
    rows = [row for result in results for row in result.tokens]
    return np.array(rows, np.int64).reshape(len(rows), len(plan.layers))


def _mean_gmacs(results: Iterable[ImageResult], recipe: Recipe) -> float | None:
    """Mean multiply-adds over the windows, each with its own token counts, in 10^9."""
    rows = _tokens(results, recipe.merging).tolist()
    counts = [multiply_adds(recipe.network, recipe.merging, row).gmacs for row in rows]
    return float(np.mean(counts)) if counts else None


def _histograms(tokens: NDArray[np.int64], recipe: Recipe) -> TokenHistograms:
    patches = recipe.network.grid[0] * recipe.network.grid[1]
    edges = np.linspace(0, patches, HISTOGRAM_BINS + 1)
    counted = {
        name: tuple(np.histogram(counts, edges)[0].tolist())
        for name, counts in zip(merge_names(recipe.merging), tokens.T, strict=True)
    }
    return TokenHistograms(token_edges=tuple(edges.tolist()), windows_by_merge=counted)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
