"""Protocols by name, and what a bundle's dense, merged and truncated networks take under one of them.

| protocol | a batch is | clock |
|---|---|---|
| duplicate | one picture repeated, as the published code times; mean over the pictures | network, on its device |
| mixed | different pictures, each in equally many batches | network, on its device |
| latency | one picture | host, from a window in its memory until the label map is back there |

The device's clock is CUDA events where the runtime executes on a CUDA device, and the host's clock elsewhere, where
both are one. Every network is run through its runner with the same output; truncated keeps as many tokens as merging
leaves on average on these very pictures. Where dense is timed with cuDNN's attention too, merging is held to the
faster.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from tqdm import tqdm

from algm_deploy.bundle.records import (
    DENSE_VARIANTS,
    ByPicture,
    MergeTokens,
    Parity,
    ProtocolName,
    Speed,
    VariantName,
    storable,
)
from algm_deploy.bundle.signature import merge_names, threshold_defaults
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import GpuState, environment, gpu_state
from algm_deploy.errors import AlgmDeployError, BundleError, GateError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.parity.chain import verify
from algm_deploy.pictures.preprocessing import read_photo
from algm_deploy.pictures.sliding import best_labels
from algm_deploy.predictor import WARM_UP_S, network_canvas
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.schema import Recipe
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.timing.timers import (
    MOST_DRIFT,
    SAMPLES_FOR_P99,
    Call,
    Effort,
    Times,
    cuda_ms,
    drift,
    efficiency_by_round,
    host_ms,
    merge_efficiency,
    percentiles,
    steady,
    take_turns,
    typical_ms,
)
from algm_deploy.timing.variants import (
    VARIANTS,
    executables,
    faster_dense,
    may_attend_by_cudnn,
    planned,
    variant_bundle,
    variant_runner,
)
from algm_deploy.wording import variant_title

_LOG = logging.getLogger("algm_deploy")
_ORDER: tuple[VariantName, ...] = (*DENSE_VARIANTS, "merged", "truncated")
_STAGE_EFFORT = Effort(warmup=1, rounds=2, most_rounds=2)


@dataclass(frozen=True)
class Request:
    """What to time: up to `count` pictures in batches of `batch`; for `latency` that is 1.

    `thresholds` instead of the bundle's, by input name. `variants` stand beside each other; a bundle that merges
    nothing has only itself. Where others are held to a dense network that cuDNN's attention may make faster, that is
    timed as well, unless `against` names the dense network to be held to: the faster, as an earlier run told. Where
    that cannot be timed no gain is told, as one over another network would not compare with that run's.
    """

    protocol: ProtocolName
    count: int = 8
    batch: int = 1
    effort: Effort = field(default_factory=Effort)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    variants: tuple[VariantName, ...] = VARIANTS
    against: VariantName | None = None

    def __post_init__(self) -> None:
        if self.protocol == "latency" and self.batch != 1:
            raise BundleError(
                f"expected a batch of 1 for latency, got {self.batch}: leave --batch out, or time --protocol duplicate "
                "or mixed"
            )


def usual_request(
    recipe: Recipe,
    protocol: ProtocolName,
    count: int | None = None,
    batch: int | None = None,
    warmup: int | None = None,
    rounds: int | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Request:
    """A request whose missing numbers are the usual ones.

    Batches are as large as the bundle takes them, the pictures are eight or fill a batch, and for `latency` there are
    enough rounds for a 99th percentile.
    """
    usual = Effort()
    batch = batch or (1 if protocol == "latency" else recipe.max_batch)
    count = count or max(8, batch)
    rounds = rounds or max(usual.rounds, math.ceil(SAMPLES_FOR_P99 / count) if protocol == "latency" else 0)
    warmup = usual.warmup if warmup is None else warmup
    effort = Effort(warmup, rounds, max(usual.most_rounds, 2 * rounds))
    return Request(protocol, count, batch, effort, thresholds or {})


# ------------------------------------------------------------------------------------------------------------- the run


def benchmark(
    bundle: Bundle, runtime: str, windows: Array, request: Request, progress: bool = True
) -> dict[VariantName, Speed]:
    """Times a bundle and its variants on one runtime; returns a record each.

    Args:
        bundle: verified on this runtime.
        runtime: its name.
        windows: pictures (n, 3, H, W) in the dtype of the bundle's image input.
        request: protocol, batch, effort, thresholds.
        progress: show a bar.

    Raises:
        BundleError: never verified on this runtime, or pictures that do not make batches of this size.
        GateError: parity failed, of the bundle or of its dense variant.
    """
    check_verified(bundle, runtime)
    batches = batches_of(request.protocol, len(windows), request.batch)
    with runner(bundle, runtime) as merged:
        tokens = _token_counts(merged, windows, request, batches)
    mean = tokens.mean(0)
    first = windows[list(batches[0])]
    bundles = _bundles(bundle, runtime, first, request, np.rint(mean).astype(int).tolist())
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(runner(one, runtime) if one is bundle else variant_runner(one, runtime, bundle))
            for name, one in bundles.items()
        }
        _check_truncated(runners.get("truncated"), windows, mean)
        contestants = {name: Contestant(one, request.thresholds) for name, one in runners.items()}
        pieces = [windows[list(batch)] for batch in batches]
        _warm_up(contestants.values(), pieces)
        times, stages = times_of(contestants, pieces, request, progress)
        common = _conditions(contestants["merged" if "merged" in runners else "dense"]) | {
            "runtime": runtime,
            "pictures_timed": len(windows),
            "warmup_calls": request.effort.warmup,
        }
        executed = {name: one.executed(first) for name, one in contestants.items()}
    figures = _figures(bundle.recipe, times, stages, request, tokens)
    return {name: Speed(**found, **executed[name], **common) for name, found in figures.items()}


def _warm_up(contestants: Iterable[Contestant], batches: Sequence[Array]) -> None:
    """Networks get their CUDA graphs before the clock counts, as far as the time allows; `execution` tells.

    Those that a server captures, and those of these batches that nobody could foresee, which are captured when they
    come for the second time.
    """
    for one in contestants:
        one.run.warm_up(len(batches[0]), WARM_UP_S)
        for batch in (*batches, *batches) if one.run.captures else ():
            one.network(batch)()


class Pace(NamedTuple):
    """How fast a network is, and how many times as fast as the dense one; no numbers to rely on if not `stable`."""

    throughput_img_per_s: float
    speedup: float
    stable: bool


def paces(
    bundle: Bundle, plans: Sequence[MergePlan], windows: Array, request: Request, progress: bool = True
) -> list[Pace]:
    """Times the weights of a bundle in PyTorch by several merge plans, in turns with each other and with no merging.

    No plan needs a bundle of its own. The output is a label map, whatever the bundle's is.

    Args:
        bundle: verified on the torch runtime.
        plans: what to time.
        windows: pictures (n, 3, H, W) in the dtype of the bundle's image input.
        request: protocol, batch, effort; its thresholds and variants are not read.
        progress: show a bar.

    Raises:
        BundleError: never verified on this runtime, or pictures that do not make batches of this size.
        GateError: parity failed.
        PlanError: a plan that does not fit the network.
    """
    check_verified(bundle, "torch")
    batches = [windows[list(batch)] for batch in batches_of(request.protocol, len(windows), request.batch)]
    with ExitStack() as stack:
        contestants = {
            str(index): Contestant(stack.enter_context(runner(planned(bundle, plan), "torch")))
            for index, plan in enumerate((DENSE, *plans))
        }
        _warm_up(contestants.values(), batches)
        times, _ = times_of(contestants, batches, request, progress)
    stable = all(map(steady, times.values()))
    dense, *others = map(typical_ms, times.values())
    return [Pace(1e3 * request.batch / ms, dense / ms, stable) for ms in others]


def check_verified(bundle: Bundle, runtime: str) -> None:
    """Nothing is timed that has not passed the parity chain on its runtime.

    Raises:
        RuntimeUnavailableError, NotExecutedError, BuildError: it was never run, and cannot be here.
        BundleError: it was never run, or not on the files there are now.
        GateError: it failed.
    """
    record = bundle.found(Parity, runtime)
    command = f"`algm-deploy verify {quote(str(bundle.path))} --runtime {runtime}`"
    if record is None:
        with runner(bundle, runtime):  # what keeps it from running here keeps it from being verified: that comes first
            pass
        raise BundleError(f"expected a bundle that was verified on {runtime}, this one was not: run {command} first")
    if not record.passed:
        raise GateError(f"the parity chain failed on {runtime}, so nothing is timed: {command} shows where")
    if record.files not in (None, executables(bundle, runtime)):
        raise BundleError(
            f"expected the files that were verified on {runtime}, some were built since: run {command} again"
        )


def batches_of(protocol: ProtocolName, pictures: int, batch: int) -> list[tuple[int, ...]]:
    """Pictures of each batch by index.

    `mixed` takes pictures in a circle until each has been in equally many batches.

    Raises:
        BundleError: no picture, or a mixed batch of more pictures than there are.
    """
    if pictures < 1:
        raise BundleError("expected at least one picture to time, got none: give a larger --count or more --images")
    if protocol != "mixed":
        return [(index,) * batch for index in range(pictures)]
    if pictures < batch:
        raise BundleError(
            f"expected at least {batch} different pictures for mixed batches of {batch}, got {pictures}: give a larger "
            "--count, more --images or a smaller --batch"
        )
    count = math.lcm(pictures, batch) // batch
    return [tuple((start * batch + i) % pictures for i in range(batch)) for start in range(count)]


def _bundles(
    bundle: Bundle, runtime: str, batch: Array, request: Request, tokens: Sequence[int]
) -> dict[VariantName, Bundle]:
    """The networks to time, tried on a batch where need be; a bundle that merges nothing is its own dense network."""
    if not bundle.recipe.merging.layers:
        return {"dense": bundle}
    found = {name: variant_bundle(bundle, name, tokens) for name in VARIANTS if name in request.variants}
    if "dense" in found:
        _prove_dense(found["dense"], runtime, batch, bundle)
        check_verified(found["dense"], runtime)
        if len(found) > 1 and request.against != "dense" and may_attend_by_cudnn(bundle, runtime):
            found |= _attending_by_cudnn(bundle, runtime, batch)
    if request.against and request.against not in found:
        what = variant_title(request.against)
        _LOG.warning("no speed-up is told: it would be against %s, which could not be timed here", what)
    others = set(DENSE_VARIANTS) - {request.against} if request.against in found else set()
    return {name: one for name, one in found.items() if name not in others}


def _attending_by_cudnn(bundle: Bundle, runtime: str, batch: Array) -> dict[VariantName, Bundle]:
    """The dense network with cuDNN's attention, what a user who merges nothing would run where that is faster.

    It is timed under the conditions of the other, and left out, as one line tells, where it cannot be.
    """
    try:
        dense = variant_bundle(bundle, "dense_cudnn", ())
        if not _prove_dense(dense, runtime, batch, bundle).passed:
            command = f"algm-deploy verify {quote(str(dense.path))} --runtime {runtime}"
            raise GateError(f"its parity chain failed: `{command}` shows where")
        with variant_runner(dense, runtime, bundle) as run:
            run.infer({"image": batch})  # a plan for these sizes may fail where that for one picture did not
    except AlgmDeployError as error:
        _LOG.warning("dense with cuDNN's attention is left out: %s", error)
        return {}
    return {"dense_cudnn": dense}


def _prove_dense(dense: Bundle, runtime: str, batch: Array, bundle: Bundle) -> Parity:
    """The chain on one picture, unless it has passed before."""
    with variant_runner(dense, runtime, bundle):
        pass  # builds what is missing, so that what is verified is what is timed
    known = dense.found(Parity, runtime)
    if known is None or not known.passed or known.files != executables(dense, runtime):
        found = verify(dense, runtime, batch[:1], progress=False)
        known = structs.replace(found, files=executables(dense, runtime))
        dense.record(known)
    return known


def _check_truncated(truncated: Runner | None, windows: Array, mean: NDArray[np.float64]) -> None:
    if truncated is None:
        return
    kept = truncated.infer({"image": windows[:1]}, ["token_counts"])["token_counts"][0]
    if kept.tolist() != np.rint(mean).tolist():
        raise GateError(f"expected a truncated network that keeps {np.rint(mean)} tokens, got {kept}: nothing is timed")


def _token_counts(
    merged: Runner, windows: Array, request: Request, batches: Sequence[tuple[int, ...]]
) -> NDArray[np.int64]:
    """Patch tokens (images, merges) left behind each merge, of every image of every batch."""
    thresholds = {n: np.asarray(v, np.float32) for n, v in request.thresholds.items()}
    counts = [
        merged.infer({"image": windows[list(batch)], **thresholds}, ["token_counts"])["token_counts"]
        for batch in batches
    ]
    return np.concatenate(counts)


# --------------------------------------------------------------------------------------------------------- contestants


Name = TypeVar("Name", bound=str)


class Contestant:
    """One network on its runner, with calls that do what a protocol times."""

    def __init__(self, run: Runner, thresholds: Mapping[str, float] = {}) -> None:
        recipe = run.bundle.recipe
        self.run, self.output, self.size = run, recipe.output, recipe.network.image_size
        defaults = run.signature.defaults  # none where nothing merges
        self.thresholds = {name: thresholds.get(name, default) for name, default in defaults.items()}
        self.on_cuda = run.device.type == "cuda"
        self.halves: list[tuple[float, float]] = []
        """Of every call of `whole`: milliseconds until the outputs are in host memory, and from there."""

    def network(self, windows: Array) -> Callable[[], float]:
        """Milliseconds of the network alone, on its device, when the pictures are there."""
        clock = cuda_ms if self.on_cuda else host_ms
        return lambda: clock(self._network(windows))

    def whole(self, windows: Array) -> Callable[[], float]:
        """Milliseconds of the host's clock from pictures to label maps, both in host memory."""

        def call() -> float:
            start = time.perf_counter()
            outputs = self.run.infer(self._feeds(windows), [self.output])
            between = time.perf_counter()
            self._labels(outputs)
            end = time.perf_counter()
            self.halves.append((1e3 * (between - start), 1e3 * (end - between)))
            return 1e3 * (end - start)

        return call

    def executed(self, windows: Array) -> dict[str, Any]:
        """How the network really ran, as far as its runner tells."""
        placed = self.run.placement(self._feeds(windows))
        found = {"nodes_by_provider": placed.nodes, "host_device_copies": placed.copies} if placed else {}
        return {"execution": self.run.execution, "custom_operators": self.run.custom_operators, **found}

    def _network(self, windows: Array) -> Call:
        """The call to time; pictures are uploaded here, and freed with it."""
        image = torch.from_numpy(windows).to(self.run.device)
        return partial(self.run.infer_device, {"image": image, **self.thresholds}, [self.output])

    def _feeds(self, windows: Array) -> dict[str, Array]:
        return {"image": windows, **{n: np.asarray(v, np.float32) for n, v in self.thresholds.items()}}

    def _labels(self, outputs: Mapping[str, Array]) -> list[Array]:
        found = outputs[self.output]
        return list(found) if self.output == "labels" else [best_labels(scores, self.size) for scores in found]


