"""Times of the CUDA merging kernels beside their floors, for the widths of ViT-T, S, B and L at 512 x 512.

    cmake -S runtimes/kernels -B build/kernels -DALGM_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native
    cmake --build build/kernels
    python benchmarks/kernels/time_kernels.py build/kernels/libalgm_kernels.so

An operator's floor is the larger of two times: every input read once and every output written once at the bandwidth of
a large copy, and its multiply-adds at the rate of a large matrix product (both measured first, on this device). For
label_map the arithmetic is one multiply-add and one maximum a pixel and class; maxima issue on 64 lanes a
multiprocessor. `x` is the time over that floor. Launches are counted apart: `launches_us` is what as many empty kernels
in a row take as the operator launches, and `x_launched` the time over floor plus launches.
A time is the median over replays of a CUDA graph that runs the operator on a rotation of inputs larger than the cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "native"))
from kernel_library import (  # noqa: E402 - found through the line above
    ROWS_ON_DEVICE,
    ClapParams,
    DeviceMemory,
    GbmParams,
    Kernels,
    LabelMapParams,
    UnmergeParams,
)

WIDTHS = {"T": 192, "S": 384, "B": 768, "L": 1024}
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
GRID, PATCHES, CLASSES, PIXELS = 32, 1024, 150, 512
AFTER_CLAP, AFTER_GBM = 641, 511  # rows that the thresholds below aim at
LAUNCHES = {"clap": 3, "gbm": 3, "label_map": 1, "unmerge": 1}  # kernels one after another
ROTATION_BYTES = 200e6
MAX_LANES = 64  # maxima a clock and multiprocessor


class Stream:
    """Calls kernels on torch's current stream with tensors as arguments."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels

    def call(self, name: str, params: Any, *arguments: Any) -> None:
        converted = [
            ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in arguments
        ]
        status = self.kernels.function(name)(
            ctypes.byref(params), *converted, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        )
        if status:
            raise RuntimeError(f"{name}: {self.kernels.status_text(status)}")


