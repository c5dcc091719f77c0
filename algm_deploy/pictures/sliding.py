"""Pictures through a network: windows slide over each and share batches, and become label maps of the pictures' sizes.

Memory is bounded, however many pictures there are. For K classes, a canvas of h x w pixels (at most `MAX_ASPECT`
windows or `max_ratio` short sides long), a photo of H x W pixels and b windows of side s at a time, beside what the
network itself holds: 4 K h w bytes of score sums, 4 b K s^2 of fresh scores, 12 h w of canvas, and about 10 H W for the
label map; and for each further picture that shares the batch its own pixels and canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from algm_deploy.errors import GateError
from algm_deploy.pictures.preprocessing import Pixels, canvas_of, resize_bilinear, window_anchors
from algm_deploy.pictures.sources import Failure
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.schema import Protocol

Network = Callable[[Pixels], Mapping[str, NDArray[Any]]]
"""Windows (b, 3, h, w), RGB 0..255, uint8 or float32 (see `canvas_of`) -> outputs by their names in the signature:
`token_counts` (b, M) int64 (the patches' tokens left after each of the M merges, prefix tokens such as cls not
counted), `scores` (b, K, h, w) float32 or `labels` (b, h, w), and the token maps (b, N) that were asked for."""

ScoresOf = Callable[[Pixels], tuple[NDArray[np.float32], NDArray[np.int64]]]
"""The same for scores and token counts alone."""

Labels = NDArray[np.integer[Any]]
MAP_PREFIX = "token_map_"


@dataclass(frozen=True)
class Prediction:
    """What a picture became.

    `labels` (H, W), uint8 up to 255 classes and int32 above; `token_counts` (windows, M) int64, one row for every
    (top, left) of `anchors` on the resized canvas. On request `scores` (K, H, W) float32, whose best class is the
    label, and `token_maps` (windows, N) int64 by the name of the merge: the token that stands for each patch.

    `path` is the file that the picture came from, `frame` its number in a video; None for pictures in memory.
    """

    labels: Labels
    token_counts: NDArray[np.int64]
    anchors: list[tuple[int, int]]
    scores: NDArray[np.float32] | None = None
    token_maps: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    path: Path | None = None
    frame: int | None = None


class Pending:
    """A picture on its way through a network: its windows go out one by one, their results come back in that order.

    Args:
        size: height and width of the picture, and of its label map.
        canvas: the resized picture (h, w, 3) that windows are cut from.
        anchors: (top, left) of every window.
        window: height and width of a window.
        with_scores: whether the prediction holds scores.
        origin: `path` and `frame` of the prediction.
    """

    def __init__(
        self,
        size: Size,
        canvas: Pixels,
        anchors: list[tuple[int, int]],
        window: Size,
        with_scores: bool = False,
        origin: tuple[Path | None, int | None] = (None, None),
    ) -> None:
        self.size, self.canvas, self.anchors, self.window = size, canvas, anchors, window
        self._with_scores, self._origin = with_scores, origin
        self._rows: list[dict[str, NDArray[Any]]] = []
        self._sums = np.zeros((0, 0, 0), np.float32)
        self._cover = np.zeros(canvas.shape[:2] if len(anchors) > 1 else (0, 0), np.float32)

    def restart(self) -> None:
        """Forgets the results of windows that are there."""
        self._rows = []
        self._cover[...] = 0

    @property
    def done(self) -> bool:
        """Whether the results of all windows are there."""
        return len(self._rows) == len(self.anchors)

    def windows(self) -> Iterator[Pixels]:
        """Windows (3, h, w) in the order of the anchors, views of the canvas."""
        for top, left in self.anchors:
            yield self.canvas[self._place(top, left)].transpose(2, 0, 1)

    def take(self, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Takes the network's outputs for the next window, each without its batch axis."""
        rest = dict(outputs)
        if "scores" in rest:
            self._add(rest.pop("scores"))
        self._rows.append(rest)

    def prediction(self) -> Prediction:
        """The result, when all windows are done."""
        if "labels" in self._rows[0]:
            labels: Any = cv2.resize(self._rows[0]["labels"], self.size[::-1], interpolation=cv2.INTER_NEAREST)
            scores = None
        else:
            scores = self._sums if len(self.anchors) == 1 else np.divide(self._sums, self._cover, out=self._sums)
            if self._with_scores:
                scores = np.stack([resize_bilinear(plane, self.size) for plane in scores])
            labels = best_labels(scores, self.size)
        gathered = {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0] if name != "labels"}
        return Prediction(
            labels,
            gathered.pop("token_counts"),
            self.anchors,
            scores if self._with_scores else None,
            {name.removeprefix(MAP_PREFIX): maps for name, maps in gathered.items()},
            *self._origin,
        )

    def _add(self, scores: NDArray[np.float32]) -> None:
        if len(self.anchors) == 1:
            self._sums = scores
            return
        if not self._rows:
            self._sums = np.zeros((len(scores), *self._cover.shape), np.float32)
        place = self._place(*self.anchors[len(self._rows)])
        self._sums[:, *place] += scores
        self._cover[place] += 1

    def _place(self, top: int, left: int) -> tuple[slice, slice]:
        return slice(top, top + self.window[0]), slice(left, left + self.window[1])


