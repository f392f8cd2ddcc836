"""Sweeps: a job forecast at every point of a grid, on all cores, into one Parquet file.

::

    from experiments.sweeps.run import load_sweep, run
    summary = run(load_sweep("sweep.yaml"), "results.parquet")

Points are forecast in chunks of neighbours, and a chunk is the same whoever forecasts it: so are the results, on one
worker or many, resumed or not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiments.sweeps.expressions import Expression, parsed
from experiments.sweeps.grid import Changes, Names, Sweep, at, load_sweep
from experiments.sweeps.store import Row, Store
from hardware.errors import MeshcastError, PlanError
from simulator import load_job, simulate
from simulator.forecast.shared_work import SharedWork
from simulator.report.figures import row_of

__all__ = ["Sweep", "load_sweep", "run"]

CHUNK = 64
"""Points that are forecast and kept together: about a second of work, which is what an interruption costs."""

MOST_CHUNKS = 10_000
"""Larger sweeps have larger chunks instead of more files."""

WINDOW = 128
"""Chunks that are handed to the executor at once; two windows are under way."""


class Executor(Protocol):
    """Whatever has the `map` of the standard library's executors: it may work anywhere, and be lazy or not."""

    def map(self, work: Callable[[Any], Any], tasks: Iterable[Any], /) -> Iterable[Any]: ...


class Chunk(NamedTuple):
    """Some points that follow each other, with all that a worker needs to forecast them."""

    start: int
    points: list[Changes]
    job: dict[str, Any]
    base: str
    where: tuple[tuple[str, str], ...]
    """Texts of the constraints, and their places."""


def run(
    sweep: Sweep,
    out: str | Path,
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    restart: bool = False,
    watch: Callable[[int, int], None] = lambda done, points: None,
) -> dict[str, Any]:
    """Forecasts every point of a sweep into the Parquet file `out`; the summary of its rows.

    What an earlier run of the same sweep has kept beside `out` is not forecast again.

    executor: anything whose `map` is that of the standard library's executors; processes of this machine if not given.
    workers: so many processes; one for each core if not given.
    restart: discard what another sweep has left at `out`, or an earlier run of this one.
    watch: called after every chunk with the points that are done and that there are.
    Raises PlanError where rows cannot be written; KeyboardInterrupt leaves all finished chunks for the next run.
    """
    size = max(CHUNK, -(-sweep.points // MOST_CHUNKS))
    store = Store(Path(out), sweep, size, restart)
    if not store.finished:
        todo = [number for number in range(store.chunks) if number not in store.kept]
        watch(store.points_kept, sweep.points)
        with _at_work(executor, min(workers or os.cpu_count() or 1, len(todo)), store) as at_work:
            answers = _in_windows(at_work, (_chunk(sweep, number, size) for number in todo))
            for number, rows in zip(todo, answers, strict=True):
                store.keep(number, rows)
                watch(store.points_kept, sweep.points)
        store.join()
    return store.summary()


def _chunk(sweep: Sweep, number: int, size: int) -> Chunk:
    start = number * size
    points = [sweep.point(index) for index in range(start, min(start + size, sweep.points))]
    where = tuple((constraint.text, constraint.where) for constraint in sweep.where)
    return Chunk(start, points, sweep.job, str(sweep.base.absolute()), where)


def _in_windows(executor: Executor, chunks: Iterator[Chunk]) -> Iterator[list[Row]]:
    """The rows of every chunk, in order; the next window is at work before this one is read."""
    ahead: Iterator[list[Row]] = iter(())
    while window := list(islice(chunks, WINDOW)):
        following = iter(executor.map(answered, window))
        yield from ahead
        ahead = following
    yield from ahead


class _Here:
    """The executor of one worker: this process."""

    map = staticmethod(map)


@contextmanager
def _at_work(executor: Executor | None, workers: int, store: Store) -> Iterator[Executor]:
    """The executor given, or processes that live as long as this."""
    if executor is not None or workers <= 1:
        yield executor or _Here()
        return
    pool = ProcessPoolExecutor(workers, initializer=_obey)
    try:
        yield pool
    except BrokenExecutor:
        rule = f"a worker has died, most likely for want of memory; {store.points_kept:,} points are kept"
        raise PlanError("--workers", rule, f"Run it again with fewer, it goes on from {store.parts}", workers) from None
    finally:  # whoever interrupts waits for the chunks at work, not for those that wait
        pool.shutdown(cancel_futures=True)


def _obey() -> None:
    """A worker leaves Ctrl-C to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()


# ----------------------------------------------------------------------------------------- one chunk

_local = threading.local()


def answered(chunk: Chunk) -> list[Row]:
    """The rows of a chunk, without the points that break a constraint."""
    names = Names(chunk.job, Path(chunk.base))
    where = [parsed(*constraint) for constraint in chunk.where]
    if not hasattr(_local, "workshop"):  # one for each thread of a worker: what it knows changes no answer
        _local.shared_work = SharedWork()
    rows = (_row(changes, chunk, names, where) for changes in chunk.points)
    return [{"index": index, **row} for index, row in enumerate(rows, chunk.start) if row is not None]


def _row(changes: Changes, chunk: Chunk, names: Names, where: list[Expression]) -> Row | None:
    """The row of one point; None if it is left out."""
    try:
        look = names.at(changes)
        if not all(holds(look) for holds in where):
            return None
        report = simulate(load_job(at(chunk.job, changes), base=chunk.base), shared_work=_local.shared_work)
        told = report.to_dict()
        return {**changes, "status": told["status"], **row_of(told), "limits": told["limits"]}
    except MeshcastError as error:
        place = error.where.removeprefix("job.")
        return {**changes, "status": "invalid", "reason": f"{type(error).__name__} {place}: {error.rule}"}
    except Exception as error:  # a defect of meshcast, which must cost one row and not all the others
        return {**changes, "status": "invalid", "reason": f"meshcast failed: {type(error).__name__}: {error}"}
