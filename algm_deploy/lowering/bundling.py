"""From weights and a recipe to a bundle: the network itself, the portable ONNX, and what runners must know."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from algm_deploy.bundle.files import ONNX, ONNX_DATA, WEIGHTS, sha256_of
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BundleError, ExportError
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.merging import insert_merging
from algm_deploy.models.checkpoints import Checkpoint, state_dict_for
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.families import DTYPES, network_module, parameter_shapes
from algm_deploy.models.vit import VitNetwork
from algm_deploy.recipe.schema import Recipe

ALIGNMENT = 64
# Smaller tensors stay in the graph, where shape inference and graph optimisers can read them.
EXTERNAL_BYTES = 1024


def write_bundle(checkpoint: Checkpoint, recipe: Recipe, target: Path, preprocessing_sha256: str) -> Bundle:
    """Exports a checkpoint to a new bundle at `target`, complete or not at all.

    The peak is about the weights in fp32, once more in the graph's layout.

    Raises:
        CheckpointError: the weights do not fit the recipe's network.
        ExportError: the network cannot be written as ONNX, or the precision has no portable ONNX.
    """
    if recipe.precision == "bf16":
        raise ExportError("portable ONNX has no bf16 that runtimes agree on: export fp32 or fp16")
    weights = state_dict_for(recipe.network, checkpoint)
    source = {file.name: sha256_of(file) for file in checkpoint.files}
    model = network_module(recipe.network, weights.state_dict, DTYPES[recipe.precision])
    with BundleWriter(target, recipe) as writer:
        write_network(writer, model, deployed(model, recipe), source)
        writer.describe(
            unused_checkpoint_keys=weights.unused,
            position_embedding_resized_from=weights.resized_from,
            preprocessing_sha256=preprocessing_sha256,
        )
    return Bundle.open(target)


def write_network(writer: BundleWriter, model: VitNetwork, network: Deployed, source: Mapping[str, str]) -> None:
    """Writes the weights of `model`, `network` (the same weights) as portable ONNX, and the recipe's signature.

    `source`: SHA-256 of what the weights were made from, by file name.
    """
    recipe = writer.recipe
    weights = writer.path(WEIGHTS)
    try:
        save_file(_contiguous(model.state_dict()), weights)
    except SafetensorError as error:  # a full disk, in an error of its own
        raise OSError(errno.EIO, str(error), str(weights)) from error
    made_from = {WEIGHTS: writer.list_file(WEIGHTS, source).sha256}
    graph = base_onnx(network, recipe.merging, signature_of(recipe).image.dtype)
    with writer.path(ONNX_DATA).open("wb") as data:
        move_weights(graph, data, ONNX_DATA)
    add_function_bodies(graph)
    ir.save(graph, writer.path(ONNX))
    writer.list_file(ONNX_DATA, made_from)
    writer.list_file(ONNX, made_from, uses=(ONNX_DATA,))
    writer.describe(signature=signature_of(recipe))


def load_network(bundle: Bundle, dtype: torch.dtype | None = None) -> VitNetwork:
    """The network of a bundle, merge slots empty, in the bundle's precision or in `dtype`.

    Raises:
        BundleError: the weights cannot be read or are those of another network.
    """
    path = bundle.file(WEIGHTS)
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise BundleError(f"{path}: expected weights as safetensors ({error}): export the bundle again") from error
    expected = parameter_shapes(bundle.recipe.network)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        name, _ = min(expected.items() ^ found.items())
        raise BundleError(
            f"{path}: expected {name} of shape {expected.get(name)} for the recipe's network, got {found.get(name)}: "
            "export the bundle again"
        )
    return network_module(bundle.recipe.network, weights, dtype or DTYPES[bundle.recipe.precision])


def deployed(model: VitNetwork, recipe: Recipe) -> Deployed:
    """The network with the recipe's merging and the deployed inputs and outputs."""
    return Deployed(insert_merging(model, recipe.merging), recipe.network, recipe.output).eval()


def move_weights(model: ir.Model, data: BinaryIO, location: str) -> None:
    """Writes the larger initializers to `data`, one after the other, and lets the graph refer to them there."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < EXTERNAL_BYTES:
            continue
        data.seek(-data.tell() % ALIGNMENT, 1)
        offset = data.tell()
        data.write(tensor.tobytes())
        value.const_value = ir.ExternalTensor(
            location, offset, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=str(value.name)
        )


def _contiguous(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.contiguous() for key, value in state_dict.items()}
