"""The command line. Exit codes: 0 done, 1 a gate failed, 2 bad input, 3 built but nothing here can execute it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algm_deploy import __version__
from algm_deploy.errors import AlgmDeployError, GateError, NotExecutedError, RecipeError
from algm_deploy.recipes import checked, recipe, recipe_names

if TYPE_CHECKING:
    from algm_deploy.bundle import Bundle
    from algm_deploy.evaluation.datasets import Dataset
    from algm_deploy.parity.chain import ParityReport
    from algm_deploy.recipes import Recipe
    from algm_deploy.timing.protocols import Request
    from algm_deploy.tuning.findings import Finding
    from algm_deploy.tuning.objective import Aim, Goal

RUNTIMES = ("torch", "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors made for users are one sentence, without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        code = run(options)
        sys.stdout.flush()  # here, where a failure is caught
        return code
    except AlgmDeployError as error:
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except MemoryError as error:
        message, code = (
            f"expected more free memory ({error}): use smaller pictures or batches",
            AlgmDeployError.exit_code,
        )
    except BrokenPipeError:  # such as `algm-deploy list | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell counts a process that ended by SIGPIPE
    except OSError as error:
        place, reason = f"{error.filename or 'a file'!s:.200}", error.strerror or str(error)
        message, code = f"expected to use {place}, got {reason}: name another one", AlgmDeployError.exit_code
    print(f"algm-deploy {options.command}: {message}", file=sys.stderr)
    return code


# --- commands --------------------------------------------------------------------------------------------------------


def _list(_: argparse.Namespace) -> int:
    from algm_deploy.report.tables import text_table

    rows = []
    for name in recipe_names():
        facts = recipe(name)
        plan, network = facts.merging, facts.network
        layers = f"CLAP {', '.join(map(str, plan.clap_layers))}; GBM {', '.join(map(str, plan.gbm_layers))}"
        size = "x".join(map(str, network.image_size))
        published = facts.published.get("miou_percent")
        miou = f"{published:g}" if published else "-"
        rows.append((name, facts.protocol.dataset, size, layers, f"{plan.clap_threshold:g}", miou))
    print(text_table(("recipe", "dataset", "input", "merging layers", "tau", "published mIoU %"), rows))
    return 0


def _export(options: argparse.Namespace) -> int:
    _exported(options)
    print(f"next: algm-deploy verify {options.output} --runtime onnxruntime-cpu")
    return 0


def _exported(options: argparse.Namespace) -> Bundle:
    from algm_deploy.deployment import export

    result = export(options.checkpoint, options.output, options.recipe, _settings(options))
    for line in (*result.conflicts, *result.notes):
        print(f"note: {line}")
    bundle = result.bundle
    if unused := bundle.fact("unused_checkpoint_keys"):
        print(f"unused in the checkpoint: {', '.join(unused)}")
    for name, entry in sorted(bundle.files.items()):
        print(f"{entry.size_bytes / 1e6:9.1f} MB  {options.output / name}")
    return bundle


def _build(options: argparse.Namespace) -> int:
    from algm_deploy.bundle import Bundle

    _built(Bundle.open(options.bundle), options)
    print(f"next: algm-deploy verify {options.bundle} --runtime {options.runtime}")
    return 0


def _built(bundle: Bundle, options: argparse.Namespace) -> None:
    from algm_deploy.deployment import build_bundle

    for line in build_bundle(bundle, options.runtime, **_engine_options(bundle, options)):
        print(line)


def _engine_options(bundle: Bundle, options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say about an engine; nothing where none is given, and the builder's defaults hold."""
    flags = ("level", "workspace_mib", "timing_cache", "version_compatible", "hardware_compatible")
    given = {name: getattr(options, name) for name in flags if getattr(options, name)}
    if options.compute_capabilities:
        given["compute_capabilities"] = tuple(options.compute_capabilities)
    if options.opt_batch:
        given["batches"] = (1, options.opt_batch, bundle.recipe.max_batch)
    found: dict[str, Any] = {"precision": options.engine_precision} if options.engine_precision else {}
    if given:
        from algm_deploy.runners.tensorrt_build import EngineOptions

        largest = bundle.recipe.max_batch
        found["options"] = EngineOptions(**({"batches": (1, largest, largest)} | given))
    return found


