"""ONNX Runtime on a GPU as users run it: dense, merged and truncated networks, one picture repeated and different ones.

    python benchmarks/runtimes.py export FOLDER --networks S L             any machine; graphs without weights
    python benchmarks/runtimes.py time FOLDER --networks S L -o benchmarks/records/x.json
                                                                           needs a GPU and onnxruntime-gpu

Sizes of Segmenter with a mask transformer, 512x512 pixels and 150 classes, or recipes, as they are or, as `NAME:B`, on
a ViT of another size; random weights in fp16, label maps as output. Thresholds are set so that of a Segmenter's 1025
rows 641 are left behind CLAP and 511 behind GBM, and as many of each patch of other networks. `merged`: one picture
repeated. `mixed`: different pictures, thresholds such that they keep as many tokens on average. Each image decides
alone.

What runs is what the runner runs: up to `largest_batch_in_graphs` a network is replayed from CUDA graphs after a
warm-up, larger batches are launched operator by operator. `dense cudnn` is the dense network without this project's
attention, in ONNX Runtime's own choice, cuDNN's on Hopper; `speedup` is against the faster of both.

Every configuration is compared with PyTorch before it is timed, on the very batch that is timed; one that fails is in
the record with what it said, and the others go on. The configurations take turns, repetition by repetition. Sessions
are opened anew for each batch, as those of the batch before hold memory. Without a GPU they are compared and not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from trained import write

import algm_deploy
from algm_deploy.bundle.records import VariantName
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD, signature_of
from algm_deploy.environment import environment
from algm_deploy.errors import GateError
from algm_deploy.lowering.export import base_onnx
from algm_deploy.lowering.onnxruntime import Provider, multiplies_fp32, rewrite, single_image
from algm_deploy.lowering.onnxruntime_segments import segments
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.lowering.writing import ALIGNMENT, EXTERNAL_BYTES
from algm_deploy.merging import merge_inputs, replay_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.fp8 import use_fp8
from algm_deploy.models.loading import DTYPES, network_class, network_module
from algm_deploy.models.vit import MergeInputs, Tokens, VitNetwork
from algm_deploy.native_libraries import made_from, require_library
from algm_deploy.ops.clap import window_similarity
from algm_deploy.ops.gbm import gbm_similarity
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import recipe as named_recipe
from algm_deploy.recipe.schema import Precision, Protocol, Recipe
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession
from algm_deploy.runners.onnxruntime.runner import largest_batch_in_graphs
from algm_deploy.runners.onnxruntime.sessions import (
    CUDA_OPTIONS,
    CUDA_PROVIDER,
    CUDNN_ATTENTION,
    LIBRARY,
    TENSOR_CORES,
    CudaSession,
    checked_session,
)
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
SEED = 0
COMPARED = 4  # images of a batch
PHOTOS = 16  # that come one by one
CUDNN = "dense cudnn"
GRAPHS: dict[str, VariantName] = {"dense": "dense", CUDNN: "dense", "merged": "merged", "truncated": "truncated"}
BESIDE = ("launched", "kernels")
# Layers of decoders whose queries answer with masks and classes, and how much they answer with: by noise of 0.02 every
# mask is half there everywhere, one class is the highest in the whole picture, and comparing labels tells nothing.
# Masks get less: their layers follow one another, and of masks some hundreds below zero the library's sums end in zero
# on a GPU earlier than PyTorch's.
ANSWERS = {"cross.q.weight": 3.0, "cross.k.weight": 3.0, "decoder.mask.": 1.5, "decoder.classes.weight": 3.0}


def main() -> None:
    parser = parser_of(__doc__, "runtimes.json", repeats=15)
    parser.add_argument("step", choices=("export", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument(
        "--beside",
        nargs="*",
        choices=BESIDE,
        default=[],
        help="dense and merged launched operator by operator where they are replayed; kernels of the merged network",
    )
    options = parser.parse_args()
    if options.step == "time":
        write_record(options, network_record, onnxruntime=ort.__version__)
        return
    for name in options.networks:
        export(name, options)


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
        "sources": sources(),
        **facts,
        "precision": options.precision,
        "output": "labels",
        "repeats": options.repeats,
        "networks": {},
    }
    for name in options.networks:
        record["networks"][name] = of_network(name, options)
        write(record, options.output)


def sources() -> dict[str, str]:
    """Which code a record is of: hashes of the package's modules and, behind the version, of the native sources."""
    root = Path(algm_deploy.__file__).parent
    modules = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        modules.update(
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(root).as_posix()}\n".encode()
        )
    return {"package": modules.hexdigest()[:12], "native": made_from()}


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
    """Weights as a network starts its training with: norms are identities, all else is noise, of deviation 0.02 but in
    `ANSWERS`."""
    with torch.device("meta"):
        shapes = {
            key: tensor.shape for key, tensor in network_class(recipe.network)(recipe.network).state_dict().items()
        }
    generator = torch.Generator().manual_seed(SEED)
    dtype = DTYPES[recipe.precision]
    weights = {
        key: (torch.randn(shape, generator=generator) * deviation(key, shape)).to(dtype)
        for key, shape in shapes.items()
    }
    for key in weights:
        if "norm" in key:
            weights[key] = torch.full_like(weights[key], float(key.endswith("weight")))
    return network_module(recipe.network, weights, dtype)


