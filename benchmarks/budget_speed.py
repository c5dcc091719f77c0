"""What budgets buy in time: dense, thresholds, budgets and truncated in turns, in one run, on photos.

    python benchmarks/budget_speed.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid -o budget_speed.json

CHECKPOINT is a folder in the authors' format, or one of the sizes of `runtimes.py`, such as L: random weights, whose
thresholds leave 640 and 510 of 1024 tokens on average. Labels out. The budgets merge as much as the thresholds do on
average on the very photos that are timed, and truncated drops as much; each of the two merging networks and the dense
one has passed the parity chain in the same run. `duplicate`: one photo repeated, all photos in turn; `mixed`: different
photos; both by the device's clock. `latency`: one photo, from host memory to its label map there, by the host's clock.
Percentiles are over all photos and rounds. Where a runtime can leave dense attention to cuDNN, that network is timed
too, and gains are against the faster, the `baseline` (in no record of before that key).
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from full_size import random_checkpoint
from trained import new_record, parser_of, write

from algm_deploy.bundle.records import DENSE_VARIANTS, MergeTokens
from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import build, export, parity_windows, verify
from algm_deploy.errors import GateError
from algm_deploy.pictures.sources import find_images
from algm_deploy.recipe.reading import budget_settings
from algm_deploy.recipe.writing import recipe_toml
from algm_deploy.report.tables import shown, text_table
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.timing.protocols import Contestant, Request, batches_of, times_of
from algm_deploy.timing.timers import SAMPLES_FOR_P99, Effort, drift, merge_efficiency, percentiles, typical_ms
from algm_deploy.timing.variants import faster_dense, may_attend_by_cudnn, variant_bundle, variant_runner
from algm_deploy.tuning.budgets import budgets_like
from runtimes import SIZES, TOKENS, bisected, recipe_of

STEPS = 20  # of a bisection
NAMES = ("dense", "dense_cudnn", "thresholds", "budgets", "truncated")


def main() -> None:
    """Times every runtime, protocol and batch, and prints one table."""
    parser = parser_of(__doc__, "budget_speed.json", batches=(1, 32))
    parser.add_argument("--precision", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--count", type=int, default=32, help="photos that are timed")
    parser.add_argument("--rounds", type=int, default=10, help="over all photos, at least; enough for a p99")
    parser.add_argument(
        "--tokens", type=int, nargs=2, help="thresholds that leave so many on average after CLAP and GBM"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if str(options.checkpoint) in SIZES:
            name, options.tokens = f"random weights, {options.checkpoint}", options.tokens or TOKENS
            options.checkpoint, options.recipe = random_weights(str(options.checkpoint), options, Path(scratch))
        else:
            name = options.checkpoint.resolve().name
        record = new_record(name, precision=options.precision, output="labels", photos=options.count)
        for runtime in options.runtimes:
            record["runs"][runtime] = run(runtime, options, Path(scratch) / runtime)
            write(record, options.output)
    print(table(record))


def random_weights(size: str, options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """A checkpoint of random weights of one of the sizes of `runtimes.py`, and its recipe."""
    recipe, file = recipe_of(size, options, "per_image"), folder / f"segmenter_{size}.toml"
    file.write_text(recipe_toml(recipe), encoding="utf-8")
    checkpoint, _ = random_checkpoint(recipe.network, folder / "checkpoint")
    return checkpoint, file


def run(runtime: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens, parity and times of one runtime."""
    photos = find_images(options.photos)[: options.count]
    settings: dict[str, Any] = {
        "output": "labels",
        "precision": options.precision,
        "max_batch": max(options.batches),
    }
    chosen: dict[str, float] = {} if options.tau is None else {"merging.clap_threshold": options.tau}
    if options.tokens:
        tried = export(options.checkpoint, folder / "tried", options.recipe, settings).bundle
        chosen = fitting(tried, parity_windows(tried.recipe, photos, options.count), options.tokens)
        print(runtime, chosen, flush=True)
    thresholds = proven(exported(options, folder / "thresholds", settings | chosen), runtime, photos, options)
    windows = parity_windows(thresholds.recipe, photos, options.count)
    with runner(thresholds, runtime) as opened:
        tokens = tokens_of(opened, windows, 1)
    plan = thresholds.recipe.merging
    means = [MergeTokens(merge=str(layer), mean=float(m)) for layer, m in zip(plan.layers, tokens.mean(0), strict=True)]
    like = budgets_like(plan, means, thresholds.recipe.network.grid)
    shares = (like.clap_budget, like.gbm_budget)
    budgets = proven(
        exported(options, folder / "budgets", settings | budget_settings(*shares)), runtime, photos, options
    )
    with runner(budgets, runtime) as opened:
        kept = tokens_of(opened, windows, 1)
    if (kept != kept[0]).any():
        raise GateError(f"expected budgets that leave every photo the same tokens, got {kept.tolist()}")
    dense = [name for name in DENSE_VARIANTS if name == "dense" or may_attend_by_cudnn(thresholds, runtime)]
    bundles = {
        **{name: proven(variant_bundle(thresholds, name, []), runtime, photos, options) for name in dense},
        "thresholds": thresholds,
        "budgets": budgets,
        "truncated": variant_bundle(budgets, "truncated", kept[0].tolist()),
    }
    result: dict[str, Any] = {
        "budget": dict(zip(("clap", "gbm"), shares, strict=True)),
        "tokens": {
            "thresholds": {
                "mean": tokens.mean(0).tolist(),
                "min": tokens.min(0).tolist(),
                "max": tokens.max(0).tolist(),
            },
            "budgets": kept[0].tolist(),
        },
        "times": {},
    }
    likes = {**dict.fromkeys(dense, thresholds), "truncated": budgets}
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(
                variant_runner(one, runtime, likes[name]) if name in likes else runner(one, runtime)
            )
            for name, one in bundles.items()
        }
        for batch in options.batches:
            for protocol in ("latency", "duplicate") if batch == 1 else ("duplicate", "mixed"):
                name = f"{protocol} batch {batch}"
                result["times"][name] = found = times(runners, windows, protocol, batch, options.rounds)
                print(runtime, name, {one: round(row["ms"], 3) for one, row in found.items()}, flush=True)
    return result


