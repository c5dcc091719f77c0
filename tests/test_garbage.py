"""Python collects nothing while any thread asks it not to."""

from __future__ import annotations

import gc
import threading

import pytest

from algm_deploy.garbage import no_collection


def test_nothing_is_collected_inside() -> None:
    with no_collection(), no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="work"), no_collection():
        raise ValueError("work")
    assert gc.isenabled()


def test_whoever_switched_it_off_keeps_it_so() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_lasts_until_the_last_thread_leaves() -> None:
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with no_collection():
            entered.set()
            leave.wait(10)

    with no_collection():
        other = threading.Thread(target=stay)
        other.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()
