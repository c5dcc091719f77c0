"""The embedded demo: the whole product on a small network trained on drawn street scenes. Everything is synthetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from PIL import Image

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import Parity
from algm_deploy.bundle.store import Bundle
from algm_deploy.demo import ASSETS
from algm_deploy.demo.scenes import scene, slice_name
from algm_deploy.deployment import bench, build, evaluate, export, require_runtime, verify
from algm_deploy.errors import GateError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.pictures.sources import find_images
from algm_deploy.predictor import Predictor
from algm_deploy.report.gallery import draw_gallery, labelled_photos
from algm_deploy.report.page import write_report
from algm_deploy.report.pictures import PictureWriter
from algm_deploy.timing.protocols import Request
from algm_deploy.timing.timers import Effort
from algm_deploy.wording import counted

UNSEEN_SEED = 9_000_000  # behind the seeds of training, selection and testing
PICTURES, GALLERY = 6, 3
SHORT = Request("latency", count=2, effort=Effort(warmup=2, rounds=6, most_rounds=24), variants=("dense", "merged"))

Say = Callable[[str], None]


def demonstrate(folder: Path, runtime: str, generated: int, say: Say, progress: bool = True) -> Bundle:
    """Exports, verifies, evaluates, times and pictures the demo network in `folder`, and writes a report about it.

    `say` takes each line for the reader.

    Raises:
        GateError: the parity chain failed.
    """
    require_runtime(runtime)
    say(f"1. export: checkpoint and recipe of the package to a bundle, built for {runtime}")
    bundle = export(ASSETS, folder / "bundle", "demo", {}).bundle
    build(bundle, runtime)
    say(f"2. verify: {runtime} against PyTorch")
    _verify(bundle, runtime, 4, say, progress)
    say("3. evaluate: what merging costs")
    _compare(bundle, runtime, labelled_pictures(), ("pictures", "of the package"), say, progress)
    _compare(bundle, runtime, generated_scenes(folder / "scenes", generated), ("scenes", "drawn now"), say, progress)
    say("4. time: one picture at a time, until its label map is there")
    for name in dict.fromkeys(("torch", runtime)):
        _time(bundle, name, say, progress)
    say(f"5. pictures: {folder / 'pictures'}")
    draw_pictures(bundle, runtime, folder / "pictures")
    gallery = draw_gallery(bundle, runtime, labelled_photos(labelled_pictures(), GALLERY), progress)
    say(f"6. report, for a browser: {write_report([bundle], folder / 'report.html', gallery)}")
    return bundle


def labelled_pictures() -> Dataset:
    """The 24 labelled pictures of the package, by time of day."""
    return open_dataset("folder", ASSETS, slice_by="folder")


def generated_scenes(folder: Path, count: int) -> Dataset:
    """`count` scenes nobody has seen, written to `folder` as a labelled data set.

    Those already there are kept; more than `count` of them, from an earlier run, are no part of the data set.
    """
    names = {f"{slice_name(seed)}/{seed}": seed for seed in range(UNSEEN_SEED, UNSEEN_SEED + count)}
    for name, seed in names.items():
        picture, labels = (folder / kind / f"{name}.png" for kind in ("images", "labels"))
        if not picture.exists():  # it comes last
            for target, array in zip((labels, picture), reversed(scene(seed)), strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                with write_atomically(target) as path:
                    Image.fromarray(array).save(path)
    with write_atomically(folder / "classes.json") as path:
        path.write_bytes((ASSETS / "classes.json").read_bytes())
    found = open_dataset("folder", folder, slice_by="folder")
    return replace(found, samples=tuple(sample for sample in found.samples if sample.name in names))


def draw_pictures(bundle: Bundle, runtime: str, folder: Path) -> list[Path]:
    """The merged-token figures of a few of the package's pictures."""
    photos = find_images([ASSETS / "images"])
    with Predictor(bundle, runtime) as predictor:
        writer = PictureWriter(predictor, folder)
        return [path for photo in photos[:: len(photos) // PICTURES] for path in writer.write(photo)]


def _verify(bundle: Bundle, runtime: str, count: int, say: Say, progress: bool) -> None:
    report = verify(bundle, runtime, count=count, progress=progress)
    for link in report.links:
        say(f"   {link.number} {link.name:10} {'ok' if link.passed else 'FAILED':6} {link.measured}")
    if not report.passed:
        raise GateError("the parity chain failed on the demo network: please report this with the output of `doctor`")


def _time(bundle: Bundle, runtime: str, say: Say, progress: bool) -> None:
    """Dense against merged on a few scenes, for a few seconds."""
    if bundle.found(Parity, runtime) is None:  # nothing is timed before
        _verify(bundle, runtime, 1, lambda _: None, progress)
    dense, merged = bench(bundle, runtime, protocol=SHORT, progress=progress)
    if merged.stable:
        # What the speed-up is made of.
        times = f"{dense.batch_ms_mean_of_medians:.1f} ms dense, {merged.batch_ms_mean_of_medians:.1f} ms merged"
        say(f"   {runtime:15} {times}: {merged.speedup:.2f} times as fast")
    else:
        say(f"   {runtime:15} not stable: something else runs on this machine, so there is no figure")


def _compare(bundle: Bundle, runtime: str, dataset: Dataset, kind: tuple[str, str], say: Say, progress: bool) -> None:
    dense, merged = (evaluate(bundle, dataset, runtime, dense=dense, progress=progress) for dense in (True, False))
    things, origin = kind
    gmacs = (merged.gmacs_per_window_mean or 0) / (dense.gmacs_per_window_mean or 1)
    say(
        f"   {counted(merged.images, things)} {origin}: mIoU {dense.miou_percent:.2f} % dense, "
        f"{merged.miou_percent:.2f} % merged, at {100 * gmacs:.0f} % of the multiply-adds"
    )
    for name, part in merged.slices.items():
        before = dense.slices[name].miou_percent
        say(f"      {name:6} {before:6.2f} -> {part.miou_percent:6.2f} %")
