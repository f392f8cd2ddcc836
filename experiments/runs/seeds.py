"""Simulates the runs of a job, on this process or several: the same runs whatever their number, or in which order."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, wait
from contextlib import contextmanager
from ctypes import Array, c_double
from functools import cached_property
from multiprocessing import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshcast.experiments.sweeps.grid import Sweep
from meshcast.experiments.sweeps.store import Row, Store, arrow_types, refuse_damage
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.workers import count_cores, open_pool, stop_if_asked
from meshcast.simulator.report.version import product_version
from meshcast.simulator.runs.failures import FailingUnits, FailureLog
from meshcast.simulator.runs.inputs import RunPlan
from meshcast.simulator.runs.training import TIMES, RunSetting, SimulatedRun, simulate_run

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 8
"""Runs that are simulated and stored together: seconds of work, which an interruption loses."""

MAX_CHUNKS = 10_000

TOLD_EVERY = 0.25
"""Time after which running chunks are asked how far they are [s]."""

Watch = Callable[[int, int], None]
"""Called after every chunk with the number of finished runs and of all runs."""

Tell = Callable[[float], None]
"""Called now and then with how many runs are done of those after the finished chunks, parts of them included."""


class Seeds(NamedTuple):
    """Consecutive runs, with all that a worker needs.

    start: number of the first run.
    runs: how many.
    """

    setting: RunSetting
    seed: int
    start: int
    runs: int


def simulate_seeds(task: Seeds, tell: Tell = lambda done: None) -> list[SimulatedRun]:
    """Simulates some of the runs of a job. Raises PlanError if any does not end."""

    def follow(share: float) -> None:
        stop_if_asked()
        tell(len(runs) + share)

    runs: list[SimulatedRun] = []
    for i in range(task.runs):
        runs.append(simulate_run(task.setting, task.seed, task.start + i, follow))
    return runs


def simulate_runs(
    plan: RunPlan,
    workers: int | None = None,
    watch: Watch = lambda done, runs: None,
    tell: Tell = lambda done: None,
) -> list[SimulatedRun]:
    """Simulates all runs of a job. workers: number of processes; as many as cores that this process may use if None.
    Raises PlanError if a worker is killed, and if a run does not end."""
    simulated: list[SimulatedRun] = []
    watch(0, plan.seeds)
    for runs in _simulate_tasks(_make_tasks(plan, CHUNK), workers, tell):
        simulated += runs
        watch(len(simulated), plan.seeds)
    return simulated


class RunSimulator:
    """Simulates the runs of plans in turn, on this process, or on those of a pool.

    cpu: CPU time of the others [s].
    """

    def __init__(self, pool: Executor | None = None, workers: int = 1) -> None:
        self._pool, self._workers, self.cpu = pool, workers, 0.0

    def run(self, plan: RunPlan) -> list[SimulatedRun]:
        """Simulates all runs: the same on any number of processes. Raises PlanError if a worker is killed."""
        if self._pool is None:
            return simulate_seeds(Seeds(plan.setting, plan.seed, 0, plan.seeds))
        size = max(1, -(-plan.seeds // (2 * self._workers)))
        simulated: list[SimulatedRun] = []
        try:
            for runs, cpu in self._pool.map(_time_seeds, _make_tasks(plan, size)):
                simulated += runs
                self.cpu += cpu
        except BrokenExecutor:
            raise _explain_killed(self._workers) from None
        return simulated


@contextmanager
def open_simulator(workers: int) -> Iterator[RunSimulator]:
    """Yields a simulator on so many processes, which are started at once."""
    if workers < 2:
        yield RunSimulator()
        return
    with open_pool(workers) as pool:
        pool.submit(count_cores).result()  # before this process has threads, or much memory
        yield RunSimulator(pool, workers)


def _time_seeds(task: Seeds) -> tuple[list[SimulatedRun], float]:
    """Simulates some of the runs of a job; with the CPU time that it took [s]."""
    began = time.process_time()
    return simulate_seeds(task), time.process_time() - began


def store_runs(
    plan: RunPlan,
    job: dict[str, Any],
    base: Path,
    out: Path,
    workers: int | None = None,
    restart: bool = False,
    watch: Watch = lambda done, runs: None,
    tell: Tell = lambda done: None,
) -> list[SimulatedRun]:
    """Simulates all runs of a job into a Parquet file with a row for each; those that an earlier call has stored are
    not simulated again.

    job: as plain data, as it was written. base: folder of its relative paths. restart: discards what `out` holds.
    Raises PlanError if rows cannot be written, or are those of another job, and if a run does not end.
    """
    chunk = max(CHUNK, -(-plan.seeds // MAX_CHUNKS))
    store = SeedStore(out, job, base, plan, chunk, restart)
    if not store.finished:
        todo = [number for number in store.chunks if number not in store.kept]
        watch(store.points_kept, store.points)
        answers = _simulate_tasks(_make_tasks(plan, chunk, todo), workers, tell)
        for number, runs in zip(todo, answers, strict=True):
            first = number * chunk
            store.keep(number, [store.make_row(first + i, run) for i, run in enumerate(runs)])
            watch(store.points_kept, store.points)
        store.join()
    return store.read_runs()


def _make_tasks(plan: RunPlan, size: int, numbers: Iterable[int] | None = None) -> list[Seeds]:
    """Returns the tasks of chunks of `size` runs. numbers: of the chunks; None: all."""
    starts = [number * size for number in numbers] if numbers is not None else range(0, plan.seeds, size)
    return [Seeds(plan.setting, plan.seed, start, min(size, plan.seeds - start)) for start in starts]


def _simulate_tasks(tasks: list[Seeds], workers: int | None, tell: Tell) -> Iterator[list[SimulatedRun]]:
    """Yields the runs of every task, in order, simulated by several processes or by this process alone."""
    number = min(workers or count_cores(), len(tasks))
    if number <= 1:
        yield from (simulate_seeds(task, tell) for task in tasks)
        return
    done = RawArray("d", len(tasks))  # of every task its runs, parts of them included
    try:
        with open_pool(number, _share_progress, done) as pool:
            futures = [pool.submit(_simulate_told, at, task) for at, task in enumerate(tasks)]
            for at, future in enumerate(futures):
                while not wait([future], TOLD_EVERY).done:
                    tell(sum(done[at:]))
                yield future.result()
    except BrokenExecutor:
        raise _explain_killed(workers) from None


_done: Array[c_double]
"""Of a worker: shared memory with the runs of every task that are done."""


def _share_progress(done: Array[c_double]) -> None:
    global _done
    _done = done


def _simulate_told(number: int, task: Seeds) -> list[SimulatedRun]:
    """Simulates a task in a worker, and tells its parent how far it is."""

    def tell(done: float) -> None:
        _done[number] = done

    runs = simulate_seeds(task, tell)
    tell(task.runs)
    return runs


def _explain_killed(workers: int | None) -> PlanError:
    """Returns the error of a pool that lost a worker."""
    rule = "a worker was killed, most likely for lack of memory"
    return PlanError("--workers", rule, "Run it again with fewer workers", workers)


class SeedStore(Store):
    """The rows of the runs of a job on disk, a row for each run."""

    def __init__(self, out: Path, job: dict[str, Any], base: Path, plan: RunPlan, chunk: int, restart: bool) -> None:
        self.components = _name_components(plan.setting)
        numbers = tuple({"number": number} for number in range(plan.seeds))
        super().__init__(out, Sweep(job, base, (numbers,), name="run"), chunk, restart)

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns: number of the run, its steps, its duration by use, failures by component."""
        import pyarrow as pa

        kinds = arrow_types()
        names = {"index": pa.int64(), "steps": kinds[int], **{f"{name}_s": kinds[float] for name in TIMES}}
        names |= {f"failures_{name}": kinds[int] for name in self.components}
        about = {"version": product_version(), "fingerprint": self.fingerprint, "points": self.sweep.points}
        about |= {"chunk": self.chunk, "job": self.sweep.job}
        return pa.schema(list(names.items())).with_metadata({"meshcast": json.dumps(about)})

    def make_row(self, number: int, run: SimulatedRun) -> Row:
        times = {f"{name}_s": run.time_s[name] for name in TIMES}
        failures = {f"failures_{name}": run.failures.get(name, 0) for name in self.components}
        return {"index": number, "steps": run.steps, **times, **failures}

    def read_runs(self) -> list[SimulatedRun]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(self.out, use_threads=False, page_checksum_verification=True).to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise refuse_damage(self.out, str(error)) from None
        if len(rows) != self.points or not all(_is_count(cell) for row in rows for cell in row.values()):
            raise refuse_damage(self.out, f"it does not hold {self.points:,} rows of numbers from 0")
        return [
            SimulatedRun(
                {name: row[f"{name}_s"] for name in TIMES},
                {name: row[f"failures_{name}"] for name in self.components if row[f"failures_{name}"]},
                row["steps"],
            )
            for row in rows
        ]


def _is_count(cell: float | None) -> bool:
    return cell is not None and 0 <= cell < math.inf


def _name_components(setting: RunSetting) -> Sequence[str]:
    """Returns names of all components that may fail, sorted."""
    components = set[str]()
    for source in setting.sources:
        if isinstance(source, FailingUnits):
            components.add(source.component)
        elif isinstance(source, FailureLog):
            components.update(entry.component for entry in source.entries)
    return sorted(components)
