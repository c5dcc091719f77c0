"""The steps of a deployment, one function each: what the command line calls and what a script may call.

    import algm_deploy

    algm_deploy.export("checkpoint", "bundle", "segmenter_vit_s16_ade20k")
    algm_deploy.build("bundle")
    algm_deploy.verify("bundle", images="photos")
    algm_deploy.evaluate("bundle", "datasets/ade20k").miou_percent

A bundle is its folder, or the opened `Bundle`. Without a `runtime` it is the best that can execute the bundle here.
What a step finds goes into the bundle's manifest, and is returned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from algm_deploy.bundle.records import Evaluation, Parity, ProtocolName, Rebuilds, Reference, Speed, Step
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, CheckpointError, DatasetError, NotExecutedError, RecipeError
from algm_deploy.evaluation.datasets import SPECS, Dataset, open_dataset
from algm_deploy.evaluation.evaluate import Measure, Measurer, evaluate_by
from algm_deploy.fleet.cluster import connected
from algm_deploy.fleet.evaluating import Fleet
from algm_deploy.fleet.opening import opening_of
from algm_deploy.lowering.writing import write_bundle
from algm_deploy.models.checkpoints.reading import VARIANT_FILE, read_checkpoint
from algm_deploy.models.checkpoints.variant import settings_from_variant
from algm_deploy.models.quantized import CALIBRATED
from algm_deploy.parity.chain import verify as verify_chain
from algm_deploy.parity.exchange import load_inputs, load_outputs, save_inputs, save_outputs
from algm_deploy.parity.pairwise import Comparison, Standing, check_comparable, difference
from algm_deploy.pictures.preprocessing import check_pixels, preprocessing_fingerprint
from algm_deploy.pictures.shipped import scene
from algm_deploy.pictures.sources import AnyPath, find_images, named, read_photos
from algm_deploy.predictor import (
    AnyBundle,
    Predictor,
    chosen,
    given_thresholds,
    network_anchors,
    network_canvas,
    opened,
    takes_whole_frames,
    thresholds_in_force,
    usual_batch,
)
from algm_deploy.recipe.reading import budget_settings, checked, recipe_settings, resolve, with_method
from algm_deploy.recipe.schema import Recipe
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.registry import default_runtime, row_of
from algm_deploy.timing.protocols import Request, benchmark, check_verified, natural, reading_ms, usual_request
from algm_deploy.timing.timers import host_ms
from algm_deploy.timing.variants import executables
from algm_deploy.wording import merge_titles

REBUILD_PICTURES = 4
CALIBRATION_PICTURES = 32
Images = AnyPath | Sequence[AnyPath]
"""Pictures and folders of pictures; an empty list stands for the drawn scenes that ship."""


@dataclass(frozen=True)
class Exported:
    """A new bundle, and what its owner should know about its settings, one printable line each: those on which their
    sources disagreed (`conflicts`), and what no source decided or what was taken for granted (`notes`)."""

    bundle: Bundle
    conflicts: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export(
    checkpoint: AnyPath,
    bundle: AnyPath,
    recipe: AnyPath | None = None,
    settings: Mapping[str, Any] = {},
    *,
    tau: float | None = None,
    gbm: float | None = None,
    budget: tuple[int | float, int | float] | None = None,
    calibrate: Images = (),
    source: str = "the call",
) -> Exported:
    """Exports a checkpoint to a bundle.

    Args:
        checkpoint: `checkpoint.pth` or its folder, in the official format; or another file of torch.save, or of
            safetensors.
        bundle: folder of the new bundle; an existing bundle there is replaced once the new one is complete.
        recipe: name or TOML file; without it `variant.yml` beside the checkpoint decides.
        settings: dotted recipe settings that win over both sources, such as {"merging.clap_threshold": 0.9}.
        tau: CLAP's threshold, as the setting `merging.clap_threshold`.
        gbm: GBM's multiplier or threshold, as the setting `merging.gbm_threshold`.
        budget: merges, instead of what reaches a threshold, so many windows and tokens of every picture: counts, or
            shares of the windows and of the tokens that reach GBM. Not the paper's rule; shapes are static.
        calibrate: for int8, and for fp8 with TensorRT, photos like those that the bundle will see, on which ranges are
            measured; up to `CALIBRATION_PICTURES` of them, spread evenly.
        source: what lines about conflicts call the origin of `settings`.

    Raises:
        CheckpointError, RecipeError: one of them is malformed, or they do not fit together.
        BundleError: nothing can be written there.
    """
    target = named(bundle, BundleError)
    content = read_checkpoint(named(checkpoint, CheckpointError))
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if content.variant is not None or recipe is None:
        layers.append((VARIANT_FILE, settings_from_variant(content)))
    if recipe is not None:
        below = layers[0][1] if layers else {}
        layers.append((f"recipe {recipe}", with_method(recipe_settings(str(recipe)), below)))
    thresholds = {"merging.clap_threshold": tau, "merging.gbm_threshold": gbm}
    given = {key: value for key, value in thresholds.items() if value is not None}
    given |= budget_settings(*budget) if budget else {}
    if twice := sorted(settings.keys() & given.keys()):
        raise RecipeError(f"expected {twice[0]} once, got it among the settings and as an argument: leave one out")
    asked = {**settings, **given}
    layers.append((source, {key: checked(key, value) for key, value in asked.items()}))
    decided, conflicts = resolve(layers)
    windows = _calibration_windows(decided, calibrate)
    fingerprint = preprocessing_fingerprint(decided.protocol)
    written = write_bundle(content, _with_classes(decided), target, fingerprint, windows)
    return Exported(written, conflicts, (*content.notes, *_threshold_note(decided, layers), *_high_note(written)))


def _calibration_windows(recipe: Recipe, images: Images) -> NDArray[Any] | None:
    """Windows to measure ranges on where the precision needs them.

    Raises:
        RecipeError: int8 without pictures, or pictures for a precision that is not calibrated.
    """
    paths = _pictures(images)
    if paths and recipe.precision not in CALIBRATED:
        wanted = " or ".join(CALIBRATED)
        raise RecipeError(
            f"expected photos to calibrate on with {wanted} alone, got some for {recipe.precision}: leave them out"
        )
    if recipe.precision == "int8" and not paths:
        raise RecipeError(
            "expected photos to calibrate int8 on, got none: name some like those it will see (--calibrate PHOTOS)"
        )
    return parity_windows(recipe, paths, CALIBRATION_PICTURES) if paths else None


def _high_note(bundle: Bundle) -> tuple[str, ...]:
    """What a calibration decided."""
    found = bundle.manifest.quantization
    if found is None:
        return ()
    around = "fp32" if bundle.recipe.precision == "int8" else "fp16"
    kept = f", {len(found.high)} stay in {around} ({', '.join(found.high[:3])}{', ...' if found.high[3:] else ''})"
    inside = found.label_agreement_attention
    with_attention = f", {100 * inside:.2f} % with attention's own products in int8" if inside is not None else ""
    return (
        f"{bundle.recipe.precision}: {len(found.products)} matrix products, calibrated on {found.windows} windows"
        f"{kept if found.high else ''}; {100 * found.label_agreement:.2f} % of labels there as in fp32{with_attention}",
    )


def _with_classes(recipe: Recipe) -> Recipe:
    """The recipe with the data set's class names and colours where it has none of its own."""
    spec = SPECS.get(recipe.protocol.dataset)
    if spec is None or len(spec.classes.names) != recipe.network.classes:
        return recipe
    names, palette = spec.classes.names, spec.classes.palette
    return replace(recipe, class_names=recipe.class_names or names, palette=recipe.palette or palette)


