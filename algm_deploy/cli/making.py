"""Commands that make bundles: demo, export, build, deploy. Imports are inside, so that help and errors come at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algm_deploy.cli import arguments, proving
from algm_deploy.cli.saying import note, say, word
from algm_deploy.errors import DatasetError, GateError, NotExecutedError

if TYPE_CHECKING:
    from algm_deploy.bundle.store import Bundle


# ----------------------------------------------------------------------------------------------------------------- demo


def demo_flags(command: arguments.Parser) -> None:
    """Flags of demo."""
    command.add_argument(
        "-o", "--output", type=arguments.path, default=Path("algm-demo"), help="folder to write (algm-demo)"
    )
    arguments.runtime(command)


def demo(options: argparse.Namespace) -> int:
    """The whole product on a small network that ships."""
    from algm_deploy.demo.run import demonstrate

    say(
        "A small network goes from checkpoint to report. It merges tokens: parts of a picture that look alike become\n"
        "one, which leaves less to compute. It was really trained, but on drawn street scenes: all here is synthetic.\n"
    )
    demonstrate(options.output, arguments.runtime_of(options), say, progress=not options.quiet)
    say(
        "\nThe same for a checkpoint of yours:\n"
        "  algm-deploy deploy CHECKPOINT -o BUNDLE --images PHOTOS --data DATASET\n"
        "  algm-deploy evaluate BUNDLE --data DATASET --dense\n"
        "  algm-deploy bench BUNDLE --images PHOTOS\n"
        "  algm-deploy predict BUNDLE PHOTO\n"
        "  algm-deploy report BUNDLE --data DATASET"
    )
    return 0


# --------------------------------------------------------------------------------------------------------------- export


def export_flags(command: arguments.Parser) -> None:
    """Flags of export."""
    arguments.settings(command)


def export(options: argparse.Namespace) -> int:
    """Checkpoint to a bundle."""
    _exported(options)
    say(f"next: algm-deploy verify {word(options.output)}")
    return 0


def _exported(options: argparse.Namespace) -> Bundle:
    from algm_deploy.deployment import export

    settings = arguments.given_settings(options)
    result = export(
        options.checkpoint,
        options.output,
        options.recipe,
        settings,
        calibrate=options.calibrate,
        source="command line",
    )
    for line in (*result.conflicts, *result.notes):
        note(options, line)
    if options.dense:
        note(options, "--dense: the bundle merges nothing, its network is the original one")
    bundle = result.bundle
    if unused := bundle.manifest.unused_checkpoint_keys:
        note(options, f"unused in the checkpoint: {', '.join(unused)}")
    for name, entry in sorted(bundle.files.items()):
        say(f"{entry.size_bytes / 1e6:9.1f} MB  {options.output / name}")
    return bundle


# ---------------------------------------------------------------------------------------------------------------- build


def build_flags(command: arguments.Parser) -> None:
    """Flags of build."""
    arguments.bundle(command)
    arguments.runtime(command)
    _engine_flags(command)
    command.add_argument(
        "--repeat",
        type=arguments.up_to(100),
        metavar="N",
        help="build N times and tell how far labels and times of them differ",
    )


def _engine_flags(command: arguments.Parser) -> None:
    group = command.add_argument_group("TensorRT engines")
    group.add_argument("--engine-precision", choices=("fp32", "fp16", "bf16"), help="default: the bundle's")
    group.add_argument("--opt-batch", type=arguments.positive, help="batch it is tuned for; default: the largest")
    group.add_argument("--level", type=int, choices=range(6), help="optimisation level of the builder")
    group.add_argument(
        "--in-parts",
        action="store_true",
        help="build one engine for each part between merges as well, which runs where the single engine fails",
    )
    group.add_argument("--workspace-mib", type=arguments.positive, help="scratch memory that the engine may take")
    group.add_argument(
        "--timing-cache", type=arguments.path, help="tensorrt only: file of measured times, read and written"
    )
    group.add_argument("--version-compatible", action="store_true", help="tensorrt only: runs on later releases too")
    group.add_argument("--hardware-compatible", action="store_true", help="tensorrt only: runs on later GPUs too")
    group.add_argument(
        "--compute-capabilities",
        type=arguments.several(arguments.word),
        metavar="CC,CC",
        help="tensorrt-rtx only: GPUs to build for, such as 8.6,8.9",
    )


def build(options: argparse.Namespace) -> int:
    """A runtime's own executable, added to a bundle."""
    from algm_deploy.bundle.store import Bundle

    bundle = Bundle.open(options.bundle)
    runtime = arguments.runtime_of(options, bundle)
    if options.repeat:
        say(_rebuilt(bundle, runtime, options))
    else:
        _built(bundle, runtime, options)
    say(f"next: algm-deploy verify {word(options.bundle)} --runtime {runtime}")
    return 0