def deviation(key: str, shape: Sequence[int]) -> float:
    """Of the noise in a parameter. What answers is so many times as large as what it is asked."""
    times = next((times for part, times in ANSWERS.items() if part in key), 0.0) if len(shape) > 1 else 0.0
    return times * math.prod(shape[1:]) ** -0.5 or 0.02


def merged_in(patches: int) -> tuple[int, int]:
    """Windows and rows that merge of a picture, as many of each patch as in a Segmenter's."""
    return round(patches * MERGED_WINDOWS / PATCHES), round(patches * MERGED_ROWS / PATCHES)


def tokens_of(recipe: Recipe) -> tuple[int, int]:
    """Patch tokens that are left behind each of the two merges."""
    patches = math.prod(recipe.network.grid)
    windows, rows = merged_in(patches)
    return patches - 3 * windows, patches - 3 * windows - rows


def pictures(count: int, size: tuple[int, int] = (512, 512)) -> torch.Tensor:
    """uint8 (count, 3, *size): soft colours under noise whose strength differs from patch to patch."""
    generator = torch.Generator().manual_seed(SEED)
    colours = F.interpolate(torch.rand(count, 3, 8, 8, generator=generator), size=size, mode="bilinear")
    strength = F.interpolate(torch.rand(count, 1, 32, 32, generator=generator), size=size, mode="nearest")
    noise = torch.randn(count, 3, *size, generator=generator) * strength
    return (colours * 255 + 60 * noise).clamp(0, 255).to(torch.uint8)


# --- graphs ----------------------------------------------------------------------------------------------------------


def variant_graph(
    model: VitNetwork,
    recipe: Recipe,
    variant: VariantName,
    tokens: Sequence[int],
    provider: Provider,
    custom: bool,
    own_attention: bool = True,
) -> ir.Model:
    """A variant's graph for a provider of ONNX Runtime, weights inside; the first arguments as for `variant_network`.

    `custom`: merges, unmerge and label map are custom operators; `own_attention`: attention too, where it fits.
    Outputs: labels or scores, token counts, and for `merged` token maps.
    """
    network, named = variant_network(model, recipe, variant, tokens)
    graph = base_onnx(network, named.merging, signature_of(named).image.dtype)
    add_function_bodies(graph)
    rewrite(graph, provider, custom, single_image(recipe, provider), own_attention)
    return graph


