"""What merging is held to: the faster of the dense networks that a runtime has."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from msgspec import structs
from PIL import Image

from algm_deploy.bundle.records import OptimizedGraph, Parity, Speed
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import tuning
from algm_deploy.deployment import bench, build, parity_windows, verify
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.evaluation.datasets import Dataset, Sample
from algm_deploy.native_libraries import find_library
from algm_deploy.pictures.shipped import scene
from algm_deploy.report.records import artifact_of, rows_of
from algm_deploy.report.tables import speed_notes, speed_table
from algm_deploy.runners.contract import Runner, runner, runner_type
from algm_deploy.runners.onnxruntime import runner as onnxruntime
from algm_deploy.runners.onnxruntime import sessions
from algm_deploy.runners.onnxruntime.sessions import LIBRARY
from algm_deploy.timing import protocols
from algm_deploy.timing.protocols import Request
from algm_deploy.timing.timers import Effort
from algm_deploy.timing.variants import faster_dense, may_attend_by_cudnn, variant_bundle, variant_runner

CPU, CUDA = "onnxruntime-cpu", "onnxruntime-cuda"
QUICK = Effort(warmup=1, rounds=2, most_rounds=2)
ONE = Request("latency", count=1, effort=QUICK)


@pytest.fixture(scope="module")
def verified(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that may be timed on ONNX Runtime's CPU provider, which stands in for CUDA here."""
    bundle = Bundle.open(shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("verified") / "tiny"))
    build(bundle, CPU)
    assert verify(bundle, CPU, count=1, progress=False).passed
    return bundle


@pytest.fixture
def untried(verified: Bundle, copied: Callable[..., Bundle]) -> Bundle:
    """The same, whose network with cuDNN's attention was never timed."""
    bundle = copied(verified)
    shutil.rmtree(bundle.path / "variants" / "dense_cudnn", ignore_errors=True)
    return bundle


@pytest.fixture
def two_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the runtime, it has cuDNN's attention."""
    monkeypatch.setattr(protocols, "may_attend_by_cudnn", lambda *_: True)


def timed_as(monkeypatch: pytest.MonkeyPatch, **ms: float) -> None:
    """Lets every network take so many milliseconds, by its variant, whatever it does."""

    def told(contestants: dict[str, Any], batches: list[Any], request: Request, progress: bool) -> Any:
        times = {name: np.full((request.effort.rounds, len(batches)), ms[name]) for name in contestants}
        return times, {name: {"network_ms_p50": 1.0} for name in contestants}

    monkeypatch.setattr(protocols, "times_of", told)


def write_scene(path: Path) -> Path:
    """A drawn scene as a photo."""
    Image.fromarray(scene(0)[0]).save(path)
    return path


def one_photo(folder: Path) -> Dataset:
    """A data set of one drawn scene."""
    photos = (Sample("a", write_scene(folder / "a.png"), Path(), "a"),)
    return Dataset("folder", "val", Path(), ("x",), ((0, 0, 0),), photos, np.zeros(256, np.int16))


def timed(bundle: Bundle, request: Request = ONE) -> dict[str, Speed]:
    return {one.variant: one for one in bench(bundle, CPU, protocol=request, progress=False)}


# --- which is the faster ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_attentions")
@pytest.mark.parametrize(("own", "cudnn", "baseline", "ms"), [(8.0, 7.0, "dense_cudnn", 7.0), (8.0, 9.0, "dense", 8.0)])
def test_merging_is_held_to_the_faster(
    verified: Bundle, monkeypatch: pytest.MonkeyPatch, own: float, cudnn: float, baseline: str, ms: float
) -> None:
    timed_as(monkeypatch, dense=own, dense_cudnn=cudnn, merged=5.0, truncated=4.0)
    found = timed(verified)
    assert list(found) == ["dense", "dense_cudnn", "merged", "truncated"]
    merged, truncated = found["merged"], found["truncated"]
    assert {merged.baseline, truncated.baseline} == {baseline}
    assert merged.speedup == pytest.approx(ms / 5)
    assert truncated.speedup == pytest.approx(ms / 4)
    assert merged.merge_efficiency == pytest.approx((ms - 5) / (ms - 4))
    assert merged.merge_efficiency_by_round is not None
    assert merged.merge_efficiency_by_round.max == pytest.approx((ms - 5) / (ms - 4))
    for name in ("dense", "dense_cudnn"):
        assert (found[name].speedup, found[name].merge_efficiency) == (None, None)
        assert found[name].tokens == found["dense"].tokens
        assert found[name].gmacs_per_window_mean == found["dense"].gmacs_per_window_mean


