"""A server over HTTP: what it answers, what it refuses, and that one client harms no other."""

from __future__ import annotations

import base64
import gc
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hostile import bomb, truncated
from http_client import Client
from PIL import Image

from algm_deploy.bundle.store import Bundle, BundleWriter
from algm_deploy.cli.parser import parser
from algm_deploy.errors import BundleError, ExecutionError, GateError, ListenError
from algm_deploy.predictor import Predictor, WarmUp
from algm_deploy.report.pictures import final_tokens
from algm_deploy.runners.contract import Runner
from algm_deploy.serving.answers import Answers
from algm_deploy.serving.app import Limits
from algm_deploy.serving.server import Settings, server

INFER = "/v2/models/net/infer"


def png_of(photo: np.ndarray) -> bytes:
    stream = BytesIO()
    Image.fromarray(photo).save(stream, "PNG")
    return stream.getvalue()


def pixels(photo: np.ndarray) -> dict[str, Any]:
    return {"name": "image", "datatype": "UINT8", "shape": list(photo.shape), "data": photo.ravel().tolist()}


def encoded(*contents: bytes) -> dict[str, Any]:
    data = [base64.b64encode(one).decode() for one in contents]
    return {"name": "encoded_image", "datatype": "BYTES", "shape": [len(data)], "data": data}


def metric(client: Any, name: str) -> float:
    lines = client.ask("GET", "/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_health_and_metadata(client: Any) -> None:
    assert client.get("/v2/health/live") == (200, {"live": True})
    assert client.get("/v2/health/ready") == (200, {"ready": True})
    assert client.get("/v2/models/net/ready") == (200, {"name": "net", "ready": True})
    assert client.get("/v2")[1]["extensions"] == ["binary_tensor_data"]
    status, table = client.get("/v2/models/net")
    assert status == 200
    assert [(one["name"], one["datatype"], one["shape"]) for one in table["inputs"]] == [
        ("image", "UINT8", [-1, -1, -1, 3]),
        ("encoded_image", "BYTES", [-1]),
    ]
    assert {one["name"]: (one["datatype"], one["shape"]) for one in table["outputs"]} == {
        "labels": ("UINT8", [-1, -1, -1]),
        "labels_png": ("BYTES", [-1]),
        "tokens_png": ("BYTES", [-1]),
        "token_counts": ("INT64", [-1, 2]),
        "patches": ("INT64", [-1]),
    }
    assert table["platform"] == "onnxruntime-cpu"
    assert len(table["parameters"]["classes"]) == len(table["parameters"]["palette"]) == 11
    (version,) = table["versions"]
    assert client.get(f"/v2/models/net/versions/{version}")[1] == table
    for path in ("/v2/models/other", "/v2/models/net/versions/2"):
        assert client.get(path)[0] == 404


def test_labels_and_tokens_are_those_of_predict(client: Any, photos: list[np.ndarray]) -> None:
    for photo in photos:
        wanted = client.predictor.prediction(photo)
        for one in (pixels(photo), encoded(png_of(photo))):
            status, found = client.infer(one)
            assert status == 200
            assert np.array_equal(found["labels"][0], wanted.labels)
            assert found["token_counts"].tolist() == [wanted.token_counts.sum(0).tolist()]
            assert found["patches"].tolist() == [64 * len(wanted.anchors)]


def test_binary_answers_and_pictures_of_different_sizes(client: Any, photos: list[np.ndarray]) -> None:
    contents = [png_of(photo) for photo in photos]
    tail = b"".join(struct.pack("<I", len(one)) + one for one in contents)
    given = {**encoded(*contents), "parameters": {"binary_data_size": len(tail)}}
    del given["data"]
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("labels_png", "tokens_png")]
    head = json.dumps({"inputs": [given], "outputs": outputs}).encode()
    status, body = client.ask("POST", INFER, head + tail, inference_header_content_length=str(len(head)))
    assert status == 200, body
    rest = body[int(client.headers["inference-header-content-length"]) :]
    pictures = []
    while rest:
        (size,) = struct.unpack_from("<I", rest)
        pictures.append(np.asarray(Image.open(BytesIO(rest[4 : 4 + size]))))
        rest = rest[4 + size :]
    assert len(pictures) == 6
    for photo, labels in zip(photos, pictures, strict=False):
        assert np.array_equal(labels, client.predictor.predict(photo))
    drawn = final_tokens(client.predictor, photos[0], "").picture
    assert pictures[3].shape[2] == drawn.shape[2] == 3
    assert abs(pictures[3].mean() - drawn.mean()) < 2  # the same tokens on a sheet of another width


