"""The steps of a deployment, one function each: what the command line calls and what a script may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from algm_deploy.bundle.records import Evaluation, Parity, Rebuilds, Step
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, DatasetError, GateError, NotExecutedError
from algm_deploy.evaluation.datasets import SPECS, Dataset
from algm_deploy.evaluation.evaluate import evaluate
from algm_deploy.lowering.writing import write_bundle
from algm_deploy.models.checkpoints.reading import VARIANT_FILE, read_checkpoint
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.parity.chain import verify
from algm_deploy.pictures.preprocessing import preprocessing_fingerprint, read_photo
from algm_deploy.pictures.shipped import scene
from algm_deploy.predictor import Predictor, network_anchors, network_canvas, takes_whole_frames
from algm_deploy.recipe.reading import recipe_settings, resolve
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.pictures import LABELS, OVERLAY, TOKENS
from algm_deploy.report.records import Measured, artifact_of
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.registry import row_of
from algm_deploy.timing.protocols import Request, benchmark, check_verified, natural, reading_ms
from algm_deploy.timing.timers import host_ms
from algm_deploy.timing.variant_bundles import executables

REBUILD_PICTURES = 4
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}


@dataclass(frozen=True)
class Exported:
    """A new bundle, and what its owner should know about its settings, one printable line each: those on which their
    sources disagreed (`conflicts`), and those that no source decided (`notes`)."""

    bundle: Bundle
    conflicts: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export(checkpoint: Path, target: Path, recipe: str | None, settings: Mapping[str, Any]) -> Exported:
    """Exports a checkpoint to a bundle.

    Args:
        checkpoint: `checkpoint.pth` or its folder, in the official format.
        target: folder of the new bundle; an existing bundle there is replaced once the new one is complete.
        recipe: name or TOML file; without it `variant.yml` beside the checkpoint decides.
        settings: dotted recipe settings that win over both, such as {"merging.clap_threshold": 0.9}.
    """
    source = read_checkpoint(checkpoint)
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if source.variant is not None or recipe is None:
        layers.append((VARIANT_FILE, settings_from_variant(source)))
    if recipe is not None:
        layers.append((f"recipe {recipe}", recipe_settings(recipe)))
    layers.append(("command line", settings))
    decided, conflicts = resolve(layers)
    bundle = write_bundle(source, _with_classes(decided), target, preprocessing_fingerprint(decided.protocol))
    return Exported(bundle, conflicts, _threshold_note(decided, layers))


def _with_classes(recipe: Recipe) -> Recipe:
    """The recipe with the data set's class names and colours where it has none of its own."""
    spec = SPECS.get(recipe.protocol.dataset)
    if spec is None or len(spec.classes.names) != recipe.network.classes:
        return recipe
    names, palette = spec.classes.names, spec.classes.palette
    return replace(recipe, class_names=recipe.class_names or names, palette=recipe.palette or palette)


def _threshold_note(recipe: Recipe, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, ...]:
    if not recipe.merging.clap_layers or any("merging.clap_threshold" in settings for _, settings in layers):
        return ()
    tau = recipe.merging.clap_threshold
    return (
        f"no source gives CLAP's threshold for {recipe.name}, so it is {tau:g} and CLAP merges practically nothing: "
        "give --tau, at best the mean + standard deviation of the similarities on training images",
    )


def require_runtime(runtime: str) -> None:
    """RuntimeUnavailableError or BuildError where it is clear before the export that a runtime cannot be built for."""
    runner_type(runtime).require_builder()


def build_bundle(bundle: Bundle, runtime: str, **options: Any) -> list[str]:
    """Makes a runtime's executable and adds it to the bundle; returns what was done, one printable line each."""
    return runner_type(runtime).build(bundle, **options)


