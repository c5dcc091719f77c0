"""ONNX Runtime on a GPU beside eager PyTorch: dense, merged and truncated networks, same output, same tail.

    python benchmarks/runtimes.py export FOLDER --networks S L             any machine; graphs without weights
    python benchmarks/runtimes.py time FOLDER -o benchmarks/records/x.json    needs a GPU and onnxruntime-gpu

Segmenter with a mask transformer, 512x512 pixels, 150 classes, random weights in fp16, label maps as output.
Thresholds are set so that 1025 rows become 641 behind CLAP and 511 behind GBM. `duplicate`: one image repeated, images
of a batch decide together (`batch_min`), so nothing is padded. `mixed`: different images, each decides alone, padded to
the longest.

Every configuration is compared with PyTorch before it is timed. The networks take turns, repetition by repetition.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
import torch.nn.functional as F
from tqdm import tqdm
from trained import write

from algm_deploy.bundle.records import VariantName
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD, signature_of
from algm_deploy.environment import environment
from algm_deploy.errors import GateError
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.onnxruntime import Provider, rewrite, single_image
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.lowering.writing import ALIGNMENT, EXTERNAL_BYTES
from algm_deploy.merging import merge_inputs, replay_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import DTYPES, network_class, network_module
from algm_deploy.models.vit import MergeInputs, Tokens, VitNetwork
from algm_deploy.native_libraries import require_library
from algm_deploy.ops.clap import window_similarity
from algm_deploy.ops.gbm import gbm_similarity
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.reading import recipe as named_recipe
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.runners.onnxruntime.runner import LIBRARY
from algm_deploy.runners.onnxruntime.sessions import CUDA_OPTIONS, CudaSession, placement
from algm_deploy.timing.timers import merge_efficiency
from algm_deploy.timing.variants import VARIANTS, variant_network

# width, depth, heads, 1-based block of GBM
SIZES = {
    "T": (192, 12, 3, 5),
    "S": (384, 12, 6, 5),
    "B": (768, 12, 12, 5),
    "L": (1024, 24, 16, 7),
    "toy": (64, 3, 1, 2),
}
PATCHES, MERGED_WINDOWS, MERGED_ROWS = 1024, 128, 130
TOKENS = (PATCHES - 3 * MERGED_WINDOWS, PATCHES - 3 * MERGED_WINDOWS - MERGED_ROWS)
PLANS: dict[str, VariantName] = {"dense": "dense", "merged": "merged", "truncated": "truncated", "mixed": "merged"}
SEED = 0


def main() -> None:
    parser = parser_of(__doc__, "runtimes.json")
    parser.add_argument("step", choices=("export", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--without-library", action="store_true", help="merges by their function bodies")
    options = parser.parse_args()
    if options.step == "export":
        for name in options.networks:
            export(name, options)
        return
    write_record(options, timed, onnxruntime=ort.__version__, custom_operators=not options.without_library)


def parser_of(description: str | None, output: str, repeats: int = 30) -> argparse.ArgumentParser:
    """What the benchmarks of these networks are all asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["S", "L"], help=f"of {', '.join(SIZES)}, or recipes")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--precision", choices=("fp16", "fp32", "fp8"), default="fp16")
    parser.add_argument("-o", "--output", type=Path, default=Path(output))
    return parser


def write_record(
    options: argparse.Namespace, of_network: Callable[[str, argparse.Namespace], dict[str, Any]], **facts: object
) -> None:
    """The record of all networks and the conditions they share, written anew after each."""
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": asdict(environment(devices=True)),
        **facts,
        "precision": options.precision,
        "output": "labels",
        "repeats": options.repeats,
        "networks": {},
    }
    for name in options.networks:
        record["networks"][name] = of_network(name, options)
        write(record, options.output)


# --- networks --------------------------------------------------------------------------------------------------------


