"""What PyTorch computes for two small pictures, kept beside an engine: whoever opens the engine first on a machine
compares.

An engine that was never executed can be wrong in silence: where TensorRT hands a plugin the bound of a size tensor in
place of its value, all pictures of a batch but the first read rows of others. So the pictures differ and go in
together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from algm_deploy.bundle.files import WEIGHTS
from algm_deploy.bundle.records import Evaluation, storable
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import user_cache
from algm_deploy.errors import BundleError
from algm_deploy.pictures.shipped import scene
from algm_deploy.runners.contract import Array
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.torch.runner import TorchRunner

PICTURES = 2
_SCENES = (0, 7)  # by day and by night: they merge differently
# Between precisions a few decisions near a threshold fall otherwise: on the demo network bf16 shares 99 % of the labels
# and 72 % of the groups with fp32, two different pictures share 40 % and 28 %. The bar lies halfway to those.
EQUAL_AT_MOST = 0.9
# PyTorch's counts in fp16 and bf16 are at most 0.3 % of the patches from those in fp32: the two pictures on the demo
# network and on a trained Segmenter-S (1024 patches each), more scenes on the former. The two pictures are 12 to 21 %
# apart. Twelve small networks of 24 patches left one more at most, which is 4 % there; a window is up to three. In int8
# ONNX Runtime and OpenVINO were at most 4 patches of 1024 from each other on 12 windows of CamVid, and 8 from fp32.
COUNTS_APART, LEAST_APART = 0.02, 4  # of the patches, and patches: whichever is more


@dataclass(frozen=True)
class Digest:
    """Pictures (b, 3, H, W) as the network takes them, and its `outputs` for them, with labels in place of scores."""

    image: Array
    outputs: Mapping[str, Array]


def digest_file(runtime: str) -> str:
    """Name of the bundle's file with the digest of a runtime's engine."""
    return str(PurePosixPath(row_of(runtime).own).with_suffix(".digest.npz"))


def make_digest(bundle: Bundle, batches: tuple[int, int, int]) -> Digest:
    """Runs the bundle's network in PyTorch, in fp32 on the CPU, on as many pictures as the engine's `batches` allow."""
    low, _, high = batches
    count = min(max(PICTURES, low), high)
    image = np.stack([_picture(bundle, _SCENES[n % PICTURES]) for n in range(count)])
    with TorchRunner(bundle, "fp32") as runner:
        return Digest(image, with_labels(runner.infer({"image": image}, output_names(bundle))))


def _picture(bundle: Bundle, number: int) -> Array:
    """A drawn scene (3, H, W) in the network's size, by its nearest pixels."""
    height, width = bundle.recipe.network.image_size
    drawn = scene(number)[0]
    rows, columns = (np.arange(side) * have // side for side, have in zip((height, width), drawn.shape, strict=False))
    return np.ascontiguousarray(drawn[rows][:, columns].transpose(2, 0, 1)).astype(bundle.signature.image.dtype)


def output_names(bundle: Bundle) -> list[str]:
    """All outputs of the network."""
    return [tensor.name for tensor in bundle.signature.outputs]


def with_labels(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs, with labels in place of scores."""
    found = dict(outputs)
    if (scores := found.pop("scores", None)) is not None:
        found["labels"] = scores.argmax(1).astype(np.int32)
    return found


def keep_digest(bundle: Bundle, runtime: str, digest: Digest) -> None:
    """Adds the digest to the bundle, beside the runtime's engine."""
    with bundle.add(digest_file(runtime), made_from={WEIGHTS: bundle.files[WEIGHTS].sha256}) as path:
        arrays: dict[str, Any] = {"image": digest.image, **digest.outputs}
        np.savez_compressed(path, **arrays)


def kept_digest(bundle: Bundle, runtime: str) -> Digest:
    """The digest beside the runtime's engine.

    Raises:
        BundleError: there is none, or the file was changed.
    """
    with np.load(bundle.file(digest_file(runtime)), allow_pickle=False) as found:
        outputs = {name: found[name] for name in found.files}
    try:
        return Digest(outputs.pop("image"), outputs)
    except KeyError as error:
        raise BundleError(f"{bundle.path}: expected pictures in {digest_file(runtime)}, found none") from error


# --- comparing -------------------------------------------------------------------------------------------------------


def first_difference(digest: Digest, found: Mapping[str, Array], merges: Sequence[str]) -> str | None:
    """The first link, in the order of the network, at which `found` is not what the digest holds; None where it is.

    Args:
        digest: what PyTorch computes.
        found: all outputs of the engine for the digest's pictures.
        merges: names of the merges, in the order they run.
    """
    expected, got = digest.outputs, with_labels(found)
    for name, array in expected.items():
        if got[name].shape != array.shape:
            return f"the shape of {name}, {got[name].shape} where PyTorch has {array.shape}"
    return next(_differences(expected, got, merges), None)


def _differences(expected: Mapping[str, Array], got: Mapping[str, Array], merges: Sequence[str]) -> Iterator[str]:
    for place, merge in enumerate(merges):
        name = f"token_map_{merge}"
        patches = expected[name].shape[1]
        counts, counted = (one["token_counts"][:, place] for one in (expected, got))
        for picture, (count, other) in enumerate(zip(counts.tolist(), counted.tolist(), strict=True), 1):
            if abs(other - count) > max(COUNTS_APART * patches, LEAST_APART):
                yield f"the token counts after {merge}, of picture {picture} {other} where PyTorch leaves {count}"
        yield from _unequal(f"the token map of {merge}", _groups(expected[name]), _groups(got[name]))
    yield from _unequal("the labels", expected["labels"], got["labels"])


def _unequal(link: str, expected: Array, got: Array) -> Iterator[str]:
    """The pictures whose values are nearer to those of another picture than to their own."""
    others = float((expected[0] == expected[1]).mean()) if len(expected) > 1 else 0.0
    least = min((1 + others) / 2, EQUAL_AT_MOST)
    for picture, (one, other) in enumerate(zip(expected, got, strict=True), 1):
        if (share := float((one == other).mean())) < least:
            yield f"{link}, of picture {picture} {share:.0%} equal where {least:.0%} were expected"


def _groups(maps: Array) -> Array:
    """For every patch the first one that has the same token: the same for any order of tokens."""
    groups = np.empty_like(maps)
    for row, tokens in enumerate(maps):
        _, first, place = np.unique(tokens, return_index=True, return_inverse=True)
        groups[row] = first[place]
    return groups


# --- once a machine --------------------------------------------------------------------------------------------------


def marker(*facts: str) -> Path:
    """File whose presence says that an engine was compared on this machine; `facts` tell engine, device and runtime."""
    return user_cache() / "engines-compared" / hashlib.sha256("\0".join(facts).encode()).hexdigest()


# --- what to tune for ------------------------------------------------------------------------------------------------


def usual_rows(bundle: Bundle, digest: Digest, batch: int) -> tuple[dict[str, int], str]:
    """Rows that each merge usually leaves in a batch of that size, prefix counted, by the merge's name; and measured on
    what.

    A batch has as many rows as its longest picture: the median of that is where a share of 0.5^(1/batch) of all
    pictures is shorter. They are those of the bundle's last evaluation at its own thresholds, else the digest's.
    """
    share, prefix = 0.5 ** (1 / batch), bundle.recipe.network.prefix
    own = storable(bundle.signature.defaults)
    evaluation = next((e for e in reversed(bundle.manifest.evaluations) if e.thresholds == own), None)
    if evaluation is not None and evaluation.windows:
        counts = {name: _quantile(evaluation, name, share) for name in bundle.signature.merges}
        source = f"{evaluation.images} pictures of {evaluation.dataset}"
    else:
        counted = np.quantile(digest.outputs["token_counts"], share, axis=0)
        counts = {name: float(counted[place]) for place, name in enumerate(bundle.signature.merges)}
        source = f"{len(digest.image)} drawn scenes"
    return {name: prefix + max(1, round(count)) for name, count in counts.items()}, source


def _quantile(evaluation: Evaluation, merge: str, share: float) -> float:
    histogram = evaluation.token_histograms
    below = np.cumsum([0, *histogram.windows_by_merge[merge]])
    return float(np.interp(share * below[-1], below, histogram.token_edges))
