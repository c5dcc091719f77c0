"""Fixtures shared by all tests."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import hashlib
import os
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# Several processes run tests side by side; most networks here are too small for more than a thread of each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("ALGM_COMPILE", "0")  # no test compiles by the way, on a machine with a GPU

# How long an example takes says more about what else runs on the machine.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import ModuleType

    import numpy as np
    import onnx_ir as ir

    from algm_deploy.bundle.store import Bundle
    from algm_deploy.models.deployed import Deployed
    from algm_deploy.models.segmenter import Segmenter
    from algm_deploy.recipe.plan import MergePlan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root_dir() -> Path:
    """The source checkout these tests belong to."""
    return ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of `benchmarks/`, by its path there; it and what it imports there are forgotten afterwards."""
    folder, before = ROOT / "benchmarks", set(sys.modules)

    def imported(path: str) -> ModuleType:
        file = folder / path
        monkeypatch.syspath_prepend(file.parent)
        return import_module(file.stem)

    yield imported
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def vectors_dir() -> Path:
    """Golden outputs of the published ALGM modules."""
    return ROOT / "tests" / "data" / "vectors"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Trained checkpoints and photos that may not ship with the project (`models/`, `data/`), beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the trained checkpoints and photos that do not ship with the project, looked in {folder}")
    return folder


