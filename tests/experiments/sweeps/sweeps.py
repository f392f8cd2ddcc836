"""Shared by the tests of sweeps: small sweeps, and executors of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.grid import Names
from meshcast.experiments.sweeps.run import Chunk, Sweep, load_sweep

ROOT = Path(__file__).resolve().parents[3]
JOB: dict[str, Any] = {
    "model": "gpt2-124m",
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "sequence": 1024},
}
GRID: dict[str, Any] = {
    "job": JOB,
    "vary": {"plan.tp": [1, 2, 3, 4], "plan.pp": [1, 2], "batch.micro": [1, 2], "plan.recompute": ["none", "full"]},
    "where": ["plan.tp * plan.pp <= 4"],
}
"""32 points: 8 left out, 4 with a tp that 16 GPUs do not allow."""


class Lazy:
    """An executor that has a map and nothing else."""

    map = staticmethod(map)


class Counting:
    """An executor that notes the first point of every chunk that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def map(self, work: Any, tasks: Any) -> Any:
        tasks = list(tasks)
        self.asked.extend(task.start for task in tasks)
        return map(work, tasks)


class Whole:
    """An executor whose map answers when all is done, as multiprocessing's pools do."""

    def map(self, work: Any, tasks: Any) -> list[Any]:
        return [work(task) for task in list(tasks)]


@contextmanager
def know_forecasts(rows: Path) -> Iterator[None]:
    """Gives every point the forecast that a file has of its index, and leaves out those that it leaves out."""
    known = {row["index"]: row for row in pq.read_table(rows).to_pylist()}

    def forecast_chunk(chunk: Chunk) -> list[dict[str, Any]]:
        points = enumerate(chunk.points, chunk.start)
        return [{**known[index], **changes} for index, changes in points if index in known]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "forecast_chunk", forecast_chunk)
        yield


def sweep(**keys: Any) -> Sweep:
    return load_sweep({"job": JOB, **keys})


def points(of: Sweep) -> list[dict[str, Any]]:
    return [of.point(index) for index in range(of.points)]


def kept(of: Sweep) -> list[dict[str, Any]]:
    """The points that break no constraint."""
    names = Names(of.job, of.base)
    return [point for point in points(of) if all(holds(names.at(point)) for holds in of.where)]


def values(axis: Any, **job: Any) -> list[Any]:
    return [point["plan.tp"] for point in points(load_sweep({"job": {**JOB, **job}, "vary": {"plan.tp": axis}}))]
