"""`tune` and its searches: thresholds, positions of merges, and what attention does, from data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algm_deploy.cli import arguments
from algm_deploy.cli.saying import say, tell
from algm_deploy.errors import GateError, PlanError, RecipeError

if TYPE_CHECKING:
    from algm_deploy.bundle.records import Aim, Evaluation, Knob, Speed, Tuning, VariantName
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.evaluation.datasets import Dataset
    from algm_deploy.recipe.plan import MergePlan
    from algm_deploy.report.gallery import Example
    from algm_deploy.timing.protocols import Request
    from algm_deploy.tuning.budgets import PacesOf
    from algm_deploy.tuning.trial import Evaluate, Trial

PICTURED = 3  # photos of the held-out part on a page
AIMS = {"reference": ("reference", "drop"), "best": (), "gmacs": ("target",), "throughput": ("target",)}
"""Each aim, and the flags that are read for it alone."""


def add_tune(commands: Any) -> None:
    """Adds `tune` to the commands, and to it a command for each search."""
    about = (
        "A threshold, a precision, a budget or a place to merge at, from your data; or what merging does to attention"
    )
    tune = commands.add_parser("tune", help=about[0].lower() + about[1:], description=about)
    searches = tune.add_subparsers(dest="search", required=True, metavar="SEARCH")
    for run, add_flags, output in (
        (tune_rule, _rule_flags, "tuned.toml"),
        (tune_threshold, _threshold_flags, "tuned.toml"),
        (tune_precision, _precision_flags, "tuned.toml"),
        (tune_budget, _budget_flags, "tuned.toml"),
        (tune_positions, _position_flags, "tuned.toml"),
        (tune_attention, _attention_flags, "attention.html"),
    ):
        text, name = str(run.__doc__).rstrip("."), run.__name__.removeprefix("tune_")
        command = searches.add_parser(name, help=text[0].lower() + text[1:], description=text)
        command.set_defaults(run=run)
        arguments.bundle(command)
        add_flags(command)
        what = "recipe to write; a page .html and pictures come beside it" if output.endswith("toml") else "page"
        command.add_argument(
            "-o", "--output", type=arguments.path, default=Path(output), help=f"{what} (default {output})"
        )
        arguments.talk(command)


def _rule_flags(command: arguments.Parser) -> None:
    arguments.images(command, "those of --data")
    _data_flags(command, required=False, slices=False)
    command.add_argument(
        "--layers", choices=("first", "all"), default="first", help="blocks to measure (default first)"
    )


def _data_flags(command: arguments.Parser, required: bool = True, slices: bool = True) -> None:
    arguments.dataset(command, required, slices)
    command.add_argument("--limit", type=arguments.positive, help="use that many images of a split, spread evenly")


def _search_flags(command: arguments.Parser) -> None:
    _data_flags(command)
    command.add_argument(
        "--held-out",
        type=arguments.word,
        help="split to report on; default: the second half of each slice is kept back",
    )
    command.add_argument(
        "--held-out-limit", type=arguments.positive, metavar="LIMIT", help="of --held-out; default: as --limit"
    )
    command.add_argument(
        "--reference",
        type=arguments.word,
        help="whose mIoU to keep: dense (default), clap (the same without GBM), a number in percent, or another "
        "bundle, without merging",
    )
    command.add_argument(
        "--drop", type=arguments.finite, help="points of mIoU that may be lost to the reference (default 0)"
    )
    command.add_argument("--tau", type=arguments.finite, help="CLAP's threshold instead of the bundle's")


def _variant_flag(command: arguments.Parser) -> None:
    command.add_argument(
        "--variant",
        type=arguments.word,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="merge otherwise than ALGM does, in PyTorch only: clap_feature or gbm_feature=query, key, value; "
        "reduction=first, random, copies; after_mlp=true; seed=N; no recipe can say so, so none is written",
    )


def _knob_flags(command: arguments.Parser) -> None:
    command.add_argument("--gbm", type=arguments.finite, help="GBM's multiplier or threshold instead of the bundle's")
    command.add_argument("--knob", choices=("tau", "gbm"), default="tau", help="threshold to search (default tau)")


def _threshold_flags(command: arguments.Parser) -> None:
    arguments.runtime(command)
    _search_flags(command)
    _variant_flag(command)
    _knob_flags(command)
    _aim_flags(
        command,
        AIMS,
        "merge most at the mIoU of --reference (default); reach the best mIoU; merge least within so many "
        "multiply-adds, or at a throughput, which --target gives",
        "multiply-adds of a window in 10^9 at most, or img/s at least",
    )


def _precision_flags(command: arguments.Parser) -> None:
    command.add_argument(
        "others",
        nargs="+",
        type=arguments.path,
        metavar="OTHER",
        help="exports of the same network in other precisions; the first bundle without merging is the reference",
    )
    arguments.runtime(command)
    _search_flags(command)
    _knob_flags(command)
    _value_flags(command)
    command.set_defaults(variant=[], time=True)


def _budget_flags(command: arguments.Parser) -> None:
    _search_flags(command)
    _variant_flag(command)
    _aim_flags(
        command,
        [aim for aim in AIMS if aim != "throughput"],
        "merge most at the mIoU of --reference (default); reach the best mIoU; merge least within so many "
        "multiply-adds, which --target gives",
        "multiply-adds of a window in 10^9 at most",
    )


def _aim_flags(command: arguments.Parser, aims: Iterable[str], about: str, target: str) -> None:
    command.add_argument("--aim", choices=[*aims], default="reference", help=about)
    command.add_argument("--target", type=arguments.finite, help=target)
    _value_flags(command)
    command.add_argument(
        "--time", action="store_true", help="time each value as well, in turns with the network without merging"
    )


def _value_flags(command: arguments.Parser) -> None:
    command.add_argument(
        "--range", type=arguments.finite, nargs=3, metavar=("LOW", "HIGH", "STEP"), help="values to try, evenly spaced"
    )
    command.add_argument(
        "--values",
        type=arguments.several(arguments.finite),
        metavar="VALUE,VALUE",
        default=(),
        help="values to try, one by one",
    )
    command.add_argument(
        "--curve", action="store_true", help="measure every value, also held out; default: as many as it takes"
    )


def _position_flags(command: arguments.Parser) -> None:
    _search_flags(command)
    _variant_flag(command)
    command.add_argument("--count", type=arguments.positive, default=1, help="how many GBM blocks to place (default 1)")


def _attention_flags(command: arguments.Parser) -> None:
    _data_flags(command, slices=False)
    command.add_argument("--tau", type=arguments.finite, help="CLAP's threshold instead of the bundle's")
    command.add_argument("--gbm", type=arguments.finite, help="GBM's multiplier or threshold instead of the bundle's")


# ------------------------------------------------------------------------------------------------------------ searches


def tune_rule(options: argparse.Namespace) -> int:
    """The threshold of CLAP by the paper's rule: mean + standard deviation of the similarities of a data set."""
    from algm_deploy.pictures.sources import find_images
    from algm_deploy.tuning.similarity import tune_by_rule

    bundle = _opened(options, ".toml")
    if bool(options.images) == bool(options.data):
        raise RecipeError("expected either --images with photos or --data with a data set")
    arguments.check_data(options)
    layers = (1,) if options.layers == "first" else tuple(range(1, bundle.recipe.network.encoder_depth + 1))
    found = tune_by_rule(bundle, _dataset(bundle, options) if options.data else find_images(options.images), layers)
    return _kept(bundle, found, options, replace(bundle.recipe.merging, clap_threshold=round(found.clap_threshold, 4)))