# What the published code would have written beside the golden network. CLAP merges half of a drawn scene's windows.
_TINY_VARIANT = """\
dataset_kwargs:
  dataset: camvid
  image_size: 128
  crop_size: 128
  patch_type: algm
  selected_layers: [1, 3]
  merging_window_size: [2, 2]
  threshold: 0.9
  normalization: vit
inference_kwargs:
  im_size: 128
  window_size: 128
  window_stride: 96
net_kwargs:
  image_size: !!python/tuple
  - 128
  - 128
  patch_size: 16
  d_model: 64
  n_heads: 2
  n_layers: 4
  normalization: vit
  distilled: false
  n_cls: 11
  decoder:
    name: mask_transformer
    n_layers: 2
    n_cls: 11
"""


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Folders that all processes of a run share: `made_once(name, make)` lets the first that asks fill the folder."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        target = root / "made-once" / name
        target.parent.mkdir(exist_ok=True)
        with target.with_name(f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                make(target)
        return target

    return folder


@pytest.fixture(scope="session")
def translated(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[..., ir.Model]:
    """`base_onnx` with a memory that all processes of a run share; a caller may change what it gets.

    A translation takes five to ten seconds. The key is all that one reads: weights, what the modules are and what they
    were given, plan and dtype. The values of thresholds are inputs of the graph, so networks that differ in them share
    one. Tests of what cannot be translated call `base_onnx` itself.
    """
    import onnx_ir as ir
    from torch.onnx._internal.exporter._registration import onnxscript_apis

    from algm_deploy.lowering.export import base_onnx
    from algm_deploy.recipe.plan import MergePlan

    torchlib = cache(onnxscript_apis.get_torchlib_ops)

    def translate(target: Path, *network: Any) -> None:
        """The exporter parses the sources of all operators that it knows for each network; here once a process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(onnxscript_apis, "get_torchlib_ops", torchlib)
            ir.save(base_onnx(*network), target)

    def read(value: object) -> object:
        return replace(value, clap_threshold=0.0, gbm_threshold=0.0) if isinstance(value, MergePlan) else value

    def remembered(network: Deployed, plan: MergePlan, image_dtype: str = "uint8") -> ir.Model:
        digest = hashlib.sha256(repr((read(plan), image_dtype)).encode())
        for name, module in network.named_modules():
            given = {key: read(value) for key, value in vars(module).items() if not key.startswith("_")}
            digest.update(repr((name, type(module), given)).encode())
        for name, tensor in network.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.float().numpy().tobytes())
        key = digest.hexdigest()
        return ir.load(made_once(f"{key[:32]}.onnx", lambda target: translate(target, network, plan, image_dtype)))

    return remembered


@pytest.fixture(scope="session", autouse=True)
def translated_once(translated: Callable[..., ir.Model]) -> Iterator[None]:
    """Bundles of the same network are written from one translation; processes that tests start translate themselves."""
    from algm_deploy.lowering import tensorrt, writing

    with pytest.MonkeyPatch.context() as patch:
        for user in (writing, tensorrt):
            patch.setattr(user, "base_onnx", translated)
        yield


@pytest.fixture
def untranslated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles are written with an empty graph, for tests of networks that the torch runtime alone runs."""
    import onnx_ir as ir

    def nothing(*_: object) -> ir.Model:
        return ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10)

    monkeypatch.setattr("algm_deploy.lowering.writing.base_onnx", nothing)


@pytest.fixture(scope="session")
def tiny_checkpoint(vectors_dir: Path, made_once: Callable[..., Path]) -> Path:
    """Folder of an official checkpoint: the golden 4-block, 64-wide network for 128x128 pixels, and variant.yml."""

    def make(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(vectors_dir / "mask_transformer_4x64.pth", folder / "checkpoint.pth")
        (folder / "variant.yml").write_text(_TINY_VARIANT)

    return made_once("segmenter_tiny", make)


@pytest.fixture(scope="session")
def tiny_export(tiny_checkpoint: Path, made_once: Callable[..., Path]) -> Callable[..., Bundle]:
    """The tiny network as a bundle: `tiny_export({"output": "labels"})`.

    All processes of a run share it, so a test that changes one takes a copy: `copied(tiny_export())`.
    """

    def bundle(settings: dict[str, Any] | None = None) -> Bundle:
        from algm_deploy.bundle.store import Bundle
        from algm_deploy.deployment import export

        key = hashlib.sha256(repr(sorted((settings or {}).items())).encode()).hexdigest()[:12]
        folder = made_once(f"tiny-{key}", lambda target: export(tiny_checkpoint, target, None, settings or {}))
        return Bundle.open(folder)

    return bundle


@pytest.fixture
def no_native_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native libraries are neither installed nor built; the cache is an empty folder."""
    from algm_deploy import native_libraries

    monkeypatch.setattr(native_libraries, "wheel_folder", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Bundle]:
    """A copy of a bundle that a test may change: `copied(bundle)`, or `copied(bundle, "name")` beside the first."""

    def copy(bundle: Bundle, name: str = "bundle") -> Bundle:
        from algm_deploy.bundle.store import Bundle

        return Bundle.open(shutil.copytree(bundle.path, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def tiny_bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    """The tiny network as a bundle with scores; shared."""
    return tiny_export()


@pytest.fixture(scope="session")
def labels_bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    """The tiny network as a bundle with labels; shared."""
    return tiny_export({"output": "labels"})


@pytest.fixture(scope="session")
def scenes_to_calibrate(tiny_bundle: Bundle, made_once: Callable[..., Path]) -> Path:
    """Folder of eight drawn scenes."""
    import cv2

    from algm_deploy.deployment import parity_windows

    def make(photos: Path) -> None:
        photos.mkdir()
        for index, window in enumerate(parity_windows(tiny_bundle.recipe, [], 8)):
            cv2.imwrite(str(photos / f"{index}.png"), window.transpose(1, 2, 0)[..., ::-1])

    return made_once("tiny-photos", make)


@pytest.fixture(scope="session")
def int8_bundle(tiny_checkpoint: Path, scenes_to_calibrate: Path, made_once: Callable[..., Path]) -> Bundle:
    """The tiny network in int8, calibrated on drawn scenes, every product quantised; shared."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.deployment import export

    settings = {"precision": "int8", "gates.int8_label_agreement": 0.0}
    calibrate = [scenes_to_calibrate]
    return Bundle.open(
        made_once("tiny-int8", lambda to: export(tiny_checkpoint, to, None, settings, calibrate=calibrate))
    )


@pytest.fixture(scope="session")
def measured_fp8_bundle(
    tiny_checkpoint: Path,
    scenes_to_calibrate: Path,
    made_once: Callable[..., Path],
    translated: Callable[..., ir.Model],
) -> Bundle:
    """The tiny network in fp8 with ranges from drawn scenes, every product quantised, and its graph for TensorRT;
    shared. One translation serves both graphs."""
    from algm_deploy.bundle.store import Bundle
    from algm_deploy.deployment import export
    from algm_deploy.lowering import tensorrt, writing

    settings = {"precision": "fp8", "gates.fp8_label_agreement": 0.0, "max_batch": 2}

    def make(target: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in (tensorrt, writing):
                patch.setattr(module, "base_onnx", translated)
            export(tiny_checkpoint, target, None, settings, calibrate=[scenes_to_calibrate])
            tensorrt.write_tensorrt_onnx(Bundle.open(target), "fp8")

    return Bundle.open(made_once("tiny-measured-fp8", make))


@pytest.fixture(scope="session")
def wide_bundle(tiny_export: Callable[..., Bundle]) -> Bundle:
    """The tiny network for whole frames of 96x160 pixels; shared."""
    return tiny_export({"network.image_size": (96, 160), "max_batch": 2})


@pytest.fixture(scope="session")
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """`with unprivileged():` this thread obeys permissions, also where root runs the tests."""
    libc, words = ctypes.CDLL(None, use_errno=True), ctypes.c_uint32 * 6  # effective, permitted, inheritable; 64 bits
    header, overrides = (ctypes.c_uint32 * 2)(0x20080522, 0), 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH

    def call(name: str, data: ctypes.Array[ctypes.c_uint32]) -> None:
        if getattr(libc, name)(header, data):
            raise OSError(ctypes.get_errno(), name)

    @contextmanager
    def obey() -> Iterator[None]:
        before, after = words(), words()
        for data in (before, after):
            call("capget", data)
        after[0] &= ~overrides
        call("capset", after)
        try:
            yield
        finally:
            call("capset", before)

    return obey


@pytest.fixture(scope="session")
def ort_library() -> Path:
    """The custom operator library for the CPU."""
    from native_build import built

    return built("ort_custom_op")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="long forms of tests that are cut short by default")


@pytest.fixture(scope="session")
def long_form(request: pytest.FixtureRequest) -> bool:
    """Whether a test that has one runs in its long form."""
    return bool(request.config.getoption("--long"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that processes that share them end together.

    Skips `gpu` tests, with the reason, where no CUDA device is present.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: Python need not look through it for garbage again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a missing thing: how many tests were skipped for it."""
    reasons = Counter(_reason(report) for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.section("not run here", sep="-")
        for reason, tests in reasons.most_common():
            terminalreporter.line(f"{tests:5} tests: {reason}")


def _reason(report: Any) -> str:
    """Why a test was skipped, in the words of its skip."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(told).removeprefix("Skipped: ")


@pytest.fixture(scope="session")
def golden_segmenter(vectors_dir: Path) -> Callable[[str], Segmenter]:
    """The golden networks (4 blocks, 64 wide, 128x128 pixels, 11 classes) by decoder, merge slots empty."""
    import torch

    from algm_deploy.models.loading import network_module
    from algm_deploy.recipe.network import Network

    def load(decoder: str) -> Segmenter:
        weights = torch.load(vectors_dir / f"{decoder}_4x64.pth", weights_only=True)
        network = Network("segmenter", 64, 4, 2, 11, (128, 128), decoder=decoder)
        return network_module(network, weights.get("model", weights), torch.float32)

    return load


@pytest.fixture(scope="session")
def blob_images() -> Callable[[int], np.ndarray]:
    """Images (B, 3, 128, 128) uint8 of flat and of busy regions, more of them busy from image to image."""
    import numpy as np

    def draw(images: int) -> np.ndarray:
        rng = np.random.default_rng(7)
        blocks = rng.integers(0, 256, (images, 3, 4, 4)).repeat(32, 2).repeat(32, 3).astype(np.float64)
        noise = rng.normal(0, 60, (images, 3, 128, 128))
        for image in range(images):
            noise[image, :, :, : 96 - 128 * image // (images + 1)] *= 0.02
        return (blocks + noise).clip(0, 255).astype(np.uint8)

    return draw
