"""A graph for one operating point: its thresholds are constants instead of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from algm_deploy.bundle.graphs import DOMAIN


def write_fixed(source: Path, target: Path, thresholds: Mapping[str, float]) -> onnx.ModelProto:
    """Writes the graph in `source` to `target` with these thresholds in it, and returns it.

    Weights stay where they are: the files that the graph names have to lie beside the new one under the same names.
    """
    model = onnx.load(source, load_external_data=False)
    inputs = [one for one in model.graph.input if one.name not in thresholds]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    constants = (numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in thresholds.items())
    model.graph.initializer.extend(constants)
    target.write_bytes(model.SerializeToString())
    return model


def needs_operators(model: onnx.ModelProto) -> bool:
    """Whether it calls operators of ours that have no body in it: then their library has to be loaded."""
    bodies = {(one.domain, one.name) for one in model.functions}
    return any(node.domain == DOMAIN and (node.domain, node.op_type) not in bodies for node in model.graph.node)