def export(name: str, options: argparse.Namespace) -> None:
    """Writes a network's graphs; their weights are places in one data file, which is written where they are timed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(name, options, "per_image")
    model = random_network(recipe)
    parameters = Deployed(model, recipe.network, "labels").state_dict()
    layout: dict[tuple[str, bool], int] = {}
    for kind, variant in tqdm(GRAPHS.items(), f"export {name}"):
        own = kind != CUDNN
        graph = variant_graph(model, recipe, variant, tokens_of(recipe), "cuda", custom=True, own_attention=own)
        move_out(graph, parameters, layout, f"{stem(name)}.data")
        ir.save(graph, options.folder / f"{stem(name, kind)}.onnx")
        if variant == "merged":
            for index, part in enumerate(segments(graph)):
                ir.save(part, options.folder / f"{stem(name, kind)}_{index}.onnx")
    places = [[key, turned, offset] for (key, turned), offset in layout.items()]
    (options.folder / f"{stem(name)}.json").write_text(json.dumps(places))


def stem(*names: str) -> str:
    """What files are called."""
    return "_".join(names).replace(":", "_").replace(" ", "_")


def move_out(
    graph: ir.Model, parameters: dict[str, Tensor], layout: dict[tuple[str, bool], int], location: str
) -> None:
    """Lets initializers be places in the data file at `location` where they are parameters, as they are or transposed.

    What was made of parameters, or of none, stays in the graph.
    """
    for name, value in graph.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        key = f"model.{name.removesuffix('constant')}weight" if name.endswith(".constant") else f"model.{name}"
        if tensor.nbytes < EXTERNAL_BYTES or key not in parameters:
            continue
        parameter, stored = parameters[key], torch.from_numpy(tensor.numpy().copy())
        turned = parameter.ndim == 2 and torch.equal(stored, parameter.T)
        if not turned and not torch.equal(stored, parameter):
            continue
        if (key, turned) not in layout:
            end = max((offset + parameters[k].nbytes for (k, _), offset in layout.items()), default=0)
            layout[key, turned] = end + -end % ALIGNMENT
        shape, offset = ir.Shape(tensor.shape.numpy()), layout[key, turned]
        value.const_value = ir.ExternalTensor(location, offset, tensor.nbytes, tensor.dtype, shape=shape, name=name)


def write_weights(name: str, network: Deployed, folder: Path) -> Path:
    """Writes the data file that the graphs of a network share."""
    parameters, path = network.state_dict(), folder / f"{stem(name)}.data"
    with path.open("wb") as file:
        for key, turned, offset in json.loads((folder / f"{stem(name)}.json").read_text()):
            file.seek(offset)
            tensor = parameters[key].cpu()
            file.write((tensor.T if turned else tensor).contiguous().numpy().tobytes())
    return path


# --- timing ----------------------------------------------------------------------------------------------------------


@contextmanager
def going_on(failures: dict[str, str], what: str) -> Iterator[None]:
    """Notes under `what` whatever goes wrong inside the block: what comes then is still to be timed."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a machine with a GPU is not there again to time the rest
        traceback.print_exc()
        failures[what] = f"{type(error).__name__}: {error}"


@torch.inference_mode()
def network_record(name: str, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"failed": {}}
    with going_on(result["failed"], "network"), closing(Bench(name, options)) as bench:
        result |= {"thresholds": bench.thresholds, "tokens": bench.tokens, "batches": {}}
        for batch in options.batches:
            row = result["batches"][str(batch)] = {"failed": {}}
            with going_on(row["failed"], "batch"):
                bench.fill(row, batch)
            print(line(name, batch, row), flush=True)
    return result


def line(name: str, batch: int, row: dict[str, Any]) -> str:
    """One batch, for people."""
    ms = ", ".join(f"{label} {value:.3f}" for label, value in row.get("ms", {}).items())
    names = ("speedup", "merge_efficiency", "merged_over_truncated", "mixed_over_duplicate_throughput")
    told = ", ".join(f"{key} {row[key]:.2f}" for key in names if row.get(key) is not None)
    failed = "; ".join(f"FAILED {what}: {error}" for what, error in row["failed"].items())
    return f"{name}, batch {batch}: {'; '.join(filter(None, (ms, told, failed))) or 'compared'}"


@dataclass
class Configuration:
    """One thing to time; `session` is a `SegmentedSession`, a `CudaSession` or an `OnCpu`."""

    variant: VariantName
    session: Any
    image: Tensor
    thresholds: dict[str, float]

    def run(self, *outputs: str) -> dict[str, Tensor]:
        """Labels where nothing else is asked for."""
        found: dict[str, Tensor] = self.session.run(self.image, self.thresholds, outputs or ("labels",))
        return found


