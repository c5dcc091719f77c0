"""A checkpoint's tensors as the weights of a network: names and shapes checked, names translated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from algm_deploy.errors import CheckpointError
from algm_deploy.models.checkpoints.reading import VARIANT_FILE, Checkpoint, names_of, shape_of
from algm_deploy.models.checkpoints.variant import training_size
from algm_deploy.models.loading import converted, is_finite, network_class, parameter_shapes
from algm_deploy.models.naming import Naming
from algm_deploy.recipe.network import Network, Size


@dataclass(frozen=True)
class Weights:
    """Tensors that fit a network exactly; `unused` checkpoint keys; the grid the position embedding came from."""

    state_dict: dict[str, Tensor]
    unused: tuple[str, ...]
    resized_from: Size | None


def checkpoint_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a checkpoint of the network holds, by the names of the first project that computes it."""
    naming = next(n for n in network_class(network).namings(network) if network.decoder in n.decoders)
    return naming.expected(parameter_shapes(network))


def state_dict_for(network: Network, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Weights:
    """The checkpoint's weights for a network: every key and shape checked, the position embedding at its grid.

    What makes a weight is computed in fp32 or fp64 and rounded to `dtype` once. At no time is more than one weight held
    in another dtype, beside the checkpoint.

    Raises:
        CheckpointError: a key is missing, unknown or of another shape, a weight is not finite, or the position
            embedding is of another grid and its project has no rule to resize it.
        ExportError: a weight is beyond the range of `dtype`.
    """
    naming = _naming(network, checkpoint)
    shapes, found = parameter_shapes(network), checkpoint.state_dict
    reason = naming.refusal(found)
    if reason:
        raise CheckpointError(f"{checkpoint.path}: {reason}")
    expected = naming.expected(shapes)
    unused = tuple(sorted(key for key in set(found) - set(expected) if naming.is_unused(key)))
    _check_keys(checkpoint, expected, set(found) - set(unused))
    _check_shapes(checkpoint, expected, naming)
    old = _stored_grid(checkpoint, naming, network)
    grids = None if old == network.grid else (old, network.grid)
    weights = _finite(checkpoint, naming.translated(found, shapes, grids))
    state_dict = {name: converted(name, weight, dtype) for name, weight in weights}
    return Weights(state_dict, unused, old if grids else None)


def _naming(network: Network, checkpoint: Checkpoint) -> Naming:
    namings = network_class(network).namings(network)
    naming = next((n for n in namings if any(key.startswith(n.mark) for key in checkpoint.state_dict)), None)
    if naming is None:
        raise CheckpointError(
            f"{checkpoint.path}: expected {network.family} as {' or '.join(n.project for n in namings)} names its "
            f"parameters, got {names_of(checkpoint.state_dict)}: choose the recipe that fits the checkpoint"
        )
    if network.decoder not in naming.decoders:
        raise CheckpointError(
            f"{checkpoint.path}: expected network.decoder {' or '.join(naming.decoders)}, which {naming.project} "
            f"computes, got {network.decoder}: choose the recipe that fits the checkpoint"
        )
    return naming


def _finite(checkpoint: Checkpoint, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        if not is_finite(weight):
            raise CheckpointError(
                f"{checkpoint.path}: expected finite weights, got NaN or infinity in {name}: train or copy it again"
            )
        yield name, weight


def _check_keys(checkpoint: Checkpoint, expected: Iterable[str], found: set[str]) -> None:
    missing, unknown = sorted(set(expected) - found), sorted(found - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{checkpoint.path}: expected the parameters of this network, missing {names_of(missing)}, unknown "
            f"{names_of(unknown)}: choose the recipe that fits the checkpoint"
        )


def _check_shapes(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], naming: Naming) -> None:
    """A position embedding that its project resizes may have any number of rows."""
    for key, shape in expected.items():
        came = shape_of(checkpoint.state_dict, key)
        of_positions = key == naming.positions and len(came) == 3 and (came[0], came[2]) == (shape[0], shape[2])
        if came == shape or (of_positions and naming.resized):
            continue
        if of_positions:
            raise CheckpointError(
                f"{checkpoint.path}: expected position embeddings of {shape[1]} tokens, got {came[1]}: this network "
                "takes no other size than it was trained for, so set network.image_size to that"
            )
        raise CheckpointError(
            f"{checkpoint.path}: expected {key} of shape {shape}, got {came}: choose the recipe that fits"
        )


def _stored_grid(checkpoint: Checkpoint, naming: Naming, network: Network) -> Size:
    """The grid of the position embedding: a square, or that of the pictures in training, perhaps the network's."""
    if naming.resized is None:
        return network.grid
    patches = checkpoint.state_dict[naming.positions].shape[1] - naming.positioned
    side = math.isqrt(max(patches, 0))
    candidates, known, cure = [(side, side)], "a square grid", "choose the recipe that fits the checkpoint"
    if not naming.square:
        height, width = training_size(checkpoint) or network.image_size
        trained = height // network.patch_size, width // network.patch_size
        candidates = [trained, network.grid, (side, side)]
        known, cure = f"a square grid or that of {VARIANT_FILE}", "correct net_kwargs.image_size there"
    for grid in candidates:
        if patches > 0 and math.prod(grid) == patches:
            return grid
    raise CheckpointError(
        f"{checkpoint.path}: expected position embeddings of {known} in {naming.positions}, got {patches} patches: "
        f"{cure}"
    )
