"""How similar tokens are: the threshold rule of ALGM (CVPR 2024), and the statistics behind it.

The rule: tau = mean + standard deviation of the cosine similarity between the tokens of an image after attention, over
a data set. Every pair of different patches counts once, patches outside the image's window and prefix tokens not at
all. Nothing is sampled: for unit vectors u of dimension D, the sum of all N^2 products is |sum u|^2 and the sum of
their squares is the squared Frobenius norm of sum u u^T, so an image costs N D min(N, D) and no matrix of pairs. Images
are joined by the parallel update of Chan, Golub and LeVeque in fp64: what is kept does not grow with the data set.

With labels, pairs are also told apart by whether both patches show the same class, over the whole window and within
small windows of 2 to 8 patches a side, as in the paper's analysis of where similar tokens lie.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, DatasetError
from algm_deploy.evaluation.datasets import IGNORE, Dataset
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import load_network
from algm_deploy.models.vit import MergeInputs, Tokens, VisionTransformer
from algm_deploy.ops.clap import window_members
from algm_deploy.pictures.preprocessing import (
    Pixels,
    canvas_of,
    preprocessing_fingerprint,
    read_photo,
    window_anchors,
)
from algm_deploy.recipe.schema import Recipe, Size, patch_margins

ALL = "all"
WINDOWS = range(2, 9)
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers; `a + b` are those of both sets together."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0

    @classmethod
    def of_sums(cls, sums: NDArray[np.float64]) -> Moments:
        """From count, sum and sum of squares; fp64 is enough for what one image holds."""
        count, total, squares = sums.tolist()
        return cls(int(count), total / count, max(squares - total * total / count, 0.0)) if count else cls()

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        step = other.mean - self.mean
        mean = self.mean + step * other.count / count
        spread = step * step * (self.count * other.count / count)
        return Moments(count, mean, self.deviations + other.deviations + spread)

    @property
    def std(self) -> float:
        """Standard deviation; the pairs are the whole population. NaN of nothing."""
        return math.sqrt(self.deviations / self.count) if self.count else math.nan


Groups = dict[str, Moments]
"""`all`: every pair of patches. With labels also `global same`, `global other`, `2x2 same`, ...: pairs of one class and
of two classes, in the whole window or within windows of so many patches."""


@dataclass(frozen=True)
class Picture:
    """A photo, and how to get its class indices (H, W) uint8 where there are labels."""

    path: Path
    labels: Callable[[], NDArray[np.uint8]] | None = None


@dataclass(frozen=True)
class Similarity:
    """Similarities of tokens after the attention of blocks, by 1-based layer, over `images` photos."""

    images: int
    layers: Mapping[int, Groups]

    @property
    def threshold(self) -> float:
        """tau by the rule, over the pairs of all measured layers."""
        pooled = sum((groups[ALL] for groups in self.layers.values()), Moments())
        return pooled.mean + pooled.std

    def record(self) -> dict[str, Any]:
        """JSON-able record; `pairs`, `mean` and `std` of each group by layer."""
        return {
            "schema_version": SCHEMA_VERSION,
            "images": self.images,
            "clap_threshold": self.threshold,
            "layers": {
                str(layer): {
                    name: {"pairs": group.count, "mean": group.mean, "std": group.std}
                    for name, group in groups.items()
                    if group.count
                }
                for layer, groups in self.layers.items()
            },
        }


def pictures_of(dataset: Dataset) -> list[Picture]:
    """The photos of a data set with their labels."""
    return [Picture(sample.image_path, partial(dataset.labels_of, sample)) for sample in dataset.samples]


def measure_similarity(
    bundle: Bundle, pictures: Sequence[Picture], layers: Sequence[int], progress: bool = True
) -> Similarity:
    """Measures the dense network of a bundle, in fp32, on every window of the recipe's protocol.

    The state after each photo is kept in the bundle's `reports`: a run that was interrupted goes on behind the last
    photo it finished, and gives the same figures to the last bit.

    Args:
        bundle: network, weights and protocol; its merge plan is not used.
        pictures: photos, all with labels or all without.
        layers: 1-based blocks; the forward pass ends with the last of them.

    Raises:
        DatasetError: no photo, photos with and without labels, or labels of another size than their photo.
        ImageError: a photo cannot be read.
        BundleError: the state file cannot be used.
    """
    labelled = {picture.labels is not None for picture in pictures}
    if len(labelled) != 1:
        raise DatasetError(f"expected photos that all have labels or all have none, got {len(pictures)} photos")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = dense_encoder(bundle, max(layers)).to(device)
    state = _State(bundle, pictures, layers)
    with tqdm(pictures, "similarity", unit="image", disable=None if progress else True, initial=state.done) as bar:
        for picture in pictures[state.done :]:
            state.add(_measured(picture, encoder, bundle.recipe, layers))
            bar.update()
    return Similarity(state.done, state.layers)


# ------------------------------------------------------------------------------------------------------------- network


class _Recorder(nn.Module):
    """Keeps the tokens that pass through a merge slot, which lies behind a block's attention."""

    seen: Tensor

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        self.seen = tokens.values
        return tokens


