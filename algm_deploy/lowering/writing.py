"""Writes a bundle: the weights of a network, its portable ONNX, and the signature that runners read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from algm_deploy.bundle.files import ONNX, ONNX_DATA, ONNX_INLINED, WEIGHTS, sha256_of
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.portable import add_function_bodies, inline
from algm_deploy.merging import deployed
from algm_deploy.models.checkpoints.reading import Checkpoint
from algm_deploy.models.checkpoints.weights import state_dict_for
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import DTYPES, network_module, save_weights
from algm_deploy.models.quantized import in_graphs, quantized
from algm_deploy.models.vit import VitNetwork
from algm_deploy.quantization.calibration import calibrate
from algm_deploy.recipe.schema import Recipe

ALIGNMENT = 64
# Smaller tensors stay in the graph, where shape inference and graph optimisers can read them.
EXTERNAL_BYTES = 1024


def write_bundle(
    checkpoint: Checkpoint,
    recipe: Recipe,
    target: Path,
    preprocessing_sha256: str,
    calibration: NDArray[np.generic] | None = None,
) -> Bundle:
    """Exports a checkpoint to a new bundle at `target`, complete or not at all.

    Memory peaks when all weights are read, at those of the checkpoint and those of the bundle; then `checkpoint` is
    released. `calibration`: windows (n, 3, H, W) in the graph's pixel dtype, for a recipe in int8 or fp8.

    Raises:
        CheckpointError: the weights do not fit the recipe's network.
        BundleError: nothing can be written there.
        ExportError: the network cannot be written as ONNX.
    """
    with BundleWriter(target, recipe) as writer:  # first of all: a place that takes no bundle is told before the work
        source = {file.name: sha256_of(file) for file in checkpoint.files}
        model = _described_network(writer, checkpoint)
        network = as_written(model)
        if calibration is not None:
            single = model if in_graphs(recipe.precision) else copy.deepcopy(model).float()
            balanced, quantization = calibrate(single, recipe, calibration)
            if in_graphs(recipe.precision):
                model = balanced
                network = quantized(model, quantization.products, recipe.precision)
            writer.describe(quantization=quantization)
        write_network(writer, model, deployed(network, recipe), source)
        writer.describe(preprocessing_sha256=preprocessing_sha256)
    return Bundle.open(target)


def _described_network(writer: BundleWriter, checkpoint: Checkpoint) -> VitNetwork:
    """The network with the weights of a checkpoint, which is released; the manifest says how they were taken."""
    network, dtype = writer.recipe.network, DTYPES[writer.recipe.precision]
    weights = state_dict_for(network, checkpoint, dtype)
    checkpoint.release()
    writer.describe(unused_checkpoint_keys=weights.unused, position_embedding_resized_from=weights.resized_from)
    return network_module(network, weights.state_dict, dtype)


def as_written(model: VitNetwork) -> VitNetwork:
    """The network that graphs are written from. One in bf16 is in fp32 there, with its weights, so what is folded into
    them is not rounded again."""
    low = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return copy.deepcopy(model).float() if low else model


def write_network(writer: BundleWriter, model: VitNetwork, network: Deployed, source: Mapping[str, str]) -> None:
    """Writes the weights of `model`, `network` (the same weights) as portable ONNX, and the recipe's signature.

    The graph is written twice, with functions and without; both refer to the same weights.

    `source`: SHA-256 of what the weights were made from, by file name.
    """
    recipe = writer.recipe
    save_weights(model, writer.path(WEIGHTS))
    made_from = {WEIGHTS: writer.list_file(WEIGHTS, source).sha256}
    graph = base_onnx(network, recipe.merging, signature_of(recipe).image.dtype)
    with writer.path(ONNX_DATA).open("wb") as data:
        move_weights(graph, data, ONNX_DATA)
    add_function_bodies(graph)
    ir.save(graph, writer.path(ONNX))
    inline(graph)
    ir.save(graph, writer.path(ONNX_INLINED))
    writer.list_file(ONNX_DATA, made_from)
    for name in (ONNX, ONNX_INLINED):
        writer.list_file(name, made_from, uses=(ONNX_DATA,))
    writer.describe(signature=signature_of(recipe))


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
