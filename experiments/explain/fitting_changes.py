"""The cheapest changes of a plan that is tight or does not fit in memory which make it fit, by trial.

Each field of `FIELDS` is changed alone: more recomputation, sequence parallelism, more states sharded, smaller
micro-batches, more ranks of every kind, offloading. Where fewer than `SHOWN` changes fit, pairs are tried, those first
whose parts alone need least memory. Changes that break a rule are left out. All of them keep the model, the cluster and
the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import combinations, islice
from operator import attrgetter
from typing import Any, NamedTuple

from meshcast.experiments.explain.changeable_job import Change, ChangeableJob
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PLAN_KEYS, SCHEME_KEYS, PlanKey, choosing_keys, option_keys
from meshcast.simulator.plan.size import measure_size
from meshcast.simulator.report.peak_errors import FITS
from meshcast.simulator.report.report import Report

SHOWN = 3
"""Changes that are shown."""

PAIRS = 40
"""Most pairs that are tried."""

TRIALS = 1.0
"""Most trials, in forecasts of the size of those that are made unasked."""


@dataclass(frozen=True)
class FittingChange:
    """A change of a plan that was tried.

    changes: fields with their new values.
    forecast: step time and memory with them.
    saved: by how much less the fullest GPU needs [bytes].
    """

    changes: Change
    forecast: StepAndMemory
    saved: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the change in the answer of ``predict --json``."""
        return {
            "changes": self.changes,
            "step_time_s": self.forecast.step_time,
            "peak_device_gib": self.forecast.peak_device / GIB,
            "saved_gib": self.saved / GIB,
        }

    def __str__(self) -> str:
        return " ".join(f"--set {field}={write_change(value)}" for field, value in self.changes.items())


class MemoryChanges(NamedTuple):
    """Changes of a plan by their memory.

    fitting: those with the shortest steps with which it fits, at most `SHOWN` and of different fields.
    lever: the change of a single field that saves most; None if none saves anything.
    """

    fitting: list[FittingChange]
    lever: FittingChange | None


NO_CHANGES = MemoryChanges([], None)


def fitting_changes(report: Report, shared_work: SharedWork | None = None, of_any_form: bool = False) -> MemoryChanges:
    """Returns the changes that make a plan fit, with the probability of `FITS`, and that which saves most memory.

    of_any_form: also of a plan in long form, which ``--set`` does not change so.
    None of a plan that fits, and of plans with listed stages or replicas, whose fields are not those of `FIELDS`.
    """
    job, shared = ChangeableJob(report.job), shared_work or SharedWork()
    if report.fit.verdict == "fits" or not job.is_uniform or (job.is_long and not of_any_form):
        return NO_CHANGES
    needed, room, tried = report.fit.held, report.fit.error.ratio(FITS), list[FittingChange]()
    # A step that takes seconds is played a few times, a usual step as often as there are changes.
    most = 1 + int(TRIALS / measure_size(report.play.plan).excess)
    for change in islice(_single_changes(job), most):
        tried += _try(job, change, shared, needed)
    lever = max(tried, key=attrgetter("saved"), default=None)
    fitting = [trial for trial in tried if trial.forecast.room >= room]
    if len({frozenset(trial.changes) for trial in fitting}) < SHOWN:
        for change in _pair_changes([trial for trial in tried if trial.forecast.room < room], min(PAIRS, most)):
            fitting += [trial for trial in _try(job, change, shared, needed) if trial.forecast.room >= room]
    best: dict[frozenset[str], FittingChange] = {}
    for trial in sorted(fitting, key=lambda trial: (trial.forecast.step_time, len(trial.changes))):
        best.setdefault(frozenset(trial.changes), trial)  # of the same fields the best values
    return MemoryChanges([*best.values()][:SHOWN], lever if lever is not None and lever.saved > 0 else None)


def _pair_changes(tight: list[FittingChange], most: int) -> Iterator[Change]:
    """Yields pairs of changes with which a plan does not fit, those first whose parts need least memory."""
    closest = sorted(tight, key=attrgetter("forecast.peak_device"))
    pairs = sorted(combinations(range(len(closest)), 2), key=lambda pair: (sum(pair), pair))
    for pair in pairs[:most]:
        first, second = (closest[place].changes for place in pair)
        if not first.keys() & second.keys():
            yield first | second