def repeat_build(bundle: Bundle, runtime: str, builds: int, **options: Any) -> Rebuilds:
    """Builds a runtime's executable `builds` times and keeps in the manifest how far the results differ.

    A builder that times kernels takes others the next time, and rounding with them: what two builds of one network
    differ by, no comparison of two runtimes can resolve. The last build stays in the bundle.

    Returns the record: `distinct_files`, and, on synthetic scenes where it can be executed here, the share of labels
    that equal the first build's in the worst picture, and each build's milliseconds for a picture.
    """
    bundle.require_writable()
    windows = parity_windows(bundle.recipe, [], REBUILD_PICTURES)
    files, labels, times = set(), [], []
    for _ in range(builds):
        build_bundle(bundle, runtime, **options)
        files.add(bundle.files[row_of(runtime).own].sha256)
        try:
            with runner(bundle, runtime) as run:
                labels.append([_labels(run, window[None]) for window in windows])
                times.append(min(host_ms(partial(run.infer, {"image": windows[:1]})) for _ in range(5)))
        except NotExecutedError:
            continue
    shares = [
        100 * float((one == first).mean()) for found in labels[1:] for first, one in zip(labels[0], found, strict=True)
    ]
    record = Rebuilds(
        runtime=runtime,
        builds=builds,
        distinct_files=len(files),
        pictures=len(windows),
        labels_equal_percent_min=min(shares, default=None),
        network_ms_by_build=tuple(times) or None,
        device=row_of(runtime).device_here(),
    )
    bundle.record(record)
    return record


def _labels(run: Runner, window: NDArray[Any]) -> NDArray[Any]:
    outputs = run.infer({"image": window})
    return outputs["labels"] if "labels" in outputs else outputs["scores"].argmax(1)


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Pictures among files and, in name order, below folders.

    Raises:
        DatasetError: a path does not exist, or no picture was found.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DatasetError(f"{path}: expected a picture or a folder of pictures, found nothing")
        found += sorted(p for p in path.rglob("*") if _is_photo(p)) if path.is_dir() else [path]
    if not found:
        listed = ", ".join(map(str, paths))
        raise DatasetError(f"{listed}: expected pictures ({', '.join(sorted(IMAGE_SUFFIXES))}), found none")
    return found


