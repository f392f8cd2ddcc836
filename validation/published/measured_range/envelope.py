"""Envelope of published utilisation: the best run of each GPU, number format of the GEMMs and class of model.

MFU and HFU are those of a report (docs/figures.md), from the measured time of a step and meshcast's own FLOP counts,
never the printed figure of a source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from meshcast.hardware.load import load, read_yaml
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.regimes import StepClass, step_class
from meshcast.simulator.ir.operators import QUANTISED
from meshcast.simulator.job.job import Job

FILE, JOBS = "envelope.yaml", "envelope_jobs.jsonl"

PLACES = ("best", "best_causal", "large")
"""The runs of an entry."""

ROOM = resources.files("meshcast.validation.published.measured_range")

SAME_PEAK = {"fp16": "bf16"}
"""Number formats that share an entry: GPUs of the catalog have the same peak rate for both."""

LARGE = 256
"""GPUs from which a job is compared with runs of as many GPUs or more, where there are some: on few GPUs neither a
network nor a pipeline costs anything, and many such runs are of models cut to some layers."""


@dataclass(frozen=True)
class BestRun:
    """A published run with the highest utilisation of its kind.

    mfu, causal: model FLOPs utilisation in the convention of PaLM, and with half of attention.
    hfu: hardware FLOPs utilisation; its FLOPs are those of the forecast of the run's plan.
    run: id of the run.
    gpus: of the run.
    model: its name, and the layers that were run.
    source: paper or repository, and the place in it.
    trust: how certain its figures are; empty if not stated.
    printed: utilisation and TFLOP/s as its source prints them, in the source's convention; empty if it prints none.
    """

    mfu: float
    causal: float
    hfu: float
    run: str
    gpus: int
    model: str
    source: str
    trust: str
    printed: str

    @property
    def job(self) -> Mapping[str, Any]:
        """The job of the run, as it is forecast."""
        return _read_jobs()[self.run]


@dataclass(frozen=True)
class EnvelopeEntry:
    """The best runs of a GPU, number format and class.

    best: in the convention of PaLM.
    best_causal: the best with half of attention; None if it is `best`.
    large: the best on `LARGE` GPUs or more; None if there is none, or it is `best`.
    runs, sources: behind the entry.
    """

    gpu: str
    number: str
    kind: StepClass
    best: BestRun
    best_causal: BestRun | None
    large: BestRun | None
    runs: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Envelope:
    """The best published utilisation that a job is compared with.

    best: the run with the highest MFU in the convention of PaLM.
    causal: the highest MFU with half of attention, of any run of the entry.
    gpu, number, kind: keys of the entry.
    borrowed: whether the entry is that of another GPU of the same architecture.
    large: whether it is of runs on `LARGE` GPUs or more.
    runs, sources: behind the entry.
    """

    best: BestRun
    causal: float
    gpu: str
    number: str
    kind: StepClass
    borrowed: bool
    large: bool
    runs: int
    sources: tuple[str, ...]

    @property
    def mfu(self) -> float:
        return self.best.mfu

    def __str__(self) -> str:
        of = f"{self.gpu}, {self.number}, {self.kind}"
        whose = f"borrowed from {of}" if self.borrowed else of
        return f"{self.mfu:.1%} ({whose}): {self.best.run} on {self.best.gpus:,} GPUs, {self.best.source}"


def format_of(job: Job) -> str:
    """Returns the number format of the GEMMs of a job, as the envelope names it."""
    framework = job.framework
    number = QUANTISED[framework.quantised].dtype if framework.quantised else framework.weights
    return SAME_PEAK.get(number, number)


def class_of(job: Job) -> StepClass:
    """Class of the model of a job."""
    return step_class(job.model.moe is not None, job.adapters is not None)


def published_envelope(job: Job) -> Envelope | None:
    """Returns the best published utilisation of the GPU, number format and class of a job.

    Of a GPU without an entry it is the best entry of its architecture; of a job on `LARGE` GPUs or more that of runs on
    as many, where there are some. None if nobody has published a run of the architecture, number format and class, or
    the job has GPUs of several kinds.
    """
    if job.cluster.groups:
        return None
    gpu = job.cluster.gpu
    key = format_of(job), class_of(job)
    entries = [entry for entry in read_envelope() if (entry.number, entry.kind) == key]
    of_gpu = [entry for entry in entries if entry.gpu == gpu.name]
    near = of_gpu or [entry for entry in entries if load("gpus", entry.gpu).architecture == gpu.architecture]
    envelopes = [_compare_by_size(entry, job.cluster.gpus, not of_gpu) for entry in near]
    return max(envelopes, key=lambda envelope: (envelope.large, envelope.mfu), default=None)


def _compare_by_size(entry: EnvelopeEntry, gpus: int, borrowed: bool) -> Envelope:
    runs = [run for run in (entry.best, entry.best_causal, entry.large) if run is not None]
    large = [run for run in runs if run.gpus >= LARGE] if gpus >= LARGE else []
    used = large or runs
    best, causal = max(used, key=lambda run: run.mfu), max(run.causal for run in used)
    keys = (entry.gpu, entry.number, entry.kind, borrowed, bool(large))
    return Envelope(best, causal, *keys, entry.runs, entry.sources)


@cache
def read_envelope() -> tuple[EnvelopeEntry, ...]:
    """Returns all entries: the table that ships with meshcast."""
    return tuple(_read_entry(entry) for entry in read_yaml(ROOM / FILE).data)


def _read_entry(entry: Mapping[str, Any]) -> EnvelopeEntry:
    best, best_causal, large = (BestRun(**entry[key]) if key in entry else None for key in PLACES)
    assert best is not None
    keys = (entry["gpu"], entry["format"], entry["class"])
    return EnvelopeEntry(*keys, best, best_causal, large, int(entry["runs"]), tuple(entry["sources"]))


@cache
def _read_jobs() -> dict[str, Mapping[str, Any]]:
    """Returns the jobs of the runs of the table, by the id of the run."""
    lines = (ROOM / JOBS).read_text("utf-8").splitlines()
    return {job["id"]: job for job in map(json.loads, lines)}
