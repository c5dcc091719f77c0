"""One engine for each part between merges: built and opened, with ONNX's interpreter in place of TensorRT.

What runs is real but for the engines: the graph is cut and kept in the bundle, the merges are the kernel library's, on
the CPU, and the runner compares the whole with PyTorch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from host_device import HostDevice
from tensorrt_in_numpy import evaluate

from algm_deploy import native_libraries
from algm_deploy.bundle.files import sha256_of
from algm_deploy.bundle.records import Engine, EngineStretches, ParsedNetwork
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BuildError, BundleError
from algm_deploy.runners.contract import runner
from algm_deploy.runners.registry import row_of
from algm_deploy.runners.tensorrt import build as build_module
from algm_deploy.runners.tensorrt.runner import TensorRTRunner

ROW = row_of("tensorrt")
PARTS = [str(ROW.segments).replace("*", str(index)) for index in range(3)]
NAMES = {np.dtype("uint8"): "UINT8", np.dtype("int64"): "INT64", np.dtype("float32"): "FLOAT"}
WRONG, BREAKS = b"wrong ", b"breaks "  # in front of an engine that computes something else, or that fails as it runs


class OnnxEngine:
    """An engine of host memory: a graph in ONNX's interpreter."""

    def __init__(self, model: onnx.ModelProto, content: bytes) -> None:
        self.model, self.wrong, self.breaks = model, content.startswith(WRONG), content.startswith(BREAKS)
        self.inputs = [value.name for value in model.graph.input]
        self.tensors = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return [*self.tensors][index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def dtype(self, name: str) -> np.dtype[Any]:
        return onnx.helper.tensor_dtype_to_np_dtype(self.tensors[name].elem_type)

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=NAMES[self.dtype(name)])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d.dim_value or -1 for d in self.tensors[name].shape.dim)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(batch, *self.get_tensor_shape(name)[1:]) for batch in (1, 2, 2)]

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    def __init__(self, engine: OnnxEngine) -> None:
        self.engine, self.shapes, self.addresses = engine, dict[str, tuple[int, ...]](), dict[str, int]()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sides: dict[str, int] = {}
        for given, shape in self.shapes.items():
            for dim, side in zip(self.engine.tensors[given].shape.dim, shape, strict=True):
                assert dim.dim_value in (0, side), f"{given} {shape}"
                assert not dim.dim_param or sides.setdefault(dim.dim_param, side) == side, f"{given} {shape}"
        return tuple(dim.dim_value or sides[dim.dim_param] for dim in self.engine.tensors[name].shape.dim)

    def _view(self, name: str, shape: tuple[int, ...]) -> Any:
        dtype = self.engine.dtype(name)
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.breaks:
            return False
        feeds = {name: self._view(name, self.shapes[name]) for name in self.engine.inputs}
        found = evaluate(self.engine.model, feeds)
        for value, made in zip(self.engine.model.graph.output, found, strict=True):
            self._view(value.name, self.get_tensor_shape(value.name))[...] = made[::-1] if self.engine.wrong else made
        return True


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bindings whose engines are the paths of graphs, and a builder that writes such."""
    native_libraries.say_once.cache_clear()
    module: Any = ModuleType("stand_in")

    class Logger:
        def __init__(self) -> None:
            pass

    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, content: bytes) -> OnnxEngine | None:
            path = Path(content.removeprefix(WRONG).removeprefix(BREAKS).decode())
            return OnnxEngine(onnx.load(path), content) if path.is_file() else None

    module.__version__, module.ILogger, module.Runtime = "11.4.0", Logger, Runtime
    module.TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(build_module, "require_tools", lambda runtime: None)
    monkeypatch.setattr("algm_deploy.runners.tensorrt.runner.marker", lambda *facts: tmp_path / "never" / "kept")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A builder from here on, whose single engines `single` makes; what it was told of rows, by graph."""

    def use(single: Callable[[Path], bytes]) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def engine_apart(model: Path, runtime: str, precision: Any, options: Any, rows: Any, _: bool) -> Any:
            asked[model.name] = rows
            content = single(model) if not rows else str(model).encode()
            facts = Engine(
                runtime=runtime,
                version="11.4.0",
                precision=precision,
                batches=options.batches,
                compute_capabilities=("8.9",),
                version_compatible=False,
                hardware_compatible=False,
                onnx_hash=sha256_of(model),
                plugin_sources=None,
                engine_bytes=len(content),
                parsed_network=ParsedNetwork(plugins=()),
                build_seconds=1.0,
            )
            return content, facts

        monkeypatch.setattr(build_module, "engine_apart", engine_apart)
        return asked

    return use


@pytest.fixture
def built(labels_bundle: Bundle, copied: Any, engines: Any) -> Callable[..., Any]:
    """Builds both forms; `single` makes the single engine of its graph."""

    def make(single: Callable[[Path], bytes]) -> tuple[Bundle, list[str], dict[str, Any]]:
        bundle, asked = copied(labels_bundle), engines(single)
        lines = TensorRTRunner.build(bundle, in_parts=True, batches=(1, 2, 2))
        return Bundle.open(bundle.path), lines, asked

    return make


def open_runner(bundle: Bundle) -> TensorRTRunner:
    return TensorRTRunner(bundle, cuda=HostDevice())


def refuse(_: Path) -> bytes:
    raise BuildError("the builder asserted")


def foreign(_: Path) -> bytes:
    return b"foreign"


def wrong(model: Path) -> bytes:
    return WRONG + str(model).encode()


