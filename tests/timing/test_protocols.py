"""Batches by protocol, what may be timed, and the records of a run on the tiny network."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image

from algm_deploy.bundle.records import Parity, Speed, tokens_by_merge
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import bench, build, parity_windows, verify
from algm_deploy.errors import BundleError, GateError, RuntimeUnavailableError
from algm_deploy.evaluation.flops import multiply_adds
from algm_deploy.pictures.shipped import scene
from algm_deploy.recipe.plan import DENSE
from algm_deploy.report.records import Measured, measured, rows_of
from algm_deploy.report.tables import markdown_table, speed_notes, speed_table
from algm_deploy.runners.contract import Placement, Runner, runner, runner_type
from algm_deploy.runners.onnxruntime import runner as onnxruntime
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.torch.runner import TorchRunner
from algm_deploy.timing import protocols
from algm_deploy.timing.protocols import Request, batches_of, benchmark, natural, reading_ms, usual_request
from algm_deploy.timing.timers import Effort
from algm_deploy.timing.variants import executables, variant_bundle, variant_runner

QUICK = Effort(warmup=1, rounds=2, most_rounds=2)
CPU = "onnxruntime-cpu"


@pytest.fixture(scope="module")
def verified(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle, built and verified on ONNX Runtime and PyTorch; variants are added by the tests that time."""
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("verified") / "tiny"))
    build(bundle, CPU)
    for runtime in (CPU, "torch"):
        assert verify(bundle, runtime, count=1, progress=False).passed
    return bundle


@pytest.fixture
def windows(tiny_bundle: Bundle) -> np.ndarray:
    return parity_windows(tiny_bundle.recipe, [], 2)


def failed(bundle: Bundle, runtime: str) -> Parity:
    """The record of a runtime, its last link broken."""
    record = bundle.found(Parity, runtime)
    assert record is not None
    *links, last = record.links
    return structs.replace(record, links=(*links, structs.replace(last, passed=False)))


def timed(bundle: Bundle, runtime: str, request: Request, images: Sequence[Path] = ()) -> list[Measured[Speed]]:
    return rows_of(bundle, bench(bundle, runtime, images=images, protocol=request, progress=False))


def timed_as(monkeypatch: pytest.MonkeyPatch, **ms: float) -> None:
    """Lets every network take so many milliseconds, by its variant, whatever it does."""

    def told(contestants: dict[str, Any], batches: list[Any], request: Request, progress: bool) -> Any:
        shape = request.effort.rounds, len(batches)
        stages = {"network_ms_p50": 4.0, "copies_and_calls_ms_p50": 0.7, "label_map_ms_p50": 0.3}
        return {name: np.full(shape, ms[name]) for name in contestants}, dict.fromkeys(contestants, stages)

    monkeypatch.setattr(protocols, "times_of", told)


# --- requests and batches --------------------------------------------------------------------------------------------


def test_duplicate_repeats_each_picture() -> None:
    assert batches_of("duplicate", 2, 3) == [(0, 0, 0), (1, 1, 1)]
    assert batches_of("latency", 2, 1) == [(0,), (1,)]


@pytest.mark.parametrize(("pictures", "batch"), [(4, 2), (5, 2), (8, 3), (3, 3), (9, 6)])
def test_mixed_issues_every_picture_equally_often(pictures: int, batch: int) -> None:
    batches = batches_of("mixed", pictures, batch)
    assert all(len(set(one)) == batch for one in batches)  # different pictures
    issued = Counter(index for one in batches for index in one)
    assert len(issued) == pictures
    assert len(set(issued.values())) == 1


def test_batches_that_pictures_cannot_make() -> None:
    with pytest.raises(BundleError, match="expected at least 4 different pictures for mixed batches of 4, got 3"):
        batches_of("mixed", 3, 4)
    with pytest.raises(BundleError, match="got none"):
        batches_of("duplicate", 0, 1)


def test_latency_has_no_batches() -> None:
    with pytest.raises(BundleError, match="expected a batch of 1 for latency, got 2"):
        Request("latency", batch=2)


def test_batch_beyond_the_bundle(verified: Bundle, windows: np.ndarray) -> None:
    with pytest.raises(BundleError, match="this bundle takes 1 to 8"):
        benchmark(verified, CPU, windows, Request("duplicate", batch=9, effort=QUICK), progress=False)


