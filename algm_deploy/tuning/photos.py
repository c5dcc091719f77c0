"""Which photos are tuned on and which are held out, and whether photos and labels are still the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from algm_deploy.bundle.files import sha256_of
from algm_deploy.errors import DatasetError, ImageError
from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.wording import first_few


def halves(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """The first and the second half of every slice, in the order of names: neighbouring frames stay together.

    Raises:
        DatasetError: a single photo cannot be both.
    """
    slices: dict[str, list[Sample]] = {}
    for sample in dataset.samples:
        slices.setdefault(sample.slice, []).append(sample)
    first = {sample.name for group in slices.values() for sample in group[: (len(group) + 1) // 2]}
    parts = [tuple(s for s in dataset.samples if (s.name in first) == early) for early in (True, False)]
    if not all(parts):
        raise DatasetError(
            f"{dataset.title}: expected photos to tune on and others to report on, got {len(dataset.samples)} in "
            f"{len(slices)} slices: take more photos, coarser slices, or another split as --held-out"
        )
    tuning, held_out = (
        replace(dataset, split=f"{dataset.split}-{which}-half", samples=samples)
        for which, samples in zip(("first", "second"), parts, strict=True)
    )
    return tuning, held_out


def check_apart(tuning: Dataset, held_out: Dataset) -> None:
    """Nothing is held out that was tuned on: no photo is in both, under the same name or as a copy.

    Raises:
        DatasetError: one is.
        ImageError: a photo cannot be read.
    """
    tuned = {content_of(sample.image_path) for sample in tuning.samples}
    both = [sample.name for sample in held_out.samples if content_of(sample.image_path) in tuned]
    if both:
        raise DatasetError(
            f"expected photos in {held_out.title} that are not in {tuning.title}, which is tuned on, got {len(both)} "
            f"in both, first {both[0]}: name another split as --held-out, or leave it out to keep half of each slice "
            "back"
        )


def check_all_measured(title: str, failures: Sequence[str]) -> None:
    """Refuses a measurement that some photos are not in, when the others are done: the reasons are those of all.

    Raises:
        DatasetError: there are failures.
    """
    if failures:
        raise DatasetError(
            f"{title}: expected photos and labels to measure, {len(failures)} cannot be ({first_few(failures)}): mend "
            "these files and run it again"
        )


def content_of(*paths: Path) -> str:
    """The hashes of files' bytes. Sizes and times would miss a label that was repaired in place.

    Raises:
        ImageError: a file cannot be read.
    """
    try:
        return " ".join(map(sha256_of, paths))
    except OSError as error:
        raise ImageError(f"{error.filename}: expected a photo or its labels, got {error.strerror}") from error