def _threshold_note(recipe: Recipe, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, ...]:
    plan = recipe.merging
    given = any("merging.clap_threshold" in settings for _, settings in layers)
    if given or not plan.reads_clap_threshold:
        return ()
    (merge,) = merge_titles([plan.merge_in(plan.layers[0])]).values()
    best = ", at best the mean + standard deviation of the similarities on training images" if plan.clap_layers else ""
    return (
        f"no source gives {merge}'s threshold for {recipe.name}, so it is {plan.clap_threshold:g} and {merge} merges "
        f"practically nothing: give --tau{best}",
    )


def require_runtime(runtime: str) -> None:
    """RuntimeUnavailableError or BuildError where it is clear before the export that a runtime cannot be built for."""
    runner_type(runtime).require_builder()


def build(bundle: AnyBundle, runtime: str | None = None, **options: Any) -> list[str]:
    """Makes a runtime's executable and adds it to the bundle; returns what was done, one printable line each.

    Raises:
        BuildError: options that the runtime does not have, or the build failed.
        RuntimeUnavailableError: the runtime is not installed.
    """
    bundle, runtime = chosen(bundle, runtime)
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
        build(bundle, runtime, **options)
        files.add(tuple(bundle.files[name].sha256 for name in row_of(runtime).executed(bundle.files)))
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