def _built(bundle: Bundle, runtime: str, options: argparse.Namespace) -> None:
    from algm_deploy.deployment import build

    for line in build(bundle, runtime, **_engine_options(bundle, runtime, options)):
        say(line)


def _rebuilt(bundle: Bundle, runtime: str, options: argparse.Namespace) -> str:
    from algm_deploy.deployment import repeat_build

    found = repeat_build(bundle, runtime, options.repeat, **_engine_options(bundle, runtime, options))
    share, times, distinct = found.labels_equal_percent_min, found.network_ms_by_build, found.distinct_files
    line = f"{found.builds} builds gave {'equal files' if distinct == 1 else f'{distinct} different files'}"
    if share is None or times is None:
        return f"{line}; their labels were not compared, as nothing here can execute them"
    spread = f"{min(times):.2f} to {max(times):.2f} ms a picture"
    return f"{line}; at least {share:.3f} % of the labels of each of {found.pictures} scenes are equal; {spread}"


def _given_engine_options(runtime: str, options: argparse.Namespace) -> dict[str, Any]:
    """The flags of an engine that were given, by the names of the builder's options.

    Raises:
        BuildError: one that the runtime's builder does not have.
    """
    from algm_deploy.runners.registry import row_of

    flags = ("level", "workspace_mib", "timing_cache", "version_compatible", "hardware_compatible", "in_parts")
    said = {name: getattr(options, name) for name in flags}
    said |= {"precision": options.engine_precision, "batches": options.opt_batch}
    said["compute_capabilities"] = options.compute_capabilities
    given = {name: value for name, value in said.items() if value is not None and value is not False}  # level 0 counts
    row_of(runtime).check_options(given)
    return given


def _engine_options(bundle: Bundle, runtime: str, options: argparse.Namespace) -> dict[str, Any]:
    given = _given_engine_options(runtime, options)
    if "batches" in given:
        given["batches"] = (1, given["batches"], bundle.recipe.max_batch)
    return given


# --------------------------------------------------------------------------------------------------------------- deploy


def deploy_flags(command: arguments.Parser) -> None:
    """Flags of deploy: those of its steps."""
    arguments.settings(command)
    arguments.runtime(command)
    _engine_flags(command)
    proving.picture_flags(command)
    arguments.dataset(command, required=False)
    command.add_argument("--limit", type=arguments.positive, help="evaluate that many images, spread evenly")
    command.add_argument("--bench", action="store_true", help="time it as well, beside the dense network: see bench")


def deploy(options: argparse.Namespace) -> int:
    """Checkpoint to a verified bundle: export, build, verify, evaluate, time."""
    from algm_deploy.deployment import require_runtime
    from algm_deploy.pictures.sources import find_images
    from algm_deploy.runners.registry import row_of

    # What is wrong is told before the work, not after it.
    arguments.check_data(options)
    runtime = arguments.runtime_of(options)
    if options.precision:
        row_of(runtime).check_precision(options.precision, bool(options.calibrate))
    require_runtime(runtime)
    _given_engine_options(runtime, options)
    if options.images:
        find_images(options.images)
    bundle = _exported(options)
    if options.data:
        proving.dataset_of(bundle, options)
    _built(bundle, runtime, options)
    say()
    try:
        record = proving.verified(bundle, runtime, options)
    except NotExecutedError as error:
        return _built_only(bundle, runtime, str(error))
    if not record.passed:
        raise GateError("the parity chain failed: nothing of this bundle should be trusted before it passes")
    problem = ""
    if options.data:
        say()
        problem = proving.evaluated(bundle, runtime, options, {})
    if options.bench:
        say()
        proving.timed(bundle, runtime, options, "latency")
    say(f"\ndeployed: {options.output}")
    say(f"next: algm-deploy predict {word(options.output)} PHOTO --runtime {runtime}")
    if problem:
        raise DatasetError(problem)
    return 0


def _built_only(bundle: Bundle, runtime: str, reason: str) -> int:
    """What is left to say when nothing here can execute what was built."""
    from algm_deploy.deployment import note_not_run
    from algm_deploy.report.tables import text_table

    steps = note_not_run(bundle, runtime, reason)
    say(text_table(("step", "result"), [(f"{step} {runtime}", "not run") for step in steps]))
    say(f"\nBUILT, NOT EXECUTED: {bundle.path}\nreason: {reason}")
    say(f"next, on a machine that can: algm-deploy verify {word(bundle.path)} --runtime {runtime}")
    return NotExecutedError.exit_code