def _is_photo(path: Path) -> bool:
    """Whether a file in a folder is a picture that `predict` did not write itself."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.endswith((LABELS, OVERLAY, TOKENS))


def parity_windows(recipe: Recipe, paths: Sequence[Path], count: int) -> NDArray[Any]:
    """One window (n, 3, H, W) each of up to `count` pictures spread evenly over `paths`, in the graph's pixel dtype.

    Without paths they are `count` of the drawn street scenes that ship, which exercise merging better than noise would:
    day, dusk and night are mixed, all differ, and beyond 24 they are mirror images and crops (`pictures.shipped`).
    """
    photos = [read_photo(path) for path in spread(paths, count)] if paths else [scene(n)[0] for n in range(count)]
    windows = []
    height, width = recipe.network.image_size
    for index, photo in enumerate(photos):
        canvas = network_canvas(photo, recipe)
        anchors = network_anchors(canvas, recipe)
        top, left = anchors[index % len(anchors)]
        windows.append(canvas[top : top + height, left : left + width].transpose(2, 0, 1))
    dtype = np.dtype(signature_of(recipe).image.dtype)
    stacked = np.stack([np.rint(w) if dtype == np.uint8 else w for w in windows])
    return np.ascontiguousarray(stacked.astype(dtype))


def spread(paths: Sequence[Path], count: int) -> list[Path]:
    """Up to `count` of `paths`, evenly spread over them."""
    return [paths[i] for i in np.unique(np.linspace(0, len(paths) - 1, min(count, len(paths))).round().astype(int))]


def verify_bundle(bundle: Bundle, runtime: str, paths: Sequence[Path], count: int, progress: bool = True) -> Parity:
    """Runs the parity chain and keeps its record in the manifest."""
    bundle.require_writable()
    found = verify(bundle, runtime, parity_windows(bundle.recipe, paths, count), progress)
    record = structs.replace(
        found,
        pictures="photos" if paths else "synthetic scenes",
        device=row_of(runtime).device_here(),
        files=executables(bundle, runtime),
    )
    bundle.record(record)
    return record


def evaluate_bundle(
    bundle: Bundle,
    runtime: str,
    dataset: Dataset,
    tau: float | None = None,
    gbm_threshold: float | None = None,
    merge: bool = True,
    progress: bool = True,
) -> Evaluation:
    """Evaluates a bundle on a data set, resuming where an interrupted run stopped; keeps the record in the manifest.

    Without `merge` it is the dense network that is evaluated, on the same executable.

    Raises:
        BundleError: the network takes whole frames, for which there is no published protocol.
        GateError: no image could be evaluated.
    """
    if takes_whole_frames(bundle.recipe):
        height, width = bundle.recipe.network.image_size
        window = bundle.recipe.protocol.window
        raise BundleError(
            f"expected a network for the protocol's windows of {window}x{window} pixels, got one for {height}x{width}: "
            f"export it with --image-size {window}x{window}"
        )
    bundle.require_writable()
    with Predictor(bundle, runtime, tau, gbm_threshold, merge) as predictor:
        thresholds = predictor.thresholds_in_force
        # A graph or an engine that was built anew, perhaps in another precision, starts a run of its own.
        files, plan = executables(bundle, runtime), bundle.recipe.merging
        artifact = f"{files} {bundle.recipe.precision} {runtime} {plan} {sorted(thresholds.items())}"
        result = evaluate(
            dataset,
            predictor.scores_of,
            bundle.recipe,
            artifact=artifact,
            state_folder=bundle.path / "reports",
            runtime=runtime,
            device=row_of(runtime).device_here(),
            thresholds=thresholds,
            window_batch=predictor.window_batch,
            progress=progress,
        )
    if not result.images:
        raise GateError(f"{dataset.name}: none of {len(dataset.samples)} images could be evaluated")
    bundle.record(result)
    return result


def bench_bundle(
    bundle: Bundle, runtime: str, paths: Sequence[Path], request: Request, progress: bool = True
) -> list[Measured]:
    """Times a bundle beside its dense and truncated variants; keeps the records in the manifest and returns them.

    The pictures are one window each of photos, or of synthetic scenes where there are no `paths`.

    Raises:
        BundleError: the bundle was never verified on this runtime, or the pictures do not make batches.
        GateError: its parity failed, so nothing is timed.
    """
    check_verified(bundle, runtime)
    bundle.require_writable()
    windows = parity_windows(bundle.recipe, paths, request.count)
    records = benchmark(bundle, runtime, windows, request, progress)
    facts = _kind_of_pictures(windows, paths)
    reading: dict[str, float] = {}
    if paths and request.protocol == "latency":
        reading = reading_ms(spread(paths, request.count), bundle.recipe)
    rows = []
    for figures in records.values():
        record = structs.replace(figures, **facts, stages={**reading, **figures.stages})
        bundle.record(record)
        rows.append(Measured(bundle.path.name, artifact_of(bundle, record), record))
    return rows


def _kind_of_pictures(windows: NDArray[Any], paths: Sequence[Path]) -> dict[str, Any]:
    """What was timed on. How much merges depends on the picture, so noise and scenes say little about photos."""
    kind = "photos" if paths else "synthetic scenes"
    is_natural = natural(windows)
    return {"pictures": kind if is_natural else "constant or random", "representative": is_natural and bool(paths)}


def note_not_run(bundle: Bundle, runtime: str, reason: str) -> tuple[Step, ...]:
    """Writes into the manifest that the steps behind the build did not run, and why; returns their names."""
    steps: tuple[Step, ...] = ("parity", "evaluation", "speed")
    bundle.note_not_run(steps, runtime, reason)
    return steps
