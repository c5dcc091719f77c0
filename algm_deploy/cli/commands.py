"""One function a command: flags in, exit code out. Imports are inside, so that help and errors come at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from algm_deploy.cli.settings import settings_of
from algm_deploy.errors import DatasetError, GateError, NotExecutedError
from algm_deploy.recipe.reading import recipe, recipe_names, recipe_rows
from algm_deploy.runners.registry import row_of

if TYPE_CHECKING:
    from algm_deploy.bundle.records import Parity
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.evaluation.datasets import Dataset
    from algm_deploy.timing.protocols import Request


def _word(path: Path) -> str:
    """A path as a shell takes it."""
    return quote(str(path))


def list_recipes(_: argparse.Namespace) -> int:
    """Recipes that come with the package."""
    from algm_deploy.report.tables import text_table

    rows = []
    names = [full for name in recipe_names() for full in (name, *(f"{name}@{row}" for row in recipe_rows(name)))]
    for name in names:
        facts = recipe(name)
        plan, network = facts.merging, facts.network
        kinds = {"CLAP": plan.clap_layers, "GBM": plan.gbm_layers}
        layers = "; ".join(f"{kind} {', '.join(map(str, found))}" for kind, found in kinds.items() if found)
        tau = f"{plan.clap_threshold:g}" if plan.clap_layers else "-"
        if plan.method == "tome":
            layers = f"ToMe {', '.join(map(str, plan.layers))}"
        size = "x".join(map(str, network.image_size))
        published = facts.published.get("miou_percent")
        miou = f"{published:g}" if published else "-"
        rows.append((name, facts.protocol.dataset, size, layers, tau, miou))
    print(text_table(("recipe", "dataset", "input", "merging layers", "tau", "published mIoU %"), rows))
    return 0


def export_bundle(options: argparse.Namespace) -> int:
    """Checkpoint to a bundle."""
    _exported(options)
    print(f"next: algm-deploy verify {_word(options.output)} --runtime onnxruntime-cpu")
    return 0


def _exported(options: argparse.Namespace) -> Bundle:
    from algm_deploy.deployment import export

    settings = settings_of(options)
    result = export(options.checkpoint, options.output, options.recipe, settings, source="command line")
    for line in (*result.conflicts, *result.notes):
        print(f"note: {line}")
    bundle = result.bundle
    if unused := bundle.manifest.unused_checkpoint_keys:
        print(f"unused in the checkpoint: {', '.join(unused)}")
    for name, entry in sorted(bundle.files.items()):
        print(f"{entry.size_bytes / 1e6:9.1f} MB  {options.output / name}")
    return bundle


def build(options: argparse.Namespace) -> int:
    """A runtime's own executable, added to a bundle."""
    from algm_deploy.bundle.store import Bundle

    bundle = Bundle.open(options.bundle)
    if options.repeat:
        print(_rebuilt(bundle, options))
    else:
        _built(bundle, options)
    print(f"next: algm-deploy verify {_word(options.bundle)} --runtime {options.runtime}")
    return 0


def _built(bundle: Bundle, options: argparse.Namespace) -> None:
    from algm_deploy.deployment import build

    for line in build(bundle, options.runtime, **_engine_options(bundle, options)):
        print(line)


def _rebuilt(bundle: Bundle, options: argparse.Namespace) -> str:
    from algm_deploy.deployment import repeat_build

    found = repeat_build(bundle, options.runtime, options.repeat, **_engine_options(bundle, options))
    share, times, distinct = found.labels_equal_percent_min, found.network_ms_by_build, found.distinct_files
    line = f"{found.builds} builds gave {'equal files' if distinct == 1 else f'{distinct} different files'}"
    if share is None or times is None:
        return f"{line}; their labels were not compared, as nothing here can execute them"
    spread = f"{min(times):.2f} to {max(times):.2f} ms a picture"
    return f"{line}; at least {share:.3f} % of the labels of each of {found.pictures} scenes are equal; {spread}"