Work = Mapping[str, Callable[[], float]]  # one piece of it, by contestant
Stages = dict[str, dict[str, float]]


def times_of(
    contestants: Mapping[Name, Contestant], batches: Sequence[Array], request: Request, progress: bool
) -> tuple[dict[str, Times], Stages]:
    """Times of each contestant; for latency also what parts of it take, by contestant."""
    effort, latency = request.effort, request.protocol == "latency"
    with tqdm(desc=f"time {request.protocol}", unit="call", disable=None if progress else True) as bar:
        network: list[Work] = [{name: one.network(batch) for name, one in contestants.items()} for batch in batches]
        if not latency:
            return take_turns(network, effort, bar.update), {}
        whole: list[Work] = [{name: one.whole(batch) for name, one in contestants.items()} for batch in batches]
        times = take_turns(whole, effort, bar.update)
        on_cuda = any(one.on_cuda for one in contestants.values())  # elsewhere nothing is copied
        alone = take_turns(network, _STAGE_EFFORT, bar.update) if on_cuda else {}
    return times, {
        name: _stages(one, float(np.median(times[name])), effort.warmup, alone.get(name))
        for name, one in contestants.items()
    }


def _stages(one: Contestant, p50: float, warmup: int, alone: Times | None) -> dict[str, float]:
    """The parts of a median latency, which add up to it: as all timed calls together divide.

    The network `alone` was timed on its device in calls of its own; what it leaves of its part are copies between host
    and device, and calls.
    """
    halves = np.array(one.halves[warmup:]).sum(0)
    network, label_map = (p50 * halves / halves.sum()).tolist()
    if one.output == "labels":  # the network ends in its label map
        network, label_map = p50, 0.0
    stages = {"network_ms_p50": network}
    if alone is not None:
        stages["network_ms_p50"] = min(network, float(np.median(alone)))
        stages["copies_and_calls_ms_p50"] = network - stages["network_ms_p50"]
    return stages | ({"label_map_ms_p50": label_map} if one.output == "scores" else {})


