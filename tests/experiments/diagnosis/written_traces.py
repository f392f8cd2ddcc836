"""Writes traces as torch's profiler writes them, of forecasts whose time is stretched where something is planted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.simulator import Report
from meshcast.simulator.report.trace import write_rank_traces
from meshcast.validation.traces.host_timeline import unite_spans

Rows = list[dict[str, Any]]
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


class WrittenTrace:
    """The trace of a rank, whose events are moved.

    data: of the file. rows: its events with a duration, times in microseconds.
    """

    def __init__(self, report: Report, folder: Path, stage: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = write_rank_traces(report, folder)[stage]
        self.data: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
        self.rows: Rows = [row for row in self.data["traceEvents"] if row.get("ph") == "X"]
        self.data["traceEvents"] = self.rows
        file.unlink()

    def kernels(self, wanted: Callable[[str], bool] = lambda name: True) -> Rows:
        """The kernels whose names are wanted."""
        return [row for row in self.rows if row["cat"] == "kernel" and wanted(row["name"])]

    def stretch(self, spans: Sequence[tuple[float, float]], factor: float) -> None:
        """Makes time pass more slowly within spans [us], so that all that lies in them takes `factor` times as long."""
        edges, moved, shift = [-1e18], [-1e18], 0.0
        for low, high in unite_spans(spans):
            edges += [low, high]
            moved += [low + shift, high + shift + (high - low) * (factor - 1)]
            shift += (high - low) * (factor - 1)
        edges.append(1e18)
        moved.append(1e18 + shift)

        def move(moment: float) -> float:
            at = np.searchsorted(edges, moment, "right") - 1
            part = (moment - edges[at]) / (edges[at + 1] - edges[at])
            inner = moved[at] + part * (moved[at + 1] - moved[at])
            outer = at == 0 or at == len(edges) - 2
            return moment + (shift if at == len(edges) - 2 else 0.0) if outer else inner

        for row in self.rows:
            begin, end = move(row["ts"]), move(row["ts"] + row["dur"])
            row["ts"], row["dur"] = begin, end - begin

    def insert(self, share: float, seconds: float, name: str = "") -> None:
        """Inserts a pause of the host before the kernel at a share of the step: nothing is launched in it. name: of the
        host's event in it."""
        kernels = sorted(self.kernels(), key=lambda row: row["ts"])
        at = kernels[int(share * (len(kernels) - 1))]["ts"]
        length = seconds * 1e6
        for row in self.rows:
            if row["ts"] >= at and row["cat"] in ("kernel", "gpu_memcpy"):
                row["ts"] += length
            elif row["cat"] in ("kernel", "gpu_memcpy") and row["ts"] + row["dur"] > at:
                row["dur"] = at - row["ts"]
        begun = {row["args"]["correlation"]: row["ts"] for row in self.kernels()}
        for row in self.rows:  # what is launched behind the pause is launched after it
            begin = begun.get(row.get("args", {}).get("correlation"))
            if row["cat"] == "cuda_runtime" and begin is not None and begin >= at + length:
                row["ts"] = max(row["ts"], at + length)
            if row["name"].startswith("ProfilerStep"):
                row["dur"] += length
        if name:
            self.rows.append(
                {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": length}
            )

    def vary(self, rng: np.random.Generator, noise: float = 0.05) -> WrittenTrace:
        """Stretches pieces of the step by noise."""
        first = min(row["ts"] for row in self.kernels())
        last = max(row["ts"] + row["dur"] for row in self.kernels())
        edges = np.linspace(first, last, 201)
        moved = first + np.concatenate([[0.0], np.cumsum(np.diff(edges) * np.exp(rng.normal(0, noise, 200)))])
        for row in self.rows:
            if row["cat"] != "user_annotation":
                begin, end = np.interp([row["ts"], row["ts"] + row["dur"]], edges, moved)
                row["ts"], row["dur"] = float(begin), float(end - begin)
            elif row["name"].startswith("ProfilerStep"):
                row["dur"] = float(moved[-1]) - row["ts"]
        return self

    def write(self, path: Path, rank: int | None = None) -> Path:
        """Writes the trace, of another rank of its stage where one is named."""
        if rank is not None:
            self.data["distributedInfo"]["rank"] = rank
        path.write_bytes(gzip.compress(json.dumps(self.data).encode(), 1))
        return path


def spans_of(rows: Rows) -> list[tuple[float, float]]:
    """The spans of events [us]."""
    return [(row["ts"], row["ts"] + row["dur"]) for row in rows]


def is_collective(name: str) -> bool:
    """Whether a kernel is NCCL's."""
    return name.startswith("nccl")
