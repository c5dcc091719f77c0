"""Sessions on CUDA, with stand-ins for the device; on a device, sessions that end while their work is under way."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import onnxruntime as ort
import pytest
import torch

from algm_deploy.bundle.store import Bundle
from algm_deploy.runners.onnxruntime import sessions
from algm_deploy.runners.onnxruntime.graphs import SegmentedSession
from algm_deploy.runners.onnxruntime.sessions import CudaSession, in_turn


class Stream:
    """A stream that writes down what it is asked for."""

    device = torch.device("cpu")

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.said.append(f"{self.name} is done")


class Ends:
    """Something whose end is written down."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def __del__(self) -> None:
        self.said.append(f"{self.name} ends")


@pytest.fixture
def said() -> list[str]:
    return []


def session_on(stream: Stream) -> CudaSession:
    session = object.__new__(CudaSession)
    session._stream, session._session = stream, Ends("session", stream.said)  # type: ignore[assignment]
    session._thresholds, session.device = {}, torch.device("cpu")
    return session


def test_a_session_ends_after_its_work(said: list[str]) -> None:
    session_on(Stream("work", said)).close()
    assert said == ["work is done", "session ends"]


class Kept(Ends):
    """Graphs."""

    def drop(self, belongs: Any) -> None:
        self.said.append("graphs go")


def test_segments_end_after_their_work_and_before_the_memory_they_work_in(said: list[str]) -> None:
    segmented = object.__new__(SegmentedSession)
    segmented._stream = Stream("work", said)  # type: ignore[assignment]
    segmented._joined, segmented.graphs = {1: Ends("joined", said)}, Kept("their stream", said)  # type: ignore[dict-item, assignment]
    segmented._segments = [Ends("session", said)]  # type: ignore[list-item]
    segmented._workspace = Ends("workspace", said)  # type: ignore[assignment]
    segmented.close()
    ends = ["work is done", "joined ends", "graphs go", "session ends", "workspace ends", "their stream ends"]
    assert said == ends


def test_memory_of_a_run_that_failed_is_not_given_away(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream, on which it is used next, waits for what was queued before the error."""
    monkeypatch.setattr(sessions.torch.cuda, "current_stream", lambda _: Stream("caller", said))
    with pytest.raises(RuntimeError, match="kernel"), in_turn(Stream("work", said)):  # type: ignore[arg-type]
        raise RuntimeError("kernel")
    assert said == ["work waits for caller", "caller waits for work"]


def test_thresholds_take_the_memory_of_one_each(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def on(stream: Stream) -> Any:
        said.append(stream.name)
        yield

    monkeypatch.setattr(sessions.torch.cuda, "stream", on)
    session = session_on(Stream("work", said))
    first = session._scalar("clap_threshold", 0.5)
    places = set()
    for step in range(100):
        scalar = session._scalar("clap_threshold", step / 128)
        places.add(scalar.data_ptr())
        assert (scalar.dtype, scalar.shape, float(scalar)) == (torch.float32, (), step / 128)
    assert places == {first.data_ptr()}
    assert session._scalar("gbm_threshold", 1.0).data_ptr() not in places
    written = len(said)
    session._scalar("gbm_threshold", 1.0)
    assert said == ["work"] * written, "what runs may still read the last value, so it changes behind that"


END = """
import sys
import numpy as np
import torch
from algm_deploy.bundle.store import Bundle
from algm_deploy.runners.contract import runner

bundle = Bundle.open(sys.argv[1])
image = np.zeros((2, *bundle.signature.image.shape[1:]), bundle.signature.image.dtype)
with runner(bundle, "torch") as run:
    for _ in range(3):
        run.infer({"image": image})
for _ in range(5):
    with runner(bundle, "onnxruntime-cuda") as run:
        given = torch.from_numpy(image).cuda()
        for _ in range(20):
            run.infer_device({"image": given})
        run.placement({"image": image})
print("ended")
"""


@pytest.mark.gpu
def test_sessions_end_while_their_work_is_under_way(tiny_bundle: Bundle) -> None:
    """Of the portable graph, whose standard operators leave host memory to be freed; in a process that it may abort."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    command = [sys.executable, "-c", END, str(tiny_bundle.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["ended"]), done.stderr[-2000:]
