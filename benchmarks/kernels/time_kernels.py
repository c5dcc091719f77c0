"""Times of the CUDA merging kernels beside their floors, for the widths of ViT-T, S, B and L at 512 x 512.

    algm-deploy build-native kernels
    python benchmarks/kernels/time_kernels.py
    python benchmarks/kernels/time_kernels.py --ptx 80 75   # and the code of earlier GPUs beside it, on the same inputs

An operator's floor is the larger of two times: every input read once and every output written once at the bandwidth of
a large copy, and its multiply-adds at the rate of a large matrix product (both measured first, on this device). For
label_map the arithmetic is one multiply-add and one maximum a pixel and class; maxima issue on 64 lanes a
multiprocessor. `x` is the time over that floor. Launches are counted apart: `launches_us` is what as many empty kernels
in a row take as the operator launches, and `x_launched` the time over floor plus launches.
A time is the median over replays of a CUDA graph that runs the operator on a rotation of inputs larger than the cache.

The code of earlier GPUs comes as PTX alone, which the driver translates for this one: what their instructions and tiles
cost here, not what an earlier GPU would take. `x_native` is such a time over that of the library itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from algm_deploy.native_libraries import LIBRARIES, build, cache_folder, require_library
from algm_deploy.ops.kernel_library import ROWS_ON_DEVICE, label_map_params, unmerge_params
from algm_deploy.ops.native_kernels import LIBRARY, Decision, Kernels, Merge, clap_merge, gbm_merge

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {"T": 192, "S": 384, "B": 768, "L": 1024}
GRID, PATCHES, CLASSES, PIXELS = 32, 1024, 150, 512
BATCHES = (1, 8, 32)
AFTER_CLAP, AFTER_GBM = 641, 511  # rows that the thresholds below aim at
LAUNCHES = {"clap": 3, "gbm": 3, "label_map": 1, "unmerge": 1}  # kernels one after another
ROTATION_BYTES = 200e6
MAX_LANES = 64  # maxima a clock and multiprocessor
REPEATS = 15
NATIVE = "native"


class Bench(NamedTuple):
    """The kernels to time, what this device could do, and how often a graph is replayed for a median."""

    kernels: Kernels
    limits: dict[str, float]
    repeats: int


Rows = list[dict[str, Any]]
Case = tuple[Callable[..., Rows], tuple[Any, ...]]
"""What times it, and what that takes behind the Bench."""


def median_us(run: Callable[[], None], repeats: int = REPEATS) -> float:
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


def graph_us(calls: list[Callable[[], None]], repeats: int = REPEATS) -> float:
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
    return median_us(graph.replay, repeats) / (rounds * len(calls))


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


class Merging:
    """One input set of a merge: its stages apart, and all of them. A kind of merge adds `similarity_only`, the inputs
    of its decision beside tokens or similarities, and the products that its similarities need."""

    merge: Merge
    decision: Decision
    similarities: tuple[torch.Tensor, ...]
    others: Callable[[], tuple[torch.Tensor, ...]]
    products: Callable[[], int]

    def __init__(self, kernels: Kernels, batch: int, rows: int, width: int, dtype: torch.dtype):
        self.kernels, self.tokens = kernels, similar_tokens(batch, rows, width, dtype)
        self.size = torch.ones(batch, rows, device="cuda")
        self.out = torch.empty_like(self.tokens), torch.empty_like(self.size)

    def call(self, stage: str, *arguments: torch.Tensor | int | None) -> None:
        self.kernels.call(f"{self.merge.kind}_{stage}", self.merge.params, *arguments)

    def decided(self, *inputs: torch.Tensor) -> None:
        """From the similarities in place of `inputs`, or from tokens."""
        out = self.decision
        stage = "decide" if inputs[0] is self.tokens else "decide_given"
        self.call(stage, *inputs, *self.others(), out.map, out.length, out.rows, None, out.workspace)

    def decide_only(self) -> None:
        self.decided(*self.similarities)

    def apply_only(self) -> None:
        lengths = () if self.merge.kind == "clap" else (None,)  # which only ragged tokens need
        self.call("apply", self.tokens, self.size, *lengths, self.decision.workspace, ROWS_ON_DEVICE, *self.out)

    def whole(self) -> None:
        self.decided(self.tokens)
        self.apply_only()

    def bytes_and_flops(self) -> tuple[float, float]:
        images, rows, width = self.tokens.shape
        moved = (rows * images + int(self.decision.length.sum())) * width * self.tokens.element_size()
        return moved, 2 * self.products() * width


class Clap(Merging):
    """With a threshold that merges half of the windows."""

    def __init__(self, kernels: Kernels, batch: int, width: int, dtype: torch.dtype):
        super().__init__(kernels, batch, PATCHES + 1, width, dtype)
        self.merge = clap_merge(self.tokens, (GRID, GRID), (2, 2), 1, "code", "per_image", "published", "threshold", 0)
        self.decision = kernels.decision(self.merge, self.tokens, PATCHES)
        self.similarities = (torch.empty(batch, PATCHES // 4, device="cuda"),)
        self.similarity_only()
        self.threshold = self.similarities[0].median().reshape(())

    def similarity_only(self) -> None:
        self.call("similarity", self.tokens, *self.similarities)

    def others(self) -> tuple[torch.Tensor, ...]:
        return (self.threshold,)

    def products(self) -> int:
        return 10 * self.similarities[0].numel()


class Gbm(Merging):
    """At the rows that CLAP leaves; the adaptive threshold is scaled to the aimed count."""

    def __init__(self, kernels: Kernels, batch: int, width: int, dtype: torch.dtype):
        rows = AFTER_CLAP
        super().__init__(kernels, batch, rows, width, dtype)
        self.merge = gbm_merge(self.tokens, PATCHES, 1, "adaptive", 1.0, "code", "per_image", 0)
        self.decision = kernels.decision(self.merge, self.tokens, PATCHES)
        self.map = torch.arange(PATCHES, device="cuda").clamp(max=rows - 2).add(1).repeat(batch, 1)
        self.length = torch.full((batch,), rows, device="cuda")
        candidates = kernels.query("gbm_candidates", self.merge.params)
        best = torch.empty(batch, candidates, device="cuda")
        self.similarities = best, torch.empty(batch, candidates, dtype=torch.int32, device="cuda")
        self.similarity_only()
        reached = best.double().quantile(1 - (AFTER_CLAP - AFTER_GBM) / candidates, dim=1)
        scale = (reached - best.double().mean(1)) / best.double().std(1)
        self.threshold = scale.mean().float()

    def similarity_only(self) -> None:
        self.call("similarity", self.tokens, self.length, *self.similarities, self.decision.workspace)

    def others(self) -> tuple[torch.Tensor, ...]:
        return self.map, self.length, self.threshold

    def products(self) -> int:
        images, rows, _ = self.tokens.shape
        return images * (rows // 2) * (rows // 2)


class Tail:
    """Scores of the merged tokens and what turns them into a picture; `photo`: objects of 8 x 8 patches stand out."""

    def __init__(self, kernels: Kernels, batch: int, dtype: torch.dtype, photo: bool):
        self.kernels, rows = kernels, AFTER_GBM - 1
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
        shape, name = scores.shape, name_of(dtype)
        self.label_params = label_map_params(shape, name, 1, (GRID, GRID), (PIXELS, PIXELS), wide=False)
        self.unmerge_params = unmerge_params(shape, name, PATCHES, 1)

    def label_map(self) -> None:
        self.kernels.call("label_map", self.label_params, self.scores, self.map, self.labels)

    def unmerge(self) -> None:
        self.kernels.call("unmerge", self.unmerge_params, self.scores, self.map, self.values)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def merge_rows(bench: Bench, kind: type, model: str, batch: int, dtype: torch.dtype) -> Rows:
    width, limits = WIDTHS[model], bench.limits
    element = torch.empty((), dtype=dtype).element_size()
    sets = rotation(lambda: kind(bench.kernels, batch, width, dtype), batch * PATCHES * width * element)
    times = {"total_us": graph_us([s.whole for s in sets], bench.repeats)}
    for stage in ("similarity", "decide", "apply"):
        times[f"{stage}_us"] = graph_us([getattr(s, f"{stage}_only") for s in sets], bench.repeats)
    moved, flops = sets[0].bytes_and_flops()
    rate = "float32_flop_per_s" if dtype == torch.float32 else "float16_flop_per_s"
    floor = max(moved / limits["copy_bytes_per_s"], flops / limits[rate]) * 1e6
    facts = {
        "model": model,
        "dtype": name_of(dtype),
        "rows_out": float(sets[0].decision.length.double().mean()),
    }
    return [row(limits, kind.__name__.lower(), batch, times, floor, **facts)]


def tail_rows(bench: Bench, batch: int, dtype: torch.dtype) -> Rows:
    rows, name, limits = [], name_of(dtype), bench.limits
    for photo in (False, True):
        sets = [Tail(bench.kernels, batch, dtype, photo) for _ in range(4)]
        moved = sets[0].scores.numel() * sets[0].scores.element_size() + sets[0].labels.numel()
        arithmetic = sets[0].labels.numel() * CLASSES / limits["maxima_per_s"]
        floor = max(moved / limits["copy_bytes_per_s"], arithmetic) * 1e6
        times = {"total_us": graph_us([s.label_map for s in sets], bench.repeats)}
        rows.append(row(limits, "label_map", batch, times, floor, scores="photo" if photo else "random", dtype=name))
    moved = (sets[0].scores.numel() + sets[0].values.numel()) * sets[0].scores.element_size()
    floor = moved / limits["copy_bytes_per_s"] * 1e6
    times = {"total_us": graph_us([s.unmerge for s in sets], bench.repeats)}
    rows.append(row(limits, "unmerge", batch, times, floor, dtype=name))
    return rows


def cases(batches: Sequence[int]) -> Iterator[Case]:
    """In fp32 at the largest batch alone."""
    for batch in batches:
        for model in WIDTHS:
            for kind in (Clap, Gbm):
                yield merge_rows, (kind, model, batch, torch.float16)
        yield tail_rows, (batch, torch.float16)
    for model, kind in (("S", Clap), ("S", Gbm), ("L", Clap), ("L", Gbm)):
        yield merge_rows, (kind, model, max(batches), torch.float32)


def measure(libraries: Mapping[str, Path], batches: Sequence[int] = BATCHES, repeats: int = REPEATS) -> dict[str, Any]:
    """The record of the library NATIVE, with the times of the others in `ptx`. They take turns at every case, so that
    what changes on the device meanwhile meets all of them."""
    limits = ceilings()
    benches = {name: Bench(Kernels(path), limits, repeats) for name, path in libraries.items()}
    rows: dict[str, Rows] = {name: [] for name in benches}
    for timed, arguments in cases(batches):
        for name, bench in benches.items():
            torch.manual_seed(0)  # the same inputs for each
            rows[name] += timed(bench, *arguments)
    native = rows.pop(NATIVE)
    record = {"schema": 1, "device": device_facts(), "ceilings": limits, "rows": native}
    ptx = {name: beside(native, others) for name, others in rows.items()}
    return record | ({"ptx": ptx} if ptx else {})


def beside(native: Rows, others: Rows) -> Rows:
    """Which case, the time, and that over the library's own."""
    facts = ("kernel", "batch", "model", "scores", "dtype", "total_us")
    return [
        {key: other[key] for key in facts if key in other} | {"x_native": round(other["total_us"] / own["total_us"], 2)}
        for own, other in zip(native, others, strict=True)
    ]


