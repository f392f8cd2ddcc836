"""Many forecasts: worker processes, which end with their parent, the only one to handle Ctrl-C; garbage."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from types import FrameType

ALLOCATIONS = 200_000
"""Allocations after which garbage is looked for while forecasts follow each other; Python's default is 700."""


@contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Looks for garbage in cycles after every `ALLOCATIONS` allocations only: forecasts leave little of it, and what
    they share makes each search long. At the default a seventh of the time of many forecasts is spent on it."""
    before = gc.get_threshold()
    gc.set_threshold(max(ALLOCATIONS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def count_cores() -> int:
    """Number of cores that this process may use: those of a batch job, not of the node it shares with others."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def open_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of processes; at the end it waits for work that is running, and cancels what is queued."""
    with _interrupt_once():
        pool = ProcessPoolExecutor(workers, initializer=_follow_parent)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupt_once() -> Iterator[None]:
    """Lets the first Ctrl-C through and ignores further ones: one that interrupts the shutdown of a pool leaves its
    workers waiting for work, and the parent for its workers, for ever."""
    own, previous = os.getpid(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:  # not a worker that was forked a moment ago
            signal.signal(number, signal.SIG_IGN)
            previous(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that another thread closes
            signal.signal(signal.SIGINT, previous)


def _follow_parent() -> None:
    """Makes a worker ignore Ctrl-C, and end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()