def tune_threshold(options: argparse.Namespace) -> int:
    """The threshold that serves an aim, such as ALGM*: merge most at the mIoU of the network without merging."""
    from algm_deploy.timing.protocols import check_verified
    from algm_deploy.tuning import thresholds

    bundle = _opened(options, ".toml")
    timed = options.time or options.aim == "throughput"
    if options.variant and (options.runtime not in (None, "torch") or timed):
        raise PlanError(
            f"expected --runtime torch and no times with --variant, got {options.runtime}: variants of merging exist "
            "in PyTorch only, to be evaluated; graphs and engines merge as ALGM does"
        )
    options.runtime = "torch" if options.variant else arguments.runtime_of(options, bundle)
    if timed:
        check_verified(bundle, options.runtime)
    trial = _trial(bundle, options, in_process=bool(options.variant))
    knob: Knob = "clap_threshold" if options.knob == "tau" else "gbm_threshold"
    speed_of = _speeds(bundle, options.runtime, trial.tuning) if timed else None
    values = _values(options) or thresholds.default_values(trial.plan, knob)
    found = thresholds.tune_threshold(trial, knob, values, speed_of, options.curve)
    examples = _pictures(bundle, options, found.pictured, trial.held_out) if found.pictured else []
    plan = replace(trial.plan, **{knob: found.marked.value})  # type: ignore[arg-type]
    return _kept(bundle, found, options, plan, found.reached, examples)