def recipe_of(name: str, options: argparse.Namespace, batch: str) -> Recipe:
    """A size of Segmenter, or a recipe by its name, as it is or, as `NAME:B`, on a ViT of one of the sizes."""
    told = {"output": "labels", "precision": options.precision, "max_batch": max(options.batches)}
    if name not in SIZES:
        name, _, size = name.partition(":")
        found = resized(named_recipe(name), size) if size else named_recipe(name)
        return dataclasses.replace(found, merging=dataclasses.replace(found.merging, batch=batch), **told)  # type: ignore[arg-type]
    width, depth, heads, gbm = SIZES[name]
    network = Network("segmenter", width, depth, heads, 150, (512, 512))
    plan = MergePlan((1,), (gbm,), batch=batch)  # type: ignore[arg-type]
    protocol = Protocol("ade20k", 512, 512, 480)
    return Recipe(name=f"segmenter_{name}", network=network, merging=plan, protocol=protocol, **told)  # type: ignore[arg-type]


def resized(recipe: Recipe, size: str) -> Recipe:
    """A recipe on a ViT of another size: levels at the same share of the depth, its own decoder half as wide."""
    width, depth, heads, gbm = SIZES[size]
    network = recipe.network
    network = dataclasses.replace(
        network,
        embed_dim=width,
        depth=depth,
        heads=heads,
        stages=tuple(stage * depth // network.depth for stage in network.stages),
        decoder_dim=width // 2 if network.architecture.own_heads else network.decoder_dim,
    )
    return dataclasses.replace(recipe, network=network, merging=dataclasses.replace(recipe.merging, gbm_layers=(gbm,)))


def random_network(recipe: Recipe) -> VitNetwork:
    """Weights as a network starts its training with: norms are identities, all else is noise of deviation 0.02."""
    with torch.device("meta"):
        shapes = {
            key: tensor.shape for key, tensor in network_class(recipe.network)(recipe.network).state_dict().items()
        }
    generator = torch.Generator().manual_seed(SEED)
    dtype = DTYPES[recipe.precision]
    weights = {key: (torch.randn(shape, generator=generator) * 0.02).to(dtype) for key, shape in shapes.items()}
    for key in weights:
        if "norm" in key:
            weights[key] = torch.full_like(weights[key], float(key.endswith("weight")))
    return network_module(recipe.network, weights, dtype)


def merged_in(patches: int) -> tuple[int, int]:
    """Windows and rows that merge of a picture, as many of each patch as in a Segmenter's."""
    return round(patches * MERGED_WINDOWS / PATCHES), round(patches * MERGED_ROWS / PATCHES)


def pictures(count: int, size: tuple[int, int] = (512, 512)) -> torch.Tensor:
    """uint8 (count, 3, *size): soft colours under noise whose strength differs from patch to patch."""
    generator = torch.Generator().manual_seed(SEED)
    colours = F.interpolate(torch.rand(count, 3, 8, 8, generator=generator), size=size, mode="bilinear")
    strength = F.interpolate(torch.rand(count, 1, 32, 32, generator=generator), size=size, mode="nearest")
    noise = torch.randn(count, 3, *size, generator=generator) * strength
    return (colours * 255 + 60 * noise).clamp(0, 255).to(torch.uint8)


# --- graphs ----------------------------------------------------------------------------------------------------------


def variant_graph(
    model: VitNetwork, recipe: Recipe, variant: VariantName, tokens: Sequence[int], provider: Provider, custom: bool
) -> ir.Model:
    """A variant's graph for a provider of ONNX Runtime, weights inside; the first arguments as for `variant_network`.

    `custom`: merges, unmerge and label map are custom operators. Outputs: labels or scores, token counts, and for
    `merged` token maps.
    """
    network, named = variant_network(model, recipe, variant, tokens)
    graph = base_onnx(network, named.merging, signature_of(named).image.dtype)
    add_function_bodies(graph)
    rewrite(graph, provider, custom, single_image(recipe, provider))
    return graph


def export(name: str, options: argparse.Namespace) -> None:
    """Writes a network's four graphs; their weights are places in one data file, listed by parameter of the network."""
    options.folder.mkdir(parents=True, exist_ok=True)
    layout: dict[str, tuple[str, bool, int]] = {}
    for label, variant in tqdm(PLANS.items(), f"export {name}"):
        recipe = recipe_of(name, options, "per_image" if label == "mixed" else "batch_min")
        model = random_network(recipe)
        graph = variant_graph(model, recipe, variant, TOKENS, "cuda", not options.without_library)
        parameters = Deployed(model, recipe.network, "labels").state_dict()
        move_out(graph, parameters, layout, f"{name}.data")
        ir.save(graph, options.folder / f"{name}_{label}.onnx")
    (options.folder / f"{name}.json").write_text(json.dumps(layout))


def move_out(
    graph: ir.Model, parameters: dict[str, torch.Tensor], layout: dict[str, tuple[str, bool, int]], location: str
) -> None:
    for name, value in graph.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        key = f"model.{name.removesuffix('constant')}weight" if name.endswith(".constant") else f"model.{name}"
        if tensor.nbytes < EXTERNAL_BYTES or key not in parameters:
            continue
        turned = name.endswith(".constant")
        stored = torch.from_numpy(tensor.numpy().copy())
        if not torch.equal(stored, parameters[key].T if turned else parameters[key]):
            raise GateError(f"{name} of the graph is not {key} of the network")
        if name not in layout:
            end = max((offset + parameters[k].nbytes for k, _, offset in layout.values()), default=0)
            layout[name] = (key, turned, end + -end % ALIGNMENT)
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.ExternalTensor(
            location, layout[name][2], tensor.nbytes, tensor.dtype, shape=shape, name=name
        )


def write_weights(name: str, network: Deployed, folder: Path) -> None:
    layout = json.loads((folder / f"{name}.json").read_text())
    parameters = network.state_dict()
    with (folder / f"{name}.data").open("wb") as file:
        for key, turned, offset in layout.values():
            file.seek(offset)
            tensor = parameters[key].cpu()
            file.write((tensor.T.contiguous() if turned else tensor.contiguous()).numpy().tobytes())


# --- timing ----------------------------------------------------------------------------------------------------------


def timed(name: str, options: argparse.Namespace) -> dict[str, Any]:
    recipe = recipe_of(name, options, "batch_min")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_network(recipe)
    write_weights(name, Deployed(model, recipe.network, "labels"), options.folder)
    images = pictures(max(options.batches)).to(device)
    thresholds = calibrated(model, recipe, images[:1])
    sessions = {label: session(name, label, options, device) for label in PLANS}
    networks = {
        label: variant_network(model, recipe, PLANS[label], TOKENS)[0].to(device) for label in PLANS if label != "mixed"
    }
    parity = compared(sessions, networks, model, recipe, images, thresholds)
    result: dict[str, Any] = {"thresholds": thresholds, "parity": parity, "batches": {}}
    print(name, json.dumps(parity), flush=True)
    if device.type == "cpu":
        return result
    inputs = merge_inputs(thresholds[CLAP_THRESHOLD], thresholds[GBM_THRESHOLD], device=device)
    for batch in options.batches:
        same, different = images[:1].expand(batch, -1, -1, -1).contiguous(), images[:batch]
        work: dict[str, Callable[[], object]] = {}
        for label, each in sessions.items():
            image = different if label == "mixed" else same
            work[f"onnxruntime {label}"] = lambda s=each, i=image: s.run(i, thresholds, ["labels"])
        for label, network in networks.items():
            work[f"torch {label}"] = lambda n=network, i=same: n(i, inputs)
        times = measured(work, options.repeats)
        row: dict[str, Any] = {"ms": {key: statistics.median(values) for key, values in times.items()}}
        row["spread_ms"] = {key: [min(values), max(values)] for key, values in times.items()}
        for runtime in ("onnxruntime", "torch"):
            row[runtime] = gained(*(row["ms"][f"{runtime} {v}"] for v in VARIANTS), batch)
        tokens = sessions["mixed"].run(different, thresholds, ["token_counts"])["token_counts"]
        row["mixed_tokens"] = {"mean": tokens.double().mean(0).tolist(), "max": tokens.amax(0).tolist()}
        if batch == 1:
            row["stream_ms"] = {
                "flash": stream(sessions["merged"], pictures(16).to(device), thresholds),
                "cudnn": stream(
                    session(name, "merged", options, device, cudnn=True), pictures(4).to(device), thresholds
                ),
            }
            row["host_ms"] = {k: host(w) for k, w in work.items() if "mixed" not in k}
        row["kernels_merged"] = kernels(work["onnxruntime merged"])
        result["batches"][str(batch)] = row
        print(name, batch, json.dumps({k: round(v, 3) for k, v in row["ms"].items()}), row["onnxruntime"], flush=True)
    result["merged_nodes"] = nodes(name, options, images[:1], thresholds)
    free, total = torch.cuda.mem_get_info()
    result["device_memory_used_bytes"] = total - free
    return result


def gained(dense: float, merged: float, truncated: float, batch: int) -> dict[str, float | None]:
    """What milliseconds a batch say of merging."""
    return {
        "speedup": dense / merged,
        "merge_efficiency": merge_efficiency(dense, merged, truncated),
        "images_per_s": 1e3 * batch / merged,
    }


def nodes(name: str, options: argparse.Namespace, image: torch.Tensor, thresholds: dict[str, float]) -> dict[str, Any]:
    """Nodes of the merged graph by provider, and copies between host and device among them."""
    feeds = {"image": image.cpu().numpy(), **{n: np.array(v, np.float32) for n, v in thresholds.items()}}
    path = options.folder / f"{name}_merged.onnx"
    return placement(path, settings_of(options), "CUDAExecutionProvider", CUDA_OPTIONS, feeds)._asdict()


def settings_of(options: argparse.Namespace) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    if not options.without_library:
        settings.register_custom_ops_library(str(require_library(LIBRARY)))
    return settings


def session(name: str, label: str, options: argparse.Namespace, device: torch.device, cudnn: bool = False) -> Any:
    """`cudnn` lets ONNX Runtime choose its attention, which is cuDNN's on Hopper."""
    settings = settings_of(options)
    recipe = recipe_of(name, options, "per_image" if label == "mixed" else "batch_min")
    path = options.folder / f"{name}_{label}.onnx"
    if device.type == "cuda":
        return CudaSession(path, settings, signature_of(recipe), {"sdpa_kernel": "0"} if cudnn else {})
    return OnCpu(ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"]))


@dataclasses.dataclass
class OnCpu:
    """For trying this script without a GPU; nothing is timed there."""

    session: ort.InferenceSession

    def run(self, image: torch.Tensor, thresholds: dict[str, float], outputs: list[str]) -> dict[str, torch.Tensor]:
        names = {i.name for i in self.session.get_inputs()}
        feeds = {"image": image.numpy(), **{n: np.array(v, np.float32) for n, v in thresholds.items() if n in names}}
        return {n: torch.from_numpy(v) for n, v in zip(outputs, self.session.run(outputs, feeds), strict=True)}


@torch.inference_mode()
def calibrated(model: VitNetwork, recipe: Recipe, image: torch.Tensor) -> dict[str, float]:
    """Thresholds between the last window or row that is to merge and the first that is not."""
    plan, grid, entering = recipe.merging, list(recipe.network.grid), {}
    windows, rows = merged_in(grid[0] * grid[1])
    network = variant_network(model, recipe, "merged", TOKENS)[0].to(image.device)
    for layer in plan.layers:
        network.model.blocks[layer - 1].merge.register_forward_pre_hook(  # type: ignore[operator, union-attr]
            lambda _, args, layer=layer: entering.__setitem__(layer, args[0])
        )

    def tokens_of(layer: int, clap: float) -> Tokens:
        network(image, merge_inputs(clap, float("inf"), device=image.device))
        return entering[layer]

    prefix = model.encoder.prefix
    similarity = window_similarity(tokens_of(plan.clap_layers[0], float("inf")).values, grid, list(plan.window), prefix)
    clap = between(similarity[0], windows)
    layer = plan.gbm_layers[0]
    tokens = tokens_of(layer, clap)
    best = gbm_similarity(tokens.values, tokens.length, prefix, plan.semantics)[0][0]
    best = best[torch.isfinite(best)].double()
    limit = between(best, rows)
    return {CLAP_THRESHOLD: clap, GBM_THRESHOLD: ((limit - best.mean()) * layer / best.std()).item()}


def bisected(value: Callable[[float], float], target: float, low: float, high: float, steps: int = 30) -> float:
    """Where a rising function reaches the target."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < target else (low, middle)
    return high


def between(values: torch.Tensor, count: int) -> float:
    ordered = values.double().sort(descending=True).values
    return ((ordered[count - 1] + ordered[count]) / 2).item()


@torch.inference_mode()
def compared(
    sessions: dict[str, Any],
    networks: dict[str, Deployed],
    model: VitNetwork,
    recipe: Recipe,
    images: torch.Tensor,
    thresholds: dict[str, float],
) -> dict[str, Any]:
    """Share of pixels whose label differs from PyTorch's in fp32, for ONNX Runtime and for PyTorch in fp16.

    Merged networks are replayed in PyTorch with ONNX Runtime's own token maps.

    Raises:
        GateError: ONNX Runtime differs in more than twice as many pixels as PyTorch in the same precision.
    """
    found: dict[str, Any] = {}
    wide = network_module(recipe.network, model.state_dict(), torch.float32)
    maps = [f"token_map_{kind}_{layer}" for kind, layer in zip(("clap", "gbm"), recipe.merging.layers, strict=True)]
    for label, each in sessions.items():
        batch = images[:3] if label == "mixed" else images[:1]
        merged = PLANS[label] == "merged"
        got = each.run(batch, thresholds, ["labels", *(["token_counts", *maps] if merged else [])])
        ours, expected = [], []
        for i in range(len(batch)):
            forced = tuple(got[m][i : i + 1] for m in maps) if merged else ()
            inputs = MergeInputs(*merge_inputs(0.0, 0.0, device=images.device)[:2], forced)
            for kind, results in ((model, ours), (wide, expected)):
                network = Deployed(replay_merging(kind, recipe.merging), recipe.network, "labels") if merged else (
                    variant_network(kind, recipe, PLANS[label], TOKENS)[0]
                )  # fmt: skip
                results.append(network.to(images.device)(batch[i : i + 1], inputs)[0])
        truth, baseline = torch.cat(expected), torch.cat(ours)
        wrong = (got["labels"] != truth).double().mean().item()
        allowed = 2 * (baseline != truth).double().mean().item() + 1e-3
        found[label] = {"pixels_differ": wrong, "allowed": allowed, "passed": wrong <= allowed}
        if merged:
            found[label]["tokens"] = got["token_counts"].tolist()
            if label == "merged":
                free = networks[label](batch, merge_inputs(*thresholds.values(), device=images.device))[1]
                found[label]["tokens_torch"] = free.tolist()
        if wrong > allowed:
            raise GateError(f"{label}: {wrong:.2%} of the labels differ, {allowed:.2%} are allowed: nothing is timed")
    return found


@torch.inference_mode()
def measured(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds on the device between two events, the configurations in turn."""
    times: dict[str, list[float]] = {key: [] for key in work}
    for repeat in range(-8, repeats):
        for key, run in work.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 0:
                times[key].append(start.elapsed_time(end))
    return times


@torch.inference_mode()
def host(run: Callable[[], Any], repeats: int = 100) -> dict[str, float]:
    """Milliseconds of the host clock until the label map is back on the host: percentiles."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = run()
        (found["labels"] if isinstance(found, dict) else found[0]).cpu()
        times.append(1e3 * (time.perf_counter() - start))
    return {f"p{p}": float(np.percentile(times, p)) for p in (50, 90, 99)}


@torch.inference_mode()
def stream(each: Any, images: torch.Tensor, thresholds: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of the host clock for photos of different token counts, one by one: as they come, and once more."""
    passes = []
    for _ in range(2):
        times = []
        for image in images:
            start = time.perf_counter()
            each.run(image[None], thresholds, ["labels"])["labels"].cpu()
            times.append(1e3 * (time.perf_counter() - start))
        passes.append(times[1:])
    return {"first_pass_median": statistics.median(passes[0]), "second_pass_median": statistics.median(passes[1])}


def kernels(run: Callable[[], object], repeats: int = 5) -> dict[str, Any]:
    """Microseconds of device time in one run, by kernel, and the launches: what the time is spent on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    top = [[e.key[:100], round(e.self_device_time_total / repeats, 1), round(e.count / repeats, 1)] for e in rows]
    busy = sum(row[1] for row in top)
    return {"busy_us": busy, "launches": sum(row[2] for row in top), "top": top[:16]}


if __name__ == "__main__":
    main()
