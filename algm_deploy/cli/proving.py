"""Commands that prove and measure: verify, evaluate, bench, prove, compare."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algm_deploy.cli import arguments
from algm_deploy.cli.saying import note, say, say_json
from algm_deploy.errors import BundleError, DatasetError, GateError, NotExecutedError

if TYPE_CHECKING:
    from algm_deploy.bundle.records import Parity, ProtocolName
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.evaluation.datasets import Dataset


def picture_flags(command: arguments.Parser) -> None:
    """Pictures for parity."""
    arguments.images(command, "the drawn scenes that ship")
    command.add_argument("--count", type=arguments.up_to(256), default=4, help="how many of them (default 4)")


# --------------------------------------------------------------------------------------------------------------- verify


def verify_flags(command: arguments.Parser) -> None:
    """Flags of verify."""
    arguments.bundle(command)
    arguments.runtime(command)
    picture_flags(command)
    command.add_argument(
        "--reference",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what PyTorch computes on, to which the runtime is held (default cpu); a GPU is faster for large networks",
    )
    arguments.as_json(command)


def verify(options: argparse.Namespace) -> int:
    """Proof that a runtime computes what PyTorch computes: the parity chain of a bundle."""
    from algm_deploy.bundle.store import Bundle

    bundle = Bundle.open(options.bundle)
    record = verified(bundle, arguments.runtime_of(options, bundle), options)
    return 0 if record.passed else GateError.exit_code


def verified(bundle: Bundle, runtime: str, options: argparse.Namespace) -> Parity:
    """Verifies, and prints the chain."""
    from algm_deploy.deployment import verify
    from algm_deploy.report.tables import text_table
    from algm_deploy.wording import counted

    record = verify(
        bundle,
        runtime,
        images=options.images,
        count=options.count,
        progress=not options.quiet,
        reference=getattr(options, "reference", "cpu"),
    )
    if getattr(options, "json", False):
        say_json(record)
        return record
    rows = [
        (str(link.number), link.name, "ok" if link.passed else "FAILED", link.measured, link.gate)
        for link in record.links
    ]
    say(text_table(("", "link", "result", f"measured, {runtime}", "would pass at"), rows))
    hint = "" if options.images else " (give --images for your own)"
    batches = arguments.listed(record.batches)
    verdict = "passed" if record.passed else "FAILED"
    gpu = "; PyTorch on a GPU" if record.reference == "cuda" else ""
    say(f"{counted(record.images, record.pictures)}{hint}; batches of {batches}{gpu}; {verdict}")
    say(f"seconds: {_longest_first(record.seconds)}")
    return record


def _longest_first(seconds: Mapping[str, float]) -> str:
    """Where the time went, without parts that took less than a hundredth of it."""
    least = sum(seconds.values()) / 100
    parts = sorted(seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {took:.1f}" for name, took in parts if took >= least)


# ------------------------------------------------------------------------------------------------------------- evaluate


def evaluate_flags(command: arguments.Parser) -> None:
    """Flags of evaluate."""
    arguments.bundle(command)
    arguments.runtime(command)
    arguments.dataset(command, required=True)
    command.add_argument("--limit", type=arguments.positive, help="evaluate that many images, spread evenly")
    arguments.thresholds(command)
    arguments.ray(command)
    arguments.as_json(command)


def evaluate(options: argparse.Namespace) -> int:
    """mIoU of a bundle on a data set."""
    from algm_deploy.bundle.store import Bundle

    arguments.check_ray(options)
    bundle = Bundle.open(options.bundle)
    given = arguments.given_thresholds(options)
    if options.ray:
        runtime, given = options.runtime, {**given, "ray": options.ray, "workers": options.workers}
    else:
        runtime = arguments.runtime_of(options, bundle)
    if problem := evaluated(bundle, runtime, options, given):
        raise DatasetError(problem)
    return 0


def evaluated(bundle: Bundle, runtime: str | None, options: argparse.Namespace, request: Mapping[str, Any]) -> str:
    """Evaluates, `request` as `deployment.evaluate` has it, and prints.

    Returns what is wrong with the figures, nothing where all images are in them.
    """
    from algm_deploy.deployment import evaluate
    from algm_deploy.report.tables import quality_table, text_table
    from algm_deploy.wording import first_few

    dataset = dataset_of(bundle, options)
    record = evaluate(bundle, dataset, runtime, limit=options.limit, **request, progress=not options.quiet)
    if getattr(options, "json", False):
        say_json(record)
    else:
        say(text_table(*quality_table(record)))
    for name, reason in record.failures.items():
        note(options, f"not evaluated: {name}: {reason}")
    if record.unlabelled:
        names = first_few(record.unlabelled, 10, ", ")
        note(options, f"no labelled pixel, so in the figures of tokens alone: {names}")
    if not record.failures:
        return ""
    return (
        f"{len(record.failures)} of {record.images + len(record.failures)} images could not be evaluated, the figures "
        "are those of the rest: mend these files and run it again, what is done is kept"
    )


def dataset_of(bundle: Bundle, options: argparse.Namespace) -> Dataset:
    """The data set that the flags name."""
    from algm_deploy.evaluation.datasets import open_dataset

    return open_dataset(options.dataset or bundle.recipe.protocol.dataset, options.data, options.split, options.slice)


# ---------------------------------------------------------------------------------------------------------------- bench


def bench_flags(command: arguments.Parser) -> None:
    """Flags of bench."""
    arguments.bundle(command)
    arguments.runtime(command)
    arguments.images(command, "the drawn scenes that ship")
    command.add_argument(
        "--protocol",
        choices=("duplicate", "mixed", "latency"),
        default="latency",
        help="batches of one picture repeated, of different pictures, or single pictures until the label map is back "
        "on the host (default)",
    )
    command.add_argument(
        "--batch", type=arguments.positive, help="pictures in a batch (default the bundle's maximum, 1 with latency)"
    )
    command.add_argument(
        "--count", type=arguments.up_to(1024), help="how many pictures (default 8, or a batch of them)"
    )
    command.add_argument("--warmup", type=arguments.count, help="calls before the clock counts (default 5)")
    command.add_argument(
        "--rounds",
        type=arguments.positive,
        help="rounds over the pictures at least; unsteady times get more (default 4)",
    )
    arguments.thresholds(command)
    arguments.as_json(command)


def bench(options: argparse.Namespace) -> int:
    """Speed with merging, without, and with tokens dropped instead of merged."""
    from algm_deploy.bundle.store import Bundle

    bundle = Bundle.open(options.bundle)
    numbers = {name: getattr(options, name) for name in ("batch", "warmup", "rounds")}
    thresholds = arguments.given_thresholds(options)
    timed(
        bundle, arguments.runtime_of(options, bundle), options, options.protocol, options.count, **numbers, **thresholds
    )
    return 0


def timed(
    bundle: Bundle,
    runtime: str,
    options: argparse.Namespace,
    protocol: ProtocolName,
    count: int | None = None,
    **request: Any,
) -> None:
    """Times, and prints a table with its conditions."""
    from algm_deploy.deployment import bench
    from algm_deploy.report.records import Measured, artifact_of
    from algm_deploy.report.tables import condensed, speed_notes, speed_table, text_table

    progress = not options.quiet
    records = bench(
        bundle, runtime, images=options.images, protocol=protocol, count=count, **request, progress=progress
    )
    if getattr(options, "json", False):
        say_json(records)
        return
    rows = [Measured(bundle.path.name, artifact_of(bundle, record), record) for record in records]
    table, conditions = condensed(speed_table(rows))
    say(f"{conditions}\n\n{text_table(*table)}")
    for line in speed_notes(rows):
        say(line)


# ---------------------------------------------------------------------------------------------------------------- prove


def prove_flags(command: arguments.Parser) -> None:
    """Flags of prove."""
    arguments.bundle(command)
    arguments.runtime(command)
    command.add_argument(
        "-o",
        "--output",
        type=arguments.path,
        metavar="FOLDER",
        help="folder to write; default: the bundle's name, -proof- and the runtime",
    )


def prove(options: argparse.Namespace) -> int:
    """All that this machine can show of a bundle, in one folder: built, verified, evaluated, timed."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.proof import prove

    bundle = Bundle.open(options.bundle)
    runtime = arguments.runtime_of(options, bundle)
    folder = options.output or Path(f"{bundle.path.resolve().name}-proof-{runtime}")
    found = prove(
        bundle, runtime, folder, lambda part: say(f"{part.name}: {part.result}\n  {part.found}"), not options.quiet
    )
    say(f"\nall of it: {folder}")
    if found.error:
        raise found.error
    if found.not_executed:
        say(f"BUILT, NOT EXECUTED: {bundle.path}\nreason: {found.not_executed}")
        say(f"not done: {', '.join(found.left_out)}")
        return NotExecutedError.exit_code
    return 0