def exported(options: argparse.Namespace, folder: Path, settings: Mapping[str, Any]) -> Bundle:
    return export(options.checkpoint, folder, options.recipe, settings).bundle


def proven(bundle: Bundle, runtime: str, photos: list[Path], options: argparse.Namespace) -> Bundle:
    """The same, built, and verified on a few photos."""
    build(bundle, runtime)
    report = verify(bundle, runtime, images=photos, count=options.chain_photos, progress=False)
    if not report.passed:
        raise GateError(
            f"{bundle.path.name}: parity failed: {[one.measured for one in report.links if not one.passed]}"
        )
    return bundle


def fitting(bundle: Bundle, windows: Array, tokens: Sequence[int]) -> dict[str, float]:
    """The settings of thresholds that leave so many patch tokens of these pictures on average, in PyTorch."""
    with runner(bundle, "torch") as run:

        def mean(merge: int, clap: float, gbm: float) -> float:
            given = {CLAP_THRESHOLD: np.float32(clap), GBM_THRESHOLD: np.float32(gbm)}
            return float(tokens_of(run, windows, run.signature.max_batch, given)[:, merge].mean())

        clap = bisected(lambda x: mean(0, x, np.inf), tokens[0], -1.0, 1.0, STEPS)
        gbm = bisected(lambda x: mean(1, clap, x), tokens[1], -30.0, 30.0, STEPS)
    return {"merging.clap_threshold": clap, "merging.gbm_threshold": gbm}


def tokens_of(run: Runner, windows: Array, batch: int, thresholds: Mapping[str, Any] = {}) -> Array:
    """Patch tokens (photos, merges) after each merge."""
    pieces = (windows[i : i + batch] for i in range(0, len(windows), batch))
    return np.concatenate([run.infer({"image": one, **thresholds}, ["token_counts"])["token_counts"] for one in pieces])


def times(
    runners: Mapping[str, Runner], windows: Array, protocol: Any, batch: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each network, in turns: mean over the batches of each one's median, and percentiles."""
    batches = [windows[list(one)] for one in batches_of(protocol, len(windows), batch)]
    rounds = max(rounds, math.ceil(SAMPLES_FOR_P99 / len(batches)))
    effort = Effort(warmup=2 * len(batches), rounds=rounds, most_rounds=2 * rounds)
    contestants = {name: Contestant(one) for name, one in runners.items()}
    found, _ = times_of(contestants, batches, Request(protocol, len(windows), batch, effort), progress=False)
    typical = {name: typical_ms(one) for name, one in found.items()}
    baseline = faster_dense(typical) or "dense"
    return {
        name: {
            "ms": typical[name],
            **percentiles(one),
            "images_per_s": 1e3 * batch / typical[name],
            "baseline": baseline,
            "speedup": typical[baseline] / typical[name],
            "merge_efficiency": merge_efficiency(typical[baseline], typical[name], typical["truncated"]),
            "drift": drift(one),
            "rounds": len(one),
            "execution": dict(runners[name].execution),
        }
        for name, one in found.items()
    }


def table(record: dict[str, Any]) -> str:
    """For terminals."""
    times_as_fast = ("budgets: times as fast", "against")
    header = ("runtime", "", *(f"{name} ms" for name in NAMES), *times_as_fast, "efficiency", "p50", "p99")
    rows = []
    for runtime, found in record["runs"].items():
        for protocol, by_name in found["times"].items():
            one = by_name["budgets"]
            ms = (by_name[name]["ms"] if name in by_name else None for name in NAMES)
            gain, *numbers = (shown(one[key], 3) for key in ("speedup", "merge_efficiency", "p50", "p99"))
            rows.append((runtime, protocol, *(shown(x, 3) for x in ms), gain, one.get("baseline", "dense"), *numbers))
    return text_table(header, rows)


if __name__ == "__main__":
    main()
