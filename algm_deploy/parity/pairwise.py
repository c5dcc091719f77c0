"""Two executables on the same pictures: where their merge decisions and their label maps part.

The chain (`parity/chain.py`) proves one runtime; this finds the place where two differ, the way a person bisects: two
runtimes of one bundle, two bundles of one input, or one of them and outputs that were kept in a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algm_deploy.bundle.signature import Signature
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError

Array = NDArray[Any]
Outputs = Mapping[str, Array]
"""A run's outputs by name, each for a batch of one window."""


@dataclass(frozen=True)
class WindowDifference:
    """What two runs of one window have in common.

    `patches_grouped_otherwise` counts, by merge, patches that share their token with other patches than in the other
    run; only merges that both networks have. `labels_equal_percent` is of all pixels. `scores_difference_max` is
    absolute, None where one of them gives labels only.
    """

    tokens: tuple[dict[str, int], dict[str, int]]
    patches_grouped_otherwise: dict[str, int]
    labels_equal_percent: float
    scores_difference_max: float | None

    @property
    def first_merge(self) -> str | None:
        """The first merge that decides otherwise; None where all decide alike."""
        return next((name for name, count in self.patches_grouped_otherwise.items() if count), None)


@dataclass(frozen=True)
class Comparison:
    """Two executables on the same windows; `first` and `second` say which, `gate_percent` what labels are held to."""

    first: str
    second: str
    windows: tuple[WindowDifference, ...]
    gate_percent: float

    @property
    def alike(self) -> bool:
        """Whether all decide alike, and enough labels are equal in every window."""
        return all(one.first_merge is None and one.labels_equal_percent >= self.gate_percent for one in self.windows)


@dataclass(frozen=True)
class Standing:
    """How a bundle's network, without merging (`dense`) or with it, stands to the first of several in the same form.

    `labels_equal_percent` is of all pixels of all windows, `grouped_otherwise_percent` of all patches, by merge.
    """

    bundle: Bundle
    runtime: str
    dense: bool
    windows: tuple[WindowDifference, ...]

    @property
    def labels_equal_percent(self) -> float:
        """Of the pixels of all windows, which are of one size."""
        return sum(one.labels_equal_percent for one in self.windows) / len(self.windows)

    @property
    def grouped_otherwise_percent(self) -> dict[str, float]:
        """Patches that share their token with other patches than in the first network, by merge."""
        rows, columns = self.bundle.recipe.network.grid
        counted = [one.patches_grouped_otherwise for one in self.windows]
        return {
            merge: 100 * sum(one[merge] for one in counted) / (rows * columns * len(counted)) for merge in counted[0]
        }


def check_comparable(first: Signature, second: Signature) -> None:
    """Refuses two networks that do not take the same windows.

    Raises:
        BundleError: their image inputs differ.
    """
    if first.image != second.image:
        raise BundleError(
            f"expected two bundles that take the same windows, got {first.image.dtype} {first.image.shape[1:]} and "
            f"{second.image.dtype} {second.image.shape[1:]}: export one of them for the other's --image-size"
        )


def difference(merges: tuple[Sequence[str], Sequence[str]], runs: tuple[Outputs, Outputs]) -> WindowDifference:
    """Compares two runs of one window; `merges` are the names in each network's signature.

    Raises:
        BundleError: an output is missing, or the two are of different sizes.
    """
    first, second = runs
    shared = [name for name in merges[0] if name in merges[1]]
    maps = [[_output(run, f"token_map_{name}")[0] for name in shared] for run in runs]
    pairs = zip(shared, *maps, strict=True)
    counts = tuple(
        dict(zip(names, _output(run, "token_counts")[0].tolist(), strict=True))
        for names, run in zip(merges, runs, strict=True)
    )
    labels = [_labels(run) for run in runs]
    if labels[0].shape != labels[1].shape:
        raise BundleError(f"expected label maps of one size, got {labels[0].shape} and {labels[1].shape}")
    with_scores = "scores" in first and "scores" in second and first["scores"].shape == second["scores"].shape
    return WindowDifference(
        tokens=(counts[0], counts[1]),
        patches_grouped_otherwise={name: grouped_otherwise(one, other) for name, one, other in pairs},
        labels_equal_percent=100 * float((labels[0] == labels[1]).mean()),
        scores_difference_max=float(np.abs(first["scores"] - second["scores"]).max()) if with_scores else None,
    )


def grouped_otherwise(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many patches share their token with other patches in `first` than in `second`, token maps (N,).

    The numbers of tokens do not matter: two runs that order their tokens differently group alike.
    """
    return int((_representatives(first) != _representatives(second)).sum())


def _representatives(token_map: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every patch the first patch that has the same token."""
    _, first, inverse = np.unique(token_map, return_index=True, return_inverse=True)
    return first[inverse]


def _labels(run: Outputs) -> Array:
    return _output(run, "labels") if "labels" in run else _output(run, "scores").argmax(1)


def _output(run: Outputs, name: str) -> Array:
    if name not in run:
        raise BundleError(f"expected the output {name}, got {', '.join(run)}: keep all outputs of the network")
    return run[name]