def dense_encoder(bundle: Bundle, last: int) -> VisionTransformer:
    """The encoder of a bundle that takes pixels, in fp32, cut behind the attention of block `last`."""
    recipe = bundle.recipe
    encoder = Deployed(load_network(bundle, torch.float32), recipe.network, recipe.output).model.encoder
    encoder.blocks = encoder.blocks[:last]
    for block in encoder.blocks:
        block.merge = _Recorder()
    encoder.blocks[-1].mlp = nn.Identity()  # nobody reads what follows the last attention
    return encoder.eval()


@torch.inference_mode()
def attended_tokens(encoder: VisionTransformer, image: Tensor, layers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Layer and patch tokens (B, N, D) after its attention, residual included, for each of `layers`."""
    tokens = encoder.embed(image)
    for layer, block in enumerate(encoder.blocks, 1):
        tokens = block(tokens)
        if layer in layers:
            yield layer, cast(_Recorder, block.merge).seen[:, encoder.prefix :]


# --------------------------------------------------------------------------------------------------------------- pairs


def pair_sums(unit: Tensor) -> NDArray[np.float64]:
    """Number of unordered pairs of different rows of `unit` (N, D) fp64, sum of their products, sum of the squares."""
    count, width = unit.shape
    own = unit.square().sum(1)  # 1, or 0 for a zero vector
    gram = unit.T @ unit if width < count else unit @ unit.T
    total = unit.sum(0).square().sum() - own.sum()
    squares = gram.square().sum() - own.square().sum()
    return np.array([count * (count - 1) / 2, float(total) / 2, float(squares) / 2])


def class_sums(unit: Tensor, classes: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`pair_sums` of pairs with the same and with different `classes` (N); patches of class -1 are in no pair."""
    same = sum((pair_sums(unit[classes == c]) for c in set(classes.tolist()) if c >= 0), np.zeros(3))
    return same, pair_sums(unit[classes >= 0]) - same


def window_sums(
    unit: Tensor, classes: Tensor, grid: Size, side: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """As `class_sums`, for pairs within non-overlapping windows of `side` x `side` patches from the top left."""
    members = torch.as_tensor(window_members(grid, (side, side)), device=unit.device)
    products = unit[members] @ unit[members].mT
    labels = classes[members]
    equal = labels[:, :, None] == labels[:, None, :]
    known = (labels >= 0)[:, :, None] & (labels >= 0)[:, None, :]
    pairs = known & torch.ones_like(known).triu(1)
    same, other = (products[pairs & chosen] for chosen in (equal, ~equal))
    return _sums(same), _sums(other)


def _sums(values: Tensor) -> NDArray[np.float64]:
    return np.array([values.numel(), float(values.sum()), float(values.square().sum())])


def patch_classes(labels: NDArray[np.uint8], patch: int, classes: int) -> NDArray[np.int64]:
    """The commonest class (N,) among the pixels of every patch of a window's labels (H, W), patches in raster order.

    -1 where less than half of a patch is labelled; between equally common classes the lower index.
    """
    height, width = labels.shape
    labels = np.pad(labels, patch_margins((height, width), patch), constant_values=IGNORE)
    rows, columns = (side // patch for side in labels.shape)
    blocks = labels.reshape(rows, patch, columns, patch).swapaxes(1, 2).reshape(rows * columns, -1)
    counts = np.stack([(blocks == index).sum(1) for index in range(classes)], 1)
    return np.where(2 * counts.sum(1) >= patch * patch, counts.argmax(1), -1)


def windows_of(picture: Picture, recipe: Recipe) -> Iterator[tuple[Pixels, NDArray[np.int64] | None]]:
    """The protocol's windows of a photo: pixels (3, H, W), and the class of each patch (N,) where there are labels."""
    photo = read_photo(picture.path)
    canvas = canvas_of(photo, recipe.protocol)
    side = recipe.protocol.window
    labels = None if picture.labels is None else _resized_labels(picture, photo, canvas.shape[:2])
    for top, left in window_anchors(canvas.shape[:2], recipe.protocol):
        crop = slice(top, top + side), slice(left, left + side)
        pixels = canvas[crop].transpose(2, 0, 1).copy()
        network = recipe.network
        known = None if labels is None else patch_classes(labels[crop], network.patch_size, network.classes)
        yield pixels, known


def _measured(picture: Picture, encoder: VisionTransformer, recipe: Recipe, layers: Sequence[int]) -> dict[int, Groups]:
    """The statistics of one photo, over all its windows."""
    windows = list(windows_of(picture, recipe))
    found: dict[int, Groups] = {layer: {} for layer in layers}
    for start in range(0, len(windows), recipe.max_batch):
        pixels, classes = zip(*windows[start : start + recipe.max_batch], strict=True)
        image = torch.from_numpy(np.stack(pixels)).to(encoder.pos_embed.device)
        for layer, tokens in attended_tokens(encoder, image, layers):
            for known, unit in zip(classes, F.normalize(tokens.double(), dim=-1), strict=True):
                _join(found[layer], _groups(unit, known, recipe.network.grid))
    return found


def _resized_labels(picture: Picture, photo: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """A photo's class indices at the size of its canvas."""
    labels = cast(Callable[[], NDArray[np.uint8]], picture.labels)()
    if labels.shape != photo.shape[:2]:
        raise DatasetError(
            f"{picture.path}: expected labels of the photo's height and width {photo.shape[:2]}, got {labels.shape}: "
            "the files do not belong together"
        )
    return np.asarray(cv2.resize(labels, size[::-1], interpolation=cv2.INTER_NEAREST_EXACT), np.uint8)


def _groups(unit: Tensor, classes: NDArray[np.int64] | None, grid: Size) -> Groups:
    """The statistics of one window; `unit` (N, D) fp64."""
    sums = {ALL: pair_sums(unit)}
    if classes is not None:
        known = torch.from_numpy(classes).to(unit.device)
        sums["global same"], sums["global other"] = class_sums(unit, known)
        for side in (side for side in WINDOWS if side <= min(grid)):
            sums[f"{side}x{side} same"], sums[f"{side}x{side} other"] = window_sums(unit, known, grid, side)
    return {name: Moments.of_sums(values) for name, values in sums.items()}


def _join(groups: Groups, more: Groups) -> None:
    for name, moments in more.items():
        groups[name] = groups.get(name, Moments()) + moments


# --------------------------------------------------------------------------------------------------------------- state


class _State:
    """The sums so far, in one small file that is replaced after every photo."""

    def __init__(self, bundle: Bundle, pictures: Sequence[Picture], layers: Sequence[int]) -> None:
        named = [f"{picture.path} {_bytes_of(picture.path)}" for picture in pictures]
        self._facts = {
            "schema_version": SCHEMA_VERSION,
            "weights_sha256": bundle.files["weights.safetensors"].sha256,
            "preprocessing_sha256": preprocessing_fingerprint(bundle.recipe.protocol),
            "pictures_sha256": hashlib.sha256("\n".join(named).encode()).hexdigest(),
            "labelled": pictures[0].labels is not None,
            "layers": list(layers),
        }
        key = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
        self._path = bundle.path / "reports" / f"similarity-{key[:16]}.json"
        self.done = 0
        self.layers: dict[int, Groups] = {layer: {} for layer in layers}
        if self._path.exists():
            self._read()

    def add(self, found: Mapping[int, Groups]) -> None:
        """Adds one photo, durably."""
        for layer, groups in found.items():
            _join(self.layers[layer], groups)
        self.done += 1
        sums = {
            str(layer): {name: astuple(group) for name, group in groups.items()}
            for layer, groups in self.layers.items()
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(self._path) as path:
            path.write_text(json.dumps({"facts": self._facts, "done": self.done, "layers": sums}), encoding="utf-8")

    def _read(self) -> None:
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            if saved["facts"] != self._facts:
                raise ValueError("it belongs to another measurement")
            self.done = int(saved["done"])
            for layer, groups in saved["layers"].items():
                self.layers[int(layer)] = {name: Moments(*group) for name, group in groups.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{self._path}: expected a saved measurement, delete the file ({error})") from error


def _bytes_of(path: Path) -> int:
    """Size of a file, which tells a later run whether it is the same; a missing one is named when it is read."""
    return path.stat().st_size if path.is_file() else -1
