"""ONNX Runtime at small batches on a GPU: CUDA graphs of the segments between the merges beside plain launches.

    python benchmarks/ort_graphs.py export FOLDER --networks S L         any machine; graphs without weights
    python benchmarks/ort_graphs.py time FOLDER -o benchmarks/records/x.json    needs a GPU and onnxruntime-gpu

Networks, weights and thresholds are those of `runtimes.py`. Parity comes first: labels against PyTorch in fp32, and
token counts, token maps and labels of different pictures against the same network launched kernel by kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import torch

import runtimes
from algm_deploy.errors import GateError
from algm_deploy.lowering.onnxruntime_segments import STEP, segments
from algm_deploy.models.deployed import Deployed
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession
from algm_deploy.runners.onnxruntime.sessions import CUDA_OPTIONS, CUDA_PROVIDER, checked_session
from algm_deploy.timing.variants import VARIANTS, variant_network
from runtimes import (
    TOKENS,
    calibrated,
    host,
    kernels,
    parser_of,
    pictures,
    random_network,
    recipe_of,
    settings_of,
    write_record,
)

PICTURES = 16  # that come one by one


def main() -> None:
    parser = parser_of(__doc__, "ort_graphs.json", repeats=200)
    parser.add_argument("step", choices=("export", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small-batches", nargs="*", type=int, default=[], help="host times of these batches as well")
    options = parser.parse_args()
    options.without_library, options.batches = False, [1, 8]
    if options.step == "export":
        for name in options.networks:
            export(name, options)
        return
    write_record(options, timed, onnxruntime=ort.__version__, rows_step=STEP)


def export(name: str, options: argparse.Namespace) -> None:
    """The graphs of `runtimes.py`, and the merged one that decides image by image in segments."""
    runtimes.export(name, options)
    for index, part in enumerate(segments(ir.load(options.folder / f"{name}_mixed.onnx"))):
        ir.save(part, options.folder / f"{name}_segment_{index}.onnx")


def segmented(name: str, variant: str, options: argparse.Namespace, device: torch.device) -> SegmentedSession:
    """A variant under CUDA graphs. Those that merge nothing are one segment, the whole graph."""
    files = [options.folder / f"{name}_{variant}.onnx"]
    if variant == "merged":
        files = sorted(options.folder.glob(f"{name}_segment_*.onnx"))

    def open_session(index: int, chosen: dict[str, str]) -> ort.InferenceSession:
        if device.type == "cpu":
            return ort.InferenceSession(files[index], settings_of(options), providers=["CPUExecutionProvider"])
        return checked_session(files[index], settings_of(options), CUDA_PROVIDER, CUDA_OPTIONS | chosen)

    return SegmentedSession(open_session, len(files), device, max(1, *options.small_batches))


def timed(name: str, options: argparse.Namespace) -> dict[str, Any]:
    recipe = recipe_of(name, options, "per_image")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = random_network(recipe)
    runtimes.write_weights(name, Deployed(model, recipe.network, "labels"), options.folder)
    images = pictures(PICTURES).to(device)
    thresholds = calibrated(model, recipe, images[:1])
    memory = Memory()
    plain = {v: runtimes.session(name, v, options, device) for v in VARIANTS}
    result: dict[str, Any] = {"thresholds": thresholds, "memory_bytes": {"launched": memory.taken()}}
    graphs = {v: segmented(name, v, options, device) for v in VARIANTS}
    result["memory_bytes"]["graphs"] = memory.taken()
    alone = runtimes.session(name, "mixed", options, device)
    networks = {v: variant_network(model, recipe, v, TOKENS)[0].to(device) for v in VARIANTS}
    result["parity"] = {
        "launched": runtimes.compared(plain, networks, model, recipe, images, thresholds),
        "graphs": runtimes.compared(graphs, networks, model, recipe, images, thresholds),
    }
    allowed = sum(result["parity"][kind]["merged"]["allowed"] for kind in ("launched", "graphs"))
    result["first_pass"] = agreement(alone, graphs["merged"], images, thresholds, allowed)
    result["captures"] = capture_costs(graphs, memory)
    result["second_pass"] = agreement(alone, graphs["merged"], images, thresholds, allowed)
    print(name, json.dumps(result), flush=True)
    if device.type == "cpu":
        return result
    image = images[:1]
    rows: dict[str, Any] = {}
    for variant in VARIANTS:
        for kind, sessions in (("launched", plain), ("graphs", graphs)):
            work = work_of(sessions[variant], image, thresholds)
            host(work, 20)
            busy = kernels(work)
            rows[f"{kind} {variant}"] = {"host_ms": host(work, options.repeats), "device_ms": busy["busy_us"] / 1e3}
            if kind == "graphs":
                rows[f"{kind} {variant}"]["kernels"] = busy["top"][:12]
                rows[f"{kind} {variant}"]["graph_launches"] = graph_launches(work)
    with ThreadPoolExecutor(1) as pool:
        work = work_of(graphs["merged"], image, thresholds)
        pool.submit(host, work, 20).result()
        rows["graphs merged, another thread"] = {"host_ms": pool.submit(host, work, options.repeats).result()}
    result["batch_1"] = rows
    result["small_batches"] = {
        "decisions_compared": True,
        "host_ms": {
            str(batch): small(pictures(batch).to(device), plain, alone, graphs, thresholds)
            for batch in options.small_batches
        },
    }
    result["use"] = {v: s.use._asdict() for v, s in graphs.items()}
    for session in graphs.values():
        session.close()
    print(name, json.dumps({k: round(v["host_ms"]["p50"], 3) for k, v in rows.items()}), flush=True)
    return result


def small(images: torch.Tensor, plain: Any, alone: Any, graphs: Any, thresholds: dict[str, float]) -> dict[str, Any]:
    """Percentiles of the host clock for a batch of different images that decide alone.

    Raises:
        GateError: graphs decide otherwise than launches.
    """
    names = ["token_counts", *maps_of(graphs["merged"])]
    one, other = (session.run(images, thresholds, names) for session in (alone, graphs["merged"]))
    if any(not torch.equal(one[name], other[name]) for name in names):
        raise GateError(f"batch {len(images)}: graphs and launches decide differently: nothing is timed")
    work = {
        "launched dense": plain["dense"],
        "launched merged": alone,
        "graphs dense": graphs["dense"],
        "graphs merged": graphs["merged"],
    }
    return {name: host(warm(work_of(session, images, thresholds)), 60) for name, session in work.items()}


def maps_of(session: SegmentedSession) -> list[str]:
    """Names of the token maps."""
    return [name for name in session.outputs if name.startswith("token_map_")]


class Memory:
    """Device memory that was taken since the last look, in bytes."""

    def __init__(self) -> None:
        self._used = 0
        self.taken()

    def taken(self) -> int:
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        before, self._used = self._used, total - free
        return self._used - before


def work_of(session: Any, image: torch.Tensor, thresholds: dict[str, float]) -> Callable[[], Any]:
    return lambda: session.run(image, thresholds, ["labels"])


def warm(work: Callable[[], Any]) -> Callable[[], Any]:
    """After the run that captures."""
    work()
    return work


def agreement(
    plain: Any, graphs: SegmentedSession, images: torch.Tensor, thresholds: dict[str, float], allowed: float
) -> dict[str, Any]:
    """Pictures one by one, as launched and from graphs: what differs, and medians of the host clock.

    Raises:
        GateError: other decisions, or labels that differ in more than the `allowed` share of the pixels.
    """
    names = ["labels", "token_counts", *maps_of(graphs)]
    times: dict[str, list[float]] = {"launched": [], "graphs": []}
    pixels, counts = [], []
    for image in images:
        found = {}
        for kind, session in (("launched", plain), ("graphs", graphs)):
            start = time.perf_counter()
            found[kind] = {n: t.cpu() for n, t in session.run(image[None], thresholds, names).items()}
            times[kind].append(1e3 * (time.perf_counter() - start))
        one, other = found["launched"], found["graphs"]
        pixels.append((one["labels"] != other["labels"]).double().mean().item())
        counts.append(one["token_counts"][0].tolist())
        if any(not torch.equal(one[n], other[n]) for n in names[1:]) or statistics.mean(pixels) > allowed:
            raise GateError(
                f"graphs and launches disagree: counts {one['token_counts']} and {other['token_counts']}, "
                f"{statistics.mean(pixels):.2%} of the labels"
            )
    medians = {f"{kind}_ms_p50": statistics.median(values) for kind, values in times.items()}
    return {
        "pictures": len(images),
        "labels_differ_mean": statistics.mean(pixels),
        "labels_differ_max": max(pixels),
        "token_counts": counts,
        **medians,
    }


def capture_costs(graphs: dict[str, SegmentedSession], memory: Memory) -> dict[str, Any]:
    """Milliseconds and device memory until every size of one image is captured, and how many were missing."""
    costs: dict[str, Any] = {}
    for variant, session in graphs.items():
        memory.taken()
        before, start = session.use.captured, time.perf_counter()
        session.warm_up()
        elapsed = 1e3 * (time.perf_counter() - start)
        costs[variant] = {"all_ms": elapsed, "captured": session.use.captured - before, "memory_bytes": memory.taken()}
    return costs


def graph_launches(work: Callable[[], Any]) -> dict[str, int]:
    """Calls of one run that start something on the device."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        torch.cuda.synchronize()
    wanted = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")
    return {event.key: event.count for event in profile.key_averages() if event.key in wanted}


if __name__ == "__main__":
    main()