def _verify(options: argparse.Namespace) -> int:
    from algm_deploy.bundle import Bundle

    report = _verified(Bundle.open(options.bundle), options)
    return 0 if report.passed else GateError.exit_code


def _verified(bundle: Bundle, options: argparse.Namespace) -> ParityReport:
    from algm_deploy.deployment import find_images, verify_bundle
    from algm_deploy.report.tables import text_table

    paths = find_images(options.images) if options.images else []
    report = verify_bundle(bundle, options.runtime, paths, options.count)
    rows = [
        (str(link.number), link.name, "ok" if link.passed else "FAILED", link.measured, link.gate)
        for link in report.links
    ]
    print(text_table(("", "link", "result", f"measured, {report.runtime}", "would pass at"), rows))
    batches = ", ".join(map(str, report.batches))
    pictures = "photos" if paths else "synthetic scenes (give --images for your own)"
    print(f"{report.images} {pictures}; batches of {batches}; {'passed' if report.passed else 'FAILED'}")
    return report


def _predict(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from algm_deploy.deployment import find_images
    from algm_deploy.evaluation.predictor import Predictor
    from algm_deploy.report.pictures import PictureWriter

    photos = find_images(options.images)
    with Predictor(options.bundle, options.runtime, options.tau) as predictor:
        writer = PictureWriter(predictor, options.output)
        for photo in tqdm(photos, "predict", unit="photo", disable=None if len(photos) > 1 else True):
            for path in writer.write(photo):
                tqdm.write(str(path))
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from algm_deploy.bundle import Bundle

    _evaluated(Bundle.open(options.bundle), options)
    return 0


def _evaluated(bundle: Bundle, options: argparse.Namespace) -> None:
    from algm_deploy.deployment import evaluate_bundle
    from algm_deploy.evaluation.datasets import open_dataset
    from algm_deploy.report.tables import text_table

    dataset = open_dataset(
        options.dataset or bundle.recipe.protocol.dataset, options.data, options.split, options.slice
    )
    if options.limit:
        dataset = dataset.subset(options.limit)
    merge = not options.dense
    record = evaluate_bundle(bundle, options.runtime, dataset, options.tau if merge else None, merge=merge).record()
    print(text_table(*_quality_table(record)))
    for name, reason in record["failures"].items():
        print(f"not evaluated: {name}: {reason}")


def _bench(options: argparse.Namespace) -> int:
    from algm_deploy.bundle import Bundle
    from algm_deploy.signature import CLAP_THRESHOLD
    from algm_deploy.timing.protocols import usual_request

    bundle = Bundle.open(options.bundle)
    thresholds = {} if options.tau is None else {CLAP_THRESHOLD: options.tau}
    numbers = (options.count, options.batch, options.warmup, options.rounds)
    _timed(bundle, options, usual_request(bundle.recipe, options.protocol, *numbers, thresholds))
    return 0


def _timed(bundle: Bundle, options: argparse.Namespace, request: Request) -> None:
    from algm_deploy.deployment import bench_bundle, find_images
    from algm_deploy.report.tables import speed_notes, speed_table, text_table

    paths = find_images(options.images) if options.images else []
    rows = bench_bundle(bundle, options.runtime, paths, request)
    print(text_table(*speed_table(rows)))
    for line in speed_notes(rows):
        print(line)


def _quality_table(record: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    tokens = [key for key in record if key.startswith("tokens_after_") and key.endswith("_mean")]
    header = (
        "slice",
        "images",
        "mIoU %",
        "pixel accuracy %",
        *(k.removesuffix("_mean").replace("_", " ") for k in tokens),
    )
    whole = [("all", record)] + (list(record["slices"].items()) if len(record["slices"]) > 1 else [])
    return header, [
        (
            name,
            str(part["images"]),
            f"{part['miou_percent']:.2f}",
            f"{part['pixel_accuracy_percent']:.2f}",
            *(f"{part[key]:.0f}" for key in tokens),
        )
        for name, part in whole
    ]


def _tune(options: argparse.Namespace) -> int:
    from algm_deploy.bundle import Bundle
    from algm_deploy.report.tuning import finding_text, write_finding
    from algm_deploy.tuning.recipe_file import write_recipe

    bundle = Bundle.open(options.bundle)
    if options.output.suffix != ".toml" or not options.output.parent.is_dir():
        raise RecipeError(f"expected a .toml file in a folder that exists as --output, got {options.output}")
    find = _rule if options.rule else _objective if options.objective else _positions
    finding = find(bundle, options)
    print(finding_text(finding))
    bundle.record("tuning", finding.title, finding.record)
    print(f"\n{write_finding(finding, bundle.recipe.name, options.output.with_suffix('.html'))}")
    if finding.recipe is None:
        return GateError.exit_code
    print(write_recipe(finding.recipe, (f"By algm-deploy tune: {finding.title}.", *finding.lines), options.output))
    return 0


def _rule(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.deployment import find_images
    from algm_deploy.tuning.findings import find_by_rule
    from algm_deploy.tuning.similarity import Picture, pictures_of

    layers = (1,) if options.layers == "first" else tuple(range(1, bundle.recipe.network.depth + 1))
    if options.images:
        pictures = [Picture(path) for path in find_images(options.images)]
        return find_by_rule(bundle, pictures, layers, "photos without labels")
    dataset = _tuning_data(bundle, options, options.split)
    return find_by_rule(bundle, pictures_of(dataset), layers, f"{dataset.name} {dataset.split}")


def _objective(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.deployment import evaluate_bundle
    from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD
    from algm_deploy.timing.protocols import check_verified
    from algm_deploy.tuning.findings import find_threshold
    from algm_deploy.tuning.objective import default_candidates
    from algm_deploy.tuning.search import steps

    def evaluate(dataset: Dataset, thresholds: Mapping[str, float] | None) -> dict[str, Any]:
        given = thresholds or {}
        tau, gbm = given.get(CLAP_THRESHOLD, options.tau), given.get(GBM_THRESHOLD)
        record = evaluate_bundle(bundle, options.runtime, dataset, tau, gbm, merge=thresholds is not None).record()
        if timed and thresholds and dataset is tuning:
            record |= _throughput(bundle, options, dataset, tau, gbm)
        return record

    timed = options.objective == "throughput"
    if timed:
        check_verified(bundle, options.runtime)
    tuning, held_out = _tuning_splits(bundle, options)
    base = _recipe_to_tune(bundle, options)
    references = {"dense": lambda: evaluate(tuning, None), "clap": lambda: evaluate(tuning, {GBM_THRESHOLD: inf})}
    goal = _goal(options, tuning, references)
    candidates = steps(*options.range) if options.range else default_candidates(base.merging, options.knob)
    return find_threshold(base, options.knob, goal, candidates, evaluate, tuning, held_out)


def _throughput(
    bundle: Bundle, options: argparse.Namespace, dataset: Dataset, tau: float | None, gbm: float | None
) -> dict[str, Any]:
    """Pictures a second of the merging network alone, in batches of different pictures of a data set; and if steady."""
    from algm_deploy.deployment import bench_bundle
    from algm_deploy.signature import CLAP_THRESHOLD, GBM_THRESHOLD
    from algm_deploy.timing.protocols import usual_request
    from algm_deploy.tuning.objective import STABLE, THROUGHPUT

    given = {CLAP_THRESHOLD: tau, GBM_THRESHOLD: gbm}
    thresholds = {name: value for name, value in given.items() if value is not None}
    paths = [sample.image_path for sample in dataset.samples]
    batch = min(bundle.recipe.max_batch, len(paths))
    request = replace(usual_request(bundle.recipe, "mixed", None, batch, thresholds=thresholds), variants=("merged",))
    (row,) = bench_bundle(bundle, options.runtime, paths, request)
    return {name: row.record[name] for name in (THROUGHPUT, STABLE)}


def _positions(bundle: Bundle, options: argparse.Namespace) -> Finding:
    from algm_deploy.recipes import DENSE
    from algm_deploy.tuning.findings import find_positions
    from algm_deploy.tuning.positions import PlanEvaluator

    tuning, held_out = _tuning_splits(bundle, options)
    base = _recipe_to_tune(bundle, options)
    evaluate_plan = PlanEvaluator(bundle)
    plans = {"dense": DENSE, "clap": replace(base.merging, gbm_layers=())}
    goal = _goal(options, tuning, {name: partial(evaluate_plan, plan, tuning) for name, plan in plans.items()})
    return find_positions(evaluate_plan, base, options.count, goal, tuning, held_out)


def _recipe_to_tune(bundle: Bundle, options: argparse.Namespace) -> Recipe:
    from algm_deploy.tuning.objective import tuned_recipe

    return bundle.recipe if options.tau is None else tuned_recipe(bundle.recipe, "tau", options.tau)


def _goal(
    options: argparse.Namespace, tuning: Dataset, references: Mapping[str, Callable[[], Mapping[str, Any]]]
) -> Goal:
    """What to reach; for `reference` the mIoU of one of `references`, of another bundle, or a number, less --drop."""
    from algm_deploy.bundle import Bundle
    from algm_deploy.deployment import evaluate_bundle
    from algm_deploy.tuning.objective import Goal
    from algm_deploy.tuning.search import miou_of

    aim: Aim = options.objective or "reference"
    if aim == "best":
        return Goal(aim)
    if aim in ("gmacs", "throughput"):
        if options.target is None:
            raise RecipeError(f"expected --target for --objective {aim}: multiply-adds of a window in 10^9, or img/s")
        return Goal(aim, options.target)
    if options.reference in references:
        miou = miou_of(references[options.reference]())
    elif (folder := Path(options.reference)).is_dir():
        miou = miou_of(evaluate_bundle(Bundle.open(folder), options.runtime, tuning, merge=False).record())
    else:
        miou = _percent(options.reference)
    return Goal(aim, miou - options.drop)


def _tuning_splits(bundle: Bundle, options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Photos to choose on and photos to report on: two splits, or without --held-out the halves of one."""
    from algm_deploy.tuning.objective import halves

    if options.held_out is None:
        return halves(_tuning_data(bundle, options, options.split))
    return _tuning_data(bundle, options, options.split), _tuning_data(bundle, options, options.held_out)


def _tuning_data(bundle: Bundle, options: argparse.Namespace, split: str | None) -> Dataset:
    from algm_deploy.errors import DatasetError
    from algm_deploy.evaluation.datasets import open_dataset

    if options.data is None:
        raise DatasetError("expected --data with the root folder of a labelled data set, got none")
    dataset = open_dataset(options.dataset or bundle.recipe.protocol.dataset, options.data, split, options.slice)
    if options.limit and options.limit < len(dataset.samples):
        dataset = replace(dataset.subset(options.limit), split=f"{dataset.split}-{options.limit}")
    return dataset


def _report(options: argparse.Namespace) -> int:
    from algm_deploy.bundle import Bundle
    from algm_deploy.deployment import find_images
    from algm_deploy.evaluation.datasets import open_dataset
    from algm_deploy.report.gallery import Photo, draw_gallery, labelled_photos
    from algm_deploy.report.page import write_report

    bundles = [Bundle.open(path) for path in (options.bundle, *options.beside)]
    photos = [Photo(path.name, path) for path in find_images(options.images)] if options.images else []
    if options.data:
        name = options.dataset or bundles[0].recipe.protocol.dataset
        photos += labelled_photos(open_dataset(name, options.data, options.split, options.slice), options.count)
    gallery = draw_gallery(bundles[0], options.runtime, photos) if photos else None
    print(write_report(bundles, options.output, gallery))
    return 0


def _deploy(options: argparse.Namespace) -> int:
    bundle = _exported(options)
    _built(bundle, options)
    print()
    try:
        report = _verified(bundle, options)
    except NotExecutedError as error:
        return _built_only(bundle, options, str(error))
    if options.data:
        print()
        _evaluated(bundle, options)
    if not report.passed:
        raise GateError("the parity chain failed: nothing of this bundle should be trusted before it passes")
    if options.bench:
        from algm_deploy.timing.protocols import usual_request

        print()
        _timed(bundle, options, usual_request(bundle.recipe, "latency"))
    print(f"\ndeployed: {options.output}")
    print(f"next: algm-deploy predict {options.output} PHOTO --runtime {options.runtime}")
    return 0


def _built_only(bundle: Bundle, options: argparse.Namespace, reason: str) -> int:
    """What is left to say when nothing here can execute what was built."""
    from algm_deploy.deployment import note_not_run
    from algm_deploy.report.tables import text_table

    steps = note_not_run(bundle, options.runtime, reason)
    print(text_table(("step", "result"), [(step, "not run") for step in steps]))
    print(f"\nBUILT, NOT EXECUTED: {options.output}\nreason: {reason}")
    print(f"next, on a machine that can: algm-deploy verify {options.output} --runtime {options.runtime}")
    return NotExecutedError.exit_code


def _demo(options: argparse.Namespace) -> int:
    from algm_deploy.demonstration import demonstrate

    print("A small Segmenter trained on drawn street scenes: synthetic throughout, but really trained.\n")
    folder = options.output
    demonstrate(folder, options.runtime, options.scenes, print)
    print(
        "\nThe same for a checkpoint of yours:\n"
        "  algm-deploy deploy CHECKPOINT -o BUNDLE --images PHOTOS --data DATASET\n"
        "  algm-deploy evaluate BUNDLE --data DATASET --dense\n"
        "  algm-deploy bench BUNDLE --images PHOTOS\n"
        "  algm-deploy predict BUNDLE PHOTO\n"
        "  algm-deploy report BUNDLE --data DATASET"
    )
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from algm_deploy.doctor import diagnose, json_text, text

    findings = diagnose()
    print(json_text(findings) if options.json else text(findings))
    return 0


def _build_native(options: argparse.Namespace) -> int:
    from algm_deploy.native import build

    built = build(options.libraries or ("trt_plugin", "ort_custom_op"), options.architectures)
    for name, path in built.items():
        print(f"{name}: {path}")
    return 0


# --- options ---------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "algm-deploy", description="Deploys plain-ViT segmenters with adaptive token merging."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, text, groups in (
        (
            "deploy",
            _deploy,
            "checkpoint to a verified bundle: export, build, verify, evaluate, time",
            (_export_options, _runtime, _engine, _verify_options, _data_options, _deploy_options),
        ),
        ("export", _export, "checkpoint to a bundle", (_export_options,)),
        ("build", _build, "a runtime's own executable, added to a bundle", (_bundle, _runtime, _engine)),
        ("verify", _verify, "parity chain of a bundle on a runtime", (_bundle, _runtime, _verify_options)),
        ("evaluate", _evaluate, "mIoU of a bundle on a data set", (_bundle, _runtime, _data_options)),
        (
            "tune",
            _tune,
            "thresholds and merge positions from data, as a new recipe",
            (_bundle, _runtime, _tune_options),
        ),
        ("bench", _bench, "speed beside the dense network, by protocol", (_bundle, _runtime, _bench_options)),
        ("predict", _predict, "label map, overlay and merged-token pictures of photos", (_bundle, _photos, _runtime)),
        ("demo", _demo, "the whole product on an embedded synthetic example", (_demo_options,)),
        ("report", _report, "one HTML page about a bundle", (_bundle, _runtime, _report_options)),
        ("doctor", _doctor, "what can build and execute on this machine, and what to change", (_doctor_options,)),
        ("build-native", _build_native, "compile the native libraries for this machine", (_native_options,)),
        ("list", _list, "recipes that come with the package", ()),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        for add in groups:
            add(command)
    return parser


def _bundle(command: argparse.ArgumentParser) -> None:
    command.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder that export or deploy wrote")


def _photos(command: argparse.ArgumentParser) -> None:
    command.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="photos, or folders of photos")
    command.add_argument("-o", "--output", type=Path, default=Path("predictions"), help="folder for the pictures")
    command.add_argument(
        "--tau", type=float, help="CLAP threshold instead of the bundle's; above 1 CLAP merges nothing"
    )


def _doctor_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for programs")


def _native_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("libraries", nargs="*", metavar="LIBRARY", help="trt_plugin, ort_custom_op; default: all")
    command.add_argument(
        "--architectures", type=_positive, nargs="+", metavar="CC", help="compute capabilities such as 89; default: all"
    )


def _demo_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", type=Path, default=Path("algm-demo"), help="folder to write (algm-demo)")
    command.add_argument("--runtime", choices=RUNTIMES, default="onnxruntime-cpu")
    command.add_argument("--scenes", type=_positive, default=200, help="generated scenes to evaluate on (default 200)")


def _runtime(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runtime", choices=RUNTIMES, default="onnxruntime-cpu")


def _engine(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("TensorRT engines")
    group.add_argument("--engine-precision", choices=("fp32", "fp16", "bf16"), help="default: the bundle's")
    group.add_argument("--opt-batch", type=_positive, help="batch the engine is tuned for; default: the largest")
    group.add_argument("--level", type=int, choices=range(6), help="optimisation level of the builder")
    group.add_argument("--workspace-mib", type=_positive, help="scratch memory the builder may plan with")
    group.add_argument("--timing-cache", type=Path, help="tensorrt only: file of measured times, read and written")
    group.add_argument("--version-compatible", action="store_true", help="tensorrt only: runs on later releases too")
    group.add_argument("--hardware-compatible", action="store_true", help="tensorrt only: runs on later GPUs too")
    group.add_argument(
        "--compute-capabilities", nargs="+", metavar="CC", help="tensorrt-rtx only: GPUs to build for, such as 8.9"
    )


def _verify_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--images", type=Path, nargs="+", default=[], help="photos for parity; default: synthetic scenes"
    )
    command.add_argument("--count", type=_positive, default=4, help="how many of them (default 4)")


def _data_options(command: argparse.ArgumentParser) -> None:
    required = command.prog.endswith("evaluate")
    command.add_argument(
        "--data", type=Path, required=required, help="root folder of a data set in its official layout"
    )
    command.add_argument("--dataset", help="its name; default: the bundle's")
    command.add_argument("--split", help="default: the split its results are published on")
    command.add_argument("--slice", help="how to group images for figures by slice")
    command.add_argument("--limit", type=_positive, help="evaluate that many images, spread evenly")
    if required:
        command.add_argument("--tau", type=float, help="CLAP threshold instead of the bundle's")
    command.add_argument("--dense", action="store_true", help="merge nothing: what merging costs is the difference")


def _deploy_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--bench", action="store_true", help="time it as well, beside the dense network: see bench")


def _bench_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--images", type=Path, nargs="+", default=[], help="photos to time; default: synthetic scenes")
    command.add_argument(
        "--protocol",
        choices=("duplicate", "mixed", "latency"),
        default="latency",
        help="batches of one picture repeated, of different pictures, or single pictures until the label map is back "
        "on the host (default)",
    )
    command.add_argument("--batch", type=_positive, help="pictures in a batch; default: the bundle's maximum")
    command.add_argument("--count", type=_positive, help="how many pictures (default 8, or a batch of them)")
    command.add_argument("--warmup", type=_count, help="calls before the clock counts (default 5)")
    command.add_argument(
        "--rounds",
        type=_positive,
        help="rounds over the pictures at least; unsteady times get more (default 4)",
    )
    command.add_argument("--tau", type=float, help="CLAP threshold instead of the bundle's")


def _tune_options(command: argparse.ArgumentParser) -> None:
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--rule", action="store_true", help="CLAP threshold = mean + deviation of the similarities of a data set"
    )
    what.add_argument(
        "--objective",
        choices=("reference", "best", "gmacs", "throughput"),
        help="threshold that merges most at a reference's mIoU (ALGM*), of best mIoU, or for a budget of cost",
    )
    what.add_argument("--positions", action="store_true", help="earliest block for GBM that keeps the reference's mIoU")
    command.add_argument("-o", "--output", type=Path, default=Path("tuned.toml"), help="recipe to write; and .html")
    command.add_argument("--data", type=Path, help="root folder of a data set in its official layout")
    command.add_argument("--dataset", help="its name; default: the bundle's")
    command.add_argument("--split", help="split to tune on; default: the one its results are published on")
    command.add_argument("--held-out", help="split to report on; default: the second half of each slice is kept back")
    command.add_argument("--slice", help="how to group images for figures by slice")
    command.add_argument("--limit", type=_positive, help="use that many images of a split, spread evenly")
    command.add_argument("--images", type=Path, nargs="+", default=[], help="--rule: photos without labels")
    command.add_argument("--layers", choices=("first", "all"), default="first", help="--rule: blocks (default first)")
    command.add_argument("--knob", choices=("tau", "gbm"), default="tau", help="threshold to search (default tau)")
    command.add_argument("--range", type=float, nargs=3, metavar=("LOW", "HIGH", "STEP"), help="candidates")
    command.add_argument(
        "--reference",
        default="dense",
        help="dense, clap (the same without GBM), mIoU in percent, or a bundle whose dense mIoU counts",
    )
    command.add_argument(
        "--tau", type=float, help="CLAP threshold while something else is tuned; default: the bundle's"
    )
    command.add_argument("--drop", type=float, default=0.0, help="mIoU points allowed below the reference (default 0)")
    command.add_argument("--target", type=float, help="multiply-adds of a window in 10^9, or img/s")
    command.add_argument("--count", type=_positive, default=1, help="--positions: GBM blocks to place (default 1)")


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "beside", type=Path, nargs="*", metavar="OTHER", help="bundles to compare with, such as a dense one"
    )
    command.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="file to write")
    command.add_argument("--images", type=Path, nargs="+", default=[], help="photos to show, or folders of photos")
    command.add_argument("--data", type=Path, help="root folder of a data set: photos to show with their labels")
    command.add_argument("--dataset", help="its name; default: the bundle's")
    command.add_argument("--split", help="default: the split its results are published on")
    command.add_argument("--slice", help="how to group images")
    command.add_argument("--count", type=_positive, default=3, help="how many photos of the data set (default 3)")


def _export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint.pth or its folder")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    command.add_argument(
        "--recipe", help="recipe by name (see list) or TOML file; default: the checkpoint's variant.yml"
    )
    command.add_argument(
        "--image-size",
        type=_size,
        metavar="HxW",
        help="input of the network in pixels; other than the protocol's window: photos are resized to it as a whole",
    )
    command.add_argument("--tau", type=float, help="CLAP threshold")
    command.add_argument(
        "--scores", action="store_const", const="scores", dest="tail", help="output class scores (default)"
    )
    command.add_argument(
        "--labels", action="store_const", const="labels", dest="tail", help="output label maps only: fastest"
    )
    command.add_argument("--precision", choices=("fp32", "fp16"))
    command.add_argument("--max-batch", type=_positive)
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the recipe")


SETTINGS = {
    "image_size": "network.image_size",
    "tau": "merging.clap_threshold",
    "tail": "output",
    "precision": "precision",
    "max_batch": "max_batch",
}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Recipe settings from flags."""
    given = {key: getattr(options, flag) for flag, key in SETTINGS.items() if getattr(options, flag) is not None}
    for text in options.set:
        key, separator, value = text.partition("=")
        if not separator:
            raise RecipeError(f"expected --set KEY=VALUE, such as merging.order=raster; got {text!r}")
        given[key] = checked(key, _parsed(value))
    return given


def _parsed(value: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    import tomllib

    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return value


def _size(text: str) -> tuple[int, int]:
    height, separator, width = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH in pixels, such as 512x1024, got {text!r}")
    return _positive(height), _positive(width)


def _percent(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise RecipeError(
            f"expected dense, clap, an mIoU in percent or a bundle as --reference, got {text!r}"
        ) from error


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
