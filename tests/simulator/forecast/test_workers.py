"""Worker processes: work that is in vain ends."""

import multiprocessing
import time
from concurrent.futures import BrokenExecutor
from ctypes import c_byte

import pytest

from meshcast.simulator.forecast.workers import open_pool, stop_if_asked

started: c_byte


def note(shared: c_byte) -> None:
    global started
    started = shared


def work() -> None:
    """Works for a minute, unless it is asked to stop."""
    started.value = 1
    for _ in range(6000):
        stop_if_asked()
        time.sleep(0.01)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_running_work_ends_with_an_error(error: type[BaseException]) -> None:
    begun = multiprocessing.RawValue("b", 0)
    with pytest.raises(error), open_pool(1, note, begun) as pool:
        future = pool.submit(work)
        while not begun.value:
            time.sleep(0.01)
        raise error
    assert isinstance(future.exception(), KeyboardInterrupt), "it worked on"


def sleep() -> None:
    """Does not look for a minute whether it is asked to stop."""
    started.value = 1
    time.sleep(60)


def test_running_work_that_never_asks_is_ended() -> None:
    begun = multiprocessing.RawValue("b", 0)
    with pytest.raises(ValueError), open_pool(1, note, begun) as pool:
        future = pool.submit(sleep)
        while not begun.value:
            time.sleep(0.01)
        raise ValueError
    assert isinstance(future.exception(), BrokenExecutor), "it was waited for"


def test_work_outside_of_a_pool_is_never_asked_to_stop() -> None:
    stop_if_asked()