def _engine_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of an engine that were given.

    Raises:
        BuildError: the runtime does not have one of them.
    """
    flags = ("level", "workspace_mib", "timing_cache", "version_compatible", "hardware_compatible")
    said = {name: getattr(options, name) for name in flags}
    given = {name: value for name, value in said.items() if value is not None and value is not False}  # level 0 counts
    if options.compute_capabilities:
        given["compute_capabilities"] = tuple(options.compute_capabilities)
    if options.engine_precision:
        given["precision"] = options.engine_precision
    row_of(options.runtime).check_options([*given, *(["batches"] * bool(options.opt_batch))])
    return given


def _engine_options(bundle: Bundle, options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say about an engine; nothing where none is given, and the builder's defaults hold."""
    given = _engine_flags(options)
    if options.opt_batch:
        given["batches"] = (1, options.opt_batch, bundle.recipe.max_batch)
    return given


def verify(options: argparse.Namespace) -> int:
    """Parity chain of a bundle on a runtime."""
    from algm_deploy.bundle.store import Bundle

    report = _verified(Bundle.open(options.bundle), options)
    return 0 if report.passed else GateError.exit_code


def _verified(bundle: Bundle, options: argparse.Namespace) -> Parity:
    from algm_deploy.deployment import verify
    from algm_deploy.report.tables import text_table
    from algm_deploy.wording import counted

    report = verify(bundle, options.runtime, images=options.images, count=options.count)
    rows = [
        (str(link.number), link.name, "ok" if link.passed else "FAILED", link.measured, link.gate)
        for link in report.links
    ]
    print(text_table(("", "link", "result", f"measured, {report.runtime}", "would pass at"), rows))
    batches = ", ".join(map(str, report.batches))
    pictures = counted(report.images, report.pictures)
    hint = "" if options.images else " (give --images for your own)"
    print(f"{pictures}{hint}; batches of {batches}; {'passed' if report.passed else 'FAILED'}")
    return report


def predict(options: argparse.Namespace) -> int:
    """Label map, overlay and merged-token pictures of photos."""
    from tqdm import tqdm

    from algm_deploy.pictures.sources import find_images
    from algm_deploy.predictor import Predictor
    from algm_deploy.report.pictures import PictureWriter

    photos = find_images(options.images)
    with Predictor(options.bundle, options.runtime, tau=options.tau) as predictor:
        writer = PictureWriter(predictor, options.output)
        for photo in tqdm(photos, "predict", unit="photo", disable=None if len(photos) > 1 else True):
            for path in writer.write(photo):
                tqdm.write(str(path))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """mIoU of a bundle on a data set."""
    from algm_deploy.bundle.store import Bundle

    if problem := _evaluated(Bundle.open(options.bundle), options):
        raise DatasetError(problem)
    return 0


def _evaluated(bundle: Bundle, options: argparse.Namespace) -> str:
    """Evaluates and prints; returns what is wrong with the figures, nothing where all images are in them."""
    from algm_deploy.deployment import evaluate
    from algm_deploy.report.tables import quality_table, text_table

    dataset = _dataset(bundle, options)
    if options.limit:
        dataset = dataset.subset(options.limit)
    tau = None if options.dense else options.tau
    record = evaluate(bundle, dataset, options.runtime, tau=tau, dense=options.dense)
    print(text_table(*quality_table(record)))
    failures = record.failures
    for name, reason in failures.items():
        print(f"not evaluated: {name}: {reason}")
    if not failures:
        return ""
    return (
        f"{len(failures)} of {len(dataset.samples)} images could not be evaluated, the figures are those of the rest: "
        "mend these files and run it again, what is done is kept"
    )


def _dataset(bundle: Bundle, options: argparse.Namespace) -> Dataset:
    from algm_deploy.evaluation.datasets import open_dataset

    return open_dataset(options.dataset or bundle.recipe.protocol.dataset, options.data, options.split, options.slice)


def bench(options: argparse.Namespace) -> int:
    """Speed beside the dense network, by protocol."""
    from algm_deploy.bundle.signature import CLAP_THRESHOLD
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.timing.protocols import usual_request

    bundle = Bundle.open(options.bundle)
    thresholds = {} if options.tau is None else {CLAP_THRESHOLD: options.tau}
    numbers = (options.count, options.batch, options.warmup, options.rounds)
    _timed(bundle, options, usual_request(bundle.recipe, options.protocol, *numbers, thresholds))
    return 0