def test_a_plain_post_of_a_photo_gives_a_label_map(client: Any, photos: list[np.ndarray]) -> None:
    status, body = client.ask("POST", "/predict?dense=true", png_of(photos[0]))
    assert (status, client.headers["content-type"]) == (200, "image/png")
    assert client.headers["algm-token-counts"] == "64,64"
    assert client.headers["algm-patches"] == "64"
    picture = Image.open(BytesIO(body))
    assert (picture.mode, picture.size) == ("P", (128, 128))
    assert client.ask("POST", "/predict?tau=much", png_of(photos[0]))[0] == 400


def test_requests_of_different_thresholds_do_not_mix(
    client: Any, tiny_bundle: Bundle, photos: list[np.ndarray]
) -> None:
    wanted = []
    for given in ({}, {"tau": 0.5}, {"gbm": 0.2}, {"dense": True}):
        with Predictor(tiny_bundle, "onnxruntime-cpu", **given) as predictor:
            wanted.append((given, predictor.prediction(photos[1])))
    assert len({str(one.token_counts) for _, one in wanted}) == len(wanted)

    def ask(case: tuple[dict[str, Any], Any]) -> None:
        status, found = client.infer(pixels(photos[1]), parameters=case[0])
        assert status == 200
        assert found["token_counts"].tolist() == [case[1].token_counts.sum(0).tolist()]
        assert np.array_equal(found["labels"][0], case[1].labels)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, wanted * 2))


def test_pictures_of_several_clients_share_a_batch(client: Any, photos: list[np.ndarray]) -> None:
    before = metric(client, "algm_batch_windows_count")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.infer(pixels(photos[0])), range(8)))
    assert [status for status, _ in answers] == [200] * 8
    assert metric(client, "algm_batch_windows_count") - before < 8


def test_bad_pictures_fail_alone(client: Any, photos: list[np.ndarray], tmp_path: Path) -> None:
    good = png_of(photos[0])
    jpeg, gif = BytesIO(), BytesIO()
    Image.fromarray(photos[2]).save(jpeg, "JPEG")
    Image.fromarray(photos[0]).save(gif, "GIF")
    cases = [
        (encoded(truncated(jpeg.getvalue())), "truncated"),
        (encoded(b""), "no such format"),
        (encoded(b"GARBAGE"), "no such format"),
        (encoded(gif.getvalue()), "no such format"),
        (encoded(bomb()), "at most 400000 pixels, got far more: shrink"),
        (encoded(png_of(np.zeros((1000, 1000, 3), np.uint8))), "at most 400000 pixels"),
        (encoded(png_of(np.zeros((4, 400, 3), np.uint8))), "8 times"),
        (encoded(good, truncated(good)), "picture 2"),
        (encoded(good, png_of(photos[1])), "of one size"),
    ]
    wanted = client.predictor.predict(photos[0])
    mates = [(encoded(good), "")] * len(cases)
    with ThreadPoolExecutor(4) as pool:
        asked = [case for pair in zip(cases, mates, strict=True) for case in pair]
        answers = list(pool.map(lambda case: client.infer(case[0]), asked))
    for (status, found), (_, told) in zip(answers, asked, strict=True):
        if told:
            assert (status, told in found["error"]) == (400, True), found
            assert "/" not in found["error"].replace("RGB/", "")  # no path of the server
        else:
            assert status == 200
            assert np.array_equal(found["labels"][0], wanted)
    assert client.get("/v2/health/live")[0] == 200


