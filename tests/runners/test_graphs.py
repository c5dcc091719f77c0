"""Graphs whose capture fails, with a stand-in for the capture; on CUDA, a real failure."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from algm_deploy.runners import graphs as graphs_module
from algm_deploy.runners.graphs import Graphs, give_back, take_stream


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    def captured(self: Graphs, work: Callable[[], object], pool: object, joins: bool = False) -> None:
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graphs, "_captured", captured)
    made = object.__new__(Graphs)
    made._graphs, made._limit, made.captures = OrderedDict(), 2, 0
    made._patient, made._met = False, set()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    made._device, made._pool = torch.device("cpu"), (0, 0)
    return made


def test_a_failed_capture_gives_the_result_and_is_not_tried_again(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []

    def work() -> int:
        runs.append(None)
        return len(runs)

    with caplog.at_level(logging.WARNING, "algm_deploy"):
        results = [graphs.run((1,), work) for _ in range(3)]
    assert results == [1, 3, 4], "done, then tried; afterwards only done"
    assert graphs.captures == 0
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "operation not permitted" in caplog.text


def test_patience_waits_for_the_second_time(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []
    graph = SimpleNamespace(replay=lambda: replayed.append("again"))
    monkeypatch.setattr(Graphs, "_captured", lambda self, work, pool, joins: graph)
    with graphs.warming():
        pass
    assert graphs.run((1,), lambda: "new") == "new"
    assert (len(graphs), graphs.captures) == (0, 0)
    assert graphs.run((1,), lambda: "twice") == "twice"
    assert (len(graphs), graphs.captures) == (1, 1)
    assert graphs.run((1,), lambda: "no more") == "twice"
    assert replayed == ["again"]
    with graphs.warming():
        graphs.run((2,), lambda: "at once")
    assert graphs.captures == 2


def test_what_was_dropped_comes_for_the_first_time_again(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "_captured", lambda self, work, pool, joins=False: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with graphs.warming():
        pass
    for _ in range(2):
        graphs.run((1,), lambda: None)
        graphs.drop(lambda key: key == (1,))
    assert graphs.captures == 0, "its memory was another"


def test_an_error_of_the_work_is_an_error(graphs: Graphs) -> None:
    def work() -> None:
        raise RuntimeError("shape")

    with pytest.raises(RuntimeError, match="shape"):
        graphs.run((1,), work)
    assert len(graphs) == 0


def test_two_never_have_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch hands out the same 32 in turn."""
    device, made = torch.device("cpu", 7), 0

    class Stream:
        def __init__(self, device: torch.device) -> None:
            nonlocal made
            self.device, self.cuda_stream = device, made % 32
            made += 1

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(graphs_module, "wait_for", lambda _: None)
    streams = [take_stream(device) for _ in range(20)]
    made += 12  # others took the rest, and gave them back
    streams += [take_stream(device) for _ in range(12)]
    assert len({stream.cuda_stream for stream in streams}) == 32
    give_back(streams[5])
    assert take_stream(device) is streams[5]
    assert take_stream(device) is not None, "beyond all of them one is shared"


@pytest.mark.gpu
def test_work_that_waits_for_the_device_runs_without_a_graph() -> None:
    graphs = Graphs(torch.device("cuda", 0), 4)
    x = torch.arange(4, device="cuda")

    def waits() -> int:
        return int((x + 1).sum())

    def adds() -> torch.Tensor:
        return x.add_(1)

    assert [graphs.run((0,), waits) for _ in range(3)] == [10, 10, 10]
    for expected in (10, 14, 18):
        assert int(graphs.run((1,), adds).sum()) == expected, "other work goes on"
    assert graphs.captures == 1, "and is captured"
    assert gc.isenabled()


@pytest.mark.gpu
def test_random_numbers_are_there_after_a_capture_failed() -> None:
    """PyTorch 2.11 by itself leaves its generator as during a capture."""
    graphs, x = Graphs(torch.device("cuda", 0), 4), torch.arange(4, device="cuda")
    out = torch.empty_like(x)

    def doubles() -> None:
        torch.mul(x, 2, out=out)

    graphs.run((0,), doubles)
    assert graphs.run((1,), lambda: int(x.sum())) == 6
    assert len(torch.rand(3, device="cuda").tolist()) == 3
    out.zero_()
    graphs.run((0,), doubles)
    assert out.tolist() == [0, 2, 4, 6], "older graphs stay"
    assert graphs.captures == 1