# -------------------------------------------------------------------------------------------------------------- compare


def compare_flags(command: arguments.Parser) -> None:
    """Flags of compare."""
    arguments.bundle(command)
    command.add_argument(
        "others",
        nargs="*",
        type=arguments.path,
        metavar="OTHER",
        help="bundle to compare with; default: the same one; several, or one with --table: a row for each, without "
        "merging and with it",
    )
    command.add_argument(
        "--table",
        action="store_true",
        help="exports of one network in one table: mIoU, labels and decisions as in the first, times, size on disk",
    )
    command.add_argument(
        "--runtimes",
        type=arguments.several(arguments.word),
        metavar="A[,B]",
        help="what executes the first and the second; one name stands for both; default: torch and the best one here",
    )
    arguments.images(command, "the drawn scenes that ship")
    command.add_argument("--count", type=arguments.up_to(256), default=4, help="how many of them (default 4)")
    arguments.thresholds(command)
    command.add_argument(
        "-o", "--output", type=arguments.path, metavar="FOLDER", help="keep inputs and outputs, in Polygraphy's format"
    )
    command.add_argument(
        "--load-inputs", type=arguments.path, metavar="FILE", help="inputs in Polygraphy's format instead of pictures"
    )
    command.add_argument(
        "--load-outputs",
        type=arguments.path,
        metavar="FILE",
        help="outputs in Polygraphy's format instead of a second run; with --load-inputs",
    )
    arguments.as_json(command)


