"""Layers in ONNX Runtime on a GPU: attention, GELU and norms of the library against its own, by whole networks' time.

    python benchmarks/ort_layers.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid -o ort_layers.json

The graphs differ in nothing else; in all of them the library cuts patches. The committed record is older than
that, and than the library's norms.
fp16, label maps out, milliseconds on the device between two events, launched kernel by kernel, the ways of one network
in turn. The dense network runs with every attention there is. The merging one leaves cuDNN's out, which makes a plan
for each token count; `duplicate` is the first photo repeated, `mixed` different photos.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import onnx_ir as ir
import onnxruntime as ort
import torch
from trained import exported, new_record, parser_of, write

from algm_deploy.bundle.files import ONNX
from algm_deploy.bundle.signature import threshold_defaults
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.lowering import onnxruntime
from algm_deploy.lowering.portable import load_portable
from algm_deploy.native_libraries import require_library
from algm_deploy.pictures.sources import find_images
from algm_deploy.report.tables import text_table
from algm_deploy.runners.onnxruntime.sessions import CudaSession
from algm_deploy.timing.variants import variant_bundle
from runtimes import measured


class Way(NamedTuple):
    """Whose layers: the library's, or ONNX Runtime's, attention by flash kernels unless by cuDNN's."""

    attention: bool = True
    gelu: bool = True
    norm: bool = True
    cudnn: bool = False


WAYS = {
    "the library's": Way(),
    "ONNX Runtime's GELU": Way(gelu=False),
    "ONNX Runtime's norms": Way(norm=False),
    "flash attention": Way(attention=False),
    "all of ONNX Runtime": Way(attention=False, gelu=False, norm=False),
    "cuDNN's attention": Way(attention=False, cudnn=True),
}


def main() -> None:
    """Times every way, and prints one table."""
    parser = parser_of(__doc__, "ort_layers.json", batches=(32,))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    record = new_record(options.checkpoint.resolve().name, precision="fp16", output="labels")
    with tempfile.TemporaryDirectory() as scratch:
        merged = exported(options, "labels", "fp16", Path(scratch))
        for name, bundle in {"dense": variant_bundle(merged, "dense", []), "merged": merged}.items():
            for batch in options.batches:
                record["runs"][f"{name} batch {batch}"] = timed(bundle, name, batch, options)
                write(record, options.output)
    rows = [
        [name, way, *(f"{ms:.3f}" for ms in row["ms"].values())]
        for name, run in record["runs"].items()
        for way, row in run.items()
    ]
    print(text_table(("network", "layers", "duplicate ms", "mixed ms"), rows))


def timed(bundle: Bundle, name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of one network by way and protocol, and what was rewritten."""
    windows = torch.from_numpy(parity_windows(bundle.recipe, find_images(options.photos), batch)).cuda()
    batches = {"duplicate": windows[:1].repeat(batch, 1, 1, 1), "mixed": windows}
    thresholds = {key: float(value) for key, value in threshold_defaults(bundle.recipe.merging).items()}
    ways = {way: one for way, one in WAYS.items() if name == "dense" or not one.cudnn}
    with ExitStack() as stack:
        opened = {way: stack.enter_context(session(bundle, one)) for way, one in ways.items()}
        work = {
            (way, protocol): partial(run.run, images, thresholds, ["labels"])
            for way, (run, _) in opened.items()
            for protocol, images in batches.items()
        }
        times = measured(work, options.repeats)
    return {
        way: {"rewrites": counts, "ms": {p: statistics.median(times[way, p]) for p in batches}}
        for way, (_, counts) in opened.items()
    }


@contextmanager
def session(bundle: Bundle, way: Way) -> Iterator[tuple[CudaSession, dict[str, int]]]:
    """A session of the bundle's network with these layers, and how often each rewrite fired."""
    model, counts = graph(bundle, way)
    path = bundle.file(ONNX).with_name("way.onnx")
    ir.save(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(require_library("ort_custom_op")))
    opened = CudaSession(path, options, bundle.signature, {"sdpa_kernel": "8"} if way.cudnn else {})
    try:
        yield opened, counts
    finally:
        opened.close()


def graph(bundle: Bundle, way: Way) -> tuple[ir.Model, dict[str, int]]:
    """The network's graph with these layers, and how often each rewrite fired."""
    model = load_portable(bundle.file(ONNX))
    with ExitStack() as stack:
        for name in [name for name, own in {"_bias_gelu": way.gelu, "_skip_layer_norm": way.norm}.items() if not own]:
            stack.enter_context(patch.object(onnxruntime, name, by_onnxruntime(getattr(onnxruntime, name))))
        return model, dict(onnxruntime.rewrite(model, "cuda", True, False, way.attention))


def by_onnxruntime(rewrite: Callable[[ir.Graph, bool, Counter[str]], None]) -> Callable[..., None]:
    """A rewrite that leaves the library out."""
    return lambda graph, own, counts: rewrite(graph, False, counts)


if __name__ == "__main__":
    main()
