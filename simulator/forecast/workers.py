"""Many forecasts: worker processes, which end with their parent, which alone handles Ctrl-C; garbage.

Work that takes longer than a second calls `stop_if_asked` now and then, so that an error or Ctrl-C need not wait for
it. A worker that does not, as while loops are compiled, is ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import c_byte
from multiprocessing import connection, parent_process
from types import FrameType

ALLOCATIONS = 50_000
"""Allocations after which garbage is looked for while forecasts follow each other; Python's default is 700, and a
command, which mostly makes a single forecast, has more."""


LOOK, PATIENCE = 0.2, 1.2
"""How often a worker looks whether its work is in vain, and how long it may then take to say so itself [s]."""


@contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Looks for garbage in cycles after every `ALLOCATIONS` allocations only: forecasts leave little of it, and what
    they share makes each search long. At the default a seventh of the time of many forecasts is spent on it; never
    looked for, it fills 80 MB in 8,000 forecasts."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def count_cores() -> int:
    """Counts cores that this process may use: those of a batch job, not of the node it shares with others."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def open_pool(
    workers: int, prepare: Callable[..., None] | None = None, *arguments: object
) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of processes; at the end it waits for work that is running, and cancels what is queued. After an
    error or Ctrl-C running work ends where it asks (`stop_if_asked`), or after `PATIENCE`.

    prepare: called in every worker with what follows, which may be shared memory.
    """
    stop = multiprocessing.RawValue("b", 0)

    def ask() -> None:
        stop.value = 1

    with _interrupt_once(ask):
        pool = ProcessPoolExecutor(workers, initializer=_follow_parent, initargs=(stop, prepare, *arguments))
        try:
            yield pool
        except BaseException:
            ask()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_stop: c_byte | None = None
"""Of a worker: a shared number that is 1 as soon as its work is in vain."""


def stop_if_asked() -> None:
    """Ends the work of a worker whose parent has no use for it any more. Raises KeyboardInterrupt."""
    if _stop is not None and _stop.value:
        raise KeyboardInterrupt


@contextmanager
def _interrupt_once(ask: Callable[[], None]) -> Iterator[None]:
    """Lets the first Ctrl-C through, after it has called `ask`, and ignores further ones: a second that interrupts the
    shutdown of a pool leaves its workers waiting for work, and the parent for its workers, for ever."""
    process, previous = os.getpid(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not a worker that was forked a moment ago
            signal.signal(number, signal.SIG_IGN)
            ask()
            previous(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that another thread closes
            signal.signal(signal.SIGINT, previous)


def _follow_parent(stop: c_byte, prepare: Callable[..., None] | None, *arguments: object) -> None:
    """Makes a worker ignore Ctrl-C, and end with its parent or soon after `stop`."""
    global _stop
    _stop = stop
    if prepare is not None:
        prepare(*arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel, stop), daemon=True).start()


def _end_with(sentinel: int, stop: c_byte) -> None:
    """Ends this process with its parent, or where its work does not end although it is in vain. sentinel: of the
    parent."""
    while not connection.wait([sentinel], LOOK):
        if stop.value:
            connection.wait([sentinel], PATIENCE)
            break
    os._exit(1)