class Bench:
    """A network and everything it is timed as."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.recipe = recipe_of(name, options, "per_image")
        self.signature = signature_of(self.recipe)
        self.tokens = tokens_of(self.recipe)
        self.model = random_network(self.recipe)
        self.weights = write_weights(name, Deployed(self.model, self.recipe.network, "labels"), options.folder)
        self.modules = Modules(self.model, self.recipe, self.tokens)
        self.images = self.pictures(max(options.batches))
        self.thresholds = calibrated(self.model, self.recipe, self.images[:1])
        self.opened: dict[tuple[str, bool], Any] = {}

    def close(self) -> None:
        """Ends the sessions, and gives the memory of the device and the weights' file back."""
        self.keep()
        self.weights.unlink()

    def keep(self, *sessions: object) -> None:
        """Ends all sessions but these: what they hold is in the way of those of a larger batch."""
        for key in [key for key, session in self.opened.items() if not any(session is kept for kept in sessions)]:
            self.opened.pop(key).close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def pictures(self, count: int) -> Tensor:
        """As the network takes them."""
        dtype = getattr(torch, self.signature.image.dtype)
        return pictures(count, self.recipe.network.image_size).to(self.device, dtype)

    def fill(self, row: dict[str, Any], batch: int) -> None:
        """Compares and times all configurations of a batch that fit; `row` has what is known so far if that fails."""
        row |= {"warm_up": {}, "execution": {}, "parity": {}, "tokens": {}}
        self.keep()
        found: dict[str, Configuration] = {}
        for label, make in self.configurations(row, batch).items():
            with going_on(row["failed"], label):
                found[label] = self.compared(row, label, make(), batch)
            self.keep(*(each.session for each in found.values()))
        if self.device.type == "cuda":
            self.timed(row, found, batch)

    def compared(self, row: dict[str, Any], label: str, each: Configuration, batch: int) -> Configuration:
        """A configuration that is right, with what is to be known of it."""
        row["parity"][label] = self.parity(label, each)
        row["execution"][label] = execution(each.session, batch)
        if each.variant == "merged":
            row["tokens"][label] = counted(each)
        return each

    def timed(self, row: dict[str, Any], found: dict[str, Configuration], batch: int) -> None:
        """Times what is there."""
        times = measured({label: each.run for label, each in found.items()}, self.options.repeats)
        row["ms"] = {label: statistics.median(values) for label, values in times.items()}
        row["spread_ms"] = {label: [min(values), max(values)] for label, values in times.items()}
        row |= against_the_faster(row["ms"], batch)
        if batch == 1:
            row["host_ms"] = {label: host(each.run) for label, each in found.items()}
        merged = found.get("merged")
        if batch == 1 and merged is not None:
            row["photos_ms"] = stream(merged.session, self.pictures(PHOTOS), self.thresholds)
        if "kernels" in self.options.beside and merged is not None:
            row["kernels_merged"] = kernels(merged.run)

    # --- what is timed ---

    def configurations(self, row: dict[str, Any], batch: int) -> dict[str, Callable[[], Configuration]]:
        """What makes each, by label."""
        same, different = self.images[:1].expand(batch, -1, -1, -1).contiguous(), self.images[:batch]

        def replayed(kind: str) -> Configuration:
            session = self.session(kind, batch <= self.most_in_graphs(kind))
            if isinstance(session, SegmentedSession) and session.graphs is not None:
                row["warm_up"][kind] = warmed(session, batch)
            return Configuration(GRAPHS[kind], session, same, self.thresholds)

        def mixed() -> Configuration:
            session = self.session("merged", batch <= self.most_in_graphs("merged"))
            row["mixed_thresholds"] = fitting = self.same_mean(session, different)
            return Configuration("merged", session, different, fitting)

        def launched(kind: str) -> Configuration:
            return Configuration(GRAPHS[kind], self.session(kind, graphs=False), same, self.thresholds)

        found: dict[str, Callable[[], Configuration]] = {kind: lambda k=kind: replayed(k) for kind in GRAPHS}
        if batch > 1:
            found["mixed"] = mixed
        for kind in ("dense", "merged") if "launched" in self.options.beside else ():
            if batch <= self.most_in_graphs(kind):
                found[f"{kind} launched"] = lambda k=kind: launched(k)
        return found

    def most_in_graphs(self, kind: str) -> int:
        """The largest batch that the runner replays."""
        plan = self.recipe.merging if GRAPHS[kind] == "merged" else DENSE
        return largest_batch_in_graphs(dataclasses.replace(self.recipe, merging=plan))

    def session(self, kind: str, graphs: bool) -> Any:
        """Opened when it is wanted first."""
        if (kind, graphs) not in self.opened:
            self.opened[kind, graphs] = self.segmented(kind) if graphs else self.whole(kind)
        return self.opened[kind, graphs]

    def segmented(self, kind: str) -> SegmentedSession:
        """To be replayed. What merges nothing is one segment, the whole graph."""
        files = [self.file(kind)]
        if GRAPHS[kind] == "merged":
            files = sorted(self.options.folder.glob(f"{stem(self.name, kind)}_[0-9].onnx"))

        def open_session(index: int, chosen: dict[str, str]) -> ort.InferenceSession:
            if self.device.type == "cpu":
                return on_cpu(files[index])
            options = CUDA_OPTIONS | options_of(kind, files[index]) | chosen
            return checked_session(files[index], session_options(), CUDA_PROVIDER, options)

        return SegmentedSession(open_session, len(files), self.device, self.most_in_graphs(kind))

    def whole(self, kind: str) -> Any:
        """To be launched operator by operator."""
        if self.device.type == "cpu":
            return OnCpu(on_cpu(self.file(kind)))
        options = session_options()
        return CudaSession(self.file(kind), options, self.signature, options_of(kind, self.file(kind)), self.device)

    def file(self, kind: str) -> Path:
        """Of the whole graph."""
        return Path(self.options.folder) / f"{stem(self.name, kind)}.onnx"

    def same_mean(self, session: Any, images: Tensor) -> dict[str, float]:
        """Thresholds with which these images keep as many tokens on average as one picture repeated."""

        def mean(stage: int, clap: float, gbm: float) -> float:
            thresholds = {CLAP_THRESHOLD: clap, GBM_THRESHOLD: gbm}
            counts = session.run(images, thresholds, ["token_counts"])["token_counts"]
            return float(counts[:, stage].double().mean())

        return dict(zip((CLAP_THRESHOLD, GBM_THRESHOLD), same_mean(mean, self.tokens), strict=True))

    def parity(self, label: str, each: Configuration) -> dict[str, Any]:
        """As `Modules.compared`."""
        names = [f"token_map_{merge}" for merge in self.signature.merges] if each.variant == "merged" else []
        for _ in range(2):  # captured where nothing was warmed up, then replayed
            found = each.run("labels", *names)
        maps = [found[name] for name in names]
        what, precision = f"{self.name} {label}", self.recipe.precision
        return self.modules.compared(what, each.variant, found["labels"], each.image, maps, precision)