def parity_windows(recipe: Recipe, paths: Sequence[Path], count: int) -> NDArray[Any]:
    """One window (n, 3, H, W) each of up to `count` pictures spread evenly over `paths`, in the graph's pixel dtype.

    Without paths they are `count` of the drawn street scenes that ship, which exercise merging better than noise would:
    day, dusk and night are mixed, all differ, and beyond 24 they are mirror images and crops (`pictures.shipped`).
    """
    photos = read_photos(spread(paths, count)) if paths else [scene(n)[0] for n in range(count)]
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


def verify(
    bundle: AnyBundle,
    runtime: str | None = None,
    *,
    images: Images = (),
    count: int = 4,
    progress: bool = True,
    reference: Reference = "cpu",
) -> Parity:
    """Runs the parity chain, which compares a runtime with PyTorch; the record's `passed` is the verdict.

    Args:
        bundle: its folder or the opened bundle.
        runtime: what executes it; by default the best that can here.
        images: pictures to compare on, `count` of them spread evenly.
        count: how many.
        progress: show a bar.
        reference: what PyTorch computes on, to which the runtime is held: a GPU is faster where networks are large.

    Raises:
        BundleError: two equal pictures, or pictures that do not fit the bundle.
        RuntimeUnavailableError: the runtime cannot be had here, or the reference: see `parity.chain.verify`.
    """
    bundle, runtime = chosen(bundle, runtime)
    paths = _pictures(images)
    bundle.require_writable()
    found = verify_chain(bundle, runtime, parity_windows(bundle.recipe, paths, count), progress, reference)
    record = structs.replace(
        found,
        pictures="photos" if paths else "synthetic scenes",
        device=row_of(runtime).device_here(),
        files=executables(bundle, runtime),
    )
    bundle.record(record)
    return record