# -------------------------------------------------------------------------------------------------------------- records


def _figures(
    recipe: Recipe, times: Mapping[str, Times], stages: Stages, request: Request, tokens: NDArray[np.int64]
) -> dict[VariantName, dict[str, Any]]:
    """Fields of `Speed` by variant, with speed-ups against the faster dense one, or the one that the request names. One
    that is not steady spoils all."""
    stable = all(steady(one) for one in times.values())
    typical = {name: typical_ms(one) for name, one in times.items()}
    defaults = threshold_defaults(recipe.merging)
    figures: dict[VariantName, dict[str, Any]] = {}
    for name in _ORDER:
        if name not in times:
            continue
        figures[name] = {
            "variant": name,
            "protocol": request.protocol,
            "batch": request.batch,
            "thresholds": storable({n: request.thresholds.get(n, default) for n, default in defaults.items()}),
            "stable": stable,
            "drift_percent": 100 * drift(times[name]),
            "drift_percent_allowed": 100 * MOST_DRIFT,
            "rounds": len(times[name]),
            "samples": int(times[name].size),
            "throughput_img_per_s": 1e3 * request.batch / typical[name],
            "batch_ms_mean_of_medians": typical[name],
            **_tokens(recipe, name, tokens),
            **_against_dense(name, typical, request.against),
        }
        if request.protocol == "latency":
            figures[name] |= {f"latency_ms_{share}": value for share, value in percentiles(times[name]).items()}
            figures[name]["stages"] = stages[name]
    if request.protocol == "latency" and "merged" in figures:
        figures["merged"]["by_picture"] = _by_picture(recipe, times["merged"], tokens)
    if "merge_efficiency" in figures.get("merged", {}):
        known = (figures["merged"]["baseline"], "merged", "truncated")
        figures["merged"]["merge_efficiency_by_round"] = efficiency_by_round(*(times[name] for name in known))
    return figures