def options_of(kind: str, graph: Path) -> dict[str, str]:
    """Provider options, as the runner chooses them: which attention, and where convolutions may be computed."""
    attention = CUDNN_ATTENTION if kind == CUDNN else {}
    return attention | ({} if multiplies_fp32(ir.load(graph)) else TENSOR_CORES)


def session_options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # as the runner's
    options.register_custom_ops_library(str(require_library(LIBRARY)))
    return options


def on_cpu(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, session_options(), providers=["CPUExecutionProvider"])


@dataclass
class OnCpu:
    """For trying this script without a GPU; nothing is timed there."""

    session: ort.InferenceSession

    def run(self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str]) -> dict[str, Tensor]:
        names = {i.name for i in self.session.get_inputs()}
        feeds = {"image": image.numpy(), **{n: np.array(v, np.float32) for n, v in thresholds.items() if n in names}}
        found = self.session.run(list(outputs), feeds)
        return {n: torch.from_numpy(v) for n, v in zip(outputs, found, strict=True)}

    def close(self) -> None:
        del self.session


def warmed(session: SegmentedSession, batch: int) -> dict[str, Any]:
    """Captures all that batches of this size need: how long that takes, how many graphs, how much memory."""
    assert session.graphs is not None
    captures, (free, _), start = session.graphs.captures, torch.cuda.mem_get_info(), time.perf_counter()
    session.warm_up(batch)
    torch.cuda.synchronize()
    elapsed = 1e3 * (time.perf_counter() - start)
    taken = free - torch.cuda.mem_get_info()[0]
    return {"ms": elapsed, "captures": session.graphs.captures - captures, "memory_bytes": taken}


def execution(session: Any, batch: int) -> str:
    """How a batch is run."""
    if not isinstance(session, SegmentedSession) or session.graphs is None:
        return "launched"
    if batch in session.joined:
        return "graphs joined into one"
    first, _ = session.graphs.found((batch, 0))
    return "launched" if first is None else "graphs"


def counted(each: Configuration) -> dict[str, list[float]]:
    """Patch tokens behind each merge."""
    counts = each.run("token_counts")["token_counts"].double()
    return {"mean": counts.mean(0).tolist(), "min": counts.amin(0).tolist(), "max": counts.amax(0).tolist()}


def against_the_faster(ms: dict[str, float], batch: int) -> dict[str, Any]:
    """What milliseconds a batch say of merging, against whichever dense network is the faster one; nothing without."""
    both = {label: ms[label] for label in ("dense", CUDNN) if label in ms}
    if not both:
        return {}
    faster = min(both, key=lambda label: both[label])
    return {"faster_dense": faster} | derived(ms | {"dense": both[faster]}, batch)


def gained(dense: float, merged: float, truncated: float, batch: int) -> dict[str, float | None]:
    """What milliseconds a batch say of merging."""
    return {
        "speedup": dense / merged,
        "merge_efficiency": merge_efficiency(dense, merged, truncated),
        "images_per_s": 1e3 * batch / merged,
    }


