"""Turns on the devices, and captures: who waits for whom, and what does not happen meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from algm_deploy.runners import turns
from algm_deploy.runners.turns import alone, between_captures, capturing, wait_for


def enters(turn: Callable[[], AbstractContextManager[None]]) -> bool:
    """Whether another thread gets its turn now."""
    entered = threading.Event()

    def work() -> None:
        with turn():
            entered.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return entered.wait(0.1)


FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


def test_a_device_serves_one_at_a_time_and_several_side_by_side() -> None:
    with alone(FIRST), alone(FIRST):
        assert enters(lambda: alone(SECOND))
        assert not enters(lambda: alone(FIRST))
    assert enters(lambda: alone(FIRST))


def test_a_capture_leaves_all_work_alone_but_what_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device | None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with alone(FIRST), capturing():
        assert enters(lambda: alone(SECOND))
        assert not enters(between_captures)
        thread = threading.Thread(target=wait_for, args=(SECOND,), daemon=True)
        thread.start()
        thread.join(0.1)
        assert waited == []
    thread.join(10)
    assert waited == [SECOND]
    assert enters(between_captures)


def test_a_child_waits_for_no_thread_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOCK", "_CAPTURE"):
        monkeypatch.setattr(turns, name, getattr(turns, name))  # put back afterwards
    with capturing(), alone(FIRST):
        turns._in_child()
        assert enters(between_captures)
        assert enters(lambda: alone(FIRST))


def test_one_captures_at_a_time() -> None:
    with capturing(), capturing():
        assert not enters(capturing)
    assert enters(capturing)


def test_an_error_ends_a_turn() -> None:
    for turn in (lambda: alone(FIRST), capturing, between_captures):
        with pytest.raises(ValueError, match="work"), turn():
            raise ValueError("work")
        assert enters(turn)


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    with capturing(), capturing():
        assert not gc.isenabled()
    assert gc.isenabled()