def predict_all(
    pictures: Iterable[Pending | Failure], network: Network, window_batch: int
) -> Iterator[Prediction | Failure]:
    """Predicts pictures, in their order; windows of several pictures share batches of `window_batch`.

    Raises:
        GateError: as `run_all`.
    """
    for picture in run_all(pictures, network, window_batch):
        yield picture if isinstance(picture, Failure) else picture.prediction()


def run_all(pictures: Iterable[Pending | Failure], network: Network, window_batch: int) -> Iterator[Pending | Failure]:
    """Pictures whose windows are done, in their order; windows of several pictures share batches of `window_batch`.

    Pictures are taken as batches need them, so there may be infinitely many. A failure passes through in its place; the
    batch before it goes out smaller, like the last one.

    Under a merge plan with batch semantics `per_image` every window decides alone; under `batch_min` the windows of a
    batch share counts and thresholds, which is how the published evaluation couples up to four windows.

    Raises:
        GateError: the network returned something that is not a finite score per class and pixel.
    """
    for group in _groups(pictures, window_batch):
        if isinstance(group, Failure):
            yield group
            continue
        owners, windows = zip(*group, strict=True)
        outputs = _checked(network(_stacked(windows)), len(group), owners[0].window)
        for row, owner in enumerate(owners):
            owner.take({name: values[row] for name, values in outputs.items()})
            if owner.done:
                yield owner


def predict_labels(photo: NDArray[np.uint8], scores_of: ScoresOf, protocol: Protocol, window_batch: int) -> Prediction:
    """Predicts the labels of one photo (H, W, 3) RGB uint8 by a protocol; `window_batch` as for `predict_all`.

    Raises:
        ImageError: the photo does not fit the protocol.
        GateError: as `predict_all`.
    """
    canvas = canvas_of(photo, protocol)
    anchors = window_anchors(canvas.shape[:2], protocol)
    pending = Pending(photo.shape[:2], canvas, anchors, (protocol.window, protocol.window))

    def network(windows: Pixels) -> Mapping[str, NDArray[Any]]:
        return dict(zip(("scores", "token_counts"), scores_of(windows), strict=True))

    (prediction,) = predict_all([pending], network, window_batch)
    assert isinstance(prediction, Prediction)
    return prediction


def best_labels(scores: NDArray[np.float32], size: Size) -> Labels:
    """Resizes scores (K, h, w) to `size` (height, width) class by class and keeps the best; ties to the lower index."""
    best = resize_bilinear(scores[0], size)
    labels: Labels = np.zeros(size, np.uint8 if len(scores) <= 255 else np.int32)
    for index in range(1, len(scores)):
        rival = resize_bilinear(scores[index], size)
        np.putmask(labels, rival > best, index)
        np.maximum(best, rival, out=best)
    return labels


def check_finite(scores: NDArray[np.float32]) -> None:
    """GateError where scores are NaN or infinite: they would become labels without a word."""
    with np.errstate(all="ignore"):
        total = scores.sum()  # finite only where every score is; takes a third of the time
    if not np.isfinite(total) and not np.isfinite(scores).all():
        raise GateError(
            "expected scores of every class, the network returned some that are not finite: its values leave the range "
            "of fp16, or the bundle is broken; verify it, or export with --precision fp32"
        )


def _groups(
    pictures: Iterable[Pending | Failure], window_batch: int
) -> Iterator[list[tuple[Pending, Pixels]] | Failure]:
    """Windows with the pictures they belong to, `window_batch` at a time, and failures between them."""
    group: list[tuple[Pending, Pixels]] = []
    for picture in pictures:
        if isinstance(picture, Failure):
            if group:
                yield group
            yield picture
            group = []
            continue
        for window in picture.windows():
            group.append((picture, window))
            if len(group) == window_batch:
                yield group
                group = []
    if group:
        yield group


def _stacked(windows: Sequence[Pixels]) -> Pixels:
    """One array (b, 3, h, w) in memory order; float32 where one of the windows is."""
    batch: Pixels = np.empty((len(windows), *windows[0].shape), np.result_type(*windows))
    for place, window in zip(batch, windows, strict=True):
        place[...] = window
    return batch


def _checked(outputs: Mapping[str, NDArray[Any]], windows: int, size: Size) -> Mapping[str, NDArray[Any]]:
    name = "labels" if "labels" in outputs else "scores"
    main, tokens = outputs[name], outputs["token_counts"]
    if main.ndim != (4 if name == "scores" else 3) or main.shape[-2:] != size or {len(main), len(tokens)} != {windows}:
        raise GateError(
            f"expected {name} of {windows} windows of {size[0]}x{size[1]} pixels and a row of token counts for each, "
            f"got {main.shape} and {tokens.shape}: the protocol's window must be the network's image size"
        )
    if name == "scores":
        check_finite(main)
    return outputs
