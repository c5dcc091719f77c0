"""Ways to merge side by side on trained checkpoints as they are: accuracy by slice over arithmetic and over time.

    python benchmarks/methods.py measure RECORD DATA CHECKPOINT ... --device cuda
    python benchmarks/methods.py time RECORD DATA CHECKPOINT --precision fp16 --batches 1 32
    python benchmarks/methods.py draw RECORD --pictures FOLDER

DATA is CamVid in its official layout, CHECKPOINT a folder in the authors' format; neither ships with the project,
CamVid is for non-commercial use. No method is trained: the network that was trained without merging, or with ALGM,
merges as each says, at several points. PyTorch executes all of them. `measure` finds mIoU, in fp32. `time` adds
milliseconds of a picture on the GPU or, where there is none, on the CPU: of each point, of the network that drops as
many tokens, which no way to choose them can beat, and of the network without merging, all in turns. Both go on where
the record stops. `draw` prints tables in Markdown, and draws mIoU over pictures a second, a picture a device. The
demo's network takes drawn scenes, with `--dataset folder --slice folder --recipe demo`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from budgets import Evaluator, Photo, exported, timed_on
from msgspec import to_builtins
from trained import write

from algm_deploy.bundle.records import Evaluation
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import device_name, environment
from algm_deploy.errors import GateError
from algm_deploy.evaluation.datasets import open_dataset
from algm_deploy.merging import deployed, merge_inputs
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import load_network
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan, Method
from algm_deploy.report.plots import Scatter, Series
from algm_deploy.report.tables import markdown_table
from algm_deploy.report.tuning import write_sheet
from algm_deploy.runners.torch.runner import TorchRunner
from algm_deploy.timing.protocols import Contestant, Request, times_of
from algm_deploy.timing.timers import steady, typical_ms
from algm_deploy.timing.variants import planned
from algm_deploy.tuning.trial import miou_of

METHODS = get_args(Method)
THRESHOLDS = (0.853, 0.9319, 0.98, 0.995)
BUDGETS = ((0.2, 0.1), (0.43, 0.225), (0.7, 0.2))  # windows, tokens
SHARES = (0.2, 0.3, 0.5)  # of tokens that ToMe merges in all, or around each part
ELVIT = {  # parts of the depth and of the patch grid's sides, temperature, semantics
    (2 / 3, 0.7): (
        *((0.002, "code"), (0.02, "code"), (0.2, "code")),
        *((0.02, "paper"), (0.2, "paper"), (1.0, "paper"), (5.0, "paper")),
    ),
    (1 / 2, 0.7): ((0.2, "paper"), (1.0, "paper")),
    (2 / 3, 0.5): ((0.2, "paper"), (1.0, "paper")),
}
EVIT = (0.9, 0.8, 0.7, 0.5)  # kept at each of a third, a half plus and most of the depth, as published
CTS = (51, 77, 103, 154)  # superpatches that share, where the checkpoint has a policy network
DTOP = (0.9, 0.95, 0.98, 0.995)  # confidences, where the checkpoint has auxiliary heads
G2TM = (0.88, 0.95, 0.98, 0.99)  # thresholds, in block 2; 0.88 is the published one
MPM = ((2, 5), (5,), (2, 5, 8))  # blocks that pairs merge after; the first are the published ones
# Of the labels of the modules as they are, for a network to be timed: fp16 leaves 99.1 % of a picture's as they are in
# fp32 (records/fp8_camvid_h200.json), and the least that was found here is 99.2 %.
MATCH = 0.99
NOISE = 0.05  # points of mIoU: ten times what fp16 changed without merging and with ALGM (records/fp8_camvid_h200.json)
SHOWN = 20  # points of mIoU below dense that a picture still shows


def main() -> None:
    options = parser().parse_args()
    torch.backends.cudnn.allow_tf32 = False
    options.run(options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = top.add_subparsers(required=True)
    one = steps.add_parser("measure")
    _add_sources(one, "+")
    one.add_argument("--batch", type=int, default=32, help="windows at a time")
    one.add_argument("--every", type=int, default=1, help="one photo of so many")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    one.add_argument("--methods", nargs="+", help="those alone, such as dtop, and dense; by default all")
    one.set_defaults(run=measure)
    one = steps.add_parser("time")
    _add_sources(one, 1)
    one.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    one.add_argument("--batches", type=int, nargs="+", default=[1], help="windows at a time")
    one.add_argument("--count", type=int, default=16, help="photos that are timed")
    one.add_argument("--rounds", type=int, default=4)
    one.add_argument("--together", type=int, default=4, help="points that take turns")
    one.add_argument("--methods", nargs="+", help="those alone, such as algm; by default all")
    one.set_defaults(run=add_times)
    one = steps.add_parser("draw")
    one.add_argument("record", type=Path)
    one.add_argument("--pictures", type=Path, help="folder for methods-DEVICE.svg")
    one.set_defaults(run=draw)
    return top


def _add_sources(step: argparse.ArgumentParser, checkpoints: str | int) -> None:
    step.add_argument("record", type=Path, metavar="RECORD")
    step.add_argument("data", type=Path, metavar="DATA")
    step.add_argument("checkpoints", type=Path, nargs=checkpoints, metavar="CHECKPOINT")
    step.add_argument("--recipe", default="segmenter_vit_s16_camvid")
    step.add_argument("--dataset", default="camvid")
    step.add_argument("--split", help="of the data set; by default that of published figures")
    step.add_argument("--slice", help="as the flag of `algm-deploy tune`")


def plans(plan: MergePlan, network: Network) -> dict[str, MergePlan]:
    """Every point by its name, which its method opens; `plan` is the checkpoint's own, in whose places ALGM merges."""
    depth, (rows, columns) = network.encoder_depth, network.grid
    found = {"dense": DENSE}
    found |= {f"algm threshold {tau:g}": replace(plan, clap_threshold=tau) for tau in THRESHOLDS}
    rules: dict[str, Any] = {"clap": "budget", "gbm": "budget"}
    found |= {
        f"algm budget {windows:g} {tokens:g}": replace(plan, **rules, clap_budget=windows, gbm_budget=tokens)
        for windows, tokens in BUDGETS
    }
    for share in SHARES:
        each = round(share * rows * columns / depth)
        found[f"tome {each} in each block"] = replace(DENSE, method="tome", tome_r=(each,) * depth)
    for share in SHARES:
        found[f"tome_blockwise {share:g}"] = replace(DENSE, method="tome_blockwise", tome_share=(share,) * depth)
    found |= dict(_elvit_plans(network))
    places = tuple(sorted({-(-depth * step // 24) for step in (8, 14, 20)}))  # blocks of 24 in the published recipes
    for keep in EVIT:
        found[f"evit {keep:g} in {','.join(map(str, places))}"] = replace(
            DENSE, method="evit", evit_layers=places, evit_keep=keep
        )
    found |= {
        f"g2tm threshold {tau:g}": replace(DENSE, method="g2tm", g2tm_layer=2, clap_threshold=tau) for tau in G2TM
    }
    for blocks in (blocks for blocks in MPM if blocks[-1] <= depth):
        found[f"mpm after {','.join(map(str, blocks))}"] = replace(DENSE, method="mpm", mpm_layers=blocks)
    if network.policy:
        found |= {f"cts {count}": replace(DENSE, method="cts", cts_shared=count) for count in CTS}
    if network.auxiliary:
        plan = replace(DENSE, method="dtop", dtop_layers=network.auxiliary)
        found |= {f"dtop confidence {tau:g}": replace(plan, clap_threshold=tau) for tau in DTOP}
    return found


def _elvit_plans(network: Network) -> Iterator[tuple[str, MergePlan]]:
    for (place, side), settings in ELVIT.items():
        height, width = (round(side * length) for length in network.grid)
        layer = round(place * network.encoder_depth)
        plan = replace(DENSE, method="elvit", elvit_layer=layer, elvit_grid=(height, width))
        for temperature, semantics in settings:
            name = f"elvit {semantics} {height}x{width} after {layer}, {temperature:g}"
            yield name, replace(plan, elvit_temperature=temperature, semantics=semantics)  # type: ignore[arg-type]


def kind_of(point: str) -> str:
    """The series of a point: its method, and ALGM's rule."""
    words = point.split()
    return " ".join(words[:2]) if words[0] == "algm" else words[0]


def opened(path: Path) -> dict[str, Any]:
    """A record, empty where there is none yet."""
    if not path.is_file():
        return {"schema_version": 2, "checkpoints": {}, "times": {}}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


# ------------------------------------------------------------------------------------------------------------ accuracy


def measure(options: argparse.Namespace) -> None:
    """Adds to the record what it lacks, point by point."""
    whole = open_dataset(options.dataset, options.data, options.split, options.slice)
    dataset = replace(whole, samples=whole.samples[:: options.every])
    gpu = options.device == "cuda"
    facts = {
        "recipe": options.recipe,
        "precision": options.precision,
        "device": device_name(gpu),
        "photos": f"{len(dataset.samples)} of {dataset.title}",
    }
    record = opened(options.record)
    if any(record.get(key, value) != value for key, value in facts.items()):
        raise SystemExit(f"{options.record} is of other facts than {facts}: name another file")
    record |= facts | {"environment": asdict(environment(devices=gpu))}
    photos: dict[str, list[Photo]] = {}
    for checkpoint in options.checkpoints:
        rows = record["checkpoints"].setdefault(checkpoint.resolve().name, {})
        with exported(checkpoint, options, options.precision) as bundle:
            evaluate = Evaluator(bundle, options.device, options.batch, photos)
            for name, plan in plans(bundle.recipe.merging, bundle.recipe.network).items():
                wanted = name == "dense" or plan.method in (options.methods or METHODS)
                if wanted and name not in rows:
                    rows[name] = figures(evaluate(plan, dataset))
                    write(record, options.record)
                    print(checkpoint.name, name, rows[name]["miou_percent"], flush=True)


def figures(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "miou_percent": miou_of(evaluation),
        "miou_percent_by_slice": {name: part.miou_percent for name, part in evaluation.slices.items()},
        "gmacs_per_window": evaluation.gmacs_per_window_mean,
        "tokens": to_builtins(evaluation.tokens),
    }


# ---------------------------------------------------------------------------------------------------------------- time


def add_times(options: argparse.Namespace) -> None:
    """Adds the milliseconds that the record lacks for this device, precision and batch, a few points at a time."""
    record, (checkpoint,) = opened(options.record), options.checkpoints
    dataset = open_dataset(options.dataset, options.data, options.split, options.slice)
    paths = [one.image_path for one in dataset.samples]
    options.batch = max(options.batches)  # what the bundle is verified for
    with exported(checkpoint, options, options.precision) as bundle:
        windows, request = timed_on(bundle, paths, options)
        for batch in options.batches:
            _add_times(record, checkpoint.resolve().name, bundle, windows, replace(request, batch=batch), options)


def _add_times(
    record: dict[str, Any], name: str, bundle: Bundle, windows: Any, request: Request, options: argparse.Namespace
) -> None:
    gpu, measured = torch.cuda.is_available(), record["checkpoints"][name]
    key = f"{device_name(gpu)}, {options.precision}, batch {request.batch}"
    times = record["times"].setdefault(key, {"environment": asdict(environment(devices=gpu)), "checkpoints": {}})
    rows = times["checkpoints"].setdefault(name, {})
    found = plans(bundle.recipe.merging, bundle.recipe.network)
    wanted = [p for p in found if p in measured and p != "dense" and found[p].method in (options.methods or METHODS)]
    first = {costs_of(found[point]): point for point in reversed(wanted)}
    waiting = [point for point in wanted if point not in rows and point in first.values()]
    for start in range(0, len(waiting), options.together):
        chosen = {point: found[point] for point in waiting[start : start + options.together]}
        tokens = {point: [round(one["mean"]) for one in measured[point]["tokens"]] for point in chosen}
        rows |= in_turns(bundle, chosen, tokens, windows, request)
        print(key, *(f"\n{point} {rows[point]}" for point in chosen), flush=True)
        timed = {point: rows.get(first[costs_of(found[point])]) for point in wanted}
        rows |= {point: row for point, row in timed.items() if row}
        write(record, options.record)


def costs_of(plan: MergePlan) -> MergePlan:
    """What decides about time: ELViT multiplies as much at every temperature, and in both semantics."""
    return replace(plan, elvit_temperature=1.0, semantics="code") if plan.method == "elvit" else plan


def in_turns(
    bundle: Bundle, chosen: Mapping[str, MergePlan], tokens: Mapping[str, list[int]], windows: Any, request: Request
) -> dict[str, dict[str, Any]]:
    """Milliseconds of a picture at each point, of as many tokens that are dropped, and without merging.

    Raises:
        GateError: a network gives other labels than its modules as they are.
    """
    whole = len(windows) - len(windows) % request.batch
    batches = [windows[start : start + request.batch] for start in range(0, whole, request.batch)]
    with ExitStack() as stack:
        runs = {"dense": TorchRunner(planned(bundle, DENSE))}
        for name, plan in chosen.items():
            runs[name] = TorchRunner(planned(bundle, plan))
            rows = dict(zip(plan.layers, (bundle.recipe.network.prefix + n for n in tokens[name]), strict=True))
            network = partial(dropping, plan=plan, rows=rows)
            runs[f"{name}, dropped"] = TorchRunner(planned(bundle, DENSE), network=network)
        contestants = {name: Contestant(stack.enter_context(run)) for name, run in runs.items()}
        agreed = {name: check(bundle, chosen[name], runs[name], batches[0]) for name in chosen}
        times, _ = times_of(contestants, batches, request, progress=False)
        executed = {name: runs[name].execution for name in chosen}
    each = {name: typical_ms(one) / request.batch for name, one in times.items()}
    return {
        name: {
            "ms": each[name],
            "dropped_ms": each[f"{name}, dropped"],
            "dense_ms": each["dense"],
            "stable": bool(steady(times[name]) and steady(times["dense"])),
            "labels_equal": agreed[name],
            "execution": executed[name],
        }
        for name in chosen
    }


def dropping(bundle: Bundle, dtype: torch.dtype, plan: MergePlan, rows: Mapping[int, int]) -> Deployed:
    """The network that keeps as many tokens as `plan` leaves, whichever these are."""
    return deployed(load_network(bundle, dtype), replace(bundle.recipe, merging=plan), rows)


def check(bundle: Bundle, plan: MergePlan, run: TorchRunner, windows: Any) -> float | None:
    """The share of labels in which what is timed on a GPU equals the modules as they are, in the same precision.

    Raises:
        GateError: it is below `MATCH`.
    """
    if run.device.type == "cpu":
        return None  # it is the modules
    bare = planned(bundle, plan)
    model = deployed(load_network(bundle), bare.recipe).to(run.device)
    inputs = merge_inputs(plan.clap_threshold, plan.gbm_threshold, device=run.device)
    with torch.inference_mode():
        expected = model(torch.from_numpy(windows).to(run.device), inputs)[0].cpu().numpy()
    agree = float((run.infer({"image": windows}, ["labels"])["labels"] == expected).mean())
    if agree < MATCH:
        raise GateError(f"expected the labels of the modules at {MATCH:.0%} of the pixels, {plan} has {agree:.2%}")
    return agree


# ------------------------------------------------------------------------------------------------------------- picture


def draw(options: argparse.Namespace) -> None:
    """Prints a table for each checkpoint, and draws a picture for each device."""
    record = opened(options.record)
    for name, rows in record["checkpoints"].items():
        print(f"{name}, {record['precision']}\n\n{table(rows, times_for(record, name))}\n")
    if not options.pictures:
        return
    for device in dict.fromkeys(key.partition(",")[0] for key in record["times"]):
        keys = [key for key in record["times"] if key.startswith(device)]
        scatters = [scatter(record, name, key) for name in record["checkpoints"] for key in keys]
        kind = "gpu" if "NVIDIA" in device else "cpu"
        write_sheet(scatters, len(keys), options.pictures / f"methods-{kind}.svg")


def times_for(record: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Times of each point by device, precision and batch: of that checkpoint, else of the one that was timed.

    A constant count costs as much in every network of one shape; where the picture decides, the counts are similar.
    """
    found = {key: part["checkpoints"] for key, part in record["times"].items()}
    return {key: {**next(iter(part.values()), {}), **part.get(name, {})} for key, part in found.items()}


def table(points: Mapping[str, Any], times: Mapping[str, Mapping[str, Any]]) -> str:
    """The points in Markdown."""
    slices = sorted(points["dense"]["miou_percent_by_slice"])
    lines = []
    for name, row in points.items():
        mious = row["miou_percent"], *(row["miou_percent_by_slice"][one] for one in slices)
        costs = (shown_times(name, rows) for rows in times.values())
        lines.append((name, *map(_shown, mious), left(row), _shown(row["gmacs_per_window"]), *costs))
    columns = (f"ms (as many dropped), {key}" for key in times)
    return markdown_table(("point", "mIoU %", *slices, "tokens left", "GMACs", *columns), lines)


def left(row: Mapping[str, Any]) -> str:
    """Mean tokens after the last merge."""
    return f"{row['tokens'][-1]['mean']:.0f}" if row["tokens"] else "all"


def shown_times(name: str, rows: Mapping[str, Any]) -> str:
    if name == "dense":
        return _shown(dense_ms(rows)) if rows else "-"
    if name not in rows:
        return "-"
    return f"{_shown(rows[name]['ms'])} ({_shown(rows[name]['dropped_ms'])})" + ("" if rows[name]["stable"] else " ?")


def dense_ms(rows: Mapping[str, Any]) -> float:
    return float(np.median([row["dense_ms"] for row in rows.values()]))


def frontier(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points (pictures a second, mIoU, name) that are more accurate than all faster ones, by more than noise."""
    best = sorted(points, reverse=True)
    return [one for i, one in enumerate(best) if all(one[1] > other[1] + NOISE for other in best[:i])]


def scatter(record: Mapping[str, Any], name: str, key: str) -> Scatter:
    """mIoU over pictures a second of one checkpoint, and the frontier."""
    points, times = record["checkpoints"][name], times_for(record, name)[key]
    dense = points["dense"]["miou_percent"]
    placed = {"dense": (1e3 / dense_ms(times), dense, "")}
    placed |= {p: (1e3 / row["ms"], points[p]["miou_percent"], "") for p, row in times.items() if p in points}
    placed = {p: one for p, one in placed.items() if one[1] > dense - SHOWN}
    kinds = dict.fromkeys(map(kind_of, points))  # the same marks in every picture
    series = [Series(kind, [one for p, one in placed.items() if kind_of(p) == kind]) for kind in kinds]
    title = f"{name}, {key.partition(', ')[2]}"
    best = Series("frontier", frontier(list(placed.values())))
    return Scatter(
        title, f"pictures a second, {key.partition(',')[0]}", f"mIoU %, {record['precision']}", [best, *series]
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 10 else f"{value:.2f}"


if __name__ == "__main__":
    main()
