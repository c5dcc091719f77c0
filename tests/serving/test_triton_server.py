"""A real Triton server, where there is one: photos over gRPC, batches of any thresholds, and processes that die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.pictures.sliding import Prediction
from algm_deploy.predictor import Predictor
from algm_deploy.recipe.reading import budget_settings
from algm_deploy.serving.triton_repository import Settings, write_repository

OUTPUTS = ("labels", "token_counts")
MOST_BYTES = 16 << 20  # what the allocator of another process may keep at its own time
_PORTS = ("18400", "18401", "18402")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a repository."""
    if "TRITONSERVER_ROOT" not in os.environ:
        pytest.skip("needs a Triton server, in TRITONSERVER_ROOT with its folders bin and backends (docs/triton.md)")
    pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    return tmp_path_factory.mktemp("triton") / "models"


def add(bundle: Bundle, models: Path, name: str) -> None:
    write_repository(bundle, models, Settings(name, runtime="onnxruntime-cpu", device="cpu"))


@pytest.fixture(scope="module")
def start(tiny_bundle: Bundle, models: Path) -> Any:
    """`with start() as server` runs a server with the tiny network, `net`, or with models named; it is killed then."""
    root, folder = os.environ["TRITONSERVER_ROOT"], models.parent
    add(tiny_bundle, models, "net")
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
    def started(*names: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [f"{root}/bin/tritonserver", f"--model-repository={models}", "--model-control-mode=explicit"]
        command += [f"--backend-directory={root}/backends", "--disable-auto-complete-config"]
        command += [f"--load-model={name}" for name in names or ("net",)]
        for kind, port in zip(("http", "grpc", "metrics"), _PORTS, strict=True):
            command += [f"--{kind}-address=127.0.0.1", f"--{kind}-port={port}"]
        with (folder / "log").open("ab") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stubs: list[int] = []
            try:
                _wait(server, folder / "log", names or ("net",))
                stubs = instances(server)
                yield server
            finally:
                server.kill()
                server.wait()
                for stub in stubs:  # it outlives a server that was killed, for a moment
                    with suppress(ProcessLookupError):
                        os.kill(stub, signal.SIGKILL)

    return started


def _client() -> Any:
    import tritonclient.grpc as client

    return client, client.InferenceServerClient(f"127.0.0.1:{_PORTS[1]}")


def _wait(server: subprocess.Popen[bytes], log: Path, names: Sequence[str]) -> None:
    _, client = _client()
    for _ in range(6000):
        assert server.poll() is None, log.read_text()[-2000:]
        with suppress(Exception):  # it does not listen yet
            if all(map(client.is_model_ready, names)):
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def asked(photo: np.ndarray, **given: float) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of a request."""
    module, _ = _client()
    inputs = [module.InferInput("image", [1, *photo.shape], "UINT8")]
    inputs[0].set_data_from_numpy(photo[None])
    for name, value in given.items():
        inputs.append(module.InferInput(name, [1, 1], "FP32"))
        inputs[-1].set_data_from_numpy(np.array([[value]], np.float32))
    return inputs, [module.InferRequestedOutput(name) for name in OUTPUTS]


def ask(photo: np.ndarray, name: str = "net", **given: float) -> dict[str, np.ndarray]:
    _, client = _client()
    inputs, outputs = asked(photo, **given)
    return answered(client.infer(name, inputs, outputs=outputs, client_timeout=60))


def answered(found: Any) -> dict[str, np.ndarray]:
    return {name: found.as_numpy(name) for name in OUTPUTS}


def ask_together(questions: Sequence[tuple[np.ndarray, dict[str, float]]]) -> list[Callable[[], Any]]:
    """Sends requests over one connection without waiting; each is a function that waits for its answer or error."""
    _, client = _client()
    waiting = []
    for photo, given in questions:
        inputs, outputs = asked(photo, **given)
        future: Future[Any] = Future()

        def done(result: Any, error: Any, future: Future[Any] = future) -> None:
            future.set_exception(error) if error else future.set_result(answered(result))

        client.async_infer("net", inputs, done, outputs=outputs, client_timeout=60)
        waiting.append(partial(future.result, 90))
    return waiting


def agrees(found: dict[str, np.ndarray], wanted: Prediction) -> bool:
    counts = found["token_counts"][0].tolist() == wanted.token_counts.sum(0).tolist()
    return counts and np.array_equal(found["labels"][0], wanted.labels)


def instances(server: subprocess.Popen[bytes]) -> list[int]:
    """The processes that run the network."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    every = {int(child) for child in children} | {
        int(child)
        for task in Path(f"/proc/{server.pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    }
    return [child for child in every if b"triton_python_backend_stub" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def stalled(clients: int) -> Iterator[None]:
    """Clients that have sent the beginning of a request, and send nothing more."""
    head = b"POST /v2/models/net/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{"
    with ExitStack() as stack:
        for _ in range(clients):
            stack.enter_context(socket.create_connection(("127.0.0.1", int(_PORTS[0])), timeout=10)).sendall(head)
        yield


def test_a_server_answers_as_predict_beside_clients_that_stall(
    start: Any, photos: list[np.ndarray], tiny_bundle: Bundle
) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu") as network:
        wanted = [network.prediction(photo) for photo in photos]
    with start(), stalled(50):
        for photo, one in zip(photos, wanted, strict=True):
            assert agrees(ask(photo), one)
        assert ask(photos[0], tau=0.6)["token_counts"][0, 0] < wanted[0].token_counts[0, 0]
        with pytest.raises(Exception, match="expected a number as tau"):
            ask(photos[0], tau=float("nan"))


def test_bundles_in_int8_and_with_budgets_answer_as_predict(
    start: Any, models: Path, photos: list[np.ndarray], int8_bundle: Bundle, tiny_export: Callable[..., Bundle]
) -> None:
    bundles = {"int8": int8_bundle, "budgets": tiny_export(budget_settings(0.4, 0.2))}
    for name, bundle in bundles.items():
        add(bundle, models, name)
    with start(*bundles):
        for name, bundle in bundles.items():
            with Predictor(bundle, "onnxruntime-cpu") as network:
                for photo in photos:
                    assert agrees(ask(photo, name), network.prediction(photo)), name
        with pytest.raises(Exception, match="a fixed budget"):
            ask(photos[0], "budgets", tau=0.6)


def test_requests_of_different_thresholds_share_a_call(
    start: Any, photos: list[np.ndarray], tiny_bundle: Bundle
) -> None:
    wanted = {}
    for tau in (0.5, 0.7, 0.95):
        with Predictor(tiny_bundle, "onnxruntime-cpu", tau=tau) as network:
            wanted[tau] = network.prediction(photos[0])
    assert len({str(one.token_counts) for one in wanted.values()}) == 3
    with start():
        waiting = ask_together([(photos[0], {"tau": tau}) for tau in (*wanted, float("nan"), *wanted)])
        for number, tau in enumerate((*wanted, None, *wanted)):
            if tau is None:
                with pytest.raises(Exception, match="expected a number as tau"):
                    waiting[number]()
            else:
                assert agrees(waiting[number](), wanted[tau])
        _, client = _client()
        (told,) = client.get_inference_statistics("net").model_stats
        warm = 2  # calls of the warm-up
        assert told.execution_count - warm < 7


def test_a_server_that_is_killed_tells_its_clients_and_starts_anew(
    start: Any, photos: list[np.ndarray], tiny_bundle: Bundle
) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu") as network:
        wanted = network.prediction(photos[2])
    with start() as server:
        waiting = ask_together([(photos[2], {})] * 64)
        server.kill()
        told = []
        for one in waiting:
            try:
                assert agrees(one(), wanted)
            except Exception as error:  # noqa: BLE001 - the client's own kind
                told.append(str(error))
        assert told  # some had no answer yet; nobody waits for ever
        assert all("UNAVAILABLE" in text or "CANCELLED" in text for text in told), told[:3]
    with start():
        assert agrees(ask(photos[2]), wanted)


def test_a_killed_instance_is_told_of_and_comes_back_with_its_model(
    start: Any, photos: list[np.ndarray], tiny_bundle: Bundle
) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu") as network:
        wanted = network.prediction(photos[0])
    with start() as server:
        assert agrees(ask(photos[0]), wanted)
        (instance,) = instances(server)
        os.kill(instance, signal.SIGKILL)
        with pytest.raises(Exception, match=r"(?i)stub|healthy"):
            ask(photos[0])
        _, client = _client()
        client.unload_model("net")
        client.load_model("net")
        assert agrees(ask(photos[0]), wanted)
        assert instances(server) != [instance]


def test_an_instance_that_stood_still_leads_to_no_wrong_answer(
    start: Any, photos: list[np.ndarray], tiny_bundle: Bundle
) -> None:
    """Triton gives it up after a second without a sign of life; server 2.51 crashes when it goes on."""
    with Predictor(tiny_bundle, "onnxruntime-cpu") as network:
        wanted = network.prediction(photos[2])
    with start() as server:
        (instance,) = instances(server)
        os.kill(instance, signal.SIGSTOP)
        with pytest.raises(Exception, match="healthy"):
            ask(photos[0])
        os.kill(instance, signal.SIGCONT)
        for _ in range(5):
            try:
                found = ask(photos[2])
            except Exception:  # noqa: BLE001, S112 - the client's own kind
                continue
            assert agrees(found, wanted)
    with start():
        assert agrees(ask(photos[2]), wanted)


def test_a_full_queue_refuses_some_and_many_requests_leave_nothing(
    start: Any, photos: list[np.ndarray], tiny_bundle: Bundle, long_form: bool
) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu") as network:
        wanted = network.prediction(photos[2])
    with start() as server:
        refused = 0
        for one in ask_together([(photos[2], {})] * 200):
            try:
                assert agrees(one(), wanted)
            except Exception as error:  # noqa: BLE001 - the client's own kind
                refused += 1
                assert "maximum queue size" in str(error), error  # noqa: PT017
        assert 0 < refused < 200
        (instance,) = instances(server)

        def send(requests: int) -> int:
            for number in range(requests):
                if number % 4 == 3:
                    with pytest.raises(Exception, match="expected a number as tau"):
                        ask(photos[0], tau=float("nan"))
                else:
                    ask(photos[0], tau=0.5 + number % 3 / 10)
            return int(Path(f"/proc/{instance}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before = send(1000 if long_form else 100)
        assert send(10_000 if long_form else 100) - before < MOST_BYTES