def test_bad_requests_are_told_why(client: Any, photos: list[np.ndarray]) -> None:
    picture = pixels(photos[0])
    for given, told in (
        ({"tau": "NaN"}, "number as tau"),
        ({"tau": 0.9, "dense": True}, "leave one out"),
        ({"budget": 0.5}, "tau, gbm and dense"),
    ):
        status, found = client.infer(picture, parameters=given)
        assert (status, told in found["error"]) == (400, True), found
    status, body = client.ask("POST", INFER, b'{"inputs": [], "parameters": {"tau": NaN}}')
    assert (status, b"JSON" in body) == (400, True)
    assert client.infer({**picture, "datatype": "FP32"})[0] == 400
    status, body = client.ask("POST", INFER, bytes(3 << 20))
    assert (status, b"2097152 bytes" in body) == (413, True)
    assert client.ask("GET", INFER)[0] == 405
    assert client.ask("GET", "/v2/health/live", host="evil.example")[0] == 400


def test_a_slow_client_is_let_go(client: Any) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nslow")
        assert b" 408 " in connection.recv(1000)
    assert client.get("/v2/health/ready")[0] == 200


def test_a_failing_batch_runs_again_one_by_one(
    client: Any, photos: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = client.predictor.predict(photos[2])  # several windows: half a batch may have been taken
    infer = Predictor.infer
    black = np.zeros((128, 128, 3), np.uint8)

    def failing(self: Predictor, windows: np.ndarray, *rest: Any, **named: Any) -> Any:
        if any(not window.any() for window in windows):
            raise GateError("expected scores, got NaN")
        return infer(self, windows, *rest, **named)

    monkeypatch.setattr(Predictor, "infer", failing)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda photo: client.infer(pixels(photo)), [photos[2], black] * 3))
    assert [status for status, _ in answers] == [200, 500] * 3
    for _, found in answers[::2]:
        assert np.array_equal(found["labels"][0], wanted)
    assert client.get("/v2/health/live")[0] == 200  # a picture is to blame, not the runtime


