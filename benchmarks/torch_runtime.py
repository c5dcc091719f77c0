"""PyTorch's best on a GPU: dense, merged and truncated networks, one image and batches, and batches of different ones.

    python benchmarks/torch_runtime.py -o benchmarks/records/torch_h200.json     needs a GPU and the kernel library
    python benchmarks/torch_runtime.py --precision fp8 -o benchmarks/records/torch_fp8_h200.json
    python benchmarks/torch_runtime.py --networks setr_naive_vit_b16_cityscapes deit_vit_b16_ade20k --compiled 1 32 \
        --beside eager -o benchmarks/records/torch_families_h200.json

The networks, pictures and thresholds of `runtimes.py`; a recipe's network is as large as the recipe says, with random
weights, and merges as many of its patches as they do. What runs is what the torch runtime runs: packed rows, the
segments between the merges as CUDA graphs, merges and label map by the kernels of this project. `duplicate`: one image
repeated, images of a batch decide together. `mixed`: different images, each decides alone, thresholds such that they
keep as many tokens on average. Beside them: the modules as they are (`eager`); a dense network with cuDNN's attention;
PyTorch's compiler on the whole network, captured (`compiled`), where the number of tokens is known; and what the torch
runtime takes to scores in fp32, (B, 150, 512, 512), instead of labels (`scores`). With fp8 the same networks in fp16
take turns with it instead of the modules and of cuDNN.

Every configuration is compared with the modules in fp32 before it is timed, on the very batch that is timed. The
configurations take turns, repetition by repetition.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from algm_deploy.bundle.records import VariantName
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.merging import merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.fp8 import use_fp8
from algm_deploy.models.scores import Scores, upsample_scores
from algm_deploy.native_libraries import require_library
from algm_deploy.ops.attention import _BACKENDS
from algm_deploy.ops.native_kernels import LIBRARY, use_kernels
from algm_deploy.recipe.network import Size
from algm_deploy.recipe.schema import Precision, Recipe
from algm_deploy.runners.torch import packed as torch_packed
from algm_deploy.runners.torch.packed import PackedNetwork
from algm_deploy.runners.torch.tail import labels
from algm_deploy.timing.variants import VARIANTS, variant_network
from runtimes import (
    Modules,
    calibrated,
    derived,
    host,
    kernels,
    measured,
    parser_of,
    pictures,
    random_network,
    recipe_of,
    same_mean,
    tokens_of,
    write_record,
)

Call = Callable[[], Tensor]
UNMERGED = ("dense", "truncated")  # what PyTorch's compiler takes: no picture changes its shapes
BESIDE = ("eager", "cudnn", "photos", "kernels")


@dataclass
class Configuration:
    """One thing to time: `call` returns labels (B, H, W) or scores (B, K, H, W); maps of its merges by `decisions`.

    `kept` is what a graph reads where it is, such as weights.
    """

    variant: VariantName
    image: Tensor
    call: Call
    decisions: Callable[[], tuple[Tensor, ...]] = tuple
    kept: Any = None
    precision: Precision = "fp16"


def main() -> None:
    parser = parser_of(__doc__, "torch_runtime.json")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--compiled", nargs="*", type=int, default=[], help="batches with PyTorch's compiler beside")
    parser.add_argument("--compiled-variants", nargs="+", choices=UNMERGED, default=[*UNMERGED])
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=[*BESIDE], help="what else is measured")
    parser.add_argument("--only-compile", action="store_true", help="fill the compiler's cache and measure nothing")
    parser.add_argument("--scores", nargs="*", type=int, default=[], help="batches with scores beside labels")
    options = parser.parse_args()
    require_library(LIBRARY)
    use_kernels()
    write_record(options, network_record)


@contextmanager
def compiling() -> Iterator[None]:
    """PyTorch's compiler without other networks' results, which count against a limit of its own.

    Beyond the limit it would run the modules as they are, and only warn; here that is an error.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@compiling()
