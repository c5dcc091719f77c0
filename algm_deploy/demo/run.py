"""The embedded demo: the whole product on a small network trained on drawn street scenes. Everything is synthetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import (
    bench,
    build,
    evaluate,
    export,
    require_runtime,
    verify,
)
from algm_deploy.errors import GateError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.package_data import DEMO_ASSETS
from algm_deploy.pictures.shipped import scene_paths
from algm_deploy.predictor import Predictor
from algm_deploy.report.gallery import draw_gallery, labelled_photos
from algm_deploy.report.page import write_report
from algm_deploy.report.pictures import PictureWriter
from algm_deploy.timing.protocols import Request
from algm_deploy.timing.timers import Effort
from algm_deploy.wording import counted, without_merging

PICTURES = 6
SHORT = Request("latency", count=2, effort=Effort(warmup=2, rounds=6, most_rounds=8), variants=("dense", "merged"))

Say = Callable[[str], None]


def demonstrate(folder: Path, runtime: str, say: Say, progress: bool = True) -> Bundle:
    """Exports, verifies, evaluates, times and pictures the demo network in `folder`, and writes a report about it.

    `say` takes each line for the reader.

    Raises:
        GateError: the parity chain failed.
    """
    require_runtime(runtime)
    say(f"1. export: the network becomes a bundle, {folder / 'bundle'}, and is built for {runtime}")
    bundle = export(DEMO_ASSETS, folder / "bundle", "demo", {}).bundle
    build(bundle, runtime)
    say(f"2. verify: does {runtime} compute what PyTorch computes?")
    _verify(bundle, runtime, 4, say, progress)
    say("3. evaluate: what does merging cost in accuracy? The higher the mIoU, the better")
    _compare(bundle, runtime, labelled_pictures(), say, progress)
    say("4. time: how much faster does merging make it? One picture at a time, until its label map is there")
    for name in dict.fromkeys(("torch", runtime)):
        _time(bundle, name, say, progress)
    say(f"5. pictures, in {folder / 'pictures'}: *.tokens.png show what was merged, *.overlay.png what was recognised")
    draw_pictures(bundle, runtime, folder / "pictures")
    shown = one_of_each_slice(labelled_pictures())
    gallery = draw_gallery(bundle, runtime, labelled_photos(shown, len(shown.samples)), progress)
    say(f"6. report, all of this on a page for a browser: {write_report([bundle], folder / 'report.html', gallery)}")
    say("   merging goes together with lower precision: export in bf16 and int8 too, then `algm-deploy tune precision`")
    say(
        "   draws accuracy over milliseconds, a curve a precision, and picks precision and threshold (docs/commands.md)"
    )
    return bundle


def labelled_pictures() -> Dataset:
    """The 24 labelled scenes of the package, by hour of the day."""
    opened = open_dataset("folder", DEMO_ASSETS, slice_by="folder")
    return replace(opened, name="drawn scenes", split="that ship")


def one_of_each_slice(dataset: Dataset) -> Dataset:
    """The same data set with the first picture of every slice."""
    first = {sample.slice: sample for sample in reversed(dataset.samples)}
    return replace(dataset, samples=tuple(first[name] for name in sorted(first)))


def draw_pictures(bundle: Bundle, runtime: str, folder: Path) -> list[Path]:
    """Label map, overlay and merged tokens of a few of the package's pictures."""
    with Predictor(bundle, runtime) as predictor:
        writer = PictureWriter(predictor, folder)
        return [path for photo in scene_paths()[:PICTURES] for path in writer.write(photo)]


def measured_before() -> tuple[int, float, float]:
    """What the network's model card says of scenes that do not ship: how many, mIoU in % without merging, and with."""
    card = (DEMO_ASSETS / "MODEL_CARD.md").read_text(encoding="utf-8")
    result = r"on (\d+) unseen scenes: mIoU ([\d.]+) % without merging,\s+\*\*([\d.]+) %\*\* with merging"
    ((count, dense, merged),) = re.findall(result, card)
    return int(count), float(dense), float(merged)


def _verify(bundle: Bundle, runtime: str, count: int, say: Say, progress: bool) -> None:
    report = verify(bundle, runtime, count=count, progress=progress)
    for link in report.links:
        say(f"   {link.number} {link.name:10} {'ok' if link.passed else 'FAILED':6} {link.measured}")
    if not report.passed:
        raise GateError("the parity chain failed on the demo network: please report this with the output of `doctor`")


def _compare(bundle: Bundle, runtime: str, dataset: Dataset, say: Say, progress: bool) -> None:
    """What merging costs on a data set, whole and by slice, beside what it cost on many more scenes."""
    dense, merged = (
        evaluate(bundle, dataset, runtime, dense=unmerged, progress=progress) for unmerged in (True, False)
    )
    gmacs = (merged.gmacs_per_window_mean or 0) / (dense.gmacs_per_window_mean or 1)
    say(
        f"   {counted(merged.images, 'drawn scenes')} that training never saw: mIoU {dense.miou_percent:.2f} % without "
        f"merging, {merged.miou_percent:.2f} % with merging, at {100 * gmacs:.0f} % of the multiply-adds"
    )
    for name, part in merged.slices.items():
        before = dense.slices[name].miou_percent
        say(f"      {name:6} {before:6.2f} -> {part.miou_percent:6.2f} %")
    count, without, with_merging = measured_before()
    say(
        f"   {merged.images} scenes are few: on {count} others the model card gives {without:.2f} % without merging, "
        f"{with_merging:.2f} % with"
    )


def _time(bundle: Bundle, runtime: str, say: Say, progress: bool) -> None:
    """Dense against merged on a few scenes, for a few seconds."""
    if bundle.found(Parity, runtime) is None:  # nothing is timed before
        _verify(bundle, runtime, 1, lambda _: None, progress)
    speeds = {record.variant: record for record in bench(bundle, runtime, protocol=SHORT, progress=progress)}
    merged = speeds["merged"]
    dense = speeds[merged.baseline]
    if merged.stable:
        # What the speed-up is made of.
        before, after = (f"{record.batch_ms_mean_of_medians:.1f} ms" for record in (dense, merged))
        base = without_merging(dense.variant)
        say(f"   {runtime:15} {before} {base}, {after} with: {merged.speedup:.2f} times as fast")
    else:
        say(f"   {runtime:15} not stable: something else runs on this machine, so there is no figure")
