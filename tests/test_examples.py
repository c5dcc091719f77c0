"""The C++ programs of the documentation compile, and what runs here gives Python's labels."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from algm_deploy.bundle.store import Bundle
from algm_deploy.native_libraries import ONNXRUNTIME_HEADER, TENSORRT_HEADER, find_header, find_nvcc
from algm_deploy.pictures.shipped import scene
from algm_deploy.predictor import Predictor
from algm_deploy.runners.contract import runner_type
from algm_deploy.runners.onnxruntime import runner as module


@pytest.fixture(scope="module")
def built(root_dir: Path, made_once: Callable[..., Path]) -> Path:
    """Folder in which CMake has built the programs."""
    lacks = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]
    lacks += [] if find_header(ONNXRUNTIME_HEADER) else ["ONNX Runtime's headers (ONNXRUNTIME_ROOT)"]
    spec = importlib.util.find_spec("onnxruntime")
    found = sorted(Path(str(spec and spec.origin)).parent.glob("capi/libonnxruntime.so.*"))
    lacks += [] if found else ["ONNX Runtime's library, which its wheel holds"]
    if lacks:
        pytest.skip(f"needs {', '.join(lacks)}")
    nvcc = find_nvcc()
    toolkit = [f"-DCUDAToolkit_ROOT={nvcc.parents[1]}"] if nvcc else []

    def make(folder: Path) -> None:
        source, root = root_dir / "docs/examples/cpp", folder / "onnxruntime"
        (root / "lib").mkdir(parents=True)
        for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # as in a release archive
            (root / "lib" / name).symlink_to(found[0])
        subprocess.run(
            ["cmake", "-G", "Ninja", "-S", source, "-B", folder, f"-DONNXRUNTIME_ROOT={root}", *toolkit,
             "-DCMAKE_CXX_FLAGS=-Werror", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"],
            check=True,
        )  # fmt: skip
        subprocess.run(["cmake", "--build", folder], check=True)

    return made_once("examples", make)


def write_ppm(path: Path, photo: np.ndarray) -> Path:
    height, width = photo.shape[:2]
    path.write_bytes(f"P6\n# a comment\n{width} {height}\n255\n".encode() + photo.tobytes())
    return path


def run(built: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(built / "segment_onnxruntime"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def photos() -> dict[str, Any]:
    """Pictures that are taken as they are, in several windows, shrunk, halved, and enlarged in fractions."""
    photo = scene(0)[0]
    return {
        "as it is": photo[:128, :128],
        "several windows": photo[:128, :240],
        "shrunk": photo[:201, :231],
        "halved": photo[:256, :256],
        "enlarged": photo[:75, :101],
        "longer than the protocol allows": cv2.resize(photo, (600, 100)),
    }


def test_labels_and_tokens_are_those_of_python(tiny_bundle: Bundle, built: Path, tmp_path: Path) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu", batch=1) as network:
        for name, photo in photos().items():
            file = write_ppm(tmp_path / "photo.ppm", np.ascontiguousarray(photo))
            done = run(built, tiny_bundle.path, file, tmp_path / "labels.pgm")
            assert done.returncode == 0, done.stderr
            wanted = network.prediction(np.ascontiguousarray(photo))
            assert np.array_equal(Image.open(tmp_path / "labels.pgm"), wanted.labels), name
            counts = " ".join(map(str, wanted.token_counts.sum(0)))
            assert done.stdout == f"tokens after each merge: {counts}\n", name


def test_sides_of_whole_multiples(tiny_export: Callable[..., Bundle], built: Path, tmp_path: Path) -> None:
    bundle = tiny_export({"protocol.multiple": 48})
    photo = np.ascontiguousarray(photos()["several windows"])
    done = run(built, bundle.path, write_ppm(tmp_path / "photo.ppm", photo), tmp_path / "labels.pgm")
    with Predictor(bundle, "onnxruntime-cpu", batch=1) as network:
        wanted = network.prediction(photo)
    assert len(wanted.anchors) > 2
    assert done.returncode == 0, done.stderr
    assert np.array_equal(Image.open(tmp_path / "labels.pgm"), wanted.labels)
    assert done.stdout.split()[-2:] == [str(count) for count in wanted.token_counts.sum(0)]


def test_a_graph_with_custom_operators_and_other_thresholds(
    labels_bundle: Bundle,
    copied: Callable[..., Bundle],
    built: Path,
    tmp_path: Path,
    ort_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("find_library", "require_library"):
        monkeypatch.setattr(module, name, lambda _: ort_library)
    bundle = copied(labels_bundle)
    runner_type("onnxruntime-cpu").build(bundle)
    photo = np.ascontiguousarray(cv2.resize(photos()["as it is"], (192, 192)))
    file = write_ppm(tmp_path / "photo.ppm", photo)
    words = (bundle.path, file, tmp_path / "labels.pgm", "model.onnxruntime-cpu.onnx", ort_library)
    with Predictor(Bundle.open(bundle.path), "onnxruntime-cpu", tau=0.6) as network:
        wanted = network.prediction(photo)
    done = run(built, *words, "clap_threshold=0.6")
    assert done.returncode == 0, done.stderr
    assert np.array_equal(Image.open(tmp_path / "labels.pgm"), wanted.labels)
    assert done.stdout.split()[-2:] == [str(count) for count in wanted.token_counts[0]]
    assert run(built, *words).stdout != done.stdout
    for word, told in (("other=1", "this network reads no other"), ("clap_threshold=nan", "expected a number in {}")):
        failed = run(built, *words, word)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert failed.stderr == f"segment_onnxruntime: {told.format(word)}\n"


def test_what_is_no_picture_is_refused(tiny_bundle: Bundle, built: Path, tmp_path: Path) -> None:
    file = write_ppm(tmp_path / "photo.ppm", photos()["as it is"])
    file.write_bytes(file.read_bytes()[:-1])
    failed = run(built, tiny_bundle.path, file, tmp_path / "labels.pgm")
    assert (failed.returncode, "truncated" in failed.stderr) == (1, True)
    assert not (tmp_path / "labels.pgm").exists()


def test_the_program_for_tensorrt_compiles(built: Path) -> None:
    if find_header(TENSORRT_HEADER) is None or find_nvcc() is None:
        pytest.skip("needs the headers of TensorRT and of CUDA")
    (found,) = built.rglob("tensorrt.cpp.o")
    symbols = subprocess.run(["nm", "-C", found], capture_output=True, text=True, check=True).stdout
    assert "createInferRuntime_INTERNAL" in symbols