def tune_precision(options: argparse.Namespace) -> int:
    """The precision and the threshold that are fastest together at the mIoU of the reference; one runtime for all."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.recipe.plan import DENSE
    from algm_deploy.report.tuning import precision_plots, write_sheet
    from algm_deploy.runners.registry import row_of
    from algm_deploy.timing.protocols import check_verified
    from algm_deploy.tuning import precisions, thresholds

    first = _opened(options, ".toml")
    bundles = [first, *map(Bundle.open, options.others)]
    precisions.check_one_network(bundles)
    options.runtime = arguments.runtime_of(options, first)
    for bundle in bundles:
        row_of(options.runtime).check_precision(bundle.recipe.precision, bundle.calibrated)
        check_verified(bundle, options.runtime)
    trial = _trial(first, options, in_process=False)
    reference = f"dense {first.recipe.precision}", partial(trial.evaluate, DENSE)
    trial = replace(trial, reference=trial.reference or reference)
    contenders = [
        precisions.Contender(
            bundle,
            trial if bundle is first else replace(trial, evaluate=_of_bundle(bundle, options.runtime, trial.plan)),
            _speeds(bundle, options.runtime, trial.tuning),
        )
        for bundle in bundles
    ]
    knob: Knob = "clap_threshold" if options.knob == "tau" else "gbm_threshold"
    values = _values(options) or thresholds.default_values(trial.plan, knob)
    found = precisions.tune_precision(contenders, options.runtime, knob, values, options.curve)
    plots = precision_plots(found)
    say(str(write_sheet(plots, len(plots), options.output.with_suffix(".svg"))))
    best = found.best.search
    plan = replace(trial.plan, **{knob: best.marked.value})  # type: ignore[arg-type]
    return _kept(bundles[found.marked], found, options, plan, best.reached)


def tune_budget(options: argparse.Namespace) -> int:
    """The budget that serves an aim, beside the threshold that merges as much on average; runs in PyTorch."""
    from algm_deploy.report.tuning import trade_offs, write_sheet
    from algm_deploy.timing.protocols import check_verified
    from algm_deploy.tuning import budgets, thresholds

    bundle = _opened(options, ".toml")
    knob = budgets.knob_of(bundle.recipe.merging)
    options.knob = "tau" if knob == "clap_threshold" else "gbm"
    if options.time and options.variant:
        raise PlanError(
            f"expected no --time with --variant {options.variant[0]}, which is there to be evaluated: leave one out"
        )
    if options.time:
        check_verified(bundle, "torch")
    trial = _trial(bundle, options, in_process=True)
    values = _values(options) or thresholds.default_values(trial.plan, knob)
    paces_of = _paces(bundle, trial.tuning) if options.time else None
    found = budgets.tune_budget(trial, bundle.recipe.network.grid, values, options.curve, paces_of)
    if plots := trade_offs(found):
        say(str(write_sheet(plots, len(plots), options.output.with_suffix(".svg"))))
    return _kept(bundle, found, options, found.plan, found.reached)


def tune_positions(options: argparse.Namespace) -> int:
    """The earliest block for GBM that keeps the reference's mIoU; runs in PyTorch."""
    from algm_deploy.tuning import positions

    bundle = _opened(options, ".toml")
    trial = _trial(bundle, options, in_process=True)
    found = positions.tune_positions(trial, bundle.recipe.network.encoder_depth, options.count)
    return _kept(bundle, found, options, replace(trial.plan, gbm_layers=found.layers), found.reached)


