"""ViT-Adapter and EVA at full size in PyTorch on a GPU: dense, merged and truncated, the encoder's part, and memory.

    python benchmarks/adapters.py -o benchmarks/records/adapters_h200.json     needs a GPU and the kernel library

Networks of recipes, of random weights in fp16, label maps as output. `budget`: as many windows and rows merge as in the
Segmenters of `runtimes.py`, an eighth of the patches each, whatever the picture; so the whole network is a CUDA graph,
as the network without merging is. `thresholds`: the picture decides, and the network runs layer by layer. `truncated`
drops as many tokens as `budget` merges. `encoder` are the blocks and the adapter of the same graph, `blocks` the blocks
alone. `operators` is the dense network whose deformable attention is made of PyTorch's operators and not the kernel.

Before anything is timed, the encoder's maps in fp16 are compared with those in fp32, and in fp32 those by the kernel
with those by PyTorch's operators. The configurations take turns, repetition by repetition.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.errors import GateError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.merging import merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import network_module, parameter_shapes
from algm_deploy.native_libraries import require_library
from algm_deploy.ops.deformable_attention import deformable_attention
from algm_deploy.ops.native_kernels import LIBRARY, use_kernels
from algm_deploy.recipe.plan import DENSE
from algm_deploy.recipe.schema import Recipe
from algm_deploy.timing.variants import variant_network
from runtimes import (
    SEED,
    calibrated,
    gained,
    kernels,
    measured,
    merged_in,
    parser_of,
    pictures,
    recipe_of,
    write_record,
)

NETWORKS = ["vit_adapter_vit_b16_ade20k", "vit_adapter_vit_l16_ade20k", "eva_vit_g16_ade20k"]
# Shares of a map's norm, through forty blocks: fp32 in another order and fp16 beside it. Eight to ten times the largest
# that was found, 1.05e-5 and 1.3e-3 (records/adapters_h200.json).
KERNEL_GATE, FP16_GATE = 1e-4, 1e-2


def main() -> None:
    parser = parser_of(__doc__, "adapters.json", repeats=10)
    parser.set_defaults(networks=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    options = parser.parse_args()
    require_library(LIBRARY)
    use_kernels()
    write_record(options, network_record)


@torch.inference_mode()
def network_record(name: str, options: argparse.Namespace) -> dict[str, Any]:
    recipe = recipe_of(name, options, "per_image")
    network, plan = recipe.network, recipe.merging
    windows, rows = merged_in(math.prod(network.grid))
    budget = dataclasses.replace(plan, clap="budget", clap_budget=windows, gbm="budget", gbm_budget=rows)
    tokens = [math.prod(network.grid) - (3 * windows if layer in plan.clap_layers else rows) for layer in plan.layers]
    weights = random_weights(recipe)
    model = network_module(network, weights, torch.float16)
    image = pictures(max(options.batches), network.image_size).cuda()
    variants = {
        "dense": variant_network(model, recipe, "dense", ())[0],
        "budget": variant_network(model, dataclasses.replace(recipe, merging=budget), "merged", ())[0],
        "truncated": variant_network(model, recipe, "truncated", tokens)[0],
    }
    for each in variants.values():
        each.to(memory_format=torch.channels_last)  # as the torch runtime does
    result: dict[str, Any] = {
        "parameters": sum(weight.numel() for weight in weights.values()),
        "tokens": tokens,
        "multiply_adds": {
            "dense": dataclasses.asdict(multiply_adds(network, DENSE)),
            "budget": dataclasses.asdict(multiply_adds(network, budget, tokens)),
        },
        "compared": compared(recipe, weights, variants["dense"], image[:1]),
        "batches": {},
    }
    print(name, json.dumps(result["compared"]), flush=True)
    del weights
    thresholds = calibrated(model, recipe, image[:1])
    by_thresholds = variant_network(model, recipe, "merged", ())[0].cuda().to(memory_format=torch.channels_last)
    given = merge_inputs(thresholds[CLAP_THRESHOLD], thresholds[GBM_THRESHOLD], device="cuda")
    result["thresholds"] = thresholds | {"tokens": by_thresholds(image[:1], given)[1].tolist()}
    for batch in options.batches:
        few = image[:batch]
        result["batches"][str(batch)] = row = batch_record(variants, few, options.repeats)
        layered = {
            "dense layer by layer": lambda x=few: variants["dense"](x, given),
            "thresholds layer by layer": lambda x=few: by_thresholds(x, given),
        }
        row["ms"] |= medians(layered, options.repeats)
        row["peak_gib"] |= {"thresholds layer by layer": peak(layered["thresholds layer by layer"])}
        print(name, batch, json.dumps(row["ms"]), json.dumps(row["peak_gib"]), flush=True)
    return result


def batch_record(variants: dict[str, Deployed], image: Tensor, repeats: int) -> dict[str, Any]:
    """Times and memory at one batch."""
    inputs = merge_inputs(0.0, 0.0, device="cuda")
    work: dict[str, Callable[[], object]] = {}
    pool = torch.cuda.graph_pool_handle()
    memory = {name: peak(lambda n=n: n(image, inputs)) for name, n in variants.items()}  # before a graph holds any
    with deformable_attention.set_kernel_enabled("cuda", enabled=False):
        memory["operators"] = peak(lambda: variants["dense"](image, inputs))
    for name, network in variants.items():
        work[name] = captured(lambda n=network: n(image, inputs), pool)
        work[f"{name}, encoder"] = captured(lambda n=network: n.model.encoder.maps(image, inputs), pool)
        work[f"{name}, blocks"] = captured(blocks_of(network, image, inputs), pool)
    with deformable_attention.set_kernel_enabled("cuda", enabled=False):
        work["operators"] = captured(lambda: variants["dense"](image, inputs), pool)
    ms = medians(work, repeats)
    looked = {name: kernels(lambda n=variants[name]: n(image, inputs), 2) for name in ("dense", "budget")}
    return {
        "ms": ms,
        "gained": gained(ms["dense"], ms["budget"], ms["truncated"], len(image)),
        "peak_gib": memory,
        "kernels": looked,
    }


def blocks_of(network: Deployed, image: Tensor, inputs: Any) -> Callable[[], None]:
    """Each block once more on the rows that reach it."""
    blocks, reached = list(network.model.encoder.blocks), []
    hooks = [b.register_forward_pre_hook(lambda m, given: reached.append((m, given[0]))) for b in blocks]
    network(image, inputs)
    for hook in hooks:
        hook.remove()

    def run() -> None:
        for block, rows in reached:
            block(rows, inputs)

    return run


def random_weights(recipe: Recipe) -> dict[str, Tensor]:
    """By name, fp32 values that fp16 holds: of a size that keeps activations of order one."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    weights = {}
    for key, shape in parameter_shapes(recipe.network).items():
        if len(shape) > 1:
            noise = torch.randn(shape, generator=generator, device="cuda") / math.sqrt(math.prod(shape[1:]))
        else:
            noise = torch.full(shape, float(key.endswith("weight")), device="cuda")
        weights[key] = noise.half().float()
    return weights


