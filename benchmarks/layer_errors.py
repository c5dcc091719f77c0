"""Which layer errs: ONNX Runtime and PyTorch in one precision beside PyTorch in fp64, by what enters each layer.

    python benchmarks/layer_errors.py setr_naive_vit_b16_cityscapes segmenter_vit_b16_ade20k -o layer_errors.json
    python benchmarks/layer_errors.py demo --runtime onnxruntime-cpu

Recipes with random weights, those of `full_size.py`, without merging, so that no decision falls otherwise. What enters
a LayerNorm, a linear layer or a convolution is made in every runtime and can be handed out; layers that the runtime's
graph has no node of their own for, such as the linear one of fused attention, are left out. The last row has the scores
of the runtime as it is, because handing out may change a kernel: a sum that is handed out is not fused with the norm
behind it unless `build` fused them, and on a CPU, which computes fp16 in fp32, a value is rounded where it is handed
out. Errors are root mean squares over all scenes: those of the values themselves, which stand beside them, and the two
networks' as a ratio. What errs more than what entered the layer before it errs by that layer. PyTorch computes on the
GPU if there is one.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from full_size import random_checkpoint
from torch import Tensor, nn
from tqdm import tqdm
from trained import write

from algm_deploy.bundle.files import ONNX_DATA
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import build, export, parity_windows
from algm_deploy.environment import environment
from algm_deploy.merging import deployed_network, merge_inputs
from algm_deploy.models.loading import DTYPES
from algm_deploy.recipe.reading import recipe
from algm_deploy.report.tables import text_table
from algm_deploy.runners.contract import runner
from algm_deploy.runners.onnxruntime.runner import OnnxRuntimeCpuRunner, OnnxRuntimeCudaRunner
from algm_deploy.runners.registry import row_of

RUNNERS = {kind.runtime: kind for kind in (OnnxRuntimeCudaRunner, OnnxRuntimeCpuRunner)}
LAYERS = nn.LayerNorm, nn.Linear, nn.Conv2d
# Nodes are called by their module and their operator; a rewritten one keeps the name of what it stands for.
NODE = re.compile(r"(?P<layer>.+)/(LayerNormalization|MatMul|Conv)(_\d+)?")
GRAPH, SCORES, AS_IT_IS = "layers.onnx", "scores", "scores, nothing handed out"
Values = dict[str, Tensor]  # by layer; a layer that runs again has a number after its name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--runtime", choices=RUNNERS, default="onnxruntime-cuda")
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp16")
    parser.add_argument("--scenes", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=Path("layer_errors.json"))
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": asdict(environment(devices=True)),
        "runtime": options.runtime,
        "precision": options.precision,
        "scenes": options.scenes,
        "networks": {},
    }
    for name in tqdm(options.recipes, unit="network"):
        with tempfile.TemporaryDirectory() as folder:
            bundle = dense_bundle(name, options.precision, Path(folder))
            build(bundle, options.runtime)
            images = parity_windows(bundle.recipe, [], options.scenes)
            found = record["networks"][name] = layer_errors(bundle, options.runtime, images)
        write(record, options.output)
        print(f"{name}, {options.precision}, {options.runtime}\n\n{table(found['layers'])}", flush=True)
        print(f"scores unchanged by handing values out: {found['scores_unchanged']}\n", flush=True)


def dense_bundle(name: str, precision: str, folder: Path) -> Bundle:
    """A recipe exported without merging, its scores as output."""
    checkpoint, _ = random_checkpoint(recipe(name).network, folder / "checkpoint")
    settings = {"precision": precision, "output": SCORES, "merging.clap_layers": (), "merging.gbm_layers": ()}
    return export(checkpoint, folder / "bundle", name, settings).bundle


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    header = "what enters", "size", "ONNX Runtime's error", "PyTorch's", "ratio"
    return text_table(
        header,
        [
            (layer, f"{row['size']:.3g}", f"{row['onnxruntime']:.3g}", f"{row['pytorch']:.3g}", f"{row['ratio']:.3f}")
            for layer, row in rows.items()
        ],
    )


# --- errors ----------------------------------------------------------------------------------------------------------


def layer_errors(bundle: Bundle, runtime: str, images: np.ndarray[Any, Any]) -> dict[str, Any]:
    """`layers`: by layer in the order in which PyTorch runs them, RMS of the exact values that enter (`size`), of both
    errors, and their ratio, over images (n, 3, H, W); then of the scores, and of those of the runtime as it is.
    `scores_unchanged`: whether those two are equal bit for bit."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = [PyTorch(bundle, dtype, device) for dtype in (torch.float64, DTYPES[bundle.recipe.precision])]
    session, unchanged = OnnxRuntime(bundle, runtime), True
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    with runner(bundle, runtime) as run:
        for image in images:
            exact, own = (network(image[None]) for network in networks)
            theirs = session(image[None]) | {AS_IT_IS: torch.from_numpy(run.infer({"image": image[None]})[SCORES])}
            unchanged &= torch.equal(theirs[SCORES], theirs[AS_IT_IS])
            for layer in [layer for layer in exact if layer in theirs]:
                for place, square in enumerate(mean_squares(exact[layer], theirs[layer].to(device), own[layer])):
                    squares[layer][place] += square / len(images)
    rows = {layer: figures(*(float(np.sqrt(square)) for square in found)) for layer, found in squares.items()}
    return {"scores_unchanged": unchanged, "layers": rows}