def _timed(bundle: Bundle, options: argparse.Namespace, request: Request) -> None:
    from algm_deploy.deployment import bench
    from algm_deploy.report.records import rows_of
    from algm_deploy.report.tables import condensed, speed_notes, speed_table, text_table

    rows = rows_of(bundle, bench(bundle, options.runtime, images=options.images, protocol=request))
    table, conditions = condensed(speed_table(rows))
    print(f"{conditions}\n\n{text_table(*table)}")
    for line in speed_notes(rows):
        print(line)


def report(options: argparse.Namespace) -> int:
    """One HTML page about a bundle."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.pictures.sources import find_images
    from algm_deploy.report.gallery import Photo, draw_gallery, labelled_photos
    from algm_deploy.report.page import write_report

    bundles = [Bundle.open(path) for path in (options.bundle, *options.beside)]
    photos = [Photo(path.name, path) for path in find_images(options.images)] if options.images else []
    if options.data:
        photos += labelled_photos(_dataset(bundles[0], options), options.count)
    gallery = draw_gallery(bundles[0], options.runtime, photos) if photos else None
    print(write_report(bundles, options.output, gallery))
    return 0


def deploy(options: argparse.Namespace) -> int:
    """Checkpoint to a verified bundle: export, build, verify, evaluate, time."""
    from algm_deploy.deployment import require_runtime
    from algm_deploy.pictures.sources import find_images

    # What is wrong is told before the work, not behind it.
    require_runtime(options.runtime)
    _engine_flags(options)
    if options.images:
        find_images(options.images)
    bundle = _exported(options)
    if options.data:
        _dataset(bundle, options)
    _built(bundle, options)
    print()
    try:
        report = _verified(bundle, options)
    except NotExecutedError as error:
        return _built_only(bundle, options, str(error))
    if not report.passed:
        raise GateError("the parity chain failed: nothing of this bundle should be trusted before it passes")
    problem = ""
    if options.data:
        print()
        problem = _evaluated(bundle, options)
    if options.bench:
        from algm_deploy.timing.protocols import usual_request

        print()
        _timed(bundle, options, usual_request(bundle.recipe, "latency"))
    print(f"\ndeployed: {options.output}")
    print(f"next: algm-deploy predict {_word(options.output)} PHOTO --runtime {options.runtime}")
    if problem:
        raise DatasetError(problem)
    return 0


def _built_only(bundle: Bundle, options: argparse.Namespace, reason: str) -> int:
    """What is left to say when nothing here can execute what was built."""
    from algm_deploy.deployment import note_not_run
    from algm_deploy.report.tables import text_table

    steps = note_not_run(bundle, options.runtime, reason)
    print(text_table(("step", "result"), [(step, "not run") for step in steps]))
    print(f"\nBUILT, NOT EXECUTED: {options.output}\nreason: {reason}")
    print(f"next, on a machine that can: algm-deploy verify {_word(options.output)} --runtime {options.runtime}")
    return NotExecutedError.exit_code


def demo(options: argparse.Namespace) -> int:
    """The whole product on an embedded synthetic example."""
    from algm_deploy.demo.run import demonstrate

    print(
        "A small network goes from checkpoint to report. It merges tokens: parts of a picture that look alike become\n"
        "one, which leaves less to compute. It was really trained, but on drawn street scenes: all here is synthetic.\n"
    )
    folder = options.output
    demonstrate(folder, options.runtime, print)
    print(
        "\nThe same for a checkpoint of yours:\n"
        "  algm-deploy deploy CHECKPOINT -o BUNDLE --images PHOTOS --data DATASET\n"
        "  algm-deploy evaluate BUNDLE --data DATASET --dense\n"
        "  algm-deploy bench BUNDLE --images PHOTOS\n"
        "  algm-deploy predict BUNDLE PHOTO\n"
        "  algm-deploy report BUNDLE --data DATASET"
    )
    return 0


def doctor(options: argparse.Namespace) -> int:
    """What can build and execute on this machine, and what to change."""
    from algm_deploy.doctor.rules import diagnose
    from algm_deploy.doctor.text import for_people, for_programs

    findings = diagnose()
    print(for_programs(findings) if options.json else for_people(findings))
    return 0


def build_native(options: argparse.Namespace) -> int:
    """Compile the native libraries for this machine."""
    from algm_deploy.native_libraries import BUILT, build

    built = build(options.libraries or BUILT, options.architectures)
    for name, path in built.items():
        print(f"{name}: {path}")
    return 0