def test_usual_requests(tiny_bundle: Bundle) -> None:
    latency = usual_request(tiny_bundle.recipe, "latency")
    assert (latency.count, latency.batch, latency.effort.rounds) == (8, 1, 13)  # 104 samples have a 99th percentile
    mixed = usual_request(tiny_bundle.recipe, "mixed", warmup=0)
    assert (mixed.count, mixed.batch, mixed.effort.warmup, mixed.effort.rounds) == (8, 8, 0, 4)
    assert usual_request(tiny_bundle.recipe, "latency", count=2, rounds=3).effort.most_rounds == 16


def test_natural_pictures() -> None:
    rng = np.random.default_rng(0)
    drawn = scene(3)[0].transpose(2, 0, 1)[None]
    noise, constant = rng.integers(0, 256, (1, 3, 64, 64), np.uint8), np.full((1, 3, 64, 64), 127, np.uint8)
    assert natural(drawn)
    assert not natural(noise)
    assert not natural(constant)
    assert not natural(np.concatenate([drawn[..., :64, :64], noise]))


# --- what may be timed -----------------------------------------------------------------------------------------------


def test_nothing_unverified_is_timed(tiny_bundle: Bundle, windows: np.ndarray) -> None:
    with pytest.raises(BundleError, match=r"was not: run `algm-deploy verify .* --runtime onnxruntime-cpu` first"):
        benchmark(tiny_bundle, CPU, windows, Request("latency"), progress=False)


def test_nothing_that_failed_is_timed(verified: Bundle, windows: np.ndarray, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(verified.path, tmp_path / "failed"))
    bundle.record(failed(bundle, CPU))
    with pytest.raises(GateError, match="parity chain failed on onnxruntime-cpu, so nothing is timed"):
        benchmark(bundle, CPU, windows, Request("latency"), progress=False)
    assert Bundle.open(bundle.path).manifest.speeds == ()


