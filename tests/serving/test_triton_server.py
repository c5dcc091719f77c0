"""A real Triton server, where there is one: photos over gRPC."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.predictor import Predictor
from algm_deploy.serving.triton_repository import Settings, write_repository

_PORTS = ("18400", "18401", "18402")


@pytest.fixture(scope="module")
def start(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`with start() as server` runs a server with the tiny network, and kills it afterwards."""
    root = os.environ.get("TRITONSERVER_ROOT")
    if root is None:
        pytest.skip("needs a Triton server, in TRITONSERVER_ROOT with its folders bin and backends (docs/triton.md)")
    pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    folder = tmp_path_factory.mktemp("triton")
    write_repository(tiny_bundle, folder / "models", Settings("net", runtime="onnxruntime-cpu", device="cpu"))
    # Triton's Python reads no PYTHONPATH: its environment lists what these tests run with.
    venv.create(folder / "python", symlinks=True)
    (site,) = (folder / "python/lib").glob("python*/site-packages")
    own = Path(algm_deploy.__file__).parents[1]
    places = [own, *filter(None, os.environ.get("TRITON_SITE", "").split(":")), *(p for p in sys.path if p)]
    (site / "tests.pth").write_text("\n".join(map(str, places)) + "\n")
    environment = {**os.environ, "PATH": f"{folder / 'python/bin'}:{os.environ['PATH']}"}
    library = Path(sys.base_prefix) / "lib"
    environment["LD_LIBRARY_PATH"] = f"{library}:{environment.get('LD_LIBRARY_PATH', '')}"

    @contextmanager
    def started() -> Iterator[subprocess.Popen[bytes]]:
        command = [f"{root}/bin/tritonserver", f"--model-repository={folder / 'models'}"]
        command += [f"--backend-directory={root}/backends", "--disable-auto-complete-config"]
        command += ["--backend-config=python,stub-timeout-seconds=600"]
        for kind, port in zip(("http", "grpc", "metrics"), _PORTS, strict=True):
            command += [f"--{kind}-address=127.0.0.1", f"--{kind}-port={port}"]
        with (folder / "log").open("ab") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                _wait(server, folder / "log")
                yield server
            finally:
                server.kill()
                server.wait()

    return started


def _client() -> Any:
    import tritonclient.grpc as client

    return client, client.InferenceServerClient(f"127.0.0.1:{_PORTS[1]}")


def _wait(server: subprocess.Popen[bytes], log: Path) -> None:
    _, client = _client()
    for _ in range(6000):
        assert server.poll() is None, log.read_text()[-2000:]
        with suppress(Exception):  # it does not listen yet
            if client.is_model_ready("net"):
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def ask(photo: np.ndarray, **given: float) -> dict[str, np.ndarray]:
    module, client = _client()
    inputs = [module.InferInput("image", [1, *photo.shape], "UINT8")]
    inputs[0].set_data_from_numpy(photo[None])
    for name, value in given.items():
        inputs.append(module.InferInput(name, [1, 1], "FP32"))
        inputs[-1].set_data_from_numpy(np.array([[value]], np.float32))
    names = ("labels", "token_counts")
    answer = client.infer("net", inputs, outputs=[module.InferRequestedOutput(one) for one in names])
    return {name: answer.as_numpy(name) for name in names}


def test_a_server_answers_as_predict(start: Any, photos: list[np.ndarray], tiny_bundle: Bundle) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu") as network:
        wanted = [network.prediction(photo) for photo in photos]
    with start():
        for photo, one in zip(photos, wanted, strict=True):
            found = ask(photo)
            assert np.array_equal(found["labels"][0], one.labels)
            assert found["token_counts"][0].tolist() == one.token_counts.sum(0).tolist()
        assert ask(photos[0], tau=0.6)["token_counts"][0, 0] < wanted[0].token_counts[0, 0]
        with pytest.raises(Exception, match="expected a number as tau"):
            ask(photos[0], tau=float("nan"))
