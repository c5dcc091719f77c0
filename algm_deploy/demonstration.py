"""The embedded demo: the whole product on a small network trained on drawn street scenes. Everything is synthetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image

from algm_deploy.bundle import Bundle
from algm_deploy.demo import ASSETS
from algm_deploy.demo.scenes import scene, slice_name
from algm_deploy.deployment import evaluate_bundle, export, find_images, verify_bundle
from algm_deploy.errors import GateError
from algm_deploy.evaluation.datasets import Dataset, open_dataset
from algm_deploy.evaluation.predictor import Predictor
from algm_deploy.report.pictures import PictureWriter

UNSEEN_SEED = 9_000_000  # behind the seeds of training, selection and testing
PICTURES = 6

Say = Callable[[str], None]


def demonstrate(folder: Path, runtime: str, generated: int, say: Say, progress: bool = True) -> Bundle:
    """Exports, verifies, evaluates and pictures the demo network in `folder`; `say` takes each line for the reader.

    Raises:
        GateError: the parity chain failed.
    """
    say("1. export: checkpoint and recipe of the package to a bundle")
    bundle = export(ASSETS, folder / "bundle", "demo", {}).bundle
    say(f"2. verify: {runtime} against PyTorch")
    report = verify_bundle(bundle, runtime, find_images([ASSETS / "images"]), 4, progress)
    for link in report.links:
        say(f"   {link.number} {link.name:10} {'ok' if link.passed else 'FAILED':6} {link.measured}")
    if not report.passed:
        raise GateError("the parity chain failed on the demo network: please report this with the output of `doctor`")
    say("3. evaluate: what merging costs")
    for dataset in (labelled_pictures(), generated_scenes(folder / "scenes", generated)):
        _compare(bundle, runtime, dataset, say, progress)
    say(f"4. pictures: {folder / 'pictures'}")
    draw_pictures(bundle, runtime, folder / "pictures")
    return bundle


def labelled_pictures() -> Dataset:
    """The 24 labelled pictures of the package, by time of day."""
    return open_dataset("folder", ASSETS, slice_by="folder")


def generated_scenes(folder: Path, count: int) -> Dataset:
    """`count` scenes nobody has seen, written to `folder` as a labelled data set; scenes already there are kept."""
    for seed in range(UNSEEN_SEED, UNSEEN_SEED + count):
        targets = [folder / kind / slice_name(seed) / f"{seed}.png" for kind in ("images", "labels")]
        if not all(target.exists() for target in targets):
            for target, array in zip(targets, scene(seed), strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(target)
    (folder / "classes.json").write_bytes((ASSETS / "classes.json").read_bytes())
    return open_dataset("folder", folder, slice_by="folder")


def draw_pictures(bundle: Bundle, runtime: str, folder: Path) -> list[Path]:
    """The merged-token figures of a few of the package's pictures."""
    photos = find_images([ASSETS / "images"])
    with Predictor(bundle, runtime) as predictor:
        writer = PictureWriter(predictor, folder)
        return [path for photo in photos[:: len(photos) // PICTURES] for path in writer.write(photo)]


def _compare(bundle: Bundle, runtime: str, dataset: Dataset, say: Say, progress: bool) -> None:
    dense, merged = (
        evaluate_bundle(bundle, runtime, dataset, merge=merge, progress=progress).record() for merge in (False, True)
    )
    gmacs = merged["gmacs_per_window_mean"] / dense["gmacs_per_window_mean"]
    say(
        f"   {merged['images']} pictures: mIoU {dense['miou_percent']:.2f} % dense, "
        f"{merged['miou_percent']:.2f} % merged, at {100 * gmacs:.0f} % of the multiply-adds"
    )
    for name, part in merged["slices"].items():
        before = dense["slices"][name]["miou_percent"]
        say(f"      {name:6} {before:6.2f} -> {part['miou_percent']:6.2f} %")