def evaluate(
    bundle: AnyBundle,
    data: Dataset | AnyPath,
    runtime: str | None = None,
    *,
    dataset: str | None = None,
    split: str | None = None,
    slice_by: str | None = None,
    limit: int | None = None,
    tau: float | None = None,
    gbm: float | None = None,
    dense: bool = False,
    device: str | None = None,
    ray: str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Evaluates a bundle on a data set, resuming where an interrupted run stopped.

    Args:
        bundle: its folder or the opened bundle.
        data: root folder of a data set in its official layout, or an opened one.
        runtime: what executes it; by default the best that can here.
        dataset: its name, or `folder` for labelled pictures of your own; by default the one the recipe names.
        split: by default the one that published figures use.
        slice_by: how to group pictures for figures by slice; `open_dataset` says how.
        limit: that many pictures, spread evenly.
        tau: CLAP's threshold instead of the bundle's.
        gbm: GBM's multiplier or threshold instead of the bundle's.
        dense: evaluates the network without merging, on the same executable.
        device: what executes it, such as `cpu` or `cuda:1`; by default the runtime's choice.
        ray: address of a Ray cluster whose workers do it, as `fleet.cluster.connected` takes it; figures are the same,
            and what one run has done, the other takes over.
        workers: of the cluster; by default one for each GPU, or for each CPU where the runtime uses none.
        progress: show a bar.

    Raises:
        DatasetError: the data set is not there, not the network's, or none of its images could be evaluated.
        BundleError: the network takes whole frames, for which there is no published protocol; or as `Predictor`.
    """
    bundle = opened(bundle)
    if takes_whole_frames(bundle.recipe):
        height, width = bundle.recipe.network.image_size
        window = bundle.recipe.protocol.window
        raise BundleError(
            f"expected a network for the protocol's windows of {window}x{window} pixels, got one for {height}x{width}: "
            f"export it with --image-size {window}x{window}"
        )
    if not isinstance(data, Dataset):
        name = bundle.recipe.protocol.dataset if dataset is None else dataset
        data = open_dataset(name, named(data), split, slice_by)
    elif (dataset, split, slice_by) != (None, None, None):
        raise DatasetError("expected a folder for dataset, split or slice_by, got an opened data set: leave them out")
    pictures = data.subset(limit) if limit else data
    bundle.require_writable()
    thresholds = thresholds_in_force(bundle, given_thresholds(bundle, tau, gbm, dense))
    by = partial(_evaluated, bundle, pictures, thresholds=thresholds, progress=progress)
    if ray is None:
        with Predictor(bundle, runtime, device=device, tau=tau, gbm=gbm, dense=dense) as predictor:
            measure = Measurer(pictures, predictor.scores_of, bundle.recipe, predictor.batch).all_of
            result = by(measure, predictor.runtime, predictor.device_name)
    else:
        with connected(ray, workers) as cluster:
            opening = opening_of(cluster, bundle, runtime, device, tau=tau, gbm=gbm, dense=dense)
            fleet = Fleet(cluster, opening, pictures)
            found = by(fleet, opening.runtime)
            result = structs.replace(found, device=", ".join(sorted(fleet.devices)) or found.device)
    bundle.record(result)
    return result


def _evaluated(
    bundle: Bundle,
    dataset: Dataset,
    measure: Measure,
    runtime: str,
    device: str = "not recorded",
    *,
    thresholds: Mapping[str, float],
    progress: bool,
) -> Evaluation:
    """Evaluates; a graph or engine that was built anew, perhaps in another precision, starts a run of its own."""
    files, plan = executables(bundle, runtime), bundle.recipe.merging
    return evaluate_by(
        dataset,
        measure,
        bundle.recipe,
        artifact=f"{files} {bundle.recipe.precision} {runtime} {plan} {sorted(thresholds.items())}",
        state_folder=bundle.path / "reports",
        runtime=runtime,
        device=device,
        thresholds=thresholds,
        window_batch=usual_batch(bundle),
        progress=progress,
    )


def bench(
    bundle: AnyBundle,
    runtime: str | None = None,
    *,
    images: Images = (),
    protocol: ProtocolName | Request = "latency",
    count: int | None = None,
    batch: int | None = None,
    warmup: int | None = None,
    rounds: int | None = None,
    tau: float | None = None,
    gbm: float | None = None,
    dense: bool = False,
    progress: bool = True,
) -> list[Speed]:
    """Times a bundle beside its dense and truncated variants; returns a record for each.

    On a runtime that can leave the attention of a dense network to cuDNN there are two of these, and gains are against
    the faster.

    Args:
        bundle: its folder or the opened bundle; verified on this runtime.
        runtime: what executes it; by default the best that can here.
        images: pictures to time, one window of each.
        protocol: `latency` (one picture until its label map is there), `mixed` (batches of different pictures) or
            `duplicate` (batches of one picture), with the usual effort; or all of a request, numbers included.
        count: how many pictures; by default eight, or as many as fill a batch.
        batch: pictures in a batch; by default as many as the bundle takes.
        warmup: calls before the clock counts.
        rounds: rounds over the pictures at least.
        tau: CLAP's threshold of the merging network instead of the bundle's.
        gbm: GBM's multiplier or threshold instead of the bundle's.
        dense: times the network without merging alone.
        progress: show a bar.

    Raises:
        BundleError: the bundle was never verified on this runtime, the pictures do not make batches, or numbers were
            given beside a request that has them.
        GateError: its parity failed, so nothing is timed.
    """
    bundle, runtime = chosen(bundle, runtime)
    if isinstance(protocol, Request):
        if dense or any(one is not None for one in (count, batch, warmup, rounds, tau, gbm)):
            raise BundleError("expected a request alone, which holds all numbers, got others beside it: leave them out")
        request = protocol
    else:
        thresholds = given_thresholds(bundle, tau, gbm, dense)
        request = usual_request(bundle.recipe, protocol, count, batch, warmup, rounds, {} if dense else thresholds)
        request = replace(request, variants=("dense",)) if dense else request
    check_verified(bundle, runtime)
    paths = _pictures(images)
    bundle.require_writable()
    windows = parity_windows(bundle.recipe, paths, request.count)
    records = benchmark(bundle, runtime, windows, request, progress)
    facts = _kind_of_pictures(windows, paths)
    reading: dict[str, float] = {}
    if paths and request.protocol == "latency":
        reading = reading_ms(spread(paths, request.count), bundle.recipe)
    speeds = [structs.replace(one, **facts, reading=reading) for one in records.values()]
    for record in speeds:
        bundle.record(record)
    return speeds


def compare(
    first: AnyBundle,
    second: AnyBundle | None = None,
    *,
    runtimes: Sequence[str] | None = None,
    images: Images = (),
    count: int = 4,
    tau: float | None = None,
    gbm: float | None = None,
    dense: bool = False,
    output: AnyPath | None = None,
    inputs: AnyPath | None = None,
    outputs: AnyPath | None = None,
) -> Comparison:
    """Runs two bundles, or two runtimes of one, on the same windows, and tells where they part.

    Args:
        first: a bundle, its folder or the opened bundle.
        second: by default the first again.
        runtimes: of the first and of the second, or one for both; by default, for one bundle PyTorch and the best
            runtime that can execute it here, for two bundles the best for each.
        images: pictures to compare on, `count` of them spread evenly.
        count: how many.
        tau: CLAP's threshold instead of each bundle's.
        gbm: GBM's multiplier or threshold instead of each bundle's.
        dense: runs both without merging.
        output: folder that keeps inputs and outputs, in Polygraphy's format.
        inputs: inputs in that format instead of pictures.
        outputs: outputs in that format, made from `inputs`, instead of a second run.

    Raises:
        BundleError: the two do not take the same windows, a file is none of Polygraphy's, or it is given beside what it
            replaces.
        ImageError: inputs that are no pixels from 0 to 255.
        RuntimeUnavailableError: a runtime cannot run here.
    """
    one, _ = chosen(first, None)
    other = one if second is None else chosen(second, None)[0]
    check_comparable(one.signature, other.signature)
    names = _runtimes_to_compare(one, other, runtimes)
    if outputs is not None and inputs is None:
        raise BundleError("expected the inputs that the outputs were made from, got outputs alone: name both files")
    paths = _pictures(images)
    if inputs is not None and paths:
        raise BundleError("expected pictures or a file of inputs, got both: leave one out")
    feeds = _feeds(parity_windows(one.recipe, paths, count)) if inputs is None else _kept_feeds(inputs)
    runs = [_all_outputs(one, names[0], feeds, given_thresholds(one, tau, gbm, dense))]
    titles = [f"{bundle.path.name} on {name}" for bundle, name in zip((one, other), names, strict=True)]
    if outputs is None:
        runs.append(_all_outputs(other, names[1], feeds, given_thresholds(other, tau, gbm, dense)))
    else:
        titles[1], kept = load_outputs(named(outputs, BundleError))
        runs.append(kept)
    if output is not None:
        thresholds = {**one.signature.defaults, **given_thresholds(one, tau, gbm, dense)}
        _keep(named(output, BundleError), [{**thresholds, **feed} for feed in feeds], titles, runs)
    if len(runs[0]) != len(runs[1]):
        raise BundleError(f"expected outputs of {len(runs[0])} runs, got {len(runs[1])}: they come from other inputs")
    merges = (one.signature.merges, other.signature.merges)
    windows = tuple(difference(merges, pair) for pair in zip(*runs, strict=True))
    return Comparison(titles[0], titles[1], windows, 100 * one.recipe.gates.label_agreement)


def compare_precisions(
    bundles: Sequence[AnyBundle], runtime: str | None = None, *, images: Images = (), count: int = 4
) -> list[Standing]:
    """Runs exports of one network on the same windows, without merging and with it, each deciding for itself.

    Args:
        bundles: two or more, the first of which the others are held to.
        runtime: what executes all of them; by default the best that can execute the first here.
        images: pictures to compare on, `count` of them spread evenly.
        count: how many.

    Returns:
        For each bundle without merging, then for each with it, how it stands to the first.

    Raises:
        BundleError: they do not take the same windows, or merge otherwise than by similarity.
        RuntimeUnavailableError: the runtime cannot run here, or does not execute one of the precisions.
    """
    opened = [chosen(one, None)[0] for one in bundles]
    first, runtime = chosen(opened[0], runtime)
    for other in opened:
        check_comparable(first.signature, other.signature)
        row_of(runtime).check_precision(other.recipe.precision, other.calibrated)
    feeds = _feeds(parity_windows(first.recipe, _pictures(images), count))
    found = []
    for dense in (True, False):
        reference: list[dict[str, NDArray[Any]]] = []
        for bundle in opened:
            outputs = _all_outputs(bundle, runtime, feeds, given_thresholds(bundle, None, None, dense))
            runs = [_with_labels(one) for one in outputs]
            reference = reference or runs
            merges = first.signature.merges, bundle.signature.merges
            windows = tuple(difference(merges, pair) for pair in zip(reference, runs, strict=True))
            found.append(Standing(bundle, runtime, dense, windows))
    return found


def _with_labels(outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Outputs with labels in place of scores, which are larger."""
    rest = dict(outputs)
    return rest if "labels" in rest else {"labels": rest.pop("scores").argmax(1), **rest}


def _feeds(windows: NDArray[Any]) -> list[dict[str, NDArray[Any]]]:
    return [{"image": window[None]} for window in windows]


def _kept_feeds(file: AnyPath) -> list[dict[str, NDArray[Any]]]:
    """Inputs from a file, after a look at their pixels."""
    feeds = load_inputs(named(file, BundleError))
    for feed in feeds:
        if "image" in feed:
            check_pixels(feed["image"])
    return feeds


def _runtimes_to_compare(one: Bundle, other: Bundle, given: Sequence[str] | None) -> tuple[str, str]:
    if given is not None and not 1 <= len(given) <= 2:
        raise BundleError(f"expected one runtime or two, got {len(given)}")
    if given is not None:
        return given[0], given[-1]
    best = default_runtime(one.files), default_runtime(other.files)
    return best if one is not other else ("torch", best[1])


def _all_outputs(
    bundle: Bundle, runtime: str, feeds: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float]
) -> list[dict[str, NDArray[Any]]]:
    """Every output of the network for each of the feeds."""
    given = {name: np.float32(value) for name, value in thresholds.items()}
    names = [tensor.name for tensor in bundle.signature.outputs]
    read = {tensor.name for tensor in bundle.signature.inputs}
    with runner(bundle, runtime) as run:
        return [run.infer({n: v for n, v in {**given, **feed}.items() if n in read}, names) for feed in feeds]


def _keep(
    folder: Path, feeds: Sequence[Mapping[str, Any]], titles: Sequence[str], runs: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Inputs and outputs of two runs, in Polygraphy's format."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"expected a folder for inputs and outputs, got {folder} ({error.strerror})") from error
    save_inputs(
        [{n: np.asarray(v, np.float32) if n != "image" else v for n, v in one.items()} for one in feeds],
        folder / "inputs.json",
    )
    for name, title, run in zip(("first", "second"), titles, runs, strict=True):
        save_outputs(run, title, folder / f"{name}.json")


def _pictures(images: Images) -> list[Path]:
    """Pictures of a step, none where the drawn scenes stand in."""
    return find_images(images) if isinstance(images, str | os.PathLike) or images else []


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
