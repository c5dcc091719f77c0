"""Model repositories for Triton: what is written, and what the model of the Python backend answers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import fake_triton
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fake_triton import Request, answers, arguments
from hostile import bomb
from PIL import Image
from triton_schema import parsed

from algm_deploy import cli
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.predictor import Predictor, WarmUp
from algm_deploy.runners.contract import runner, runner_type
from algm_deploy.runners.onnxruntime import runner as ort_runner
from algm_deploy.serving import triton_repository as writer
from algm_deploy.serving.answers import Answers
from algm_deploy.serving.triton_repository import Settings, write_repository

CPU = Settings("net", runtime="onnxruntime-cpu", device="cpu", most_pixels=400_000)
ALL = ("labels", "labels_png", "token_counts", "patches")


def png_of(photo: np.ndarray) -> bytes:
    stream = BytesIO()
    Image.fromarray(photo).save(stream, "PNG")
    return stream.getvalue()


def pixels(photo: np.ndarray, outputs: Sequence[str] = ALL, **thresholds: float) -> Request:
    rows = {name: np.array([[value]], np.float32) for name, value in thresholds.items()}
    return Request({"image": photo[None], **rows}, outputs)


def encoded(*contents: bytes, outputs: Sequence[str] = ALL, **thresholds: Sequence[float]) -> Request:
    rows = {name: np.array(values, np.float32)[:, None] for name, values in thresholds.items()}
    return Request({"encoded_image": np.array(contents, np.object_)[:, None], **rows}, outputs)


@pytest.fixture(scope="module")
def triton() -> Iterator[Any]:
    """The module of Triton's Python backend, which exists only inside it, and ours that needs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
        yield importlib.import_module("algm_deploy.serving.triton_model")
    sys.modules.pop("algm_deploy.serving.triton_model")