@pytest.mark.usefixtures("two_attentions")
def test_merging_may_lose_to_the_faster(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be a gain over this project's own attention is told as the loss it is."""
    timed_as(monkeypatch, dense=8.0, dense_cudnn=4.0, merged=5.0, truncated=4.5)
    merged = timed(verified)["merged"]
    assert merged.speedup == pytest.approx(0.8)
    assert merged.merge_efficiency is None, "dropping saves nothing either"


@pytest.mark.usefixtures("two_attentions")
def test_both_are_printed_by_name(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, dense_cudnn=7.0, merged=5.0, truncated=4.0)
    rows = rows_of(verified, [*timed(verified).values()])
    table = speed_table(rows)
    place = table.header.index("variant")
    assert [row[place] for row in table.rows] == ["dense", "dense, cuDNN attention", "merged", "truncated"]
    notes = speed_notes(rows)
    assert "speed-up and merge efficiency are against the faster dense network: dense, cuDNN attention" in notes
    assert any(note.startswith("dense, cuDNN attention ran ") for note in notes)
    assert table.header[table.header.index("speed-up") + 1] == "against"
    against = [row[table.header.index("against")] for row in table.rows]
    assert against == ["-", "-", "dense, cuDNN attention", "dense, cuDNN attention"]
    assert any("faster dense network" in note for note in speed_notes(rows[2:])), "its own row need not be there"


def test_one_dense_network_needs_no_name(untried: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    rows = rows_of(untried, [*timed(untried).values()])
    assert "against" not in speed_table(rows).header
    assert not any("faster dense network" in note for note in speed_notes(rows))


@pytest.mark.usefixtures("two_attentions")
def test_its_time_stands_beside_no_accuracy(verified: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evaluated attends as the runner does."""
    timed_as(monkeypatch, dense=8.0, dense_cudnn=7.0, merged=5.0, truncated=4.0)
    found = timed(verified)
    own, other = (artifact_of(verified, found[name]) for name in ("dense", "dense_cudnn"))
    assert own.plan == other.plan
    assert (own.cudnn_attention, other.cudnn_attention) == (False, True)


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ({"dense": 8.0, "dense_cudnn": 7.0, "merged": 5.0}, "dense_cudnn"),
        ({"dense": 7.0, "dense_cudnn": 7.0}, "dense"),
        ({"dense": 7.0, "truncated": 4.0}, "dense"),
        ({"merged": 5.0}, None),
    ],
)
def test_the_faster_of_those_that_were_timed(ms: dict[str, float], expected: str | None) -> None:
    assert faster_dense(ms) == expected


@pytest.mark.usefixtures("two_attentions")
@pytest.mark.parametrize("against", ["dense", "dense_cudnn"])
def test_one_that_is_known_to_be_the_faster_is_timed_alone(
    verified: Bundle, monkeypatch: pytest.MonkeyPatch, against: Any
) -> None:
    timed_as(monkeypatch, dense=8.0, dense_cudnn=8.0, merged=5.0)
    request = Request("latency", count=1, effort=QUICK, variants=("dense", "merged"), against=against)
    found = timed(verified, request)
    assert list(found) == [against, "merged"]
    assert (found["merged"].baseline, found["merged"].speedup) == (against, pytest.approx(1.6))


@pytest.mark.usefixtures("two_attentions")
def test_a_search_times_both_beside_its_first_steady_plan(
    verified: Bundle, monkeypatch: pytest.MonkeyPatch, copied: Callable[..., Bundle], tmp_path: Path
) -> None:
    """The faster of both stands beside the plans to come, and may turn a gain into a loss."""
    bundle, met = copied(verified), list[set[str]]()

    def told(contestants: dict[str, Any], batches: list[Any], request: Request, progress: bool) -> Any:
        ms = {"dense": 8.0, "dense_cudnn": 4.0, "merged": 5.0}
        met.append(set(contestants))
        times = {name: np.full((2, len(batches)), ms[name]) for name in contestants}
        if len(met) == 1:
            times["merged"][1] *= 2  # not steady
        return times, {}

    monkeypatch.setattr(protocols, "times_of", told)
    speed_of = tuning._speeds(bundle, CPU, one_photo(tmp_path))
    plans = [replace(bundle.recipe.merging, clap_threshold=value) for value in (0.7, 0.8, 0.9)]
    unsteady, *steady = map(speed_of, plans)
    assert not unsteady.stable
    assert [(one.baseline, one.speedup) for one in steady] == [("dense_cudnn", pytest.approx(0.8))] * 2
    both = {"dense", "dense_cudnn", "merged"}
    assert met == [both, both, both - {"dense"}]


@pytest.mark.usefixtures("two_attentions")
def test_a_search_tells_no_gain_over_another_network(
    verified: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    copied: Callable[..., Bundle],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Where the faster dense network fails beside a later plan, a gain over the slower would not compare; it comes back
    with the plan after that."""
    timed_as(monkeypatch, dense=8.0, dense_cudnn=4.0, merged=5.0)
    attend, calls = protocols._attending_by_cudnn, list[int]()

    def fails_once(*given: Any) -> dict[Any, Bundle]:
        calls.append(1)
        return {} if len(calls) == 2 else attend(*given)

    monkeypatch.setattr(protocols, "_attending_by_cudnn", fails_once)
    bundle = copied(verified)
    speed_of = tuning._speeds(bundle, CPU, one_photo(tmp_path))
    with caplog.at_level(logging.WARNING, "algm_deploy"):
        first, without, after = (
            speed_of(replace(bundle.recipe.merging, clap_threshold=value)) for value in (0.7, 0.8, 0.9)
        )
    gain = ("dense_cudnn", pytest.approx(0.8))
    assert (first.baseline, first.speedup) == (after.baseline, after.speedup) == gain
    assert (without.speedup, without.merge_efficiency) == (None, None)
    assert without.throughput_img_per_s == first.throughput_img_per_s
    (line,) = [one for one in caplog.messages if "no speed-up" in one]
    assert line.endswith("against dense, cuDNN attention, which could not be timed here")


# --- when there is but one -------------------------------------------------------------------------------------------


def test_one_dense_network_where_cudnn_does_not_attend(untried: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    found = timed(untried)
    assert list(found) == ["dense", "merged", "truncated"]
    assert (found["merged"].baseline, found["merged"].speedup) == ("dense", pytest.approx(1.6))
    assert not (untried.path / "variants" / "dense_cudnn").exists()


@pytest.mark.usefixtures("two_attentions")
def test_dense_alone_is_held_to_nothing(untried: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, dense=8.0)
    assert list(timed(untried, Request("latency", count=1, effort=QUICK, variants=("dense",)))) == ["dense"]


def test_which_runtimes_have_it(tiny_bundle: Bundle, tiny_export: Callable[..., Bundle]) -> None:
    half = tiny_export({"precision": "fp16"})
    assert may_attend_by_cudnn(half, CUDA)
    assert not may_attend_by_cudnn(tiny_bundle, CUDA), "cuDNN attends in 16 bits alone"
    assert not any(may_attend_by_cudnn(half, name) for name in (CPU, "torch", "openvino", "tensorrt"))


@pytest.mark.usefixtures("two_attentions")
def test_what_fails_its_parity_chain_is_left_out(
    untried: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    chain = protocols.verify

    def one_link_fails(bundle: Bundle, *given: Any, **options: Any) -> Parity:
        record = chain(bundle, *given, **options)
        *links, last = record.links
        return structs.replace(record, links=(*links, structs.replace(last, passed=not bundle.cudnn_attends)))

    monkeypatch.setattr(protocols, "verify", one_link_fails)
    with caplog.at_level(logging.WARNING, "algm_deploy"):
        found = timed(untried)
    (line,) = [one for one in caplog.messages if "cuDNN" in one]
    assert line.startswith("dense with cuDNN's attention is left out: its parity chain failed: `algm-deploy verify ")
    assert list(found) == ["dense", "merged", "truncated"]
    assert found["merged"].speedup == pytest.approx(1.6)


@pytest.mark.usefixtures("two_attentions")
@pytest.mark.parametrize("step", ["open", "run"])
def test_a_session_that_fails_is_left_out(
    untried: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """Where it cannot be opened, and where it fails with a whole batch."""
    timed_as(monkeypatch, dense=8.0, merged=5.0, truncated=4.0)
    kind: Any = runner_type(CPU)
    name = "_open" if step == "open" else "_infer"
    works = getattr(kind, name)

    def fails(self: Runner, *given: Any) -> Any:
        if self.bundle.cudnn_attends and (step == "open" or len(given[0]) > 1):
            raise RuntimeUnavailableError("no plan for it")
        return works(self, *given)

    monkeypatch.setattr(kind, name, fails)
    with caplog.at_level(logging.WARNING, "algm_deploy"):
        found = timed(untried, Request("mixed", count=2, batch=2, effort=QUICK))
    assert [one for one in caplog.messages if "cuDNN" in one] == [
        "dense with cuDNN's attention is left out: no plan for it"
    ]
    assert list(found) == ["dense", "merged", "truncated"]


def test_records_of_earlier_releases_are_against_dense(tiny_bundle: Bundle, copied: Callable[..., Bundle]) -> None:
    bundle = copied(tiny_bundle)
    record = Speed(runtime=CPU, variant="merged", protocol="latency", batch=1, stable=True, speedup=1.5)
    assert record.baseline == "dense"
    bundle.record(record)
    assert record in Bundle.open(bundle.path).manifest.speeds
    assert "baseline" not in (bundle.path / "manifest.json").read_text(encoding="utf-8")


# --- what attends ----------------------------------------------------------------------------------------------------


@pytest.fixture
def half(tiny_export: Callable[..., Bundle], copied: Callable[..., Bundle]) -> Bundle:
    """In 16 bits, label maps out; the heads of its decoder are 64 wide."""
    return copied(tiny_export({"precision": "fp16", "output": "labels"}))


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are built, and runners made, as on a machine with a GPU and the library."""
    monkeypatch.setattr(onnxruntime, "usable_library", lambda _: Path("library.so"))
    monkeypatch.setattr(onnxruntime, "check_cuda", lambda: None)


def attends(bundle: Bundle) -> tuple[set[str], set[str]]:
    """What attends in the graph and in its segments: the library's operator, or ONNX Runtime's."""
    names = [name for name in bundle.files if name.startswith("model.onnxruntime-cuda")]
    known = {"packed_attention", "Attention", "MultiHeadAttention"}
    graphs = {name: {node.op_type for node in ir.load(bundle.file(name)).graph} & known for name in names}
    assert len(graphs) == 2, "a network without merges is one segment"
    whole = graphs.pop("model.onnxruntime-cuda.onnx")
    return whole, graphs.popitem()[1]


@pytest.mark.usefixtures("without_device")
def test_the_two_differ_in_their_attention_alone(half: Bundle) -> None:
    runner_type(CUDA).build(half)
    rewrites, options = [], []
    for name in ("dense", "dense_cudnn"):
        run: Any = variant_runner(variant_bundle(half, name, ()), CUDA, half)  # type: ignore[arg-type]
        record = run.bundle.found(OptimizedGraph, CUDA)
        rewrites.append(dict(record.rewrites))
        options.append(run._provider_options())
        own_too = {"packed_attention"} if name == "dense" else set()
        assert attends(run.bundle) == ({"Attention"} | own_too,) * 2
        assert "label_map" in run.custom_operators
    own, other = rewrites
    assert other.pop("attention") == own.pop("attention") + own.pop("packed_attention")
    assert own == other
    assert (options[0].pop("sdpa_kernel"), options[1].pop("sdpa_kernel")) == ("19", "27")
    assert options[0] == options[1]


@pytest.mark.usefixtures("without_device")
@pytest.mark.parametrize(("precision", "tf32"), [("fp16", "1"), ("fp32", "0")])
def test_convolutions_in_16_bits_may_use_tensor_cores(
    tiny_export: Callable[..., Bundle], copied: Callable[[Bundle], Bundle], precision: str, tf32: str
) -> None:
    bundle = copied(tiny_export({"precision": precision, "output": "labels"}))
    runner_type(CUDA).build(bundle)
    run: Any = runner(bundle, CUDA)
    assert run._provider_options()["use_tf32"] == tf32
    # What an earlier version built does not tell what it multiplies.
    record = bundle.found(OptimizedGraph, CUDA)
    assert record is not None
    bundle.record(OptimizedGraph(runtime=CUDA, rewrites=record.rewrites, segments=record.segments))
    assert run._provider_options()["use_tf32"] == "0"


@pytest.mark.usefixtures("without_device")
def test_it_runs_with_cudnn_or_not_at_all(half: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = variant_bundle(half, "dense_cudnn", ())
    unbuilt: Any = runner(dense, CUDA)
    with pytest.raises(
        BundleError, match=r"attention that can be left to cuDNN, model\.onnx has none: run `algm-deplo"
    ):
        unbuilt._check_attention()
    runner_type(CUDA).build(dense)
    run: Any = runner(Bundle.open(dense.path), CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    run._check_attention()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)
    with pytest.raises(RuntimeUnavailableError, match=r"expected cuDNN 9\.3 .* got cuDNN 90100 and 9\.0"):
        run._check_attention()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    with pytest.raises(RuntimeUnavailableError, match="got cuDNN 0 and"):
        sessions.check_cudnn_attention(torch.device("cuda", 0))


def kernels_of(run: Runner, image: torch.Tensor) -> tuple[set[str], np.ndarray]:
    """Names of the kernels of a run, after the one that plans and captures, and its label map."""
    run.infer_device({"image": image})
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        labels = run.infer_device({"image": image}, ["labels"])["labels"].cpu().numpy()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}, labels


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
def test_cudnn_attends_on_a_gpu_and_agrees(half: Bundle) -> None:
    if find_library(LIBRARY) is None:
        pytest.skip(f"needs the custom operators: algm-deploy build-native {LIBRARY}")
    runner_type(CUDA).build(half)
    image = torch.from_numpy(parity_windows(half.recipe, [], 2)).cuda()
    names, labels = [], []
    for name in ("dense", "dense_cudnn"):
        with variant_runner(variant_bundle(half, name, ()), CUDA, half) as run:  # type: ignore[arg-type]
            assert ("packed_attention" in run.custom_operators) == (name == "dense")
            found = kernels_of(run, image)
            assert run.execution["cuda_graphs"] == "1"
        names.append(found[0])
        labels.append(found[1])
    own, other = ({name for name in found if "sdpa" in name or "cudnn" in name.lower()} for found in names)
    assert other and not own, "cuDNN attends in one of them alone"
    assert (labels[0] == labels[1]).mean() >= 0.99