def _tokens(recipe: Recipe, variant: VariantName, tokens: NDArray[np.int64]) -> dict[str, Any]:
    """Mean token counts after each merge, the figure the truncated network was cut to, and multiply-adds."""
    plan, network = recipe.merging, recipe.network
    patches = network.grid[0] * network.grid[1]
    kept = np.full_like(tokens, patches) if variant in DENSE_VARIANTS else tokens
    if variant == "truncated":
        kept = np.broadcast_to(np.rint(tokens.mean(0)).astype(int), tokens.shape)
    pairs = zip(merge_names(plan), kept.mean(0).tolist(), strict=True)
    means = {"tokens": tuple(MergeTokens(merge=name, mean=mean) for name, mean in pairs)}
    if variant == "truncated":
        return means
    rows = kept.tolist() if variant == "merged" else []
    gmacs = [multiply_adds(network, plan, row).gmacs for row in rows] or [multiply_adds(network, DENSE).gmacs]
    return {**means, "gmacs_per_window_mean": float(np.mean(gmacs))}


def _by_picture(recipe: Recipe, times: Times, tokens: NDArray[np.int64]) -> ByPicture:
    counts = (tuple(column) for column in tokens.T.tolist())
    return ByPicture(
        latency_ms_p50=tuple(np.median(times, axis=0).tolist()),
        tokens_by_merge=dict(zip(merge_names(recipe.merging), counts, strict=True)),
    )