def tune_attention(options: argparse.Namespace) -> int:
    """How much attention each class receives, without and with merging; runs in PyTorch."""
    from algm_deploy.tuning.attention import measure_attention

    bundle = _opened(options, ".html")
    return _kept(bundle, measure_attention(bundle, _plan(bundle, options), _dataset(bundle, options)), options)


# --------------------------------------------------------------------------------------------------------------- parts


def _opened(options: argparse.Namespace, suffix: str) -> Bundle:
    """The bundle, after a look at where the results go."""
    from algm_deploy.bundle.store import Bundle

    if options.output.suffix != suffix or not options.output.parent.is_dir():
        raise RecipeError(f"expected a {suffix} file in a folder that exists as --output, got {options.output}")
    return Bundle.open(options.bundle)


def _trial(bundle: Bundle, options: argparse.Namespace, in_process: bool) -> Trial:
    """What a search is given, by the flags about it."""
    from algm_deploy.tuning.ablations import check_variant, variant_of
    from algm_deploy.tuning.photos import check_apart, halves
    from algm_deploy.tuning.positions import PlanEvaluator
    from algm_deploy.tuning.search import Goal
    from algm_deploy.tuning.trial import Trial, miou_of

    aim: Aim = getattr(options, "aim", "reference")
    plan, variant = _plan(bundle, options), variant_of(options.variant)
    check_variant(plan, variant)
    for flag in ("reference", "drop", "target"):
        if getattr(options, flag, None) is not None and flag not in AIMS[aim]:
            raise RecipeError(f"expected no --{flag} with --aim {aim}, which does not read it: leave it out")
    if "target" in AIMS[aim] and options.target is None:
        raise RecipeError(f"expected --target with --aim {aim}: multiply-adds of a window in 10^9, or img/s")
    evaluate = _told(PlanEvaluator(bundle, variant) if in_process else _on_runtime(bundle, options.runtime), plan)
    if options.held_out is None and options.held_out_limit is not None:
        raise RecipeError("expected --held-out with --held-out-limit, got no split of its own: use --limit for both")
    tuning = _dataset(bundle, options)
    if options.held_out is None:
        tuning, held_out = halves(tuning)
    else:
        held_out = _dataset(bundle, options, options.held_out, options.held_out_limit)
        check_apart(tuning, held_out)
    reference, limit = None, getattr(options, "target", None)
    if aim == "reference":
        name, measure = _reference(options, evaluate, plan)
        limit = (_percent(name) if measure is None else miou_of(measure(tuning))) - (options.drop or 0.0)
        reference = (name, measure) if measure and name != "dense" else None
    return Trial(evaluate, plan, Goal(aim, limit), tuning, held_out, reference, tuple(options.variant))


