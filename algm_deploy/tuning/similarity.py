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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import cv2
import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import BlockSimilarity, ClassSimilarity, PairSimilarity, RuleTuning
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, DatasetError, ImageError
from algm_deploy.evaluation.datasets import IGNORE, Dataset, Sample
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
from algm_deploy.recipe.network import Size, patch_margins
from algm_deploy.recipe.schema import Recipe
from algm_deploy.tuning.photos import check_all_measured, content_of

ALL = "all"
WINDOWS = range(2, 9)
STATE_VERSION = 3
_SCOPES: dict[int | None, str] = {**{side: f"{side}x{side}" for side in WINDOWS}, None: "global"}


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
Windows = Sequence[tuple[Pixels, NDArray[np.int64] | None]]


def tune_by_rule(
    bundle: Bundle, photos: Dataset | Sequence[Path], layers: Sequence[int], progress: bool = True
) -> RuleTuning:
    """Measures the dense network of a bundle, in fp32, on every window of the recipe's protocol.

    The state after each photo is kept in the bundle's `reports`: a run that was interrupted goes on after the last
    photo it finished, and gives the same figures to the last bit. Photos or labels that changed are measured anew.

    Args:
        bundle: network, weights and protocol; its merge plan is not used.
        photos: a data set, or files without labels.
        layers: 1-based blocks; the forward pass ends with the last of them.
        progress: show a bar.

    Raises:
        DatasetError: no photo; or, when the others are measured, photos or labels that cannot be read or do not fit.
        ImageError: a file is not there.
        BundleError: the state file cannot be used.
    """
    dataset = photos if isinstance(photos, Dataset) else None
    samples = photos.samples if isinstance(photos, Dataset) else photos
    if not samples:
        raise DatasetError("expected photos to measure, got none")
    file = _state_file(bundle, samples, dataset, layers)
    sums = _read(file, layers) if file.exists() else _Sums(0, {layer: {} for layer in layers}, [])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = dense_encoder(bundle, max(layers)).to(device)
    with tqdm(samples, "similarity", unit="image", disable=None if progress else True, initial=sums.done) as bar:
        for sample in samples[sums.done :]:
            try:
                windows = list(windows_of(sample, bundle.recipe, dataset))
            except (ImageError, DatasetError) as error:
                sums.failures.append(str(error))
            else:
                for layer, groups in _measured(windows, encoder, bundle.recipe, layers).items():
                    _join(sums.layers[layer], groups)
            sums.done += 1
            _write(file, sums)
            bar.update()
    check_all_measured(dataset.title if dataset else "the photos", sums.failures)
    pooled = sum((groups[ALL] for groups in sums.layers.values()), Moments())
    return RuleTuning(
        title="Threshold by the rule",
        dataset=dataset.name if dataset else None,
        split=dataset.split if dataset else None,
        images=sums.done,
        clap_threshold=pooled.mean + pooled.std,
        blocks=tuple(_block(layer, groups) for layer, groups in sums.layers.items()),
    )


def _block(layer: int, groups: Groups) -> BlockSimilarity:
    found = {side: (groups.get(f"{scope} same"), groups.get(f"{scope} other")) for side, scope in _SCOPES.items()}
    by_class = (
        ClassSimilarity(
            side=side, same=_pairs(same) if same.count else None, other=_pairs(other) if other.count else None
        )
        for side, (same, other) in found.items()
        if same and other
    )
    return BlockSimilarity(block=layer, every=_pairs(groups[ALL]), by_class=tuple(by_class))


def _pairs(found: Moments) -> PairSimilarity:
    return PairSimilarity(pairs=found.count, mean=found.mean, std=found.std)


# ------------------------------------------------------------------------------------------------------------- network


class _Recorder(nn.Module):
    """Keeps the tokens that pass through a merge slot, which stands after a block's attention."""

    seen: Tensor

    def forward(self, tokens: Tokens, inputs: MergeInputs | None) -> Tokens:
        self.seen = tokens.values
        return tokens


class _Unread(nn.Module):
    """In place of the MLP behind the last attention: nobody reads what it would give."""

    def forward(self, rows: Tensor, length: Tensor | None = None) -> Tensor:
        return rows


def dense_encoder(bundle: Bundle, last: int) -> VisionTransformer:
    """The encoder of a bundle that takes pixels, in fp32, cut after the attention of block `last`."""
    recipe = bundle.recipe
    encoder = Deployed(load_network(bundle, torch.float32), recipe.network, recipe.output).model.encoder
    encoder.blocks = encoder.blocks[:last]
    for block in encoder.blocks:
        block.merge = _Recorder()
    encoder.blocks[-1].mlp = _Unread()
    return encoder.eval()