def device_facts() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": device_query("driver_version")}
    return {"name": torch.cuda.get_device_name(), "python": platform.python_version(), **versions}


def compiled_as_ptx(architecture: int) -> Path:
    """The kernels as PTX of a compute capability alone; compiled once for these sources."""
    folder = cache_folder() / f"ptx_{architecture}"
    path = folder / LIBRARIES[LIBRARY].file_name
    return path if path.is_file() else build([LIBRARY], [architecture], folder=folder, ptx_only=True)[LIBRARY]


def print_table(record: dict[str, Any]) -> None:
    for name, value in record["ceilings"].items():
        print(f"{name}: {value:.3g}")
    for r in record["rows"]:
        stages = " ".join(f"{k[:-3]} {r[k]:.1f}" for k in ("similarity_us", "decide_us", "apply_us") if k in r)
        print(
            f"{case_of(r):34} {r['total_us']:8.1f} us  floor {r['floor_us']:7.1f}  x{r['x']:<6} "
            f"with launches x{r['x_launched']:<6} {stages}"
        )
    for name, rows in record.get("ptx", {}).items():
        for r in rows:
            print(f"PTX {name}: {case_of(r):34} {r['total_us']:8.1f} us  x{r['x_native']} of native")


def case_of(r: dict[str, Any]) -> str:
    return f"{r['kernel']} {r.get('model', r.get('scores', ''))} {r['dtype']} x{r['batch']}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--library", type=Path, help="libalgm_kernels.so with the CUDA kernels; default: the built one")
    made.add_argument(
        "--ptx",
        type=int,
        nargs="+",
        default=[],
        metavar="CAPABILITY",
        help="also time the code of these earlier compute capabilities, such as 80 75, which nvcc compiles first",
    )
    made.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="default: %(default)s")
    made.add_argument("--repeats", type=int, default=REPEATS, help="replays of a graph; default: %(default)s")
    made.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "kernels.json")
    return made


def main(words: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(words)
    libraries = {NATIVE: arguments.library or require_library(LIBRARY)}
    libraries |= {str(number): compiled_as_ptx(number) for number in arguments.ptx}
    record = measure(libraries, arguments.batches, arguments.repeats)
    print_table(record)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
