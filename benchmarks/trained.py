"""A trained checkpoint on photos on a GPU: parity chain, then dense, merged and truncated network by every protocol.

    python benchmarks/trained.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid -o trained.json

For each output, precision and runtime: export, build, `verify`, and `bench` under all protocols, as the commands of
these names do. A runtime whose parity chain fails, its dense network's included, is not timed, and the record says so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import bench, build, export, verify
from algm_deploy.environment import environment
from algm_deploy.errors import GateError
from algm_deploy.pictures.sources import find_images
from algm_deploy.report.records import rows_of
from algm_deploy.timing.protocols import Request, usual_request

KEPT = (
    "batch_ms_mean_of_medians", "latency_ms_p50", "latency_ms_p90", "latency_ms_p99", "throughput_img_per_s",
    "speedup", "merge_efficiency", "gmacs_per_window_mean", "tokens", "stages", "reading", "stable", "rounds",
    "execution", "host_device_copies",
)  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, "trained.json")
    parser.add_argument("--precisions", nargs="+", choices=("fp16", "fp32"), default=["fp16", "fp32"])
    parser.add_argument("--outputs", nargs="+", choices=("labels", "scores"), default=["labels"])
    options = parser.parse_args()
    folder = options.checkpoint if options.checkpoint.is_dir() else options.checkpoint.parent
    record = new_record(folder.resolve().name)
    for output, precision in product(options.outputs, options.precisions):
        with tempfile.TemporaryDirectory() as scratch:
            bundle = exported(options, output, precision, Path(scratch))
            for runtime in options.runtimes:
                record["runs"][f"{runtime} {precision} {output}"] = run(bundle, runtime, options)
                write(record, options.output)


def parser_of(description: str | None, output: str, batches: Sequence[int] = (1, 8, 32)) -> argparse.ArgumentParser:
    """What benchmarks of a checkpoint on photos are all asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--recipe")
    parser.add_argument("--tau", type=float, help="CLAP threshold instead of the recipe's")
    parser.add_argument("--runtimes", nargs="+", default=["torch", "onnxruntime-cuda"])
    parser.add_argument("--batches", nargs="+", type=int, default=batches)
    parser.add_argument("--chain-photos", type=int, default=2, help="photos of the parity chain")
    parser.add_argument("-o", "--output", type=Path, default=Path(output))
    return parser


def new_record(checkpoint: str, **facts: object) -> dict[str, Any]:
    """A record without runs, of a machine with its devices."""
    kept = asdict(environment(devices=True))
    return {"schema_version": 1, "environment": kept, "checkpoint": checkpoint, **facts, "runs": {}}


def write(record: dict[str, Any], target: Path) -> None:
    with write_atomically(target) as path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def exported(options: argparse.Namespace, output: str, precision: str, folder: Path) -> Bundle:
    settings = {"output": output, "precision": precision, "max_batch": max(options.batches)}
    if options.tau is not None:
        settings["merging.clap_threshold"] = options.tau
    return export(options.checkpoint, folder / "bundle", options.recipe, settings).bundle


def run(bundle: Bundle, runtime: str, options: argparse.Namespace) -> dict[str, Any]:
    """Parity links and, if they passed, times by protocol and variant."""
    photos = find_images(options.photos)
    build(bundle, runtime)
    report = verify(bundle, runtime, images=photos, count=options.chain_photos)
    links = {link.name: {"passed": link.passed, "measured": link.measured} for link in report.links}
    result: dict[str, Any] = {"parity": {"photos": options.chain_photos, "passed": report.passed, "links": links}}
    if not report.passed:
        return result | {"not_timed": "the parity chain failed"}
    result["thresholds"] = {"tau": bundle.recipe.merging.clap_threshold, "gbm": bundle.recipe.merging.gbm_threshold}
    result["speed"] = {}
    for request in requests(bundle, options, len(photos)):
        name = f"{request.protocol} batch {request.batch}"
        try:
            rows = rows_of(bundle, bench(bundle, runtime, images=photos, protocol=request))
        except GateError as error:
            return result | {"not_timed": f"{name}: {error}"}
        result["speed"][name] = {
            row.record.variant: {key: value for key, value in to_builtins(row.record).items() if key in KEPT}
            for row in rows
        }
        print(runtime, bundle.recipe.precision, bundle.recipe.output, name, summary(result["speed"][name]), flush=True)
    return result


def requests(bundle: Bundle, options: argparse.Namespace, photos: int) -> Iterator[Request]:
    """Every protocol at every batch it is meant for; all photos are met before the clock counts."""
    for batch in options.batches:
        yield usual_request(bundle.recipe, "duplicate", photos, batch, warmup=photos)
    for batch in options.batches:
        if 1 < batch <= photos:
            yield usual_request(bundle.recipe, "mixed", photos, batch, warmup=photos)
    yield usual_request(bundle.recipe, "latency", photos, warmup=photos)


def summary(rows: dict[str, dict[str, Any]]) -> str:
    times = " / ".join(f"{row['batch_ms_mean_of_medians']:.2f}" for row in rows.values())
    merged = rows.get("merged", {})
    shown = (f"{key} {merged[key]:.2f}" for key in ("speedup", "merge_efficiency") if key in merged)
    return ", ".join((f"{times} ms", *shown))


if __name__ == "__main__":
    main()