def median_us(run: Callable[[], None], repeats: int = 15) -> float:
    """Median time of run() in microseconds, by events, after two warm-ups."""
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def graph_us(calls: list[Callable[[], None]]) -> float:
    """Median time of one call when all of them run one after another in a graph."""
    rounds = max(1, 32 // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return median_us(graph.replay) / (rounds * len(calls))


def launch_us() -> float:
    """What each further empty kernel adds to a chain in a graph: torch's sleep of zero clocks."""
    return graph_us([lambda: torch.cuda._sleep(0)])


def ceilings() -> dict[str, float]:
    """Bandwidth in byte/s of a large copy, rates in flop/s of large matrix products, time of an empty kernel."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    found = {"copy_bytes_per_s": 2 * source.numel() / (median_us(lambda: target.copy_(source)) * 1e-6)}
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, dtype, side in (("float16", torch.float16, 8192), ("float32", torch.float32, 4096)):
        a = torch.randn(side, side, device="cuda").to(dtype)
        found[f"{name}_flop_per_s"] = 2 * side**3 / (median_us(lambda a=a: a @ a, 10) * 1e-6)
    clock = device_query("clocks.max.sm").split()[0]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found["maxima_per_s"] = MAX_LANES * multiprocessors * float(clock) * 1e6
    found["launch_us"] = launch_us()
    return found


def device_query(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]  # noqa: S603


def similar_tokens(batch: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Forty segments of neighbouring tokens that resemble each other to varying degrees, as in a photo."""
    common = torch.randn(batch, 1, width, device="cuda")
    segments = common + 0.7 * torch.randn(batch, 40, width, device="cuda")
    base = segments[:, torch.arange(rows, device="cuda") * 40 // rows]
    spread = torch.rand(batch, (rows + 3) // 4, 1, device="cuda").repeat_interleave(4, dim=1)[:, :rows]
    return (base + (0.3 + spread) * torch.randn(batch, rows, width, device="cuda")).to(dtype)


class Clap:
    """One input set of CLAP, with a threshold that merges half of the windows."""

    def __init__(self, stream: Stream, batch: int, width: int, dtype: torch.dtype):
        self.stream, rows = stream, PATCHES + 1
        self.params = ClapParams(batch, rows, width, GRID, GRID, 2, 2, 1, DTYPE_CODES[dtype], 0, 0, 0)
        self.tokens, self.size = similar_tokens(batch, rows, width, dtype), torch.ones(batch, rows, device="cuda")
        self.workspace = workspace(stream, "clap_workspace", self.params)
        self.similarity = torch.empty(batch, PATCHES // 4, device="cuda")
        self.similarity_only()
        self.threshold = self.similarity.median().reshape(())
        self.map = torch.empty(batch, PATCHES, dtype=torch.int64, device="cuda")
        self.length, self.rows = self.map.new_empty(batch), self.map.new_empty(())
        self.out, self.out_size = torch.empty_like(self.tokens), torch.empty_like(self.size)

    def similarity_only(self) -> None:
        self.stream.call("clap_similarity", self.params, self.tokens, self.similarity)

    def decide_only(self) -> None:
        inputs = (self.similarity, self.threshold)
        self.stream.call("clap_decide_given", self.params, *inputs, *self._decided())

    def _decided(self) -> tuple[Any, ...]:
        return self.map, self.length, self.rows, None, self.workspace

    def apply_only(self) -> None:
        arguments = (self.tokens, self.size, self.workspace, ROWS_ON_DEVICE, self.out, self.out_size)
        self.stream.call("clap_apply", self.params, *arguments)

    def whole(self) -> None:
        self.stream.call("clap_decide", self.params, self.tokens, self.threshold, *self._decided())
        self.apply_only()

    def bytes_and_flops(self) -> tuple[float, float]:
        moved = (self.tokens.shape[1] * len(self.length) + int(self.length.sum())) * self.tokens.shape[2]
        return moved * self.tokens.element_size(), 2 * 10 * self.similarity.numel() * self.tokens.shape[2]


class Gbm:
    """One input set of GBM at the rows that CLAP leaves; the adaptive threshold is scaled to the aimed count."""

    def __init__(self, stream: Stream, batch: int, width: int, dtype: torch.dtype):
        self.stream, rows = stream, AFTER_CLAP
        self.params = GbmParams(batch, rows, width, PATCHES, 1, 1.0, DTYPE_CODES[dtype], 0, 0, 0)
        self.tokens, self.size = similar_tokens(batch, rows, width, dtype), torch.ones(batch, rows, device="cuda")
        self.in_map = torch.arange(PATCHES, device="cuda").clamp(max=rows - 2).add(1).repeat(batch, 1)
        self.in_length = torch.full((batch,), rows, device="cuda")
        self.workspace = workspace(stream, "gbm_workspace", self.params)
        candidates = stream.kernels.query("gbm_candidates", self.params)
        self.best = torch.empty(batch, candidates, device="cuda")
        self.best_row = torch.empty(batch, candidates, dtype=torch.int32, device="cuda")
        self.similarity_only()
        reached = self.best.double().quantile(1 - (AFTER_CLAP - AFTER_GBM) / candidates, dim=1)
        scale = (reached - self.best.double().mean(1)) / self.best.double().std(1)
        self.threshold = scale.mean().float()
        self.map = torch.empty_like(self.in_map)
        self.length, self.rows = self.map.new_empty(batch), self.map.new_empty(())
        self.out, self.out_size = torch.empty_like(self.tokens), torch.empty_like(self.size)

    def similarity_only(self) -> None:
        arguments = (self.tokens, self.in_length, self.best, self.best_row, self.workspace)
        self.stream.call("gbm_similarity", self.params, *arguments)

    def _rest(self) -> tuple[Any, ...]:
        inputs = (self.in_map, self.in_length, self.threshold)
        return *inputs, self.map, self.length, self.rows, None, self.workspace

    def decide_only(self) -> None:
        self.stream.call("gbm_decide_given", self.params, self.best, self.best_row, *self._rest())

    def apply_only(self) -> None:
        arguments = (self.tokens, self.size, self.workspace, ROWS_ON_DEVICE, self.out, self.out_size)
        self.stream.call("gbm_apply", self.params, *arguments)

    def whole(self) -> None:
        self.stream.call("gbm_decide", self.params, self.tokens, *self._rest())
        self.apply_only()

    def bytes_and_flops(self) -> tuple[float, float]:
        rows, width = self.tokens.shape[1:]
        moved = (rows * len(self.length) + int(self.length.sum())) * width * self.tokens.element_size()
        return moved, 2 * len(self.length) * (rows // 2) * (rows // 2) * width


class Tail:
    """Scores of the merged tokens and what turns them into a picture; `photo`: objects of 8 x 8 patches stand out."""

    def __init__(self, stream: Stream, batch: int, dtype: torch.dtype, photo: bool):
        self.stream, code = stream, DTYPE_CODES[dtype]
        rows = AFTER_GBM - 1
        row_of_patch = torch.arange(PATCHES, device="cuda").mul(rows).div(PATCHES).long()
        scores = torch.randn(batch, rows, CLASSES, device="cuda")
        if photo:
            patch_of_row = torch.arange(rows, device="cuda").mul(PATCHES).div(rows).long()
            region = patch_of_row // (8 * GRID) * (GRID // 8) + patch_of_row % GRID // 8
            winners = torch.randint(CLASSES, (batch, 16), device="cuda")[:, region, None]
            scores.scatter_add_(2, winners, torch.full(winners.shape, 6.0, device="cuda"))
        self.scores = scores.to(dtype)
        self.map = row_of_patch.add(1).repeat(batch, 1)
        self.labels = torch.empty(batch, PIXELS, PIXELS, dtype=torch.uint8, device="cuda")
        self.values = torch.empty(batch, PATCHES, CLASSES, dtype=dtype, device="cuda")
        self.label_params = LabelMapParams(batch, rows, CLASSES, GRID, GRID, PIXELS, PIXELS, 1, code, 0)
        self.unmerge_params = UnmergeParams(batch, rows, CLASSES, PATCHES, 1, code)

    def label_map(self) -> None:
        self.stream.call("label_map", self.label_params, self.scores, self.map, self.labels)

    def unmerge(self) -> None:
        self.stream.call("unmerge", self.unmerge_params, self.scores, self.map, self.values)


def workspace(stream: Stream, query: str, params: Any) -> torch.Tensor:
    return torch.empty(stream.kernels.query(query, params), dtype=torch.uint8, device="cuda")


def rotation(make: Callable[[], Any], bytes_each: float) -> list[Any]:
    return [make() for _ in range(max(2, min(24, int(ROTATION_BYTES / bytes_each) + 1)))]


def row(
    limits: dict[str, float], name: str, batch: int, times: dict[str, float], floor_us: float, **facts: Any
) -> dict[str, Any]:
    total, launches = times["total_us"], LAUNCHES[name] * limits["launch_us"]
    rounded = {key: round(value, 2) for key, value in times.items()}
    return {
        "kernel": name,
        "batch": batch,
        **facts,
        **rounded,
        "floor_us": round(floor_us, 2),
        "x": round(total / floor_us, 2),
        "launches_us": round(launches, 2),
        "x_launched": round(total / (floor_us + launches), 2),
    }


def merge_rows(
    stream: Stream, limits: dict[str, float], kind: type, model: str, batch: int, dtype: torch.dtype
) -> dict[str, Any]:
    width = WIDTHS[model]
    element = torch.empty((), dtype=dtype).element_size()
    sets = rotation(lambda: kind(stream, batch, width, dtype), batch * PATCHES * width * element)
    times = {"total_us": graph_us([s.whole for s in sets])}
    for stage in ("similarity", "decide", "apply"):
        times[f"{stage}_us"] = graph_us([getattr(s, f"{stage}_only") for s in sets])
    moved, flops = sets[0].bytes_and_flops()
    rate = "float32_flop_per_s" if dtype == torch.float32 else "float16_flop_per_s"
    floor = max(moved / limits["copy_bytes_per_s"], flops / limits[rate]) * 1e6
    facts = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "rows_out": float(sets[0].length.double().mean()),
    }
    return row(limits, kind.__name__.lower(), batch, times, floor, **facts)


def tail_rows(stream: Stream, limits: dict[str, float], batch: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    rows, name = [], str(dtype).removeprefix("torch.")
    for photo in (False, True):
        sets = [Tail(stream, batch, dtype, photo) for _ in range(4)]
        moved = sets[0].scores.numel() * sets[0].scores.element_size() + sets[0].labels.numel()
        arithmetic = sets[0].labels.numel() * CLASSES / limits["maxima_per_s"]
        floor = max(moved / limits["copy_bytes_per_s"], arithmetic) * 1e6
        times = {"total_us": graph_us([s.label_map for s in sets])}
        rows.append(row(limits, "label_map", batch, times, floor, scores="photo" if photo else "random", dtype=name))
    moved = (sets[0].scores.numel() + sets[0].values.numel()) * sets[0].scores.element_size()
    floor = moved / limits["copy_bytes_per_s"] * 1e6
    rows.append(row(limits, "unmerge", batch, {"total_us": graph_us([s.unmerge for s in sets])}, floor, dtype=name))
    return rows


def measure(library: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    stream, limits = Stream(Kernels(library, DeviceMemory())), ceilings()
    rows = []
    for batch in (1, 8, 32):
        for model in WIDTHS:
            for kind in (Clap, Gbm):
                rows.append(merge_rows(stream, limits, kind, model, batch, torch.float16))
        rows += tail_rows(stream, limits, batch, torch.float16)
    for model, kind in (("S", Clap), ("S", Gbm), ("L", Clap), ("L", Gbm)):
        rows.append(merge_rows(stream, limits, kind, model, 32, torch.float32))
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": device_query("driver_version")}
    device = {"name": torch.cuda.get_device_name(), "python": platform.python_version(), **versions}
    return {"schema": 1, "device": device, "ceilings": limits, "rows": rows}


def print_table(record: dict[str, Any]) -> None:
    for name, value in record["ceilings"].items():
        print(f"{name}: {value:.3g}")
    for r in record["rows"]:
        what = f"{r['kernel']} {r.get('model', r.get('scores', ''))} {r['dtype']} x{r['batch']}"
        stages = " ".join(f"{k[:-3]} {r[k]:.1f}" for k in ("similarity_us", "decide_us", "apply_us") if k in r)
        print(
            f"{what:34} {r['total_us']:8.1f} us  floor {r['floor_us']:7.1f}  x{r['x']:<6} "
            f"with launches x{r['x_launched']:<6} {stages}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="libalgm_kernels.so with the CUDA kernels")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "kernels.json")
    arguments = parser.parse_args()
    record = measure(arguments.library)
    print_table(record)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