def breaks(model: Path) -> bytes:
    return BREAKS + str(model).encode()


def faultless(model: Path) -> bytes:
    return str(model).encode()


def test_both_forms_are_built(built: Any) -> None:
    bundle, lines, asked = built(faultless)
    bundle.verify()
    record = bundle.found(EngineStretches, "tensorrt")
    assert record is not None
    assert record.single_refused is None
    assert [merge.kind for merge in record.merges] == ["clap", "gbm"]
    usual = bundle.found(Engine, "tensorrt").usual_rows
    clap, gbm = usual["clap_1"], usual["gbm_3"]
    assert [engine.usual_rows for engine in record.engines] == [{}, {"clap_1": clap}, {"gbm_3": gbm}]
    rows = {"tokens_clap_1": (2, clap, 65), "tokens_gbm_3": (2, gbm, 65)}
    parts = {f"model.tensorrt.stretch-{index}.onnx": rows for index in range(3)}
    assert asked == {"model.tensorrt.onnx": {}} | parts
    assert ROW.executed(bundle.files) == (ROW.own, *PARTS)
    for name, part in zip(PARTS, parts, strict=True):
        assert [*bundle.files[name].made_from] == [part]
        assert bundle.files[part].uses == ("model.onnx.data",), "weights are not stored twice"
    assert lines[-1] == (
        "where the single one fails its first comparison on a machine, 3 engines run with clap, gbm between them"
    )


@pytest.mark.parametrize(
    ("single", "said"),
    [
        (foreign, "TensorRT cannot load it"),
        (wrong, "this machine differs first in the token counts after"),
        (breaks, "TensorRT failed to execute the engine"),
    ],
)
def test_parts_run_where_the_single_engine_fails(
    built: Any, caplog: pytest.LogCaptureFixture, single: Any, said: str
) -> None:
    bundle, _, _ = built(single)
    device = HostDevice()
    with TensorRTRunner(bundle, cuda=device) as run:
        assert run.executable == PARTS[0]
        assert run.execution == {"engines": "3, with a merge between every two"}
        assert said in str(run.refused)
        assert len(device.streams) == 1, "the refused engine's stream was given back"
    (line,) = caplog.messages
    assert said in line
    assert single is breaks or "--in-parts`" in line, "what rebuilds it rebuilds both forms"
    assert line.endswith("meanwhile the engines of its parts run, with the merges between them")


def test_parts_compute_what_pytorch_does(built: Any, blob_images: Callable[[int], np.ndarray]) -> None:
    bundle, lines, _ = built(refuse)
    assert lines[0] == "one engine for the whole network was refused: the builder asserted"
    assert bundle.found(EngineStretches, "tensorrt").single_refused == "the builder asserted"
    assert ROW.executable(bundle.files) == PARTS[0]
    assert ROW.executed(bundle.files) == tuple(PARTS)
    image = blob_images(2)
    names = [tensor.name for tensor in bundle.signature.outputs]
    with open_runner(bundle) as run, runner(bundle, "torch", "cpu") as torch_run:
        for changes in ({}, {"image": image[1:], "clap_threshold": 0.5}, {"clap_threshold": 2.0}):
            feeds = {"image": image, **changes}
            found, expected = run.infer(feeds, names), torch_run.infer(feeds, names)
            assert [*found] == names
            for name in names[1:]:
                np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
            assert (found["labels"] == expected["labels"]).mean() > 0.999
        counts = expected["token_counts"]
    assert (counts[:, 0] == 64).all()


def test_a_working_single_engine_goes_first(built: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle, _, _ = built(faultless)
    with open_runner(bundle) as run:
        assert run.executable == ROW.own
        assert run.execution == {}
        assert run.refused is None
    assert caplog.messages == []


def test_parts_run_where_they_are_asked_for(built: Any, labels_bundle: Bundle) -> None:
    bundle, _, _ = built(faultless)
    with TensorRTRunner(bundle, parts=True, cuda=HostDevice()) as run:
        assert run.executable == PARTS[0]
        assert run.refused is None
    with pytest.raises(BundleError, match=r"no engine of the parts between merges .* --in-parts`"):
        TensorRTRunner(labels_bundle, parts=True, cuda=HostDevice()).__enter__()


def test_parts_that_fail_as_well_are_refused(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _, _ = built(foreign)
    with bundle.add(PARTS[1], made_from={}) as path:
        path.write_bytes(b"foreign too")
    with pytest.raises(BundleError, match=r"stretch-1\.engine: TensorRT cannot load it"):
        open_runner(bundle).__enter__()


def test_a_single_engine_built_later_goes_first(built: Any, engines: Any) -> None:
    bundle, _, _ = built(refuse)
    with pytest.raises(BuildError, match="the builder asserted"):
        TensorRTRunner.build(bundle, batches=(1, 2, 2))
    engines(faultless)
    TensorRTRunner.build(bundle, batches=(1, 2, 2))
    with open_runner(Bundle.open(bundle.path)) as run:
        assert run.executable == ROW.own


def test_budgets_have_nothing_to_cut_at(tiny_export: Callable[..., Bundle], copied: Any) -> None:
    settings = {"merging.clap": "budget", "merging.clap_budget": 5, "merging.gbm": "budget", "merging.gbm_budget": 0.3}
    bundle = copied(tiny_export(settings | {"output": "labels"}))
    with pytest.raises(BuildError, match="known beforehand and need no cut: leave --in-parts out"):
        TensorRTRunner.build(bundle, in_parts=True)