@pytest.fixture(scope="module")
def repository(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    assert write_repository(tiny_bundle, folder, CPU) == folder / "net"
    return folder


@pytest.fixture(scope="module")
def model(triton: Any, repository: Path) -> Iterator[Any]:
    config = parsed((repository / "net/config.pbtxt").read_text())
    parameters = {one.key: {"string_value": one.value.string_value} for one in config.parameters}
    made = triton.TritonPythonModel()
    made.initialize(arguments(repository / "net", {"parameters": parameters}))
    yield made
    made.finalize()


def test_a_model_for_the_python_backend_is_whole(repository: Path, tiny_bundle: Bundle) -> None:
    config = parsed((repository / "net/config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("net", "python", tiny_bundle.signature.max_batch)
    assert {one.name: (one.optional, one.allow_ragged_batch, list(one.dims)) for one in config.input} == {
        "image": (True, True, [-1, -1, 3]),
        "encoded_image": (True, False, [1]),
        "tau": (True, False, [1]),
        "gbm": (True, False, [1]),
        "dense": (True, False, [1]),
    }
    assert {one.name: list(one.dims) for one in config.output} == {
        "labels": [-1, -1],
        "labels_png": [1],
        "tokens_png": [1],
        "token_counts": [2],
        "patches": [1],
    }
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 64
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 4, 8]
    assert [one.batch_size for one in config.model_warmup] == [1, config.max_batch_size]
    copy = Bundle.open(repository / "net/1/bundle")
    assert copy.files == tiny_bundle.files
    assert (repository / "net/1/model.py").is_file()


def test_tokens_that_share_patches_are_no_picture(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that names no outputs gets all that the configuration lists."""
    monkeypatch.setattr(type(tiny_bundle.recipe.merging.row), "standing", False)
    made = write_repository(tiny_bundle, tmp_path, CPU)
    config = parsed((made / "config.pbtxt").read_text())
    assert [one.name for one in config.output] == ["labels", "labels_png", "token_counts", "patches"]


def test_triton_s_own_schema_takes_the_configurations(repository: Path, tmp_path: Path, tiny_bundle: Bundle) -> None:
    spec = importlib.util.find_spec("tritonclient")
    if spec is None or spec.origin is None:
        pytest.skip("needs Triton's schema: pip install tritonclient")
    schema = Path(spec.origin).parent / "grpc/model_config_pb2.py"
    made = importlib.util.spec_from_file_location("model_config_pb2", schema)
    assert made and made.loader
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    from google.protobuf import text_format

    write_repository(tiny_bundle, tmp_path, replace(CPU, backend="onnxruntime"))
    for folder in (repository, tmp_path):
        text_format.Parse((folder / "net/config.pbtxt").read_text(), module.ModelConfig())


def test_an_instance_on_a_gpu_is_warm_before_it_is_ready(
    triton: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread that called, which also executes."""
    threads = []

    def warm_up(_: Any) -> WarmUp:
        threads.append(threading.get_ident())
        return WarmUp(2.0, 9, False)

    monkeypatch.setattr(Predictor, "warm_up", warm_up)
    parameters = {"runtime": {"string_value": "onnxruntime-cpu"}, "max_pixels": {"string_value": "1000000"}}
    for on_gpu in (False, True):
        monkeypatch.setattr(Predictor, "on_gpu", on_gpu)
        made = triton.TritonPythonModel()
        made.initialize(arguments(repository / "net", {"parameters": parameters}))
        made.finalize()
        assert threads == [threading.get_ident()] * on_gpu
    assert fake_triton.Logger.lines[-1].startswith("net: warm after 2.0 s, with 9 CUDA graphs; there was no time")


def test_requests_of_different_sizes_and_thresholds_run_together(
    model: Any, photos: list[np.ndarray], tiny_bundle: Bundle
) -> None:
    """Each gets what it would get alone: dynamic batching puts any requests into one call."""
    requests = [
        pixels(photos[0]),
        pixels(photos[1], tau=0.6),
        encoded(*map(png_of, photos), outputs=("labels_png", "token_counts", "patches")),
        encoded(png_of(photos[0]), png_of(photos[0]), tau=(0.6, 0.95), gbm=(1.0, 1.0)),
        Request({"image": photos[0][None], "dense": np.array([[True]])}, ("tokens_png", "token_counts")),
    ]
    together = answers(model.execute(requests))
    for request, found in zip(requests, together, strict=True):
        (alone,) = answers(model.execute([request]))
        assert list(found) == list(request.outputs)
        for name, value in found.items():
            assert value.tolist() == alone[name].tolist(), name
    with Predictor(tiny_bundle, "onnxruntime-cpu") as plain, Predictor(tiny_bundle, "onnxruntime-cpu", tau=0.6) as low:
        for place, network, photo in ((0, plain, photos[0]), (1, low, photos[1])):
            wanted = network.prediction(photo)
            assert np.array_equal(together[place]["labels"][0], wanted.labels)
            assert np.array_equal(Image.open(BytesIO(together[place]["labels_png"][0, 0])), wanted.labels)
            assert together[place]["token_counts"].tolist() == [wanted.token_counts.sum(0).tolist()]
            assert together[place]["patches"].tolist() == [[64 * len(wanted.anchors)]]
    first, second = together[3]["token_counts"].tolist()
    assert first[0] < second[0]
    assert together[4]["token_counts"].tolist() == [[64, 64]]


def test_bad_requests_fail_alone(model: Any, photos: list[np.ndarray]) -> None:
    photo, good = photos[0], png_of(photos[0])
    bad = {
        "nan": pixels(photo, tau=float("nan")),
        "got both": Request({"image": photo[None], "encoded_image": np.array([[good]], np.object_)}, ALL),
        "or none": Request({}, ALL),
        "at least one": Request({"image": np.zeros((1, 0, 4, 3), np.uint8)}, ALL),
        "picture 2: the picture cannot be decoded": encoded(good, good[:-60]),
        "at most 400000 pixels, got far more": encoded(bomb()),
        "at most 400000 pixels, got 700x700": pixels(np.zeros((700, 700, 3), np.uint8)),
        "leave one out": Request(
            {"image": photo[None], "dense": np.array([[True]]), "tau": np.ones((1, 1), np.float32)}, ALL
        ),
        "pictures of one size": encoded(good, png_of(photos[1])),
    }
    responses = model.execute([pixels(photo), *bad.values(), pixels(photos[1])])
    assert {one.error.code for one in responses[1:-1]} == {fake_triton.TritonError.INVALID_ARG}
    found = answers(responses)
    for words, told in zip(bad, found[1:-1], strict=True):
        assert isinstance(told, str)
        assert words in told
    for request, mate in ((pixels(photo), found[0]), (pixels(photos[1]), found[-1])):
        (alone,) = answers(model.execute([request]))
        assert np.array_equal(mate["labels"], alone["labels"])


def test_the_request_that_the_page_on_triton_probes_with_is_answered(model: Any, root_dir: Path) -> None:
    (line,) = re.findall(r"-d '(.+)'", (root_dir / "docs/triton.md").read_text())
    asked = json.loads(line)
    inputs = {
        one["name"]: np.array(one["data"], one["datatype"].lower()).reshape(one["shape"]) for one in asked["inputs"]
    }
    (found,) = answers(model.execute([Request(inputs, [one["name"] for one in asked["outputs"]])]))
    assert found["patches"].tolist() == [[64]]


def test_an_error_that_nobody_foresaw_ends_one_request(
    model: Any, photos: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = Answers.values

    def broken(self: Answers, asked: Any, pictures: Any) -> Any:
        if "tokens_png" in asked.outputs:
            raise LookupError("of /secret")
        return values(self, asked, pictures)

    monkeypatch.setattr(Answers, "values", broken)
    responses = model.execute([pixels(photos[0], ("tokens_png",)), pixels(photos[0])])
    assert responses[0].error.code == fake_triton.TritonError.INTERNAL
    told, mate = answers(responses)
    assert "secret" not in told
    assert "/secret" in caplog.text
    assert mate["labels"].shape == (1, 128, 128)


def test_tokens_are_counted_beside_triton_s_own_metrics(model: Any, photos: list[np.ndarray]) -> None:
    patches, tokens = model._metrics._families
    before = patches.metrics[0].value, [one.value for one in tokens.metrics]
    (found,) = answers(model.execute([encoded(*map(png_of, photos), outputs=("token_counts", "patches"))]))
    assert patches.metrics[0].value - before[0] == found["patches"].sum()
    counted = [one.value - old for one, old in zip(tokens.metrics, before[1], strict=True)]
    assert counted == found["token_counts"].sum(0).tolist()
    assert [one.labels for one in tokens.metrics] == [
        {"model": "net", "merge": "clap_1"},
        {"model": "net", "merge": "gbm_3"},
    ]


def test_a_model_that_cannot_be_opened_says_why(triton: Any, repository: Path) -> None:
    parameters = {"runtime": {"string_value": "tensorrt"}, "max_pixels": {"string_value": "9"}}
    with pytest.raises(fake_triton.TritonModelException, match="tensorrt"):
        triton.TritonPythonModel().initialize(arguments(repository / "net", {"parameters": parameters}))


def session_of(model: Path) -> ort.InferenceSession:
    config = parsed((model / "config.pbtxt").read_text())
    options = ort.SessionOptions()
    for library in config.model_operations.op_library_filename:
        options.register_custom_ops_library(library)
    return ort.InferenceSession(model / "1/model.onnx", options, providers=["CPUExecutionProvider"])


def test_a_network_for_the_onnxruntime_backend_has_its_thresholds_inside(
    tiny_bundle: Bundle, tmp_path: Path, blob_images: Callable[[int], np.ndarray]
) -> None:
    images = blob_images(2)
    made = write_repository(tiny_bundle, tmp_path, replace(CPU, backend="onnxruntime", tau=0.6))
    config = parsed((made / "config.pbtxt").read_text())
    assert (config.backend, config.max_batch_size) == ("onnxruntime", tiny_bundle.signature.max_batch)
    assert [(one.name, list(one.dims)) for one in config.input] == [("image", [3, 128, 128])]
    assert [(one.name, list(one.dims)) for one in config.output] == [("scores", [11, 128, 128]), ("token_counts", [2])]
    assert not config.model_operations.op_library_filename
    session = session_of(made)
    assert [one.name for one in session.get_inputs()] == ["image"]
    found = session.run(["scores", "token_counts"], {"image": images})
    with runner(tiny_bundle, "onnxruntime-cpu") as run:
        wanted = run.infer({"image": images, "clap_threshold": 0.6})
        others = run.infer({"image": images})
    assert np.array_equal(found[0], wanted["scores"])
    assert np.array_equal(found[1], wanted["token_counts"])
    assert not np.array_equal(found[1], others["token_counts"])


def test_the_graph_of_the_cpu_takes_its_operators_along(
    labels_bundle: Bundle,
    copied: Callable[..., Bundle],
    tmp_path: Path,
    blob_images: Callable[[int], np.ndarray],
    ort_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name in ((ort_runner, "find_library"), (ort_runner, "require_library"), (writer, "require_library")):
        monkeypatch.setattr(module, name, lambda _: ort_library)
    bundle, image = copied(labels_bundle), blob_images(1)
    runner_type("onnxruntime-cpu").build(bundle)
    bundle = Bundle.open(bundle.path)
    made = write_repository(bundle, tmp_path / "repository", replace(CPU, backend="onnxruntime", runtime=None))
    config = parsed((made / "config.pbtxt").read_text())
    assert config.max_batch_size == 0  # this graph is for one image
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [1, 3, 128, 128]
    assert list(config.model_operations.op_library_filename) == [str(made / "1/libalgm_ort_custom_op.so")]
    labels, counts = session_of(made).run(["labels", "token_counts"], {"image": image})
    with runner(bundle, "onnxruntime-cpu") as run:
        wanted = run.infer({"image": image})
    assert np.array_equal(labels, wanted["labels"])
    assert np.array_equal(counts, wanted["token_counts"])
    elsewhere = replace(CPU, name="there", backend="onnxruntime", seen_at=Path("/models"))
    made = write_repository(bundle, tmp_path / "repository", elsewhere)
    library = parsed((made / "config.pbtxt").read_text()).model_operations.op_library_filename[0]
    assert library == "/models/there/1/libalgm_ort_custom_op.so"


def test_a_network_for_the_tensorrt_backend_comes_with_the_commands_that_build_its_plan(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libalgm_trt_plugin.so").touch()
    monkeypatch.setattr(writer, "require_library", lambda name: tmp_path / f"libalgm_{name}.so")
    made = write_repository(tiny_bundle, tmp_path / "repository", Settings("net", "tensorrt", dense=True))
    config = parsed((made / "config.pbtxt").read_text())
    assert (config.backend, config.instance_group[0].kind) == ("tensorrt", 1)
    graph = onnx.load(made / "network/model.onnx", load_external_data=False).graph
    assert [one.name for one in graph.input] == ["image"]
    fixed = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer if not one.dims}
    assert {np.inf} == {float(fixed[name]) for name in tiny_bundle.signature.defaults}
    assert not (made / "made-from").exists()
    called, tool = tmp_path / "called", tmp_path / "bin/trtexec"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {called}\necho stronglyTyped\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = f"{tool.parent}:{os.environ['PATH']}"
    subprocess.run([made / "build-plan.sh"], env={**os.environ, "PATH": path}, check=True, capture_output=True)
    words = called.read_text().splitlines()[-1].split()
    assert "--stronglyTyped" in words
    assert f"--maxShapes=image:{tiny_bundle.signature.max_batch}x3x128x128" in words
    named = [word.partition("=")[2] for word in words if word.startswith(("--onnx", "--dynamicPlugins"))]
    assert [(made / name).is_file() for name in named] == [True, True]


def test_what_does_not_fit_is_refused(tiny_bundle: Bundle, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="remove it"):
        write_repository(tiny_bundle, repository, CPU)
    with pytest.raises(BundleError, match="choose one with --name"):
        write_repository(tiny_bundle, tmp_path, replace(CPU, name="a/b"))
    with pytest.raises(RuntimeUnavailableError, match="expected onnxruntime-cpu or onnxruntime-cuda"):
        write_repository(tiny_bundle, tmp_path, replace(CPU, backend="onnxruntime", runtime="torch"))
    with pytest.raises(RuntimeUnavailableError, match="executes on cpu"):
        write_repository(tiny_bundle, tmp_path, replace(CPU, device="cuda"))
    with pytest.raises(BundleError, match="leave one out"):
        write_repository(tiny_bundle, tmp_path, replace(CPU, dense=True, tau=0.5))
    assert [one.name for one in tmp_path.iterdir() if not one.name.startswith(".")] == []


def test_the_command_writes_a_model(tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "serve-repository",
        str(tiny_bundle.path),
        "-o",
        str(tmp_path),
        "--name",
        "net",
        "--backend",
        "onnxruntime",
    ]
    assert cli.main([*words, "--runtime", "onnxruntime-cpu", "--instances", "2", "--queue", "9"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "net")]
    config = parsed((tmp_path / "net/config.pbtxt").read_text())
    assert config.instance_group[0].count == 2
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 9