def test_an_error_that_nobody_foresaw_is_logged_and_tells_no_detail(
    client: Any, photos: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("of /secret")

    monkeypatch.setattr(Answers, "values", broken)
    status, found = client.infer(pixels(photos[0]))
    assert (status, "secret" in found["error"]) == (500, False)
    assert "/secret" in caplog.text
    monkeypatch.undo()
    assert client.infer(pixels(photos[0]))[0] == 200
    assert metric(client, "algm_requests_running") == 0


def test_a_broken_runtime_shows_in_health_until_it_works_again(
    client: Any, photos: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "infer", broken)
        for _ in range(3):
            status, found = client.infer(pixels(photos[0]))
            assert (status, "illegal memory" in found["error"]) == (500, True)
        assert client.get("/v2/health/live") == (503, {"live": False})
        assert client.get("/v2/models/net/ready")[0] == 503
    assert client.infer(pixels(photos[0]))[0] == 200
    assert client.get("/v2/health/live")[0] == 200


def test_a_full_queue_says_so_and_forgets_who_left(
    client: Any, photos: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    infer = Predictor.infer
    go, ran = threading.Event(), []

    def held(self: Predictor, windows: np.ndarray, *rest: Any, **named: Any) -> Any:
        ran.append(len(windows))
        assert go.wait(30)
        return infer(self, windows, *rest, **named)

    def come() -> int:
        """Pictures that wait, and those that the network holds: on a busy machine it does not get all at once."""
        return int(metric(client, "algm_pictures_waiting")) + sum(ran)

    monkeypatch.setattr(Predictor, "infer", held)
    small = png_of(photos[0])
    with ThreadPoolExecutor(12) as pool:
        first = [pool.submit(client.infer, encoded(small)) for _ in range(8)]  # the network holds one or more
        until(lambda: come() == 8)
        leaving = socket.create_connection(("127.0.0.1", client.port))
        leaving.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(small) + small)
        until(lambda: come() == 9)
        status, found = client.infer(encoded(*[small] * 4))
        assert (status, "after a moment" in found["error"]) == (503, True)
        assert client.headers["retry-after"] == "1"
        assert client.get("/v2/health/ready")[0] == 200
        leaving.close()
        until(lambda: metric(client, "algm_requests_running") == 8)
        assert come() == 8
        go.set()
        assert [one.result()[0] for one in first] == [200] * 8
    assert client.infer(encoded(*[small] * 4))[0] == 200
    assert sum(ran) == 12  # the picture of the client that left never ran
    assert 'status="499"' in client.ask("GET", "/metrics")[1].decode()
    gc.collect()
    assert "never retrieved" not in caplog.text  # in which asyncio tells of what was left lying


def test_metrics_tell_tokens(client: Any, photos: list[np.ndarray]) -> None:
    before = {name: metric(client, name) for name in ("algm_patches_total", 'algm_tokens_total{merge="gbm_3"}')}
    _, found = client.infer(pixels(photos[1]))
    assert metric(client, "algm_patches_total") - before["algm_patches_total"] == found["patches"][0]
    name = 'algm_tokens_total{merge="gbm_3"}'
    assert metric(client, name) - before[name] == found["token_counts"][0, -1]
    assert metric(client, 'algm_requests_total{status="200"}') >= 1


def test_the_page_comes_whole_and_loads_nothing_from_elsewhere(client: Any) -> None:
    status, page = client.ask("GET", "/")
    assert status == 200
    assert "default-src 'none'" in client.headers["content-security-policy"]
    for name in ("page.js", "page.css"):
        assert name.encode() in page
        status, content = client.ask("GET", f"/{name}")
        assert (status, b"http" in content) == (200, False)
    assert b"http" not in page
    assert client.get("/page/model.json")[1]["name"] == "net"


def test_a_bundle_that_is_replaced_or_removed_is_served_on(
    serving: Callable[..., Any], copied: Callable[..., Bundle], tiny_bundle: Bundle, photos: list[np.ndarray]
) -> None:
    bundle = copied(tiny_bundle)
    with serving(bundle) as client:
        version = client.get("/v2/models/net")[1]["versions"]
        wanted = client.infer(pixels(photos[2]))[1]
        with BundleWriter(bundle.path, bundle.recipe) as writer:  # another network, of one broken file
            writer.path("model.onnx").write_bytes(b"not a graph")
            writer.list_file("model.onnx")
        again = client.infer(pixels(photos[2]))[1]
        shutil.rmtree(bundle.path)
        last = client.infer(pixels(photos[2]), parameters={"tau": 0.9})[1]
        assert client.get("/v2/models/net")[1]["versions"] == version
    for found in (again, last):
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_bundle_with_labels_takes_pictures_of_one_window(
    serving: Callable[..., Any], labels_bundle: Bundle, photos: list[np.ndarray]
) -> None:
    with serving(labels_bundle) as client:
        status, found = client.infer(pixels(photos[0]))
        assert status == 200
        assert np.array_equal(found["labels"][0], client.predictor.predict(photos[0]))
        status, found = client.infer(pixels(photos[1]))
        assert (status, "one window" in found["error"]) == (400, True)


def test_a_network_without_merges_has_no_tokens_to_tell(
    serving: Callable[..., Any], tiny_export: Callable[..., Bundle], photos: list[np.ndarray]
) -> None:
    bundle = tiny_export({"merging.clap_layers": (), "merging.gbm_layers": (), "max_batch": 1})
    with serving(bundle) as client:
        assert [one["name"] for one in client.get("/v2/models/net")[1]["outputs"]] == [
            "labels",
            "labels_png",
            "patches",
        ]
        status, found = client.infer(pixels(photos[2]))
        assert (status, sorted(found)) == (200, ["labels", "patches"])
        assert np.array_equal(found["labels"][0], client.predictor.predict(photos[2]))
        status, found = client.infer(pixels(photos[2]), parameters={"tau": 0.5})
        assert (status, "reads no clap_threshold" in found["error"]) == (400, True)


def test_a_name_must_fit_addresses_and_a_port_be_free(tiny_bundle: Bundle) -> None:
    with Predictor(tiny_bundle, "onnxruntime-cpu") as predictor:
        with pytest.raises(BundleError, match="--name"), server(predictor, Settings(name="my net"), print):
            pass
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with server(predictor, Settings(port=port), print) as one, pytest.raises(ListenError, match=str(port)):
                one.run()


@contextmanager
def own_process(bundle: Path, *flags: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port, once it listens."""
    command = [sys.executable, "-m", "algm_deploy", "serve", str(bundle), f"--port={port}", "--name=net"]
    with subprocess.Popen(
        [*command, "--runtime=onnxruntime-cpu", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
    ) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def sent(port: int, content: bytes) -> socket.socket:
    """The connection of a photo whose answer was not read yet."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
    connection.sendall(head + content)
    return connection


def wait_for_request(port: int) -> None:
    """Until a picture waits for company or runs."""
    watcher = Client(port)
    until(lambda: bool(metric(watcher, "algm_pictures_waiting") or metric(watcher, "algm_requests_running")))


def test_a_killed_server_tells_its_clients_and_leaves_the_next_one_all_it_needs(
    tiny_bundle: Bundle, copied: Callable[..., Bundle], photos: list[np.ndarray]
) -> None:
    """SIGTERM lets the request that was taken finish, SIGKILL cuts it off at once; both leave bundle and port whole."""
    bundle = copied(tiny_bundle).path
    files = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    content = png_of(photos[0])
    with own_process(bundle, "--wait=60000") as (process, port), sent(port, content) as connection:
        wait_for_request(port)
        process.kill()
        started = time.monotonic()
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        assert time.monotonic() - started < 5
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == files
    with own_process(bundle, "--wait=2000", port=port) as (process, again):
        assert again == port
        with sent(port, content) as connection:
            wait_for_request(port)
            process.send_signal(signal.SIGTERM)  # while the picture waits for company, for 2 s
            answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]


def test_clients_that_read_no_answer_hold_nobody_up(client: Any, photos: list[np.ndarray]) -> None:
    """More of them than the server takes pictures, each with an answer beyond what its connection holds."""
    large = np.resize(photos[2], (600, 600, 3))
    head = json.dumps({"inputs": [encoded(png_of(large))], "outputs": [{"name": "labels"}]}).encode()
    lazy = []
    for _ in range(14):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", client.port))
        lazy.append(connection)
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), len(head)) + head
        )
        assert connection.recv(12) == b"HTTP/1.1 200"
    wanted = client.predictor.predict(photos[0])
    status, found = client.infer(pixels(photos[0]))
    assert (status, np.array_equal(found["labels"][0], wanted)) == (200, True)
    for connection in lazy:
        connection.close()
    assert client.get("/v2/health/ready")[0] == 200


