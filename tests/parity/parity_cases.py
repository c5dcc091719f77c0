"""Ways to break a bundle, and how to read a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.runners.contract import Array

Outputs = dict[str, Array]


def broken(report: Parity) -> set[str]:
    """Names of the links that do not hold."""
    return {link.name for link in report.links if not link.passed}


def measured(report: Parity, name: str) -> str:
    """What a link says to people."""
    return next(link.measured for link in report.links if link.name == name)


def rewrite(bundle: Bundle, name: str, content: bytes) -> None:
    """Replaces a file of a bundle and records it as if it belonged there."""
    entry = bundle.files[name]
    with bundle.add(name, entry.made_from, entry.uses) as path:
        path.write_bytes(content)


def edit_manifest(bundle: Bundle, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of a bundle, which is to be opened again."""
    path = bundle.path / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def edit_graph(bundle: Bundle, change: Callable[[onnx.ModelProto], None]) -> None:
    """Changes the portable graph of a bundle."""
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    change(model)
    rewrite(bundle, "model.onnx", model.SerializeToString())


def edit_constant(bundle: Bundle, function: str, old: np.ndarray, new: np.ndarray) -> None:
    """Changes the constants of a function body that equal `old`."""

    def change(model: onnx.ModelProto) -> None:
        body = next(f for f in model.functions if f.name == function)
        tensors = [n.attribute[0].t for n in body.node if n.op_type == "Constant" and n.attribute[0].name == "value"]
        found = [t for t in tensors if np.array_equal(onnx.numpy_helper.to_array(t), old)]
        assert found, f"{function} has no such constant"
        for tensor in found:
            tensor.CopyFrom(onnx.numpy_helper.from_array(new.astype(onnx.numpy_helper.to_array(tensor).dtype)))

    edit_graph(bundle, change)


def edit_weight(bundle: Bundle, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Changes an fp32 initializer of the portable graph, in the data file or in the graph."""
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    if not tensor.external_data:
        values = onnx.numpy_helper.to_array(tensor)
        tensor.raw_data = change(values.copy()).astype(np.float32).tobytes()
        return rewrite(bundle, "model.onnx", model.SerializeToString())
    facts = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(facts["offset"]), int(facts["length"])
    data = bytearray((bundle.path / "model.onnx.data").read_bytes())
    values = np.frombuffer(data[start : start + length], np.float32).reshape(tuple(tensor.dims))
    data[start : start + length] = change(values.copy()).astype(np.float32).tobytes()
    return rewrite(bundle, "model.onnx.data", bytes(data))
