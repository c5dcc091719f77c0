"""Turns on the devices, and captures: who waits for whom, and what does not happen meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from algm_deploy.runners.turns import Turns, capturing


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
    turns = Turns()
    with turns.alone(FIRST), turns.alone(FIRST), turns.shared():
        assert enters(turns.shared)
        assert enters(lambda: turns.alone(SECOND))
        assert not enters(lambda: turns.alone(FIRST))
    assert enters(lambda: turns.alone(FIRST))


def test_nobody_has_a_turn_while_a_graph_is_captured() -> None:
    turns = Turns()
    with turns.alone(FIRST), turns.shared():
        with turns.capture():
            assert not enters(turns.shared)
            assert not enters(lambda: turns.alone(SECOND))
        assert enters(turns.shared)
    assert enters(lambda: turns.alone(FIRST))


def captures(turns: Turns, device: torch.device, entered: threading.Event, go_on: threading.Event) -> None:
    with turns.alone(device), turns.capture():
        entered.set()
        go_on.wait(10)


def test_a_capture_waits_for_the_turns_of_others_and_no_new_one_begins_before_it() -> None:
    turns, entered, go_on = Turns(), threading.Event(), threading.Event()
    go_on.set()
    with turns.shared():
        thread = threading.Thread(target=captures, args=(turns, FIRST, entered, go_on), daemon=True)
        thread.start()
        assert not entered.wait(0.1)
        assert not enters(turns.shared), "a busy server would never let it capture"
    assert entered.wait(10)
    thread.join(10)
    assert enters(turns.shared)


def test_two_captures_wait_for_each_other_and_both_happen() -> None:
    turns, go_on = Turns(), threading.Event()
    entered = threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=captures, args=(turns, device, event, go_on), daemon=True)
        for device, event in zip((FIRST, SECOND), entered, strict=True)
    ]
    for thread in threads:
        thread.start()
    while not any(event.wait(0.05) for event in entered):
        pass
    assert not all(event.wait(0.1) for event in entered), "one at a time"
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert all(event.is_set() for event in entered)
    assert enters(lambda: turns.alone(FIRST))


def test_a_thread_captures_for_the_one_that_has_the_turn() -> None:
    turns = Turns()
    with turns.alone(FIRST):
        assert enters(turns.capture)
        assert enters(turns.shared)


def test_an_error_ends_a_turn() -> None:
    turns = Turns()
    for turn in (turns.shared, lambda: turns.alone(FIRST)):
        with pytest.raises(ValueError, match="work"), turn():
            raise ValueError("work")
        with pytest.raises(ValueError, match="work"), turn(), turns.capture():
            raise ValueError("work")
        assert enters(lambda: turns.alone(FIRST))


def test_a_capture_that_is_interrupted_while_it_waits_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    turns = Turns()
    with turns.alone(FIRST), monkeypatch.context() as patch:
        patch.setattr(turns._change, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.capture():
            pass
    assert enters(lambda: turns.alone(FIRST))


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    with capturing(), capturing():
        assert not gc.isenabled()
    assert gc.isenabled()
