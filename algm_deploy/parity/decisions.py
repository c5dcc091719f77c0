"""Decisions of a runtime against those of PyTorch: equal, excused by noise, or wrong.

Merges decide, and so do masks by which queries choose the cells they attend to.

Decisions sit on the edges of floating-point numbers: one unit in the last place can flip a window, and the flip changes
everything behind it. So a difference is excused exactly when the runtime's decision is one that the similarities allow
once each may be off by the noise of the precision. The noise is measured (`algm_deploy.parity.replay`), not chosen.
Noise that is NaN excuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Cells = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class MaskFacts:
    """What the queries of one layer decided on, one image: true masks (Q, S) before their activation, positive for the
    cells to attend to; what PyTorch's own masks (Q, S) chose in the precision at hand; and the noise of masks."""

    masks: NDArray[np.float64]
    own: Flags
    noise: float


def map_problem(maps: list[Ints], prefix: int, fresh: Sequence[bool] = ()) -> str | None:
    """Why the token maps (N,) of one image, in the order of the merges, cannot be the maps of any merge.

    Each map tells of all merges up to its own: what merged stays merged, but for those that are `fresh`.
    """
    for index, token_map in enumerate(maps):
        rows = np.unique(token_map)
        if not np.array_equal(rows, np.arange(prefix, prefix + len(rows))):
            return f"token map {index} does not number its tokens {prefix}, {prefix + 1}, ... without a gap"
    for index, (before, after) in enumerate(pairwise(maps)):
        if not any(fresh[index + 1 : index + 2]) and len(np.unique(np.stack([before, after]), axis=1).T) != len(
            np.unique(before)
        ):
            return f"token map {index + 1} splits tokens that token map {index} had merged"
    return None


def mask_problems(facts: MaskFacts, chosen: Cells, layer: int) -> list[str]:
    """What in the choice of cells (Q, S) for one image, in a 1-based layer, the noise cannot explain."""
    if not np.isfinite(facts.noise):
        return [f"mask {layer}: masks are not finite"]
    gap = np.abs(facts.masks[(chosen > 0) != (facts.masks >= 0)]).max(initial=0)
    return [f"mask {layer}: a cell is {gap:.1e} on the other side of zero"] if gap > facts.noise else []