@torch.inference_mode()
def attended_tokens(encoder: VisionTransformer, image: Tensor, layers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Layer and patch tokens (B, N, D) after its attention, residual included, for each of `layers`."""
    # Not strict, as what takes part after the last block that is left must not be asked for.
    for layer, (block, _) in enumerate(zip(encoder.blocks, encoder.run(image), strict=False), 1):
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


def windows_of(
    sample: Sample | Path, recipe: Recipe, dataset: Dataset | None = None
) -> Iterator[tuple[Pixels, NDArray[np.int64] | None]]:
    """The protocol's windows of a photo: pixels (3, H, W), and the class of each patch (N,) where it has labels.

    Raises:
        DatasetError: the labels do not lie on their photo.
        ImageError: a file cannot be read.
    """
    labels: NDArray[np.uint8] | None = None
    if isinstance(sample, Sample) and dataset:
        photo, labels = dataset.read(sample)
    else:
        photo = read_photo(sample.image_path if isinstance(sample, Sample) else sample)
    canvas = canvas_of(photo, recipe.protocol)
    if labels is not None:
        size = canvas.shape[1::-1]
        labels = np.asarray(cv2.resize(labels, size, interpolation=cv2.INTER_NEAREST_EXACT), np.uint8)
    side, network = recipe.protocol.window, recipe.network
    for top, left in window_anchors(canvas.shape[:2], recipe.protocol):
        crop = slice(top, top + side), slice(left, left + side)
        pixels = canvas[crop].transpose(2, 0, 1).copy()
        known = None if labels is None else patch_classes(labels[crop], network.patch_size, network.classes)
        yield pixels, known


def _measured(windows: Windows, encoder: VisionTransformer, recipe: Recipe, layers: Sequence[int]) -> dict[int, Groups]:
    """The statistics of one photo, over all its windows."""
    found: dict[int, Groups] = {layer: {} for layer in layers}
    for start in range(0, len(windows), recipe.max_batch):
        pixels, classes = zip(*windows[start : start + recipe.max_batch], strict=True)
        image = torch.from_numpy(np.stack(pixels)).to(encoder.pos_embed.device)
        for layer, tokens in attended_tokens(encoder, image, layers):
            for known, unit in zip(classes, F.normalize(tokens.double(), dim=-1), strict=True):
                _join(found[layer], _groups(unit, known, recipe.network.grid))
    return found


def _groups(unit: Tensor, classes: NDArray[np.int64] | None, grid: Size) -> Groups:
    """The statistics of one window; `unit` (N, D) fp64."""
    sums = {ALL: pair_sums(unit)}
    if classes is not None:
        known = torch.from_numpy(classes).to(unit.device)
        for side, scope in _SCOPES.items():
            if side is None or side <= min(grid):
                of_classes = window_sums(unit, known, grid, side) if side else class_sums(unit, known)
                sums[f"{scope} same"], sums[f"{scope} other"] = of_classes
    return {name: Moments.of_sums(values) for name, values in sums.items()}


def _join(groups: Groups, more: Groups) -> None:
    for name, moments in more.items():
        groups[name] = groups.get(name, Moments()) + moments


# --------------------------------------------------------------------------------------------------------------- state


class _Sums(Struct, forbid_unknown_fields=True):
    """The sums so far, of one measurement: photos that are done, their statistics by layer, and why some are not in."""

    done: int
    layers: dict[int, Groups]
    failures: list[str]


def _state_file(
    bundle: Bundle, samples: Sequence[Sample | Path], dataset: Dataset | None, layers: Sequence[int]
) -> Path:
    """One small file that is replaced after every photo; its name tells what is measured, by its content."""
    files = [(one.image_path, one.label_path) if isinstance(one, Sample) else (one,) for one in samples]
    facts = {
        "state_version": STATE_VERSION,
        "weights_sha256": bundle.files["weights.safetensors"].sha256,
        "preprocessing_sha256": preprocessing_fingerprint(bundle.recipe.protocol),
        "files_sha256": [content_of(*one) for one in files],
        "label_values": dataset.lookup.tolist() if dataset else None,
        "layers": list(layers),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return bundle.path / "reports" / f"similarity-{key[:32]}.json"


def _write(file: Path, sums: _Sums) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(file) as path:
        path.write_bytes(msgspec.json.encode(sums))


def _read(file: Path, layers: Sequence[int]) -> _Sums:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Sums)
        if found.layers.keys() != set(layers) or not all(ALL in groups for groups in found.layers.values()):
            raise ValueError("it lacks a block")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise BundleError(f"{file}: expected a saved measurement, delete the file ({error})") from error
    return found