def _against_dense(
    variant: VariantName, typical: Mapping[str, float], against: VariantName | None = None
) -> dict[str, Any]:
    """Speed-up and merge efficiency, and the dense network they are told against; nothing where it was not timed."""
    baseline = against or faster_dense(typical)
    if variant in DENSE_VARIANTS or baseline is None or baseline not in typical:
        return {}
    found: dict[str, Any] = {"speedup": typical[baseline] / typical[variant], "baseline": baseline}
    if variant == "merged" and "truncated" in typical:
        found["merge_efficiency"] = merge_efficiency(typical[baseline], typical["merged"], typical["truncated"])
    return found


def _conditions(contestant: Contestant) -> dict[str, Any]:
    """What the times depend on beside network and pictures."""
    run = contestant.run
    return {
        "clock": "CUDA events" if contestant.on_cuda else "host",
        "device": run.device_name,
        "provider": run.provider,
        "executable": run.executable,
        "precision": run.precision,
        "output": run.bundle.recipe.output,
        "torch_threads": torch.get_num_threads(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "load_average_1_minute": os.getloadavg()[0],
        "environment": environment(devices=contestant.on_cuda),
        "gpu": _gpu(run.device) if contestant.on_cuda else None,
    }


def _gpu(device: torch.device) -> GpuState | None:
    """Clocks, power and temperature of a device, right after the last timed call."""
    uuid = torch.cuda.get_device_properties(device).uuid
    return gpu_state(f"GPU-{uuid}")


def reading_ms(paths: Sequence[Path], recipe: Recipe) -> dict[str, float]:
    """Milliseconds on the host from a file to pixels, and from pixels to the canvas that windows are cut from."""
    decode, preprocess = [], []
    for path in paths:
        decode.append(host_ms(partial(read_photo, path)))
        preprocess.append(host_ms(partial(network_canvas, read_photo(path), recipe)))
    return {"decode_ms_p50": float(np.median(decode)), "preprocess_ms_p50": float(np.median(preprocess))}


def natural(windows: Array) -> bool:
    """Whether pictures (n, 3, H, W) have regions, as photos do: neither constant nor noise.

    Neighbours in a photo resemble each other: here the correlation of horizontally adjacent pixels must exceed 1/2 in
    every picture.
    """
    return all(_neighbour_correlation(picture) > 0.5 for picture in np.asarray(windows, np.float64))


def _neighbour_correlation(picture: NDArray[np.float64]) -> float:
    centred = picture - picture.mean((1, 2), keepdims=True)
    energy = (centred**2).mean()
    return float((centred[..., 1:] * centred[..., :-1]).mean() / energy) if energy > 1.0 else 0.0
