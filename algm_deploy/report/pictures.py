"""What `predict` writes: label map, overlay, and the merged tokens drawn over the photo."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.signature import CLAP_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, GateError, ImageError
from algm_deploy.evaluation.datasets import Classes
from algm_deploy.pictures.preprocessing import Pixels, read_photo
from algm_deploy.pictures.sliding import Labels, Prediction
from algm_deploy.pictures.sources import WRITTEN
from algm_deploy.pictures.video import Video, video_writer
from algm_deploy.predictor import Predictor, network_canvas
from algm_deploy.recipe.network import Size, patch_margins
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.report.colors import classes_of, colored, value_colors
from algm_deploy.report.sheets import INK, Panel, Rgb, columns_for, legend, scale, sheet
from algm_deploy.wording import merge_titles

_LOG = logging.getLogger("algm_deploy")

LABELS, OVERLAY, TOKENS = (f"{ending}.png" for ending in WRITTEN)

TOKENS_CAPTION = (
    "Each token has the mean colour of its patches. White lines surround neighbours that share a token, which may have "
    "patches elsewhere too; a patch with dark borders is a token of its own."
)
_SIMILARITY_CAPTION = "The similarity was computed by PyTorch in fp32 from the bundle's weights."
_CROPS_CAPTION = "Every crop merges for itself; a dashed line shows where the picture passes from one crop to the next."

SimilarityOf = Callable[[Pixels], NDArray[np.float32]]

# Pixels: a sheet's width, the side of a patch below which a sheet gets wider, and the widest panel.
_SHEET_WIDTH, _LEAST_PATCH, _WIDEST = 1500, 8, 1800
_GRID_COLUMNS = 2  # panels of a grid are as wide as those of a sheet with two columns
_OVERLAY_WIDTH = (960, 2048)
_BLEND = 0.55
_BLANK, _OUTLINE, _SEAM = (208, 208, 208), (255, 255, 255), (255, 60, 200)


class PictureWriter:
    """Draws what one predictor makes of photos, into one folder.

    For a photo NAME.jpg the pictures are NAME.labels.png (class index as stored value, colours as palette; 16-bit grey
    above 255 classes), NAME.overlay.png (classes over the photo) and, where the network merges, NAME.tokens.png
    (window similarity, and the tokens after each merge as the runtime made them).

    Raises:
        ImageError: `folder` cannot be made.
    """

    def __init__(self, predictor: Predictor, folder: Path) -> None:
        self.predictor, self.folder = predictor, folder
        self.classes = classes_of(predictor.bundle.recipe)
        self.similarity_of = window_similarity_of(predictor.bundle)
        self._photos: dict[str, Path] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ImageError(
                f"expected a folder for pictures, got {folder} ({error.strerror}): name another one"
            ) from error

    def write(self, photo: Path) -> list[Path]:
        """Predicts a photo and writes its pictures; all are drawn before the first is written, each appears complete.

        Raises:
            ImageError: the photo cannot be read or predicted, or another one of the same name was drawn before.
            GateError: the runtime's token maps contradict its token counts.
            BundleError: the pictures cannot be written.
        """
        self._claim(photo)
        written = []
        for ending, picture in self._pictures(photo).items():
            written.append(self.folder / (photo.stem + ending))
            with write_atomically(written[-1]) as path:
                picture.save(path)
        return written

    def write_video(self, video: Path, frames: Literal["overlay", "labels"]) -> list[Path]:
        """Predicts a video, frame by frame in batches: NAME.overlay.mp4, or a folder NAME.labels with a PNG a frame.

        Raises:
            ImageError: the video or one of its frames cannot be read, or another one of the same name was written.
            BundleError: the result cannot be written.
        """
        self._claim(video)
        with Video(video) as opened:
            pixels: deque[Rgb] = deque()
            results = self.predictor.predictions(self._frames(video, opened, pixels))
            progress = tqdm(results, video.name, opened.length, unit="frame", disable=None, leave=False)
            pairs = ((pixels.popleft(), one.labels) for one in progress)
            if frames == "overlay":
                return [self._overlay_video(video, opened.rate, pairs)]
            return self._label_maps(video, pairs)

    def _frames(self, video: Path, opened: Video, kept: deque[Rgb]) -> Iterator[Rgb]:
        for number, frame in enumerate(opened):
            if frame is None:
                raise ImageError(f"{video}, frame {number}: its data is damaged: repair or cut the video")
            kept.append(frame)
            yield frame

    def _overlay_video(self, video: Path, rate: float, pairs: Iterable[tuple[Rgb, Labels]]) -> Path:
        path = self.folder / f"{video.stem}.overlay.mp4"
        with video_writer(path, rate) as write:
            for frame, labels in pairs:
                write(blended(frame, labels, self.classes, frame.shape[:2]))
        return path

    def _label_maps(self, video: Path, pairs: Iterable[tuple[Rgb, Labels]]) -> list[Path]:
        folder = self.folder / f"{video.stem}.labels"
        folder.mkdir(exist_ok=True)
        for number, (_, labels) in enumerate(pairs):
            with write_atomically(folder / f"{number:06}.png") as path:
                labels_picture(labels, self.classes).save(path)
        return [folder]

    def _claim(self, source: Path) -> None:
        """Refuses a second file whose pictures would have the names of the first one's."""
        if self._photos.setdefault(source.stem, source) != source:
            raise ImageError(
                f"{source} and {self._photos[source.stem]} would share the names of their pictures: rename one"
            )

    def _pictures(self, photo: Path) -> dict[str, Image.Image]:
        """The finished pictures of a photo by their endings."""
        pixels = read_photo(photo)
        try:
            prediction = self.predictor.prediction(pixels)
        except ImageError as error:
            raise ImageError(f"{photo}: {error}") from error
        pictures = {
            LABELS: labels_picture(prediction.labels, self.classes),
            OVERLAY: overlay(pixels, prediction.labels, self.classes),
        }
        plan = self.predictor.bundle.recipe.merging
        if plan.layers and plan.row.standing:
            panels, columns = token_panels(self.predictor, pixels, prediction, self.similarity_of)
            captions = (
                TOKENS_CAPTION,
                "The token maps come from the runtime that made the prediction.",
                *([_SIMILARITY_CAPTION] if self.similarity_of else []),
                *([_CROPS_CAPTION] if len(prediction.anchors) > 1 else []),
            )
            heading = f"{photo.name}: the tokens of {self.predictor.bundle.recipe.name}"
            pictures[TOKENS] = sheet(heading, panels, " ".join(captions), columns)
        return pictures


