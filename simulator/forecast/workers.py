"""Worker processes for many forecasts: they end with their parent, which alone handles Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from types import FrameType


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
