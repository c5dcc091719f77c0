"""Trained checkpoints in the authors' format: against the published code, and the parity chain on photos.

    python benchmarks/real_checkpoints.py DATA [--record benchmarks/records/real_checkpoints.json]

DATA holds `models/NAME/{checkpoint.pth, variant.yml, golden.npz}` and the CamVid photos in `data/camvid/images/test`;
neither ships with the project, CamVid is for non-commercial use. `golden.npz` holds what the published code
(tue-mps/algm-segmenter 674eaa2, CPU, fp32) gave for windows of 512 pixels: photo and left edge of each window, token
counts after CLAP and GBM, the map from patches to final tokens, and labels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins
from numpy.typing import NDArray
from tqdm import tqdm

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import export, verify
from algm_deploy.environment import environment
from algm_deploy.parity.merges.clap import clap_facts
from algm_deploy.parity.merges.gbm import gbm_facts
from algm_deploy.parity.replay import Replays
from algm_deploy.pictures.preprocessing import read_photo
from algm_deploy.predictor import network_canvas
from algm_deploy.recipe.schema import Recipe
from algm_deploy.report.tables import parity_table, text_table
from algm_deploy.runners.contract import runner

MODELS = ("segmenter_vit_s16_camvid", "segmenter_vit_s16_camvid_algm")
RECIPE = "segmenter_vit_s16_camvid"
RUNTIMES = ("torch", "onnxruntime-cpu")
CHAIN_PHOTOS = 20
OUTPUTS = ("scores", "token_counts", "token_map_clap_1", "token_map_gbm_5")


@dataclass(frozen=True)
class Agreement:
    """One runtime on one checkpoint against the published code, over all windows.

    `maps_unexplained` are windows whose map differs although rounding cannot have decided any merge otherwise: every
    two numbers that were compared are farther apart than the noise measured for them. `margin_of_worst` is the smallest
    such distance in the window with the fewest labels in common.
    """

    checkpoint: str
    runtime: str
    windows: int
    clap_counts_equal: int
    gbm_counts_equal: int
    gbm_count_difference_max: int
    maps_equal: int
    maps_unexplained: int
    label_agreement_mean: float
    label_agreement_min: float
    worst_window: str
    worst_window_map_equal: bool
    margin_of_worst: float


@dataclass(frozen=True)
class Golden:
    """What the published code gave, by window."""

    names: NDArray[np.str_]
    anchor: NDArray[np.int64]
    counts: NDArray[np.int64]
    token_map: NDArray[np.uint16]
    labels: NDArray[np.uint8]

    @classmethod
    def read(cls, path: Path) -> Golden:
        """Reads `golden.npz`."""
        with np.load(path) as content:
            return cls(*(content[key] for key in ("names", "anchor", "counts", "token_map", "labels")))


def windows_of(golden: Golden, photos: Path, recipe: Recipe) -> NDArray[np.uint8]:
    """The windows (W, 3, 512, 512) that the published code was run on."""
    side = recipe.protocol.window
    cut = []
    for name, left in zip(golden.names, golden.anchor, strict=True):
        canvas = network_canvas(read_photo(photos / f"{name}.jpg"), recipe)
        cut.append(canvas[:side, left : left + side].transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(cut)).astype(np.uint8)


def agreement(checkpoint: str, bundle: Bundle, runtime: str, golden: Golden, windows: NDArray[np.uint8]) -> Agreement:
    """Runs a runtime on every window."""
    counts, maps, shares = [], [], []
    with runner(bundle, runtime) as run:
        for index in tqdm(range(len(windows)), f"{checkpoint} {runtime}", unit="window", disable=None):
            outputs = run.infer({"image": windows[index : index + 1]}, OUTPUTS)
            counts.append(outputs["token_counts"][0])
            maps.append([outputs["token_map_clap_1"][0], outputs["token_map_gbm_5"][0]])
            shares.append(float((outputs["scores"][0].argmax(0) == golden.labels[index]).mean()))
    difference = np.abs(np.stack(counts) - golden.counts)
    equal = [np.array_equal(ours - 1, theirs) for (_, ours), theirs in zip(maps, golden.token_map, strict=True)]
    worst = int(np.argmin(shares))
    differing = [margins(bundle, windows[index], maps[index]) for index in range(len(windows)) if not equal[index]]
    return Agreement(
        checkpoint,
        runtime,
        windows=len(windows),
        clap_counts_equal=int((difference[:, 0] == 0).sum()),
        gbm_counts_equal=int((difference[:, 1] == 0).sum()),
        gbm_count_difference_max=int(difference[:, 1].max()),
        maps_equal=sum(equal),
        maps_unexplained=sum(all(distance > noise for distance, noise in found) for found in differing),
        label_agreement_mean=float(np.mean(shares)),
        label_agreement_min=shares[worst],
        worst_window=f"{golden.names[worst]} at {golden.anchor[worst]}",
        worst_window_map_equal=equal[worst],
        margin_of_worst=min(distance for distance, _ in margins(bundle, windows[worst], maps[worst])),
    )


def margins(bundle: Bundle, window: NDArray[np.uint8], maps: list[NDArray[np.int64]]) -> list[tuple[float, float]]:
    """How near numbers were that decided a window, in fp64, each with the noise that PyTorch's rounding makes in it.

    Two similarities whose order decides the order of tokens; one and CLAP's threshold; one and GBM's; and the two best
    of a token that GBM merges, which decide what it joins.
    """
    recipe = bundle.recipe
    replayed = [Replays(bundle, window[None], bundle.recipe.precision)(0, maps)]
    clap = clap_facts(replayed, 0, recipe.merging, recipe.network)[0]
    gbm = gbm_facts(replayed, 1, recipe.merging, recipe.network)[0]
    merged = np.sort(clap.similarity[clap.similarity >= clap.limit].astype(np.float64))
    joining = gbm.scores[gbm.sources & (gbm.best >= gbm.limit)]
    two_best = np.partition(joining, -2, axis=1)[:, -2:]
    return [
        (float(np.diff(merged).min(initial=np.inf)), clap.noise),
        (float(np.abs(clap.similarity - clap.limit).min()), clap.noise),
        (float(np.abs(gbm.best[gbm.sources] - gbm.limit).min()), gbm.noise + gbm.limit_noise),
        (float(np.diff(two_best).min(initial=np.inf)), gbm.noise),
    ]


def measure(data: Path, checkpoint: str, runtimes: tuple[str, ...] = RUNTIMES) -> Iterator[Agreement]:
    """Exports a checkpoint and compares each runtime."""
    folder = data / "models" / checkpoint
    golden = Golden.read(folder / "golden.npz")
    with tempfile.TemporaryDirectory() as temporary:
        bundle = export(folder, Path(temporary) / checkpoint, RECIPE, {}).bundle
        windows = windows_of(golden, data / "data" / "camvid" / "images" / "test", bundle.recipe)
        for runtime in runtimes:
            yield agreement(checkpoint, bundle, runtime, golden, windows)


def chain(data: Path, checkpoint: str) -> dict[str, Any]:
    """Record of what `algm-deploy verify` finds for ONNX Runtime on photos spread over the test split."""
    photos = sorted((data / "data" / "camvid" / "images" / "test").glob("*.jpg"))
    with tempfile.TemporaryDirectory() as temporary:
        bundle = export(data / "models" / checkpoint, Path(temporary) / checkpoint, RECIPE, {}).bundle
        report = verify(bundle, "onnxruntime-cpu", images=photos, count=CHAIN_PHOTOS)
    print(text_table(*parity_table(report)))
    return {"checkpoint": checkpoint, "passed": report.passed, **to_builtins(report)}


def table(rows: list[Agreement]) -> str:
    """For terminals."""
    header = ("checkpoint", "runtime", "N' equal", "N'' equal", "maps equal", "labels %", "worst %", "worst window")
    return text_table(header, [_row(row) for row in rows])


def _row(row: Agreement) -> tuple[str, ...]:
    same = "equal" if row.worst_window_map_equal else "differs"
    return (
        row.checkpoint,
        row.runtime,
        f"{row.clap_counts_equal} of {row.windows}",
        f"{row.gbm_counts_equal}, max difference {row.gbm_count_difference_max}",
        f"{row.maps_equal} of {row.windows}",
        f"{100 * row.label_agreement_mean:.3f}",
        f"{100 * row.label_agreement_min:.3f}",
        f"{row.worst_window}: map {same}, margin {row.margin_of_worst:.1e}",
    )


def main() -> None:
    """Measures both checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows = [row for name in MODELS for row in measure(options.data, name)]
    print(table(rows))
    chains = [chain(options.data, name) for name in MODELS]
    if options.record:
        content = {
            "schema_version": 1,
            "environment": asdict(environment()),
            "precision": "fp32",
            "recipe": RECIPE,
            "agreements": [asdict(row) for row in rows],
            "parity_chains": chains,
        }
        options.record.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