def window_similarity_of(bundle: Bundle) -> SimilarityOf | None:
    """A function from image windows (b, 3, H, W) to the mean cosine similarity (b, rows, columns) of CLAP's windows;
    None where there is no CLAP, and where the bundle's weights may not be read, which the log tells.

    No deployed graph has this as an output: PyTorch computes it here in fp32, from the bundle's weights, up to the
    point where CLAP decides.
    """
    import torch

    from algm_deploy.models.deployed import Deployed
    from algm_deploy.models.loading import load_network
    from algm_deploy.ops.clap import window_similarity

    network, plan = bundle.recipe.network, bundle.recipe.merging
    if not plan.clap_layers:
        return None
    try:
        weights = load_network(bundle, torch.float32)
    except BundleError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        _LOG.warning("pictures go without the similarity of windows: %s", error)  # what executes may need no weights
        return None
    encoder = Deployed(weights, network, "scores").model.encoder
    entering: list[torch.Tensor] = []
    slot = encoder.blocks[plan.clap_layers[0] - 1].get_submodule("merge")
    slot.register_forward_pre_hook(lambda _, args: entering.append(args[0].values))
    shape = tuple(side // step for side, step in zip(network.grid, plan.window, strict=True))

    @torch.inference_mode()
    def similarity(windows: Pixels) -> NDArray[np.float32]:
        for _ in islice(encoder.run(torch.from_numpy(windows)), plan.clap_layers[0]):
            pass
        values = window_similarity(entering.pop(), list(network.grid), list(plan.window), encoder.prefix)
        return np.asarray(values.numpy().reshape(-1, *shape))

    return similarity


# ------------------------------------------------------------------------------------------------------------ pictures


def labels_picture(labels: Labels, classes: Classes) -> Image.Image:
    """Labels (H, W) as a picture that stores the class index, with the classes' colours where a palette has room."""
    if labels.dtype != np.uint8:
        return Image.fromarray(labels.astype(np.uint16))
    picture = Image.fromarray(labels.astype(np.uint8))
    picture.putpalette(np.asarray(classes.palette, np.uint8).tobytes())
    return picture


def blended(photo: Rgb, labels: Labels, classes: Classes, size: Size) -> Rgb:
    """Class colours laid over a photo (H, W, 3), their borders drawn, in the size (height, width)."""
    where = cv2.resize(labels.astype(np.int32), size[::-1], interpolation=cv2.INTER_NEAREST).astype(np.int32)
    mixed = cv2.addWeighted(colored(where, classes), _BLEND, _resized(photo, size), 1 - _BLEND, 0)
    mixed[_borders(where)] = _OUTLINE
    return np.asarray(mixed, np.uint8)


def overlay(photo: Rgb, labels: Labels, classes: Classes) -> Image.Image:
    """Class colours laid over a photo (H, W, 3), and below it the classes present with the share they cover."""
    height, width = photo.shape[:2]
    wide = int(np.clip(width, *_OVERLAY_WIDTH))
    size = max(1, round(height * wide / width)), wide
    mixed = blended(photo, labels, classes, size)
    present, counts = np.unique(labels, return_counts=True)
    entries = [
        (classes.palette[index], f"{classes.names[index]} {_percent(count, labels.size)}")
        for count, index in sorted(zip(counts, present, strict=True), key=lambda entry: (-entry[0], entry[1]))
    ]
    return Image.fromarray(np.concatenate([mixed, legend(entries, wide)]))


def token_panels(
    predictor: Predictor, photo: Rgb, prediction: Prediction, similarity_of: SimilarityOf | None
) -> tuple[list[Panel], int]:
    """The photo, CLAP's window similarity and the tokens after each merge, and how many go side by side."""
    canvas, plan = network_canvas(photo, predictor.bundle.recipe), predictor.bundle.recipe.merging
    columns = columns_for(1 + bool(similarity_of) + len(predictor.signature.merges), canvas.shape[:2])
    mosaic = _mosaic(predictor, canvas, prediction, columns)
    panels = [_photo_panel(photo.shape[:2], mosaic)]
    if similarity_of:
        similarity = np.concatenate([similarity_of(windows) for windows in _batches(predictor, mosaic)])
        panels.append(_similarity_panel(similarity, mosaic, plan, *_chosen(predictor, similarity)))
    maps = _token_maps(predictor, mosaic, prediction)
    return [*panels, *(_merge_panel(merge, tokens, mosaic) for merge, tokens in maps.items())], columns


def _chosen(predictor: Predictor, similarity: NDArray[np.float32]) -> tuple[NDArray[np.bool_], float, str]:
    """Which windows (crops, rows, columns) merge, the similarity that decides, and how people are told of it."""
    recipe = predictor.bundle.recipe
    if recipe.merging.clap != "budget":
        tau = predictor.thresholds_in_force[CLAP_THRESHOLD]
        return similarity >= tau, tau, f"reach {tau:.4g}"
    from algm_deploy.merging import merges_in  # loads torch
    from algm_deploy.ops import reference

    plan, crops = recipe.merging, similarity.reshape(len(similarity), -1)
    count = merges_in(plan, plan.clap_layers[0], recipe.network)
    merged = reference.clap_decisions(crops, None, plan.semantics, plan.batch, plan.order, plan.clap, count)
    chosen = np.zeros(similarity.shape, bool)
    for crop, windows in zip(chosen.reshape(crops.shape), merged, strict=True):
        crop[windows] = True
    return chosen, float(similarity[chosen].min(initial=1.0)), f"are the {count} most similar of their crop"


def final_tokens(predictor: Predictor, photo: Rgb, title: str) -> Panel:
    """The tokens of a photo after the last merge, as the runtime made them."""
    prediction = predictor.prediction(photo)
    mosaic = _mosaic(predictor, network_canvas(photo, predictor.bundle.recipe), prediction, _GRID_COLUMNS)
    merge, tokens = [*_token_maps(predictor, mosaic, prediction).items()][-1]
    left = ", then ".join(f"{count:.0f}" for count in prediction.token_counts.mean(0))
    subtitle = f"{tokens.shape[1]} patches a window become {left} tokens"
    return replace(_merge_panel(merge, tokens, mosaic), title=title, subtitle=subtitle)


def tokens_picture(predictor: Predictor, canvas: Pixels, prediction: Prediction) -> Rgb:
    """The tokens after the last merge over the whole picture, from the token maps that the prediction holds.

    Args:
        predictor: of a network that merges.
        canvas: the picture as the network's windows were cut from it (`network_canvas`).
        prediction: with token maps.
    """
    merge = predictor.signature.merges[-1]
    return _merge_panel(merge, prediction.token_maps[merge], _mosaic(predictor, canvas, prediction, 1)).picture


def _mosaic(predictor: Predictor, canvas: Pixels, prediction: Prediction, columns: int) -> Mosaic:
    height, width = predictor.signature.image.shape[2:]
    return Mosaic(canvas, prediction.anchors, (height, width), predictor.bundle.recipe.network.patch_size, columns)


def _batches(predictor: Predictor, mosaic: Mosaic) -> list[Pixels]:
    windows, step = mosaic.windows(), predictor.batch
    return [windows[start : start + step] for start in range(0, len(windows), step)]


def _token_maps(predictor: Predictor, mosaic: Mosaic, prediction: Prediction) -> dict[str, NDArray[np.int64]]:
    """The runtime's token map (windows, N) after every merge.

    Raises:
        GateError: a map has other tokens than the runtime counted.
    """
    names = {merge: f"token_map_{merge}" for merge in predictor.signature.merges}
    runs = [predictor.infer(windows, tuple(names.values())) for windows in _batches(predictor, mosaic)]
    maps = {merge: np.concatenate([run[name] for run in runs]) for merge, name in names.items()}
    for (merge, tokens), counts in zip(maps.items(), prediction.token_counts.T.tolist(), strict=True):
        found = [len(np.unique(one)) for one in tokens]
        if found != counts:
            raise GateError(
                f"expected the {counts} tokens that the runtime counts after {merge}, its token map has {found}: "
                "verify the bundle"
            )
    return maps


# -------------------------------------------------------------------------------------------------------------- panels


def _photo_panel(size: Size, mosaic: Mosaic) -> Panel:
    # On the sheet a window of the sliding kind is a crop: CLAP's windows have the same name.
    crops = f"{len(mosaic.anchors)} overlapping crops" if len(mosaic.anchors) > 1 else "one crop"
    subtitle = f"{size[1]} x {size[0]} pixels; {crops} of {mosaic.grid[1]} x {mosaic.grid[0]} patches"
    return Panel("Photo", subtitle, mosaic.with_seams(_resized(mosaic.canvas, mosaic.size)))


def _similarity_panel(
    similarity: NDArray[np.float32],
    mosaic: Mosaic,
    plan: MergePlan,
    chosen: NDArray[np.bool_],
    lowest: float,
    told: str,
) -> Panel:
    """Windows coloured by similarity, those that merge outlined; patches of no window are grey.

    Args:
        similarity, chosen: (crops, rows, columns), and which of them merge.
        lowest: the similarity that decided.
        told: of those that merge, such as "reach 0.93".
    """
    low = min(float(np.percentile(similarity, 2)), lowest - 0.05, 0.95)
    cell = (plan.window[0] * mosaic.patch, plan.window[1] * mosaic.patch)
    cells = [-(-patches // side) for patches, side in zip(mosaic.grid, plan.window, strict=True)]
    border = [(0, 0), *((0, want - have) for want, have in zip(cells, similarity.shape[1:], strict=True))]
    padded = np.pad(similarity, border, constant_values=np.nan)
    values = mosaic.spread(padded, cell)
    picture = value_colors(np.nan_to_num(values), low, 1.0)
    picture[np.isnan(values)] = _BLANK
    windows = mosaic.spread(np.arange(padded.size).reshape(padded.shape), cell)
    windows[~mosaic.spread(np.pad(chosen, border), cell)] = -1
    picture[_borders(windows)] = INK
    reach = int(chosen.sum())
    windows_of = f"windows of {plan.window[1]} x {plan.window[0]} patches"
    subtitle = f"{reach} of {similarity.size} {windows_of} ({_percent(reach, similarity.size)}) {told}: outlined"
    subtitle += "; grey: outside all windows" if np.isnan(padded).any() else ""
    title = f"Window similarity, layer {plan.clap_layers[0]}"
    return Panel(
        title,
        subtitle,
        mosaic.with_seams(picture),
        scale(low, lowest, picture.shape[1], "lowest" if plan.clap == "budget" else "threshold"),
    )


def _merge_panel(merge: str, maps: NDArray[np.int64], mosaic: Mosaic) -> Panel:
    """Every token in the mean colour of its patches; regions of several patches have a light outline."""
    apart = maps + np.arange(len(maps))[:, None] * (maps.max() + 1)
    tokens = np.unique(apart, return_inverse=True)[1].reshape(maps.shape)
    sizes = np.bincount(tokens.ravel())
    colors = mosaic.patch_colors().reshape(-1, 3)
    sums = np.stack([np.bincount(tokens.ravel(), channel) for channel in colors.T], 1)
    where = mosaic.spread(tokens.reshape(-1, *mosaic.grid), (mosaic.patch, mosaic.patch))
    picture = np.rint(sums / sizes[:, None]).astype(np.uint8)[where]
    picture[_borders(where)] //= 2
    picture[_borders(np.where(sizes[where] > 1, where, np.int64(-1)))] = _OUTLINE
    share = f"{len(sizes)} of {tokens.size} tokens left ({_percent(len(sizes), tokens.size)})"
    subtitle = f"{share}; the largest stands for {sizes.max()} patches"
    title = f"After {merge_titles([merge])[merge]}, layer {merge.split('_')[1]}"
    return Panel(title, subtitle, mosaic.with_seams(picture))


# -------------------------------------------------------------------------------------------------------------- mosaic


@dataclass(frozen=True)
class Mosaic:
    """Windows laid on their canvas: of two that overlap, each shows half of what they share.

    `canvas` (h, w, 3) and `anchors`, row by row, are those of the prediction; `window` (height, width) and `patch` are
    in pixels of the canvas. `columns` pictures go side by side on a sheet, which decides their `size`.
    """

    canvas: Pixels
    anchors: list[tuple[int, int]]
    window: Size
    patch: int
    columns: int

    @property
    def grid(self) -> Size:
        """Patches of a window (rows, columns), those that are padded included."""
        return -(-self.window[0] // self.patch), -(-self.window[1] // self.patch)

    @property
    def size(self) -> Size:
        """Height and width of a picture."""
        height, width = self.canvas.shape[:2]
        wide = min(max(_SHEET_WIDTH // self.columns, _LEAST_PATCH * width // self.patch), _WIDEST)
        return max(1, round(height * wide / width)), wide

    def windows(self) -> Pixels:
        """The windows (windows, 3, height, width)."""
        height, width = self.window
        crops = [self.canvas[top : top + height, left : left + width] for top, left in self.anchors]
        return np.ascontiguousarray(np.stack(crops).transpose(0, 3, 1, 2))

    def patch_colors(self) -> NDArray[np.float64]:
        """Mean colour of every patch (windows, N, 3)."""
        rows, columns = self.grid
        margins = patch_margins(self.window, self.patch)
        windows = np.pad(self.windows(), ((0, 0), (0, 0), *margins), "edge")
        patches = windows.reshape(-1, 3, rows, self.patch, columns, self.patch).mean((3, 5), dtype=np.float64)
        return np.asarray(patches.transpose(0, 2, 3, 1).reshape(-1, rows * columns, 3))

    def spread(self, values: NDArray[Any], cell: Size) -> NDArray[Any]:
        """Values (windows, rows, columns) of cells of `cell` canvas pixels, as a picture of `size`."""
        (row, y), (column, x) = self._places(0), self._places(1)
        (above, _), (before, _) = patch_margins(self.window, self.patch)
        window = row[:, None] * (column[-1] + 1) + column
        picture: NDArray[Any] = values[window, ((y + above) // cell[0])[:, None], (x + before) // cell[1]]
        return picture

    def with_seams(self, picture: Rgb) -> Rgb:
        """A picture of `size` with dashed lines where it passes from one window to the next."""
        drawn = picture.copy()
        for axis, seen in enumerate((drawn, drawn.transpose(1, 0, 2))):
            dashes = np.flatnonzero(np.arange(seen.shape[1]) % 16 < 10)
            for seam in np.flatnonzero(np.diff(self._places(axis)[0])):
                seen[np.ix_((seam, seam + 1), dashes)] = _SEAM
        return drawn

    def _places(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For every pixel of a picture along one axis: which window it shows, and its place in that window."""
        full, shown = self.canvas.shape[axis], self.size[axis]
        position = ((np.arange(shown) + 0.5) * full / shown).astype(np.int64)
        starts = np.array(sorted({anchor[axis] for anchor in self.anchors}))
        window = np.searchsorted((starts[1:] + starts[:-1] + self.window[axis]) // 2, position, side="right")
        return window, position - starts[window]


def _borders(regions: NDArray[Any]) -> NDArray[np.bool_]:
    """Pixels (h, w) whose left or upper neighbour belongs to another region."""
    edge = np.zeros(regions.shape, bool)
    edge[:, 1:] |= regions[:, 1:] != regions[:, :-1]
    edge[1:] |= regions[1:] != regions[:-1]
    return edge


def _resized(pixels: Pixels, size: Size) -> Rgb:
    shrinks = size[1] < pixels.shape[1]
    picture = cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC)
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole
    return "below 1 %" if 0 < share < 1 else f"{share:.0f} %"
