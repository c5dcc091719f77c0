"""The TensorRT runners against a stand-in for the bindings and for the device: no TensorRT and no GPU is used here.

The stand-in engine reads and writes host memory through the addresses it is given, as TensorRT does on a device.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_device import HostDevice
from msgspec import structs

from algm_deploy.bundle.files import WEIGHTS, sha256_of
from algm_deploy.bundle.records import Engine, ParsedNetwork
from algm_deploy.bundle.signature import signature_of
from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.errors import BundleError, NotExecutedError, RuntimeUnavailableError
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Protocol, Recipe
from algm_deploy.runners import graphs as graphs_module
from algm_deploy.runners.graphs import take_stream
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt import runner as runner_module
from algm_deploy.runners.tensorrt.digest import Digest, digest_file, keep_digest
from algm_deploy.runners.tensorrt.library import plugin_sources
from algm_deploy.runners.tensorrt.runner import Cuda, TensorRTRtxRunner, TensorRTRunner, why_stale

RECIPE = Recipe(
    "tiny",
    Network("segmenter", 64, 2, 1, 5, (32, 48), decoder_depth=1),
    MergePlan(gbm_layers=(2,), clap_threshold=0.75),
    Protocol("ade20k", 32, 32, 32),
    output="labels",
    max_batch=8,
)
FACTS = Engine(
    runtime="tensorrt",
    version="11.4.0",
    precision="fp16",
    batches=(1, 2, 4),
    compute_capabilities=("8.9",),
    version_compatible=False,
    hardware_compatible=False,
    onnx_hash="0" * 64,
    plugin_sources=None,
    engine_bytes=6,
    parsed_network=ParsedNetwork(plugins=()),
    build_seconds=1.0,
)
ENGINE, OWN = b"engine", row_of("tensorrt").own
DTYPES = {"uint8": "UINT8", "float32": "FLOAT", "int64": "INT64"}


class StandInEngine:
    """Labels are the first channel of the image; counts and maps hold the CLAP threshold in hundredths."""

    def __init__(self) -> None:
        signature = signature_of(RECIPE)
        self.inputs = {t.name: t for t in signature.inputs}
        self.tensors = {t.name: t for t in (*signature.inputs, *signature.outputs)}
        self.names = list(self.tensors)
        self.num_io_tensors = len(self.names)
        self.contexts: list[StandInContext] = []

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=DTYPES[self.tensors[name].dtype])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert profile == 0
        return [(batch, *self.tensors[name].shape[1:]) for batch in FACTS.batches]

    def create_execution_context(self) -> StandInContext:
        self.contexts.append(StandInContext(self))
        return self.contexts[-1]


def nothing(view: Callable[[str], Any]) -> None:
    """What is wrong with a faultless engine."""


class StandInContext:
    """An execution context that works on host memory."""

    fault = staticmethod(nothing)

    def __init__(self, engine: StandInEngine) -> None:
        self.engine, self.shapes, self.addresses, self.runs, self.fails = engine, {}, {}, 0, False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shapes["image"][0] if d == -1 else d for d in self.engine.tensors[name].shape)

    def view(self, name: str) -> Any:
        shape, dtype = self.get_tensor_shape(name), np.dtype(self.engine.tensors[name].dtype)
        size = int(np.prod(self.shapes.get(name, shape))) * dtype.itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        if self.fails:
            LOGGER[0].log(SimpleNamespace(name="ERROR"), "out of memory")
            return False
        self.runs += 1
        assert set(self.addresses) == set(self.engine.names)
        for name in self.engine.names:
            if name not in self.engine.inputs:
                self.view(name)[...] = round(float(self.view("clap_threshold")) * 100)
        self.view("labels")[...] = self.view("image")[:, 0]
        self.fault(self.view)
        return True


LOGGER: list[Any] = []


class StandInLogger:
    """Stands in for ILogger, whose constructor subclasses call."""

    def __init__(self) -> None:
        pass


class StandInRuntime:
    """Deserialises the one content that is an engine."""

    def __init__(self, logger: Any) -> None:
        LOGGER[:] = [logger]

    def deserialize_cuda_engine(self, content: bytes) -> StandInEngine | None:
        if content != ENGINE:
            LOGGER[0].log(SimpleNamespace(name="ERROR"), "magic tag does not match")
            return None
        ENGINES.append(StandInEngine())
        return ENGINES[-1]


ENGINES: list[StandInEngine] = []


@pytest.fixture(autouse=True)
def bindings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in in place of both modules, on a machine that has seen no engine yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module: Any = ModuleType("stand_in")
    module.__version__ = FACTS.version
    module.ILogger, module.Runtime = StandInLogger, StandInRuntime
    module.TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, module)
    ENGINES.clear()


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., Bundle]:
    def make(content: bytes = ENGINE, **changes: Any) -> Bundle:
        engine = structs.replace(FACTS, **changes)
        with BundleWriter(tmp_path / "bundle", RECIPE) as writer:
            for name, held in ((OWN, content), (WEIGHTS, b"weights")):
                writer.path(name).write_bytes(held)
                writer.list_file(name)
            writer.describe(signature=signature_of(RECIPE))
        made = Bundle.open(tmp_path / "bundle")
        made.record(engine)
        merged = {name: np.full((2, 6), 75) for name in ("token_map_clap_1", "token_map_gbm_2")}
        expected = {"labels": image(2)[:, 0], "token_counts": np.full((2, 2), 75), **merged}
        keep_digest(made, "tensorrt", Digest(image(2), expected))
        return made

    return make


def open_runner(bundle: Bundle, contexts: int = 1) -> TensorRTRunner:
    return TensorRTRunner(bundle, contexts=contexts, cuda=HostDevice())


def image(batch: int) -> Any:
    return np.random.default_rng(batch).integers(0, 256, (batch, 3, 32, 48), dtype=np.uint8)


def test_infer(bundle: Callable[..., Bundle]) -> None:
    with open_runner(bundle()) as runner:
        for batch in (1, 4, 2):
            pixels = image(batch)
            outputs = runner.infer({"image": pixels})
            assert list(outputs) == ["labels", "token_counts"]
            np.testing.assert_array_equal(outputs["labels"], pixels[:, 0])
            assert outputs["labels"].dtype == np.uint8
            np.testing.assert_array_equal(outputs["token_counts"], np.full((batch, 2), 75))  # the plan's threshold


def test_thresholds_and_maps(bundle: Callable[..., Bundle]) -> None:
    with open_runner(bundle()) as runner:
        outputs = runner.infer({"image": image(1), "clap_threshold": np.float32(0.5)}, ["token_map_gbm_2"])
    np.testing.assert_array_equal(outputs["token_map_gbm_2"], np.full((1, 6), 50))


def test_results_belong_to_the_caller(bundle: Callable[..., Bundle]) -> None:
    with open_runner(bundle()) as runner:
        first = runner.infer({"image": image(1)})["labels"]
        kept = first.copy()
        runner.infer({"image": image(1) + 1})
        np.testing.assert_array_equal(first, kept)


def test_tensors_are_used_where_they_lie(bundle: Callable[..., Bundle]) -> None:
    pixels = torch.from_numpy(image(2))
    names = ["token_map_gbm_2", "labels", "token_counts", "token_map_clap_1"]
    with open_runner(bundle()) as runner:
        outputs = runner.infer_device({"image": pixels, "clap_threshold": 0.25}, names)
        assert ENGINES[0].contexts[0].addresses["image"] == pixels.data_ptr()
        shared: Any = image(2)  # a NumPy array speaks DLPack too
        found = runner.infer_device({"image": shared, "clap_threshold": torch.tensor(0.25)}, ["labels"])
    assert list(outputs) == names
    assert torch.equal(outputs["labels"], pixels[:, 0])
    assert outputs["token_counts"].tolist() == [[25, 25]] * 2
    assert list(found) == ["labels"]
    assert torch.equal(found["labels"], outputs["labels"])


def test_thresholds_are_kept_in_device_memory(bundle: Callable[..., Bundle]) -> None:
    pixels = torch.from_numpy(image(1))
    with open_runner(bundle()) as runner:
        addresses = []
        for tau in (0.25, 0.5, 0.25):
            counts = runner.infer_device({"image": pixels, "clap_threshold": tau}, ["token_counts"])["token_counts"]
            assert counts.tolist() == [[100 * tau, 100 * tau]]
            addresses.append(ENGINES[0].contexts[0].addresses["clap_threshold"])
    assert addresses[0] == addresses[2] != addresses[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image": torch.zeros(5, 3, 32, 48, dtype=torch.uint8)},
            r"\(1, 3, 32, 48\) to \(4, 3, 32, 48\), got \(5, 3, 32, 48\)",
        ),
        ({"image": torch.zeros(1, 3, 32, 64, dtype=torch.uint8)}, r"\(batch, 3, 32, 48\), got uint8 \(1, 3, 32, 64\)"),
        ({"image": torch.zeros(1, 3, 32, 48)}, r"expected image uint8 .*, got float32 \(1, 3, 32, 48\)"),
        (
            {"image": torch.zeros(1, 3, 32, 48, dtype=torch.uint8, device="meta")},
            "expected an image in the memory of cpu, got one in that of meta",
        ),
        ({"clap_threshold": torch.zeros(1)}, "clap_threshold is one number"),
        ({"image": None}, "the input 'image' is missing"),
    ],
)
def test_refused_tensors(bundle: Callable[..., Bundle], change: dict[str, Any], message: str) -> None:
    feeds = {"image": torch.zeros(1, 3, 32, 48, dtype=torch.uint8), "clap_threshold": torch.tensor(1.0)}
    feeds = {k: v for k, v in (feeds | {"gbm_threshold": torch.tensor(1.0)} | change).items() if v is not None}
    with open_runner(bundle()) as runner, pytest.raises(BundleError, match=message):
        runner.infer_device(feeds)


def test_an_image_of_any_layout(bundle: Callable[..., Bundle]) -> None:
    pixels = torch.from_numpy(image(2))
    strided = pixels.mT.contiguous().mT
    assert not strided.is_contiguous()
    with open_runner(bundle()) as runner:
        assert torch.equal(runner.infer_device({"image": strided})["labels"], pixels[:, 0])


def test_a_batch_outside_the_profile_is_refused_with_both_shapes(bundle: Callable[..., Bundle]) -> None:
    with (
        open_runner(bundle()) as runner,
        pytest.raises(BundleError, match=r"to \(4, 3, 32, 48\), got \(8, 3, 32, 48\)"),
    ):
        runner.infer({"image": image(8)})  # within the bundle's largest batch, not within the engine's


def test_contexts_take_turns(bundle: Callable[..., Bundle]) -> None:
    with open_runner(bundle(), contexts=2) as runner:
        for _ in range(3):
            runner.infer({"image": image(1)})
        # The first of four compared the engine with PyTorch.
        assert [context.runs for context in ENGINES[0].contexts] == [2, 2]


def test_a_context_is_returned_after_a_failure(bundle: Callable[..., Bundle]) -> None:
    with open_runner(bundle()) as runner:
        ENGINES[0].contexts[0].fails = True
        with pytest.raises(RuntimeUnavailableError, match=r"execute the engine .out of memory.: send smaller batches"):
            runner.infer({"image": image(1)})
        ENGINES[0].contexts[0].fails = False
        assert runner.infer({"image": image(1)})


def test_a_device_without_memory_for_a_context(bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT then hands out nothing in its place."""
    monkeypatch.setattr(StandInEngine, "create_execution_context", lambda _: None)
    with pytest.raises(RuntimeUnavailableError, match="expected enough device memory for an execution context"):
        open_runner(bundle()).__enter__()
    assert LOGGER[0].listeners == [], "what could not be opened still listens"