def compare(options: argparse.Namespace) -> int:
    """Where two runtimes, or two bundles, differ: merge decisions and labels of the same pictures."""
    from algm_deploy.deployment import compare

    if options.table or len(options.others) > 1:
        return _side_by_side(options)
    found = compare(
        options.bundle,
        *options.others,
        runtimes=options.runtimes,
        images=options.images,
        count=options.count,
        **arguments.given_thresholds(options),
        output=options.output,
        inputs=options.load_inputs,
        outputs=options.load_outputs,
    )
    if options.json:
        say_json(found)
    else:
        from algm_deploy.report.tables import comparison_lines, comparison_table, text_table

        say(text_table(*comparison_table(found)))
        for line in comparison_lines(found):
            say(line)
    return 0 if found.alike else GateError.exit_code


def _side_by_side(options: argparse.Namespace) -> int:
    """Several exports of one network in one table."""
    from algm_deploy.deployment import compare_precisions
    from algm_deploy.report.precisions import precision_notes, precision_rows, precision_table
    from algm_deploy.report.tables import text_table

    asked = arguments.given_thresholds(options) | {
        "runtimes": options.runtimes if len(options.runtimes or ()) > 1 else None,
        "output": options.output,
        "load_inputs": options.load_inputs,
        "load_outputs": options.load_outputs,
    }
    unread = [name.replace("_", "-") for name, value in asked.items() if value is not None and value is not False]
    if unread:
        raise BundleError(f"expected no --{min(unread)} for a table of bundles, which does not read it: leave it out")
    if not options.others:
        raise BundleError("expected other bundles with --table, got one bundle: name them")
    runtime = options.runtimes[0] if options.runtimes else None
    found = compare_precisions([options.bundle, *options.others], runtime, images=options.images, count=options.count)
    rows = precision_rows(found)
    if options.json:
        say_json(rows)
    else:
        say(f"{found[0].runtime}\n\n{text_table(*precision_table(rows))}")
        for line in precision_notes(rows):
            say(line)
    return 0