def mean_squares(exact: Tensor, theirs: Tensor, own: Tensor) -> Iterator[float]:
    """Of the exact values, and of what both others lack to them."""
    if not exact.shape == theirs.shape == own.shape:
        raise ValueError(f"expected values of one shape, got {exact.shape}, {theirs.shape} and {own.shape}")
    for values in (exact, theirs.double() - exact, own.double() - exact):
        yield float(values.square().mean())


def figures(size: float, theirs: float, own: float) -> dict[str, float]:
    return {"size": size, "onnxruntime": theirs, "pytorch": own, "ratio": theirs / own if own else float(theirs > 0)}


# --- what enters the layers ------------------------------------------------------------------------------------------


class PyTorch:
    """The bundle's network in PyTorch's own operators: what enters its layers for one image (1, 3, H, W)."""

    def __init__(self, bundle: Bundle, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._device = deployed_network(bundle, dtype).to(device), device
        self._entering: dict[str, list[Tensor]] = defaultdict(list)
        for name, module in self._model.model.named_modules():
            if isinstance(module, LAYERS):
                module.register_forward_pre_hook(lambda _, args, name=name: self._entering[name].append(args[0]))

    @torch.inference_mode()
    def __call__(self, image: np.ndarray[Any, Any]) -> Values:
        self._entering.clear()
        scores, *_ = self._model(torch.from_numpy(image).to(self._device), merge_inputs(0.0, 0.0, device=self._device))
        return numbered(self._entering) | {SCORES: scores, AS_IT_IS: scores}


class OnnxRuntime:
    """The graph of the bundle that a runtime runs, which hands out what enters its layers."""

    def __init__(self, bundle: Bundle, runtime: str) -> None:
        executed = str(row_of(runtime).own)
        model = ir.load(bundle.file(executed))
        self._values = hand_out(model)
        with bundle.add(GRAPH, {executed: bundle.files[executed].sha256}, uses=(ONNX_DATA,)) as path:
            ir.save(model, path)
        self._session = RUNNERS[runtime](bundle)._open_session(GRAPH)

    def __call__(self, image: np.ndarray[Any, Any]) -> Values:
        outputs = self._session.run([*self._values.values(), SCORES], {"image": image})
        return {name: torch.from_numpy(value) for name, value in zip([*self._values, SCORES], outputs, strict=True)}


def hand_out(model: ir.Model) -> dict[str, str]:
    """Makes outputs of what enters the layers of a graph; returns their names by layer."""
    entering: dict[str, list[ir.Value]] = defaultdict(list)
    for node in model.graph:
        if found := NODE.fullmatch(str(node.name)):
            # The sum that a fused residual makes is what enters the norm.
            fused = node.op_type in ("SkipLayerNormalization", "bias_skip_norm")
            value = node.outputs[-1] if fused else node.inputs[0]
            entering[found["layer"]].append(value)
    values: dict[str, ir.Value] = numbered(entering)
    given = set(model.graph.outputs)
    model.graph.outputs.extend(dict.fromkeys(value for value in values.values() if value not in given))
    return {layer: str(value.name) for layer, value in values.items()}


def numbered(entering: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """One value by name; what enters a layer for the second time is called `name 2`."""
    return {
        layer if turn == 1 else f"{layer} {turn}": value
        for layer, values in entering.items()
        for turn, value in enumerate(values, 1)
    }


if __name__ == "__main__":
    main()