def test_batches_have_few_sizes_and_lose_nobody(
    client: Any, photos: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    infer = Predictor.infer
    held_back, go, ran = threading.Event(), threading.Event(), []

    def held(self: Predictor, windows: np.ndarray, *rest: Any, **named: Any) -> Any:
        held_back.set()
        assert go.wait(30)
        ran.append(len(windows))
        return infer(self, windows, *rest, **named)

    monkeypatch.setattr(Predictor, "infer", held)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.infer, pixels(photos[0]))
        assert held_back.wait(30)
        rest = [pool.submit(client.infer, pixels(photos[0])) for _ in range(7)]
        until(lambda: metric(client, "algm_pictures_waiting") == 7)
        go.set()
        assert [one.result()[0] for one in (first, *rest)] == [200] * 8
    assert ran == [1, 4, 2, 1]


def test_the_code_of_the_page_on_serving_runs(
    client: Any, root_dir: Path, photos: list[np.ndarray], tmp_path: Path
) -> None:
    page = (root_dir / "docs" / "serving.md").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{client.port}")
    photo = tmp_path / "photo.jpg"
    Image.fromarray(photos[0]).save(photo)
    wanted = client.predictor.predict(photo)
    first, *curls = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()][
        1:
    ]
    assert parser().parse_args(first.split()[1:]).command == "serve"
    subprocess.run(["bash", "-ec", curls[1]], cwd=tmp_path, check=True)
    assert "algm-token-counts: " in (tmp_path / "headers.txt").read_text()
    subprocess.run(["bash", "-ec", curls[0]], cwd=tmp_path, check=True)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "labels.png")), wanted)
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-Ic", snippet], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tokens after each merge: [")