@torch.inference_mode()
def network_record(name: str, options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(name, options)
    if options.only_compile:
        return {str(batch): bench.compile_all(batch, {}) for batch in options.compiled}
    result: dict[str, Any] = {"thresholds": bench.thresholds, "batches": {}}
    for batch in options.batches:
        result["batches"][str(batch)] = bench.batch_record(batch)
        torch.cuda.empty_cache()
    return result


class Bench:
    """A network and everything it is timed as."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.recipe = recipe_of(name, options, "batch_min")
        self.alone = recipe_of(name, options, "per_image")
        self.model = random_network(self.recipe)
        self.images = pictures(max(options.batches), self.recipe.network.image_size).cuda()
        self.tokens = tokens_of(self.recipe)
        self.modules = Modules(self.model, self.recipe, self.tokens)
        self.thresholds = calibrated(self.model, self.recipe, self.images[:1])

    def batch_record(self, batch: int) -> dict[str, Any]:
        same, different = self.images[:1].expand(batch, -1, -1, -1).contiguous(), self.images[:batch]
        memory: dict[str, int] = {}
        found: dict[str, Configuration] = {}
        thresholds = self.thresholds[CLAP_THRESHOLD], self.thresholds[GBM_THRESHOLD]
        for variant in VARIANTS:
            found[variant] = self.packed(self.recipe, variant, same, thresholds, memory, variant)
        if batch in self.options.scores:
            for variant in VARIANTS:
                label = f"{variant} scores"
                found[label] = self.packed(self.recipe, variant, same, thresholds, memory, label, upsample_scores)
        row: dict[str, Any] = {}
        if batch > 1:
            fitting = self.same_mean(different)
            row["mixed_thresholds"] = fitting
            found["mixed"] = self.packed(self.alone, "merged", different, fitting, memory, "mixed")
        if self.recipe.precision == "fp8":
            fp16 = dataclasses.replace(self.recipe, precision="fp16")
            for variant in VARIANTS:
                label = f"{variant} fp16"
                found[label] = self.packed(fp16, variant, same, thresholds, memory, label)
        else:
            if "cudnn" in self.options.beside:
                with cudnn_attention():
                    found["dense cudnn"] = self.packed(self.recipe, "dense", same, thresholds, memory, "dense cudnn")
            for variant in ("dense", "merged") if "eager" in self.options.beside else ():
                found[f"{variant} eager"] = self.eager(variant, same, thresholds)
        if batch in self.options.compiled:
            row["compile_s"] = self.compile_all(batch, found)
        row["parity"] = {label: self.parity(label, each) for label, each in found.items()}
        print(self.name, batch, json.dumps(row["parity"]), flush=True)
        times = measured({label: each.call for label, each in found.items()}, self.options.repeats)
        row["ms"] = {label: statistics.median(values) for label, values in times.items()}
        row["spread_ms"] = {label: [min(values), max(values)] for label, values in times.items()}
        row["peak_memory_bytes"] = memory
        row["merged_tokens"] = self.counts(found["merged"])
        row |= derived(row["ms"], batch)
        if batch == 1:
            row["host_ms"] = {
                label: host(lambda call=each.call: (call(),), 300)
                for label, each in found.items()
                if "eager" not in label
            }
            if "photos" in self.options.beside:
                row["photos_ms"] = self.photos()
        else:
            row["mixed_tokens"] = self.counts(found["mixed"])
        if "kernels" in self.options.beside:
            for label in ("merged", "dense" if batch == 1 else "mixed"):
                row[f"kernels_{label}"] = kernels(found[label].call)
        print(self.name, batch, json.dumps({k: round(v, 3) for k, v in row["ms"].items()}), flush=True)
        print(json.dumps({k: row[k] for k in ("merge_efficiency", "speedup", "images_per_s")}), flush=True)
        return row

    # --- what is timed ---

    def compile_all(self, batch: int, found: dict[str, Configuration]) -> float:
        """Adds what PyTorch's compiler makes of the networks; returns the seconds it took."""
        start = time.perf_counter()
        same = self.images[:1].expand(batch, -1, -1, -1).contiguous()
        for variant in self.options.compiled_variants:
            found[f"{variant} compiled"] = self.compiled(variant, same)
        return time.perf_counter() - start

    def packed(
        self,
        recipe: Recipe,
        variant: VariantName,
        image: Tensor,
        thresholds: tuple[float, float],
        memory: dict[str, int],
        label: str,
        tail: Callable[[Scores, Size, Size], Tensor] = labels,
    ) -> Configuration:
        """As the torch runtime runs it; peak memory beside the weights, as the allocator reserves it."""
        network = self.network(recipe, variant)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        packed = PackedNetwork(network, torch.uint8)
        if len(image) == 1:  # as a server's
            packed.warm_up(1, math.inf)
        grid, size = recipe.network.grid, recipe.network.image_size
        maps: list[tuple[Tensor, ...]] = [()]

        def call() -> Tensor:
            with packed.run(image, *thresholds) as merged:
                maps[0] = merged.maps
                return tail(merged.scores, grid, size)

        call()
        call()
        memory[label] = torch.cuda.max_memory_reserved() - before
        return Configuration(variant, image, call, lambda: maps[0], precision=recipe.precision)

    def network(self, recipe: Recipe, variant: VariantName) -> Deployed:
        """In the recipe's precision."""
        network = variant_network(self.model, recipe, variant, self.tokens)[0].cuda()
        if recipe.precision == "fp8":
            use_fp8(network)
        return network

    def eager(self, variant: VariantName, image: Tensor, thresholds: tuple[float, float]) -> Configuration:
        network = variant_network(self.model, self.recipe, variant, self.tokens)[0].cuda()
        inputs = merge_inputs(*thresholds, device="cuda")
        return Configuration(variant, image, lambda: network(image, inputs)[0], lambda: network(image, inputs)[2])

    def compiled(self, variant: VariantName, image: Tensor) -> Configuration:
        """PyTorch's compiler on the whole network for its shapes, labels included, captured."""
        network = self.network(self.recipe, variant)

        @torch.compile(dynamic=False)
        def compiled(image: Tensor) -> Tensor:
            found: Tensor = network(image, None)[0]
            return found

        given, stream = image.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compiled(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(given)

        def call() -> Tensor:
            given.copy_(image)
            graph.replay()
            return result.clone()

        return Configuration(variant, image, call, kept=network)

    def same_mean(self, images: Tensor) -> tuple[float, float]:
        """Thresholds with which these images keep `TOKENS` on average, each deciding alone."""
        packed = PackedNetwork(self.network(self.alone, "merged"), torch.uint8)
        packed.graphs = None  # of counts that are met once

        def mean(stage: int, clap: float, gbm: float) -> float:
            with packed.run(images, clap, gbm) as merged:
                return float(merged.lengths[stage].double().mean()) - self.recipe.network.prefix

        return same_mean(mean, self.tokens)

    def counts(self, each: Configuration) -> dict[str, Any]:
        """Patch tokens behind each merge, from its maps."""
        each.call()
        last = torch.stack([map.amax(1) for map in each.decisions()])
        found = last + 1 - self.recipe.network.prefix
        return {"mean": found.double().mean(1).tolist(), "min": found.amin(1).tolist(), "max": found.amax(1).tolist()}

    # --- parity ---

    def parity(self, label: str, each: Configuration) -> dict[str, Any]:
        """As `Modules.compared`."""
        for _ in range(2):  # captured, then replayed
            result = each.call()
        if result.ndim == 4:
            result = result.argmax(1)
        maps = [map.clone() for map in each.decisions()]
        return self.modules.compared(f"{self.name} {label}", each.variant, result, each.image, maps, each.precision)

    # --- more numbers at batch 1 ---

    def photos(self, count: int = 16) -> dict[str, Any]:
        """Host milliseconds for photos of different token counts, one by one: as they come, and once more."""
        images = pictures(count, self.recipe.network.image_size).cuda()
        packed = PackedNetwork(self.network(self.alone, "merged"), torch.uint8)
        thresholds = self.thresholds[CLAP_THRESHOLD], self.thresholds[GBM_THRESHOLD]
        passes: list[list[float]] = []
        for _ in range(3):
            passes.append([])
            for image in images:
                start = time.perf_counter()
                with packed.run(image[None], *thresholds) as merged:
                    labels(merged.scores, self.recipe.network.grid, self.recipe.network.image_size).cpu()
                passes[-1].append(1e3 * (time.perf_counter() - start))
        assert packed.graphs is not None
        medians = [statistics.median(times) for times in passes]
        return {"first_pass_median": medians[0], "third_pass_median": medians[2], "graphs": len(packed.graphs)}


@contextmanager
def cudnn_attention() -> Iterator[None]:
    """What is captured meanwhile attends by cuDNN."""
    ours, backends = torch_packed.fits_attention, _BACKENDS[:]
    torch_packed.fits_attention, _BACKENDS[:] = lambda *_: False, [SDPBackend.CUDNN_ATTENTION]
    yield
    torch_packed.fits_attention, _BACKENDS[:] = ours, backends


if __name__ == "__main__":
    main()
