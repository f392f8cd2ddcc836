"""Runs a sweep: forecasts a job at every point of a grid, on all cores, and writes a Parquet file.

::

    from meshcast.experiments.sweeps.run import load_sweep, run
    summary = run(load_sweep("sweep.yaml"), "results.parquet")

Consecutive points are forecast in chunks. A chunk has the same rows in any process, so the result depends neither on
the number of workers nor on interruptions, nor on the machines at work: processes here, a Dask cluster, or shards in a
job array, which `experiments.sweeps.merge` joins.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshcast.experiments.sweeps.cluster import connect, forecast_on
from meshcast.experiments.sweeps.expressions import Expression, parse_constraint
from meshcast.experiments.sweeps.fingerprint import MANY, stat_named_files
from meshcast.experiments.sweeps.grid import Changes, Names, Sweep, apply_changes, load_sweep
from meshcast.experiments.sweeps.simulated_runs import forecast_run, simulates_runs
from meshcast.experiments.sweeps.store import WHOLE, Row, Shard, Store
from meshcast.hardware.errors import Defect, MeshcastError, PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.workers import collect_garbage_rarely, count_cores, open_pool, stop_if_asked
from meshcast.simulator.report.figures import row_of
from meshcast.simulator.report.report import Report

__all__ = ["Sweep", "load_sweep", "run"]

CHUNK = 64
"""Points that are forecast and stored together: about a second of work, which an interruption loses."""

CHUNK_OF_RUNS = 4
"""The same of points whose runs are simulated, each of which takes a second or more."""

MAX_CHUNKS = 10_000
"""Maximum number of chunks; larger sweeps have larger chunks."""

WINDOW = 128
"""Chunks in a call of the executor's `map`; two calls are in progress."""


class Executor(Protocol):
    """Any object with the `map` of the standard library's executors, local or remote, lazy or not."""

    def map(self, work: Callable[[Any], Any], tasks: Iterable[Any], /) -> Iterable[Any]: ...


class Chunk(NamedTuple):
    """Consecutive points, with everything that a worker needs to forecast them."""

    start: int
    points: list[Changes]
    job: dict[str, Any]
    base: str
    where: tuple[tuple[str, str], ...]
    """Texts of the constraints, each with its place for error messages."""
    many: bool
    """Whether the sweep has as many points as compiled loops are worth."""