def _try(job: ChangeableJob, change: Change, shared: SharedWork, needed: float) -> list[FittingChange]:
    """Returns the forecast of a change; [] if it breaks a rule. needed: by the fullest GPU without it [bytes]."""
    with suppress(MeshcastError):
        forecast = forecast_step(job.change(change), shared)
        return [FittingChange(change, forecast, needed - forecast.held)]
    return []


# ------------------------------------------------------------------------------------------- changes


def _single_changes(changeable: ChangeableJob) -> Iterator[Change]:
    """Yields every change of a single field that may lower the memory of a GPU."""
    job, plan = changeable.job, changeable.plan
    batch = job.as_written.get("batch", {})
    for change in FIELDS:
        yield from change(job, plan)
    micro = job.batch.micro
    if "lengths" not in batch and "microbatches" not in batch:
        total = {} if "global" in batch else {"batch.global": job.batch.total}
        yield from ({"batch.micro": size, **total} for size in range(1, micro) if micro % size == 0)


def _recompute(job: Job, plan: dict[str, Any]) -> Iterator[Change]:
    order = PLAN_KEYS["recompute"].auto
    now = plan.get("recompute", "none")
    if job.forward_only:
        return
    yield from ({"plan.recompute": later} for later in (order[order.index(now) + 1 :] if now in order else ()))
    if now == "operators":
        yield {"plan.recompute": "full"}
    if now == "full" and plan.get("recompute_layers") is not None:
        yield {"plan.recompute_layers": None}


def _shard(job: Job, plan: dict[str, Any]) -> Iterator[Change]:
    if plan.get(SCHEME_KEYS["data"]) is not None:
        return
    if plan.get("fsdp"):
        yield from ({"plan.shard": None} for _ in range(plan.get("shard") is not None))
        yield from _save(plan, option_keys("data"))
        return
    yield from ({"plan.zero": stage} for stage in range(plan.get("zero", 1) + 1, 4))
    yield {"plan.fsdp": True}


def _more_ranks(job: Job, plan: dict[str, Any]) -> Iterator[Change]:
    mesh = job.plan.mesh
    for name, most in (("tp", job.cluster.scale_up_domain), ("pp", job.model.layers), ("cp", job.cluster.gpus)):
        size = plan.get(name, 1)
        replicas = {"plan.dp": None} if "dp" in plan else {}
        while (size := 2 * size) <= min(most, job.cluster.gpus):
            yield {f"plan.{name}": size, **replicas}
            # More ranks alone leave whole activations.
            for saving in _save(plan, choosing_keys("tensor")) if name == "tp" else ():
                yield {"plan.tp": size, **saving, **replicas}
    experts = job.model.moe
    if experts is not None:
        size = plan.get("ep", 1)
        while (size := 2 * size) <= min(max(experts.expert_counts), job.cluster.gpus // mesh.get("pp", 1)):
            yield {"plan.ep": size}


def _offload(job: Job, plan: dict[str, Any]) -> Iterator[Change]:
    now = [*plan.get("offload", ())]
    if not job.forward_only:
        yield from ({"plan.offload": [*now, state]} for state in ("optimizer", "activations") if state not in now)


def _sequence_parallel(job: Job, plan: dict[str, Any]) -> Iterator[Change]:
    if plan.get("tp", 1) > 1:
        yield from _save(plan, choosing_keys("tensor"))


def _save(plan: dict[str, Any], keys: Iterable[PlanKey]) -> Iterator[Change]:
    """Yields the keys that have not the value which needs least memory, each with that value."""
    for key in keys:
        if key.saves is not None and plan.get(key.name) not in (None, key.saves):
            yield {f"plan.{key.name}": key.saves}


def _chunks(job: Job, plan: dict[str, Any]) -> Iterator[Change]:
    """Yields fewer chunks, which hold fewer activations; a schedule that is named may need two."""
    now = plan.get("chunks") or 1
    least = 1 if plan.get("schedule") is None else 2
    yield from ({"plan.chunks": fewer} for fewer in range(least, now) if now % fewer == 0)


FIELDS: tuple[Callable[[Job, dict[str, Any]], Iterator[Change]], ...] = (
    _recompute,
    _shard,
    _more_ranks,
    _offload,
    _chunks,
    _sequence_parallel,
)
"""Changes of a plan, each from the job and its plan as written."""


def write_change(value: Any) -> str:
    """Returns a value as ``--set`` reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
