"""Turns on the devices, and captures: who waits for whom, and what does not happen meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

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


def test_many_share_and_one_is_alone() -> None:
    turns = Turns()
    with turns.shared(), turns.shared():
        assert enters(turns.shared)
        assert not enters(turns.alone)
    with turns.alone(), turns.alone(), turns.shared():
        assert not enters(turns.shared)
        assert not enters(turns.alone)
    assert enters(turns.alone)


def test_an_error_ends_a_turn() -> None:
    turns = Turns()
    for turn in (turns.alone, turns.shared):
        with pytest.raises(ValueError, match="work"), turn():
            raise ValueError("work")
        assert enters(turns.alone)


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    with capturing(), capturing():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with capturing():
            pass
        assert not gc.isenabled(), "whoever switched it off keeps it so"
    finally:
        gc.enable()