def _reference(
    options: argparse.Namespace, evaluate: Evaluate, plan: MergePlan
) -> tuple[str, Callable[[Dataset], Evaluation] | None]:
    """Name of what --reference means, and how to evaluate it; a number is its own name."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.recipe.plan import DENSE

    name = options.reference or "dense"
    plans = {"dense": DENSE, "clap": replace(plan, gbm_layers=())}
    if name in plans:
        return name, partial(evaluate, plans[name])
    if (folder := Path(name)).is_dir():
        runtime = getattr(options, "runtime", "torch")
        return f"dense {folder.name}", partial(_on_runtime(Bundle.open(folder), runtime), DENSE)
    return name, None


def _percent(text: str) -> float:
    """A number where a reference may also have a name."""
    try:
        return arguments.finite(text)
    except argparse.ArgumentTypeError as error:
        raise RecipeError(
            f"expected dense, clap, an mIoU in percent or a bundle as --reference, got {text!r}"
        ) from error


def _plan(bundle: Bundle, options: argparse.Namespace) -> MergePlan:
    """The bundle's plan with the thresholds of the command line."""
    from algm_deploy.bundle.signature import threshold_defaults

    plan = bundle.recipe.merging
    for flag, name in (("tau", "clap_threshold"), ("gbm", "gbm_threshold")):
        value = getattr(options, flag, None)
        if value is None:
            continue
        if name not in threshold_defaults(plan) or flag == getattr(options, "knob", None):
            reason = f"reads no {name}" if name not in threshold_defaults(plan) else f"is searched for its {name}"
            raise PlanError(f"expected no --{flag} for a bundle whose plan {reason}, got {value:g}: leave it out")
        plan = replace(plan, **{name: value})
    return plan


def _values(options: argparse.Namespace) -> list[float]:
    """The candidates that are given, ascending; none where the search chooses them."""
    from algm_deploy.tuning.search import steps

    return sorted({*options.values, *(steps(*options.range) if options.range else ())})


def _on_runtime(bundle: Bundle, runtime: str) -> Evaluate:
    """Evaluates the bundle, whose thresholds are inputs."""
    from algm_deploy import deployment
    from algm_deploy.recipe.plan import DENSE

    def evaluate(plan: MergePlan, dataset: Dataset) -> Evaluation:
        if plan == DENSE:
            return deployment.evaluate(bundle, dataset, runtime, dense=True)
        given = _given(plan, bundle)
        return deployment.evaluate(
            bundle, dataset, runtime, tau=given.get("clap_threshold"), gbm=given.get("gbm_threshold")
        )

    return evaluate


def _of_bundle(bundle: Bundle, runtime: str, base: MergePlan) -> Evaluate:
    """The same, with lines that say which bundle it is."""
    return _told(_on_runtime(bundle, runtime), base, f"{bundle.path.name}, ")


def _given(plan: MergePlan, bundle: Bundle) -> Mapping[str, float]:
    """Thresholds, by input, at which a bundle merges as a plan does; those that it has anyway are left out."""
    from algm_deploy.bundle.signature import threshold_defaults

    own, wanted = threshold_defaults(bundle.recipe.merging), threshold_defaults(plan)
    return {name: wanted.get(name, inf) for name, value in own.items() if wanted.get(name) != value}


def _told(evaluate: Evaluate, base: MergePlan, whose: str = "") -> Evaluate:
    """The same, each plan once, with a line about it as soon as it is known: a search takes long."""
    from algm_deploy.report.plans import plan_name
    from algm_deploy.tuning.trial import miou_of

    @cache
    def once(plan: MergePlan, dataset: Dataset) -> Evaluation:
        found = evaluate(plan, dataset)
        gmacs = found.gmacs_per_window_mean if plan.layers else None
        cost = "" if gmacs is None else f", {gmacs:.2f} GMACs per window"
        tell(f"{whose}{dataset.title}, {plan_name(plan, base)}: mIoU {miou_of(found):.2f} %{cost}")
        return found

    return once


