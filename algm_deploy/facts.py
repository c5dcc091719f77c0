"""What later steps read of a manifest: the shape of each fact, held against it wherever it is read.

A section is a table of records, to which steps add one at a time; its shape is that of one record. A record may hold
more than is said here.
"""

# Annotations are evaluated here, so that a TypedDict knows which of its keys are required.
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, NotRequired, TypedDict

from algm_deploy.environment import Environment
from algm_deploy.errors import RecipeError
from algm_deploy.recipes import converted

Thresholds = dict[str, float | Literal["inf", "-inf"]]
NOT_RUN = "not_run"


class Link(TypedDict):
    """One link of the parity chain."""

    number: int
    name: str
    passed: bool
    measured: str
    gate: str


class Parity(TypedDict):
    """The chain on one runtime; `files` are those that were executed, by SHA-256."""

    passed: bool
    images: int
    batches: list[int]
    links: list[Link]
    runtime: NotRequired[str]
    pictures: NotRequired[str]
    device: NotRequired[str]
    files: NotRequired[dict[str, str]]


class Figures(TypedDict):
    """Quality on the images of a data set or of one of its slices."""

    images: int
    miou_percent: float | None
    pixel_accuracy_percent: float | None


class Histograms(TypedDict):
    """Windows by their tokens, for each merge."""

    token_edges: list[float]
    windows_by_merge: dict[str, list[int]]


class Evaluation(Figures):
    """One evaluation of a data set."""

    dataset: str
    split: str
    protocol: dict[str, Any]
    windows: int
    labelled_pixels: int
    iou_percent_by_class: dict[str, float | None]
    gmacs_per_window_mean: float | None
    token_histograms: Histograms
    slices: dict[str, Figures]
    failures: dict[str, str]
    thresholds: NotRequired[Thresholds]
    runtime: NotRequired[str]
    device: NotRequired[str]


class Spread(TypedDict):
    """A figure over the rounds of a run."""

    p25: float
    p75: float


class Speed(TypedDict):
    """One network under one protocol."""

    variant: Literal["dense", "merged", "truncated"]
    protocol: str
    batch: int
    stable: bool
    thresholds: NotRequired[Thresholds]
    runtime: NotRequired[str]
    device: NotRequired[str]
    pictures: NotRequired[str]
    throughput_img_per_s: NotRequired[float]
    latency_ms_p50: NotRequired[float]
    latency_ms_p90: NotRequired[float]
    latency_ms_p99: NotRequired[float | None]
    gmacs_per_window_mean: NotRequired[float]
    speedup: NotRequired[float]
    merge_efficiency: NotRequired[float]
    merge_efficiency_by_round: NotRequired[Spread]
    by_picture: NotRequired[dict[str, list[float]]]  # latencies, and token counts by merge
    pictures_timed: NotRequired[int]
    rounds: NotRequired[int]
    clock: NotRequired[str]
    representative: NotRequired[bool]
    drift_percent: NotRequired[float]
    stages: NotRequired[dict[str, float]]
    execution: NotRequired[dict[str, str]]
    nodes_by_provider: NotRequired[dict[str, int]]
    host_device_copies: NotRequired[int]


class EngineFacts(TypedDict):
    """What an engine was made with and for."""

    version: str
    precision: str
    batches: list[int]
    compute_capabilities: list[str]


class Plugin(TypedDict):
    """A plugin of a parsed network."""

    plugin: str


class ParsedNetwork(TypedDict):
    """What the builder was given."""

    plugins: list[Plugin]


class Engine(TypedDict):
    """One engine."""

    facts: EngineFacts
    parsed_network: ParsedNetwork
    build_seconds: float


class Rebuilds(TypedDict):
    """How far several builds of one executable differ; None where nothing here can execute it."""

    builds: int
    distinct_files: int
    pictures: int
    labels_equal_percent_min: float | None
    network_ms_by_build: list[float] | None


class Variant(TypedDict):
    """Which network a variant of a bundle holds."""

    name: str
    made_from: dict[str, str]
    rows_by_layer: list[tuple[int, int]]


class TuningPage(TypedDict):
    """What people read of a finding: `Page` of `tuning/findings.py`, part by part."""

    lines: list[str]
    tables: list[tuple[str, list[str], list[list[str]]]]
    plots: list[tuple[str, str, str, dict[str, list[tuple[float, float, str]]]]]
    counts: list[tuple[str, list[float], dict[str, list[int]], dict[str, float]]]


class Pictured(TypedDict):
    """Values of a threshold that pictures show."""

    name: str
    values: list[float]


class Tuning(TypedDict):
    """What `tune` found."""

    page: TuningPage
    pictured: Pictured | None


SECTIONS: dict[str, Any] = {
    "engines": Engine,
    "evaluation": Evaluation,
    "onnxruntime": dict[str, int],
    "parity": Parity,
    "rebuilds": Rebuilds,
    "speed": Speed,
    "tuning": Tuning,
}
"""Records by section. Their keys start with the runtime's name, `tuning` aside."""

FACTS: dict[str, Any] = {
    "environment": Environment,  # of the export
    NOT_RUN: dict[str, str],  # by step and runtime, such as `parity tensorrt-rtx`: why there is no record
    "preprocessing_sha256": str,
    "unused_checkpoint_keys": list[str],
    "variant": Variant,
}


def checked_fact(name: str, value: object) -> Any:
    """A fact as a manifest holds it; RecipeError where it is none."""
    return converted(FACTS.get(name, Any), value, name)


def checked_record(section: str, key: str, record: object) -> Any:
    """A record of a section; RecipeError where it is none."""
    found = converted(SECTIONS[section], record, f"{section}.{key}")
    if section in ("evaluation", "speed"):
        _check_tokens(found, f"{section}.{key}")
    return found


def _check_tokens(record: Mapping[str, Any], key: str) -> None:
    """Token counts are named after the merges of the network, and their histograms have a count between two edges."""
    for part in (record, *record.get("slices", {}).values()):
        for name in part:
            if name.startswith("tokens_after_"):
                converted(float, part[name], f"{key}.{name}")
    if (histograms := record.get("token_histograms")) is None:
        return
    edges, counts = histograms["token_edges"], histograms["windows_by_merge"]
    rising = len(edges) > 1 and all(low < high for low, high in pairwise(edges))
    if not rising or any(len(one) != len(edges) - 1 or min(one) < 0 for one in counts.values()):
        raise RecipeError(
            f"expected rising edges and a count between two of them as {key}.token_histograms, got others"
        )