def derived(ms: dict[str, float], batch: int) -> dict[str, Any]:
    """What milliseconds a batch by configuration say of merging, as far as those are there that it takes."""
    dense, merged, truncated, mixed = (ms.get(label) for label in (*VARIANTS, "mixed"))
    if dense is None or merged is None:
        return {}
    found: dict[str, Any] = {"speedup": dense / merged, "images_per_s": 1e3 * batch / merged}
    if truncated is not None:
        found |= gained(dense, merged, truncated, batch) | {"merged_over_truncated": merged / truncated}
    return found | ({"mixed_over_duplicate_throughput": merged / mixed} if mixed is not None else {})


# --- thresholds ------------------------------------------------------------------------------------------------------


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

    def tokens_at(layer: int, clap: float) -> Tokens:
        network(image, merge_inputs(clap, float("inf"), device=image.device))
        return entering[layer]

    prefix = model.encoder.prefix
    similarity = window_similarity(tokens_at(plan.clap_layers[0], float("inf")).values, grid, list(plan.window), prefix)
    clap = between(similarity[0], windows)
    layer = plan.gbm_layers[0]
    tokens = tokens_at(layer, clap)
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


def same_mean(mean: Callable[[int, float, float], float], tokens: Sequence[int]) -> tuple[float, float]:
    """Thresholds with which images keep so many tokens on average.

    `mean` tells how many they keep behind the merge of an index, by the thresholds of CLAP and GBM.
    """
    clap = bisected(lambda x: mean(0, x, math.inf), tokens[0], -1.0, 1.0)
    return clap, bisected(lambda x: mean(1, clap, x), tokens[1], -30.0, 30.0)


def between(values: torch.Tensor, count: int) -> float:
    ordered = values.double().sort(descending=True).values
    return ((ordered[count - 1] + ordered[count]) / 2).item()


# --- parity and time -------------------------------------------------------------------------------------------------


class Modules:
    """The modules of a network as they are, in its own precision and in fp32, to compare configurations with."""

    def __init__(self, model: VitNetwork, recipe: Recipe, tokens: Sequence[int]) -> None:
        self._model, self._recipe, self._tokens = model, recipe, tokens
        self._exact = network_module(recipe.network, model.state_dict(), torch.float32)

    def compared(
        self,
        what: str,
        variant: VariantName,
        labels: Tensor,
        image: Tensor,
        maps: Sequence[Tensor],
        precision: Precision,
    ) -> dict[str, Any]:
        """Share of pixels whose label differs from the modules in fp32, which replay the configuration's own maps.

        By image of the batch, with what is allowed: twice what the modules in the same precision differ in. `labels`:
        how many different ones the modules in fp32 have in these images.

        Raises:
            GateError: more pixels of these images differ than are allowed, or all have one label, which nothing that
                went wrong would change.
        """
        chosen = sorted({round(i) for i in np.linspace(0, len(labels) - 1, COMPARED)})
        wrong, allowed, different = [], [], set[int]()
        for i in chosen:
            forced = tuple(map[i : i + 1] for map in maps)
            truth, plain = (self._replayed(kind, variant, image[i : i + 1], forced) for kind in ("fp32", precision))
            wrong.append((labels[i] != truth[0]).double().mean().item())
            allowed.append(2 * (plain != truth).double().mean().item() + 1e-3)
            different |= set(truth.unique().tolist())
        found = {"images": chosen, "labels": len(different), "pixels_differ": wrong, "allowed": allowed}
        if len(different) < 2:
            raise GateError(f"{what}: {found}: expected several labels to compare: nothing is timed")
        if np.mean(wrong) > np.mean(allowed):
            raise GateError(f"{what}: {found}: nothing is timed")
        return found

    def _replayed(self, precision: Precision, variant: VariantName, image: Tensor, maps: tuple[Tensor, ...]) -> Tensor:
        model = self._exact if precision == "fp32" else self._model
        if variant == "merged":
            network = Deployed(replay_merging(model, self._recipe.merging), self._recipe.network, "labels").eval()
        else:
            network = variant_network(model, self._recipe, variant, self._tokens)[0]
        inputs = MergeInputs(*merge_inputs(0.0, 0.0, device=image.device)[:2], maps)
        if precision == "fp8":
            use_fp8(network)
        with torch.backends.cudnn.flags(allow_tf32=False):
            found: Tensor = network.to(image.device)(image, inputs)[0]
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