def test_open_again_and_closed(bundle: Callable[..., Bundle]) -> None:
    runner = open_runner(bundle())
    for _ in range(2):
        with runner:
            runner.infer({"image": image(1)})
    assert len(ENGINES) == 2
    assert LOGGER[0].listeners == []
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        runner.infer({"image": image(1)})
    with pytest.raises(RuntimeUnavailableError, match="closed"):
        runner.infer_device({})


# --- streams ---------------------------------------------------------------------------------------------------------


def test_streams_go_back_when_a_runner_is_closed(bundle: Callable[..., Bundle]) -> None:
    device = HostDevice()
    runner = TensorRTRunner(bundle(), contexts=3, cuda=device)
    for opened in (3, 6):
        with runner:
            assert len(device.streams) == 3
            runner.infer({"image": image(1)})
        assert (device.streams, device.made) == ([], opened)


def test_streams_go_back_where_no_runner_could_be_opened(
    bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was memory for the first of two contexts."""
    device, create = HostDevice(), StandInEngine.create_execution_context
    monkeypatch.setattr(StandInEngine, "create_execution_context", lambda self: None if self.contexts else create(self))
    with pytest.raises(RuntimeUnavailableError, match="expected enough device memory for an execution context"):
        TensorRTRunner(bundle(), contexts=2, cuda=device).__enter__()
    gc.collect()  # the error's traceback held them
    assert (device.streams, device.made) == ([], 1)


class LentByPyTorch(HostDevice):
    """Takes streams as on a GPU, whose 32 PyTorch hands out in turn."""

    def new_stream(self) -> Any:
        self.streams.append(take_stream(torch.device("cpu", 5)))
        return self.streams[-1]

    def end_stream(self, stream: Any) -> None:
        super().end_stream(stream)
        Cuda.end_stream(self, stream)


def test_no_stream_has_two_users_however_often_runners_open(
    bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.cycle(range(32))
    monkeypatch.setattr(torch.cuda, "Stream", lambda d: SimpleNamespace(device=d, cuda_stream=next(numbers)))
    monkeypatch.setattr(graphs_module, "wait_for", lambda _: None)
    for name, kind in (("_FREE", list), ("_TAKEN", set)):
        monkeypatch.setattr(graphs_module, name, defaultdict(kind))
    made, device = bundle(), LentByPyTorch()
    with TensorRTRunner(made, contexts=2, cuda=device):
        for _ in range(40):
            with TensorRTRunner(made, contexts=2, cuda=device):
                assert len({stream.cuda_stream for stream in device.streams}) == len(device.streams) == 4
    assert next(numbers) == 4, "those that came back were taken again"


# --- engines that do not fit -----------------------------------------------------------------------------------------

REBUILD = r"algm-deploy build .*bundle --runtime tensorrt`"


def refused(bundle: Bundle) -> str:
    with pytest.raises(BundleError, match=REBUILD) as error, open_runner(bundle):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "10.16.1"}, "built with tensorrt 10.16.1, this is 11.4.0"),
        ({"compute_capabilities": ("12.0",)}, "built for compute capability 12.0, this GPU has 8.9"),
    ],
)
def test_a_stale_engine(bundle: Callable[..., Bundle], change: dict[str, Any], reason: str) -> None:
    assert reason in refused(bundle(**change))


def test_a_foreign_engine(bundle: Callable[..., Bundle]) -> None:
    assert "magic tag does not match" in refused(bundle(content=b"foreign"))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Builds a plugin library of some sources, which opening finds from here on; `build` changes nothing but bytes."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")

    def built(sources: str, build: str) -> Path:
        code = f'extern "C" const char *algm_plugin_sources() {{ return "{sources}"; }} char build[] = "{build}";'
        path = tmp_path / f"{sources}-{build}.so"
        command = [str(compiler), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=code, text=True, check=True)
        monkeypatch.setattr(runner_module, "load_plugins", lambda *_: path)
        return path

    return built


def test_another_build_of_the_same_plugins(bundle: Callable[..., Bundle], plugins: Callable[[str, str], Path]) -> None:
    made = bundle(plugin_sources=plugin_sources(plugins("2-cafe", "first")))
    hashes = {sha256_of(plugins("2-cafe", build)) for build in ("first", "second")}
    assert len(hashes) == 2
    with open_runner(made) as runner:
        assert runner.infer({"image": image(1)})


def test_plugins_of_other_sources(bundle: Callable[..., Bundle], plugins: Callable[[str, str], Path]) -> None:
    plugins("2-beef", "first")
    assert "with plugins made of 2-cafe, those here are made of 2-beef" in refused(bundle(plugin_sources="2-cafe"))


# --- what is compared at the first open ------------------------------------------------------------------------------


def second(name: str, value: Any) -> Callable[[Callable[[str], Any]], None]:
    """A fault that shows in the second picture alone: `name` has another value there."""

    def fault(view: Callable[[str], Any]) -> None:
        view(name)[1] = value

    return fault


@pytest.mark.parametrize(
    ("fault", "link"),
    [
        (second("token_counts", [75, 6]), "the token counts after gbm_2, of picture 2 6 where PyTorch leaves 75"),
        (second("token_map_clap_1", range(6)), "the token map of clap_1, of picture 2 17% equal where 90% were"),
        (second("token_map_gbm_2", range(6)), "the token map of gbm_2, of picture 2 17% equal where 90% were"),
        (second("labels", image(2)[0, 0]), "the labels, of picture 2 0% equal where 50% were expected"),
    ],
    ids=["counts", "first map", "second map", "labels"],
)
def test_an_engine_that_computes_something_else(
    bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, fault: Any, link: str
) -> None:
    made = bundle()
    monkeypatch.setattr(StandInContext, "fault", staticmethod(fault))
    for _ in range(2):  # a refusal is not remembered for agreement
        assert f"this machine differs first in {link}" in refused(made)
    assert LOGGER[0].listeners == []
    monkeypatch.setattr(StandInContext, "fault", staticmethod(nothing))
    with open_runner(made) as runner:
        assert runner.infer({"image": image(1)})


def test_an_engine_is_compared_once_a_machine(
    bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = bundle()

    def runs() -> int:
        with open_runner(made):
            return ENGINES[-1].contexts[0].runs

    assert [runs(), runs()] == [1, 0]
    here = runner_module.environment()
    monkeypatch.setattr(runner_module, "environment", lambda: replace(here, driver="999.1"))
    assert [runs(), runs()] == [1, 0], "another driver compiles other kernels"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [runs(), runs()] == [1, 1], "nothing can be kept there"


def test_an_engine_without_what_pytorch_computed(bundle: Callable[..., Bundle]) -> None:
    made = bundle()
    (made.path / digest_file("tensorrt")).unlink()
    assert "engines/tensorrt.digest.npz" in refused(made)


def test_an_output_of_unknown_shape(bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle()
    monkeypatch.setattr(StandInContext, "get_tensor_shape", lambda self, name: (-1, 32, 48))
    assert "expected the shape of labels to follow from the inputs', TensorRT tells (-1, 32, 48)" in refused(made)


def test_a_changed_engine_file(bundle: Callable[..., Bundle]) -> None:
    made = bundle()
    (made.path / OWN).write_bytes(ENGINE[::-1])
    assert "it was edited or swapped" in refused(made)


def test_no_engine(bundle: Callable[..., Bundle]) -> None:
    made = bundle()
    with pytest.raises(BundleError, match=r"holds no engine for tensorrt-rtx: build one with `algm-deploy build"):
        TensorRTRtxRunner(made, cuda=HostDevice()).__enter__()


def test_without_a_gpu_nothing_is_executed(bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotExecutedError, match="built and not executed: torch finds no CUDA device") as error:
        TensorRTRunner(bundle()).__enter__()
    assert error.value.exit_code == 3


def test_tensorrt_rtx_does_not_run_on_data_centre_gpus(bundle: Callable[..., Bundle]) -> None:
    device = HostDevice()
    device.capability = 9, 0
    with pytest.raises(NotExecutedError, match=r"this one has compute capability 9\.0; use --runtime tensorrt"):
        TensorRTRtxRunner(bundle(runtime="tensorrt-rtx"), cuda=device).__enter__()


def test_engines_that_allow_more() -> None:
    def stale(version: str, capability: tuple[int, int], **changes: Any) -> str | None:
        return why_stale(structs.replace(FACTS, **changes), "tensorrt", version, None, capability)

    assert stale("11.4.0", (8, 9)) is None
    assert stale("11.5.0", (8, 9), version_compatible=True) is None
    assert stale("11.4.0", (12, 0), hardware_compatible=True) is None
    assert stale("11.4.0", (7, 5), hardware_compatible=True) is not None
    assert stale("11.5.0", (12, 0), hardware_compatible=True) is not None
    assert (
        why_stale(FACTS, "tensorrt-rtx", "11.4.0", None, (8, 9))
        == "the engine was built for tensorrt, not for tensorrt-rtx"
    )