class Capturing:
    """A runner whose warm-ups take four seconds each, of a clock of its own, and capture seven graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.captures = 0.0, 5
        self.calls: list[tuple[int, float]] = []
        monkeypatch.setattr("algm_deploy.predictor.time.monotonic", lambda: self.now)

    def warm_up(self, images: int, seconds: float) -> bool:
        self.calls.append((images, seconds))
        if seconds <= 0:
            return False
        self.now, self.captures = self.now + 4, self.captures + 7
        return True


@pytest.mark.parametrize(
    ("on_gpu", "seconds", "left", "said"),
    [
        (True, 20, {1: 20, 2: 16, 4: 12, 8: 8, 12: 4}, "warm after 20.0 s, with 35 CUDA graphs"),
        (True, 7, {1: 7, 2: 3, 4: -1, 8: -1, 12: -1}, "8.0 s, with 14 CUDA graphs; there was no time for the others"),
        (True, 0, dict.fromkeys((1, 2, 4, 8, 12), 0), "warm after 0.0 s; there was no time"),
        (False, 20, {1: 20, 12: 16}, "with 14 CUDA graphs"),
    ],
)
def test_a_gpu_is_warm_for_every_size_of_a_batch(
    on_gpu: bool,
    seconds: float,
    left: dict[int, float],
    said: str,
    tiny_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran, capturing = [], Capturing(monkeypatch)
    fake: Any = SimpleNamespace(
        batch=12,
        on_gpu=on_gpu,
        signature=tiny_bundle.signature,
        infer=lambda windows: ran.append(len(windows)),
        _runner=capturing,
    )
    warmed = Predictor.warm_up(fake, seconds)
    assert ran == [*left], "blank windows are run however little time there is"
    assert dict(capturing.calls) == left
    assert said in str(warmed)


def test_a_server_is_warm_before_it_listens(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread that, like that of the batches, did not open the network."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    calls = []

    def warm_up(self: Predictor, seconds: float) -> WarmUp:
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass
        calls.append((seconds, threading.get_ident()))
        return WarmUp(1.25, 3, True)

    monkeypatch.setattr(Predictor, "warm_up", warm_up)
    monkeypatch.setattr(Runner, "captures", 3)
    listens = threading.Event()
    with (
        Predictor(tiny_bundle, "onnxruntime-cpu") as predictor,
        server(predictor, Settings(port=port, name="net", warm_up_s=7), lambda _: listens.set()) as one,
    ):
        assert [seconds for seconds, _ in calls] == [7]
        assert calls[0][1] != threading.get_ident()
        assert str(one.warmed) == "warm after 1.2 s, with 3 CUDA graphs"
        thread = threading.Thread(target=one.run)
        thread.start()
        try:
            assert listens.wait(60)
            client = Client(port, predictor)
            assert client.get("/v2/health/ready") == (200, {"ready": True})
            assert metric(client, "algm_warm_up_seconds") == 1.25
            predictor._runner.captures = 8
            assert metric(client, "algm_cuda_graphs") == 8
        finally:
            one.should_exit = True
            thread.join()


def test_a_network_that_does_not_run_ends_the_start(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ExecutionError("the device is gone")

    monkeypatch.setattr(Predictor, "infer", fails)
    with (
        Predictor(tiny_bundle, "onnxruntime-cpu") as predictor,
        pytest.raises(ExecutionError, match="device is gone"),
        server(predictor, Settings(name="net"), print),
    ):
        pass


def test_threads_take_short_turns_while_a_server_runs_and_not_after(tiny_bundle: Bundle) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    try:
        with Predictor(tiny_bundle, "onnxruntime-cpu") as predictor, server(predictor, Settings(name="net"), print):
            assert sys.getswitchinterval() < 0.001
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


def test_idle_connections_outlive_those_of_proxies(tiny_bundle: Bundle) -> None:
    """nginx keeps its connections to a server for 60 seconds without a request; so do load balancers of clouds."""
    with Predictor(tiny_bundle, "onnxruntime-cpu") as predictor, server(predictor, Settings(name="net"), print) as one:
        assert one.config.timeout_keep_alive > 60


def test_limits_have_defaults_that_fit_a_photo() -> None:
    limits = Limits()
    assert limits.body_bytes >= 12_000_000
    assert 12_000_000 <= limits.pixels < 89_478_485  # from where on Pillow warns