def _speeds(bundle: Bundle, runtime: str, dataset: Dataset) -> Callable[[MergePlan], Speed]:
    """Times the merging network in batches of different pictures of a data set, in turns with the dense one.

    Where a runtime has two dense networks, the first steady run tells which is the faster, and only that one stands
    beside the plans to come. Where it cannot, a plan has its time and no speed-up.
    """
    from algm_deploy.deployment import bench

    against: VariantName | None = None

    def speed_of(plan: MergePlan) -> Speed:
        nonlocal against
        paths, request = _mixed(bundle, dataset, _given(plan, bundle))
        asked = replace(request, variants=("dense", "merged"), against=against)
        rows = bench(bundle, runtime, images=paths, protocol=asked)
        merged = next(record for record in rows if record.variant == "merged")
        against = against or (merged.baseline if merged.stable else None)
        return merged

    return speed_of


def _paces(bundle: Bundle, dataset: Dataset) -> PacesOf:
    """Times merge plans in PyTorch, in batches of different pictures of a data set."""
    from algm_deploy.deployment import parity_windows
    from algm_deploy.timing.protocols import paces

    paths, request = _mixed(bundle, dataset)
    windows = parity_windows(bundle.recipe, paths, request.count)
    return lambda plans: paces(bundle, plans, windows, request)


def _mixed(bundle: Bundle, dataset: Dataset, thresholds: Mapping[str, float] = {}) -> tuple[list[Path], Request]:
    """The pictures of a data set, and what to time: batches of different ones, as large as the bundle takes them."""
    from algm_deploy.timing.protocols import usual_request

    paths = [sample.image_path for sample in dataset.samples]
    batch = min(bundle.recipe.max_batch, len(paths))
    return paths, usual_request(bundle.recipe, "mixed", None, batch, thresholds=thresholds)


def _dataset(
    bundle: Bundle, options: argparse.Namespace, split: str | None = None, limit: int | None = None
) -> Dataset:
    from algm_deploy.evaluation.datasets import open_dataset

    name, limit = options.dataset or bundle.recipe.protocol.dataset, limit or options.limit
    dataset = open_dataset(name, options.data, split or options.split, getattr(options, "slice", None))
    return dataset.subset(limit) if limit else dataset


def _pictures(
    bundle: Bundle, options: argparse.Namespace, pictured: tuple[str, Sequence[float]], held_out: Dataset
) -> list[Example]:
    """A few photos of the held-out part at several thresholds; also written as one picture."""
    from algm_deploy.bundle.files import write_atomically
    from algm_deploy.report.gallery import draw_thresholds, labelled_photos, threshold_sheet

    examples = draw_thresholds(bundle, options.runtime, labelled_photos(held_out, PICTURED), *pictured)
    with write_atomically(options.output.with_suffix(".png")) as path:
        threshold_sheet(examples, f"{bundle.recipe.name}: what merges").save(path)
    return examples


def _kept(
    bundle: Bundle,
    found: Tuning,
    options: argparse.Namespace,
    plan: MergePlan | None = None,
    reached: bool = True,
    examples: Sequence[Example] = (),
) -> int:
    """Prints what was found and writes it: into the bundle, as a page, and as a recipe of a plan that serves."""
    from algm_deploy.bundle.files import write_atomically
    from algm_deploy.recipe.writing import recipe_toml
    from algm_deploy.report.tuning import tuning_page, tuning_text, write_tuning

    say(f"{tuning_text(found)}\n")
    bundle.record(found)
    if examples:
        say(str(options.output.with_suffix(".png")))
    say(str(write_tuning(found, bundle.recipe.name, options.output.with_suffix(".html"), examples)))
    if plan and reached and not getattr(options, "variant", None):
        comments = (f"By algm-deploy tune: {found.title}.", *tuning_page(found).lines)
        with write_atomically(options.output) as path:
            text = recipe_toml(replace(bundle.recipe, merging=plan), comments)
            path.write_bytes(text.encode("utf-8", "backslashreplace"))  # slices are called as files are
        say(str(options.output))
    return 0 if reached else GateError.exit_code