def run(
    sweep: Sweep,
    out: str | Path,
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    on: str | None = None,
    part: Shard = WHOLE,
    restart: bool = False,
    watch: Callable[[int, int], None] = lambda done, points: None,
    tell: Callable[[str], object] = warnings.warn,
) -> dict[str, Any]:
    """Forecasts every point of a sweep into the Parquet file `out` and returns the summary of its rows.

    Chunks that an earlier run of the same sweep has stored are not forecast again.

    executor: runs the chunks; processes of this machine if None.
    workers: number of these processes; as many as cores that this process may use if None.
    on: address of a Dask scheduler, ``dask://host:8786``, whose workers run the chunks instead.
    part: the shard of the sweep to forecast.
    restart: discards results of another sweep, or of an earlier run of this sweep, at `out`.
    watch: called after every chunk with the number of finished points and of all points.
    tell: called with what is wrong and may pass, such as a cluster without a worker.
    Raises PlanError if rows cannot be written, or if workers cannot forecast them. KeyboardInterrupt leaves the
    finished chunks for the next run.
    """
    least = min(CHUNK, CHUNK_OF_RUNS) if simulates_runs(sweep.job, sweep.fields) else CHUNK
    size = max(least, -(-sweep.points // MAX_CHUNKS))
    store = Store(Path(out), sweep, size, restart, part)
    if not store.finished:
        todo = [number for number in store.chunks if number not in store.kept]
        watch(store.points_kept, store.points)
        with _open_answers(store, todo, executor, count_cores() if workers is None else workers, on, tell) as answers:
            for number, rows in answers:
                store.keep(number, rows)
                watch(store.points_kept, store.points)
        store.join()
    return store.summary()


@contextmanager
def _open_answers(
    store: Store,
    todo: list[int],
    executor: Executor | None,
    workers: int,
    on: str | None,
    tell: Callable[[str], object],
) -> Iterator[Iterator[tuple[int, list[Row]]]]:
    """Yields the chunks `todo`, by number, with their rows, as they are forecast."""
    sweep, size = store.sweep, store.chunk
    if on is not None and todo:
        with connect(on) as client:
            yield forecast_on(client, forecast_numbered, sweep, size, todo, store.tell_kept, tell)
        return
    with _open_executor(executor, min(workers, len(todo)), store) as at_work:
        chunks = (_make_chunk(sweep, number, size) for number in todo)
        yield zip(todo, _map_in_windows(at_work, chunks), strict=True)


def forecast_numbered(sweep: Sweep, number: int, size: int) -> list[Row]:
    """Forecasts chunk `number` of a sweep in chunks of `size` points."""
    return forecast_chunk(_make_chunk(sweep, number, size))


def _make_chunk(sweep: Sweep, number: int, size: int) -> Chunk:
    start = number * size
    points = [sweep.point(index) for index in range(start, min(start + size, sweep.points))]
    where = tuple((constraint.text, constraint.where) for constraint in sweep.where)
    return Chunk(start, points, sweep.job, str(sweep.base.absolute()), where, sweep.points >= MANY)


def _map_in_windows(executor: Executor, chunks: Iterator[Chunk]) -> Iterator[list[Row]]:
    """Yields the rows of every chunk, in order; each window is submitted before that ahead of it is read."""
    ahead: Iterator[list[Row]] = iter(())
    while window := list(islice(chunks, WINDOW)):
        following = iter(executor.map(forecast_chunk, window))
        yield from ahead
        ahead = following
    yield from ahead


class _Here:
    """Executor of a single worker: this process."""

    map = staticmethod(map)


@contextmanager
def _open_executor(executor: Executor | None, workers: int, store: Store) -> Iterator[Executor]:
    """Yields `executor`, or a process pool that is shut down with the context."""
    if executor is not None or workers <= 1:
        yield executor or _Here()
        return
    try:
        with open_pool(workers) as pool:
            yield pool
    except BrokenExecutor:
        rule = f"a worker was killed, most likely for lack of memory; {store.points_kept:,} points are kept"
        raise PlanError(
            "--workers", rule, f"Run it again with fewer workers, it goes on from {store.parts}", workers
        ) from None


# -------------------------------------------------------------------------------------------- chunks

_local = threading.local()


def forecast_chunk(chunk: Chunk) -> list[Row]:
    """Forecasts the points of a chunk, except those that violate a constraint, and returns their rows."""
    names = Names(chunk.job, Path(chunk.base))
    where = [parse_constraint(*constraint) for constraint in chunk.where]
    forecast = _find_forecast(chunk)
    with collect_garbage_rarely():
        rows = [_forecast_point(changes, chunk, names, where, forecast) for changes in chunk.points]
    return [{"index": index, **row} for index, row in enumerate(rows, chunk.start) if row is not None]


def _find_forecast(chunk: Chunk) -> Callable[[Changes], Report]:
    """Returns what forecasts the jobs of a chunk; it keeps what they share for each thread."""
    if not hasattr(_local, "shared_work"):
        _local.shared_work = SharedWork()
    shared = _local.shared_work
    if not chunk.many or any(simulates_runs(chunk.job, changes) for changes in chunk.points):
        return lambda job: simulate(load_job(job, base=chunk.base), shared_work=shared)
    from meshcast.simulator.batch.grid import Grid  # loads a compiler where there is one

    # Jobs that are derived from others know nothing of files that have changed since.
    files = stat_named_files([chunk.job, chunk.points], Path(chunk.base))
    if getattr(_local, "inputs", None) != (chunk.base, files):
        _local.inputs, _local.grid = (chunk.base, files), Grid(shared, chunk.base)
    grid: Grid = _local.grid
    return grid.report


def _forecast_point(
    changes: Changes,
    chunk: Chunk,
    names: Names,
    where: list[Expression],
    forecast: Callable[[Changes], Report],
) -> Row | None:
    """Returns the row of a point; None if the point violates a constraint."""
    stop_if_asked()
    try:
        look = names.at(changes)
        if not all(holds(look) for holds in where):
            return None
        report = forecast(apply_changes(chunk.job, changes))
        simulated = forecast_run(report) if simulates_runs(chunk.job, changes) else {}
        return {**changes, "status": report.fit.verdict, **row_of(report), **simulated, "limits": report.limits}
    except MeshcastError as error:
        place = error.where.removeprefix("job.")
        return {
            **changes,
            "status": "invalid",
            "reason": f"{type(error).__name__} {place}: {error.rule}. {error.remedy}",
        }
    except Exception as error:  # a defect of meshcast costs a single row, not the sweep
        vars(_local).clear()  # the failure may have left what is kept incomplete
        return {**changes, "status": "invalid", "reason": Defect.of(error).rule}