def test_what_was_built_since_is_not_timed(tiny_bundle: Bundle, windows: np.ndarray, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    verify(bundle, CPU, count=1, progress=False)
    build(bundle, CPU)
    with pytest.raises(BundleError, match=r"some were built since: run `algm-deploy verify"):
        benchmark(bundle, CPU, windows, Request("latency"), progress=False)


def test_a_dense_network_that_fails_stops_the_run(
    verified: Bundle, windows: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(shutil.copytree(verified.path, tmp_path / "bundle"))
    monkeypatch.setattr(protocols, "verify", lambda *_, **__: failed(bundle, "torch"))
    with pytest.raises(GateError, match="nothing is timed"):
        benchmark(bundle, "torch", windows, Request("latency", variants=("dense", "merged")), progress=False)


# --- variants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", [CPU, "torch"])
def test_truncated_keeps_its_tokens_on_every_runtime(verified: Bundle, windows: np.ndarray, runtime: str) -> None:
    truncated = variant_bundle(verified, "truncated", (40, 25))
    with variant_runner(truncated, runtime, verified) as run:
        outputs = run.infer({"image": windows})
    assert outputs["token_counts"].tolist() == [[40, 25]] * 2
    assert outputs["scores"].shape == (2, 11, 128, 128)


def test_segments_are_executed_and_the_whole_graph_is_opened(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path / "tiny"))
    monkeypatch.setattr(onnxruntime, "usable_library", lambda _: Path("library.so"))
    runner_type("onnxruntime-cuda").build(bundle)
    files = executables(bundle, "onnxruntime-cuda")
    assert [name for name in files if "stretch" in name] == [
        f"model.onnxruntime-cuda.stretch-{i}.onnx" for i in range(3)
    ]
    assert files["model.onnxruntime-cuda.onnx"] == bundle.files["model.onnxruntime-cuda.onnx"].sha256
    assert row_of("onnxruntime-cuda").executable(bundle.files) == "model.onnxruntime-cuda.onnx"
    assert set(executables(bundle, CPU)) == {"weights.safetensors", "model.onnx"}
    assert row_of(CPU).executable(bundle.files) == "model.onnx"


def test_truncated_is_the_same_network_everywhere(verified: Bundle, windows: np.ndarray) -> None:
    truncated = variant_bundle(verified, "truncated", (40, 25))
    found = []
    for runtime in (CPU, "torch"):
        with variant_runner(truncated, runtime, verified) as run:
            found.append(run.infer({"image": windows[:1]}, ["scores"])["scores"])
    np.testing.assert_allclose(*found, atol=1e-4)


def test_dense_equals_merging_that_merges_nothing(verified: Bundle, windows: np.ndarray) -> None:
    off = dict.fromkeys(("clap_threshold", "gbm_threshold"), np.float32(np.inf))
    with variant_runner(variant_bundle(verified, "dense", ()), CPU, verified) as dense, runner(verified, CPU) as merged:
        ours = dense.infer({"image": windows[:1]})["scores"]
        theirs = merged.infer({"image": windows[:1], **off})["scores"]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_variants_are_kept_until_something_changes(verified: Bundle) -> None:
    first = variant_bundle(verified, "truncated", (40, 25))
    stamp = (first.path / "model.onnx").stat().st_mtime_ns
    assert (variant_bundle(verified, "truncated", (40, 25)).path / "model.onnx").stat().st_mtime_ns == stamp
    assert (variant_bundle(verified, "truncated", (39, 25)).path / "model.onnx").stat().st_mtime_ns > stamp
    assert variant_bundle(verified, "merged", ()) is verified


def test_another_tail_is_refused(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = variant_bundle(verified, "dense", ())
    tails = {str(dense.path): (), str(verified.path): ("label_map",)}
    kind = type(runner(verified, CPU))
    monkeypatch.setattr(kind, "custom_operators", property(lambda self: tails[str(self.bundle.path)]))
    with pytest.raises(BundleError, match=r"got others: run `algm-deploy build .*tiny --runtime"):
        variant_runner(dense, CPU, verified)


def test_tensors_of_the_device_go_through_the_torch_runner(verified: Bundle, windows: np.ndarray) -> None:
    run = TorchRunner(verified)
    with run:
        image = torch.from_numpy(windows).to(run.device)
        ours = run.infer_device({"image": image, "clap_threshold": 0.8})
        theirs = run.infer({"image": windows, "clap_threshold": np.float32(0.8)})
        assert list(ours) == list(theirs) == ["scores", "token_counts"]
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor.cpu().numpy(), theirs[name])
        assert list(run.infer_device({"image": image}, ["token_map_gbm_3"])) == ["token_map_gbm_3"]
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        run.infer_device({"image": image})


# --- records ---------------------------------------------------------------------------------------------------------


def test_latency_from_pictures_to_records(verified: Bundle, tmp_path: Path) -> None:
    for index in range(2):
        Image.fromarray(scene(index)[0]).save(tmp_path / f"{index}.png")
    photos = sorted(tmp_path.glob("*.png"))
    request = Request("latency", count=2, effort=QUICK)
    rows = timed(verified, CPU, request, photos)
    assert [row.record.variant for row in rows] == ["dense", "merged", "truncated"]
    dense, merged, truncated = (row.record for row in rows)
    assert (merged.pictures, merged.representative, merged.pictures_timed) == ("photos", True, 2)
    assert (merged.samples, merged.rounds, merged.warmup_calls, merged.clock) == (4, 2, 1, "host")
    assert merged.executable == "model.onnxruntime-cpu.onnx"
    assert merged.provider == "CPUExecutionProvider"
    assert merged.device == row_of(CPU).device_here()
    assert merged.environment is not None
    assert merged.environment.packages["onnxruntime"]
    assert set(merged.reading) == {"decode_ms_p50", "preprocess_ms_p50"}
    assert set(merged.stages) == {"network_ms_p50", "label_map_ms_p50"}  # on the host nothing is copied
    assert all(ms > 0 for ms in (*merged.stages.values(), *merged.reading.values()))
    assert sum(merged.stages.values()) == pytest.approx(merged.latency_ms_p50)
    assert merged.nodes_by_provider["CPUExecutionProvider"] > dense.nodes_by_provider["CPUExecutionProvider"] > 50
    assert (merged.host_device_copies, merged.gpu) == (0, None)
    by_picture, tokens = merged.by_picture, tokens_by_merge(merged.tokens)
    assert by_picture is not None
    assert np.mean(by_picture.tokens_by_merge["gbm_3"]) == tokens["gbm_3"]
    assert len(by_picture.latency_ms_p50) == len(by_picture.tokens_by_merge["clap_1"]) == 2
    assert dense.by_picture is None
    assert merged.latency_ms_p50 is not None
    assert merged.latency_ms_p90 is not None
    assert 0 < merged.latency_ms_p50 <= merged.latency_ms_p90
    assert merged.latency_ms_p99 is None
    assert dense.thresholds == merged.thresholds == {"clap_threshold": 0.9, "gbm_threshold": 1.0}  # of the run
    assert tokens_by_merge(dense.tokens) == {"clap_1": 64, "gbm_3": 64}
    assert tokens_by_merge(truncated.tokens)["gbm_3"] == round(tokens["gbm_3"]) < 64
    assert dense.gmacs_per_window_mean == multiply_adds(verified.recipe.network, DENSE).gmacs
    kept = [row for row in measured(Bundle.open(verified.path), Speed) if row.record.protocol == "latency"]
    assert [row.record.variant for row in kept] == ["dense", "merged", "truncated"]
    assert kept[0].artifact.plan == DENSE
    assert kept[2].artifact.truncated


def test_token_counts_are_those_of_the_pictures(
    verified: Bundle, windows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    records = benchmark(verified, CPU, windows, Request("mixed", batch=2, effort=QUICK), progress=False)
    with runner(verified, CPU) as run:
        counts = run.infer({"image": windows}, ["token_counts"])["token_counts"]
    assert tokens_by_merge(records["merged"].tokens)["clap_1"] == counts[:, 0].mean()
    gmacs = [multiply_adds(verified.recipe.network, verified.recipe.merging, row.tolist()).gmacs for row in counts]
    assert records["merged"].gmacs_per_window_mean == pytest.approx(np.mean(gmacs))
    assert records["truncated"].gmacs_per_window_mean is None


def test_speed_up_efficiency_and_throughput(
    verified: Bundle, windows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    records = benchmark(verified, CPU, windows, Request("mixed", batch=2, effort=QUICK), progress=False)
    merged = records["merged"]
    assert merged.merge_efficiency == pytest.approx(0.75)
    assert merged.merge_efficiency_by_round is not None
    spread = {"rounds": 2, "min": 0.75, "p25": 0.75, "p75": 0.75, "max": 0.75}
    assert structs.asdict(merged.merge_efficiency_by_round) == pytest.approx(spread)
    assert merged.speedup == pytest.approx(1.6)
    assert records["truncated"].speedup == pytest.approx(2.0)
    assert merged.throughput_img_per_s == pytest.approx(400.0)
    assert merged.batch_ms_mean_of_medians == 5.0
    assert (records["dense"].speedup, records["dense"].merge_efficiency) == (None, None)
    assert records["truncated"].merge_efficiency is None
    assert merged.latency_ms_p50 is None


def test_stages_are_told_where_times_are(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    rows = timed(verified, CPU, Request("latency", count=2, effort=QUICK))
    notes = speed_notes(rows)
    assert "p50 of merged 5.0 ms, of it network 4.0 ms, copies and calls 0.7 ms, label map 0.3 ms" in notes
    assert "a time goes from a window in the host's memory to its label map there" in notes[0]
    read = structs.replace(rows[0].record, reading={"decode_ms_p50": 12.0})
    told = speed_notes([replace(rows[0], record=read)])
    assert "before that, in no time above, for a photo: decode 12.0 ms" in told
    (ran,) = [note for note in notes if note.startswith("merged ran ")]
    assert re.fullmatch(r"merged ran \d+ nodes on CPUExecutionProvider", ran)


def test_networks_with_cuda_graphs_get_them_before_the_clock_counts() -> None:
    """Batches that a warm-up does not foresee come twice: the first time such a graph is not captured."""
    done: list[tuple[str, Any]] = []

    def contestant(name: str, captures: int) -> Any:
        def warm_up(images: int, seconds: float) -> None:
            done.append((name, images))

        run = SimpleNamespace(warm_up=warm_up, captures=captures)
        return SimpleNamespace(run=run, network=lambda batch: lambda: done.append((name, batch.tolist())))

    batches = [np.array([0, 0]), np.array([1, 1])]
    protocols._warm_up([contestant("with", 3), contestant("without", 0)], batches)
    assert done == [("with", 2), *[("with", batch) for batch in ([0, 0], [1, 1], [0, 0], [1, 1])], ("without", 2)]


def test_a_network_that_ends_in_labels_has_no_label_map_of_its_own(labels_bundle: Bundle, windows: np.ndarray) -> None:
    with runner(labels_bundle, "torch") as run:
        contestants: Any = {"merged": protocols.Contestant(run)}
        times, stages = protocols.times_of(contestants, [windows[:1]], Request("latency", effort=QUICK), progress=False)
    assert stages["merged"] == {"network_ms_p50": np.median(times["merged"])}


@pytest.mark.parametrize("alone", [3.0, 30.0])
def test_stages_add_up_to_the_median_whatever_the_device_says(verified: Bundle, alone: float) -> None:
    """The network's calls of its own may have met a busier machine than those that hold it."""
    with runner(verified, CPU) as run:
        one = protocols.Contestant(run)
    one.halves = [(90.0, 1.0), (6.0, 2.0), (10.0, 2.0)]  # the first call warms up
    stages = protocols._stages(one, 9.0, 1, np.full((2, 2), alone))
    assert sum(stages.values()) == pytest.approx(9.0)
    assert min(stages.values()) >= 0
    assert stages["network_ms_p50"] == pytest.approx(min(alone, 9.0 * 16 / 20))
    assert stages["label_map_ms_p50"] == pytest.approx(9.0 * 4 / 20)


def test_how_a_network_ran_is_recorded_and_told(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    kind = type(runner(verified, CPU))
    monkeypatch.setattr(kind, "execution", property(lambda _: {"cuda_graph": "no, shapes vary"}))
    placed = Placement({"CUDAExecutionProvider": 140, "CPUExecutionProvider": 3}, copies=2)
    monkeypatch.setattr(kind, "placement", lambda self, feeds: placed)
    rows = timed(verified, CPU, Request("latency", count=1, effort=QUICK))
    record = rows[1].record
    assert record.execution == {"cuda_graph": "no, shapes vary"}
    assert (record.nodes_by_provider, record.host_device_copies) == (placed.nodes, 2)
    assert (
        "merged ran cuda graph no, shapes vary, 140 nodes on CUDAExecutionProvider, 3 nodes on CPUExecutionProvider, "
        "2 copies between host and device"
    ) in speed_notes(rows)
    assert record in Bundle.open(verified.path).manifest.speeds


def test_the_spread_of_an_efficiency_stands_beside_it(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(contestants: dict[str, Any], batches: list[Any], *_: Any) -> Any:
        rounds = {"dense": [8.0, 8.0, 8.0], "merged": [4.1, 4.4, 4.8], "truncated": [4.0, 4.0, 4.0]}
        times = {name: np.array(rounds[name])[:, None].repeat(len(batches), 1) for name in contestants}
        return times, {name: {"network_ms_p50": 1.0} for name in contestants}

    monkeypatch.setattr(protocols, "times_of", told)
    monkeypatch.setattr(protocols, "steady", lambda _: True)
    rows = timed(verified, CPU, Request("latency", count=1, effort=QUICK))
    found = rows[1].record.merge_efficiency_by_round
    assert found is not None
    assert structs.asdict(found) == pytest.approx({"rounds": 3, "min": 0.8, "p25": 0.85, "p75": 0.9375, "max": 0.975})
    table = speed_table(rows)
    column = table.header.index("merge efficiency (middle half of rounds)")
    assert [row[column] for row in table.rows][:2] == ["-", "0.90 (0.85 to 0.94)"]
    rule = markdown_table(*table).splitlines()[1].strip("| ").split(" | ")
    assert rule[column] == "---:"  # still a column of numbers


def test_no_efficiency_where_dropping_saves_nothing(
    verified: Bundle, windows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_as(monkeypatch, dense=8.0, merged=9.0, truncated=8.5)
    records = benchmark(verified, CPU, windows, Request("latency", effort=QUICK), progress=False)
    assert records["merged"].merge_efficiency is None
    assert records["merged"].speedup == pytest.approx(8 / 9)


def test_threshold_of_a_run_is_recorded(verified: Bundle, windows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, merged=8.0, truncated=8.0)
    off = {"clap_threshold": float("inf")}
    request = Request("latency", count=1, effort=QUICK, thresholds=off, variants=("dense", "merged"))
    rows = timed(verified, CPU, request)
    merged = rows[1].record
    assert merged.thresholds == {"clap_threshold": "inf", "gbm_threshold": 1.0}
    assert tokens_by_merge(merged.tokens)["clap_1"] == 64
    assert ("clap_threshold", "inf") in {
        pair for one in Bundle.open(verified.path).manifest.speeds for pair in one.identity
    }
    with pytest.raises(BundleError, match="no input 'tau'"):
        benchmark(verified, CPU, windows, Request("latency", thresholds={"tau": 1.0}), progress=False)


def test_an_unsteady_run_prints_no_time(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(contestants: dict[str, Any], batches: list[Any], *_: Any) -> Any:
        slower = np.array([[10.0] * len(batches), [12.0] * len(batches)])
        times = {name: np.full_like(slower, 10.0) for name in contestants} | {"dense": slower}
        return times, {name: {"network_ms_p50": 1.0} for name in contestants}

    monkeypatch.setattr(protocols, "times_of", told)
    rows = timed(verified, CPU, Request("latency", count=2, effort=QUICK))
    assert [row.record.stable for row in rows] == [False] * 3  # a ratio of a steady and an unsteady time is neither
    table = speed_table(rows)
    merged = dict(zip(table.header, table.rows[1], strict=True))
    assert {merged[name] for name in ("img/s", "p50 ms", "speed-up")} == {"not stable"}
    assert merged["tokens after CLAP"].isdigit()  # counts are no times
    notes = " ".join(speed_notes(rows))
    assert "dense 20.0 %, merged 0.0 %" in notes
    assert "not representative" in notes
    assert "p50" not in notes


def test_scenes_and_noise_are_stamped(verified: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)

    def stamp(paths: list[Path]) -> tuple[str | None, bool | None]:
        request = Request("latency", count=1, effort=QUICK, variants=("merged",))
        rows = timed(verified, "torch", request, paths)
        return rows[0].record.pictures, rows[0].record.representative

    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    for name, pixels in (("noise", noise), ("photo", scene(2)[0])):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    assert stamp([]) == ("synthetic scenes", False)
    assert stamp([tmp_path / "noise.png"]) == ("constant or random", False)
    assert stamp([tmp_path / "photo.png"]) == ("photos", True)


def test_a_dense_bundle_is_timed_alone(verified: Bundle, windows: np.ndarray) -> None:
    dense = variant_bundle(verified, "dense", ())
    assert verify(dense, "torch", count=1, progress=False).passed
    records = benchmark(dense, "torch", windows, Request("duplicate", batch=2, effort=QUICK), progress=False)
    assert list(records) == ["dense"]
    assert records["dense"].speedup is None


def test_reading_is_timed_in_parts(tiny_bundle: Bundle, tmp_path: Path) -> None:
    Image.fromarray(scene(0)[0]).save(tmp_path / "a.png")
    found = reading_ms([tmp_path / "a.png"], tiny_bundle.recipe)
    assert list(found) == ["decode_ms_p50", "preprocess_ms_p50"]
    assert all(value > 0 for value in found.values())


def test_times_on_the_device_are_labelled_so(verified: Bundle) -> None:
    run: Runner = TorchRunner(verified)
    contestant = protocols.Contestant(run)
    assert protocols._conditions(contestant)["clock"] == ("CUDA events" if contestant.on_cuda else "host")


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", ["duplicate", "latency"])
def test_on_a_cuda_device(verified: Bundle, windows: np.ndarray, protocol: protocols.ProtocolName) -> None:
    rows = timed(verified, "torch", Request(protocol, count=1, effort=Effort(2, 4, 8)))
    for row in rows:
        assert row.record.clock == "CUDA events"
        assert row.record.batch_ms_mean_of_medians is not None
        assert row.record.batch_ms_mean_of_medians > 0
        assert row.record.environment is not None
        assert row.record.environment.devices