def compared(recipe: Recipe, weights: dict[str, Tensor], half: Deployed, image: Tensor) -> dict[str, float]:
    """How far the encoder's maps in fp16 are from those in fp32, and in fp32 those by the kernel from others; and the
    share of equal labels in fp16 and fp32, which says little where weights are random.

    Raises:
        GateError: too far.
    """
    exact = variant_network(network_module(recipe.network, weights, torch.float32), recipe, "dense", ())[0]
    inputs = merge_inputs(0.0, 0.0, device="cuda")
    true = exact.model.encoder.maps(image, inputs)[0]
    found = {
        "fp16_error": relative(half.model.encoder.maps(image, inputs)[0], true),
        "labels_equal_in_fp16": (exact(image, inputs)[0] == half(image, inputs)[0]).double().mean().item(),
    }
    with deformable_attention.set_kernel_enabled("cuda", enabled=False):
        found["kernel_error"] = relative(true, exact.model.encoder.maps(image, inputs)[0])
    del exact, true
    gc.collect()
    torch.cuda.empty_cache()
    if not found["kernel_error"] < KERNEL_GATE or not found["fp16_error"] < FP16_GATE:
        raise GateError(f"expected maps within {KERNEL_GATE} and {FP16_GATE} of each other, got {found}")
    return found


def relative(maps: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """The largest of the maps' errors, each as a share of the map's norm."""
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(maps, true, strict=True))


def captured(run: Callable[[], object], pool: Any) -> Callable[[], object]:
    """The work as a CUDA graph. Those of one pool run one after the other; nobody reads what an earlier one left."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        held = run()
    return lambda: (graph.replay(), held, run)  # it reads what `run` holds


def medians(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds."""
    return {name: statistics.median(times) for name, times in measured(work, repeats).items()}


def peak(run: Callable[[], object]) -> float:
    """Most memory that tensors took while it ran, weights included, in GiB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)


if __name__ == "__main__":
    main()
