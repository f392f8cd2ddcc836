"""Schedules against closed forms: an order played with given times, by the same engine that plays whole jobs.

Conventions (Qi et al. 2023, arXiv 2401.10241; Narayanan et al. 2021, arXiv 2104.04473): t_f, t_b, t_w are the
times of one micro-batch through the layers of one device, a chunk costs 1/v of them; a schedule without a W phase
takes t_b + t_w at once. A hop is a latency between two devices that does not block the sender. No optimizer, no
gradient reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hardware.errors import MeshcastError, PlanError
from hardware.load import validated
from simulator.engine.flat import flatten
from simulator.engine.program import build
from simulator.engine.sweep import sweep
from simulator.engine.timetable import Timetable, timetable
from simulator.mesh import Mesh
from simulator.ops import Chain, Fragment, Link, Op, Transfer
from simulator.schedule import Schedule, Shape
from simulator.scheme import find_scheme

Seconds = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
PerStage = Seconds | list[Seconds]

MAX_CHUNKS = 1_000_000
"""Most forward passes of chunks in a case: some ten seconds."""

EXAMPLES: list[dict[str, Any]] = [
    {"schedule": "gpipe", "p": 4, "m": 8, "t_f": 1, "t_b": 1, "t_w": 1},
    {"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1},
    {"schedule": "1f1b", "p": 4, "m": 8, "t_f": 1, "t_b": 1, "t_w": 1, "hop": 0.25},
    {"schedule": "interleaved-1f1b", "p": 2, "m": 4, "v": 2, "t_f": 2, "t_b": 2, "t_w": 2},
]
"""What is shown when no file of cases is given."""


class Case(BaseModel):
    """One line of the input. Times are numbers, or lists with one entry a device or a virtual stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: str
    p: int = Field(strict=True, ge=1, le=4096)
    m: int = Field(strict=True, ge=1, le=1_000_000)
    v: int = Field(default=1, strict=True, ge=1, le=1024)
    t_f: PerStage
    t_b: PerStage
    t_w: PerStage = 0.0
    hop: Seconds = 0.0
    order: bool = False
    # Keys of schedules with more knobs than the ones there are.
    slices: Any = None
    waves: Any = None
    t_pair: Any = None
    t_r: Any = None
    memory_limit: Any = None


@dataclass(frozen=True)
class Lasting:
    """Work that lasts as long as it says."""

    seconds: float

    flops = 0.0


@dataclass(frozen=True)
class Replay:
    """A schedule played with given times: begin and end of every action, device by device."""

    table: Timetable
    begin: list[list[float]]
    end: list[list[float]]
    busy: float
    """Mean busy time of a device."""

    @property
    def makespan(self) -> float:
        """First start to last end."""
        return max(map(max, self.end)) - min(map(min, self.begin))

    @property
    def spans(self) -> list[float]:
        """Per device, first start to last end of its own actions."""
        return [max(ends) - min(begins) for begins, ends in zip(self.begin, self.end, strict=True)]

    def in_flight(self, until: str) -> list[int]:
        """Per device, the peak number of chunk activations held from the start of F to the end of `until` (B or W)."""
        ends = {"B": ("B", "BW"), "W": ("W", "BW")}[until]
        peaks = []
        for order, begins, finished in zip(self.table.orders, self.begin, self.end, strict=True):
            events = []
            for action, begin, end in zip(order, begins, finished, strict=True):
                if action.kind == "F":
                    events.append((begin, 1))
                elif action.kind in ends:
                    events.append((end, -1))
            held = top = 0
            # A device does one thing at a time, so at equal times the release belongs to the earlier action.
            for _, change in sorted(events):
                held += change
                top = max(top, held)
            peaks.append(top)
        return peaks


def replay(case: Case) -> Replay:
    """Plays one case.

    Raises PlanError or ScheduleError where the schedule does not exist for its shape.
    """
    if case.p * case.m * case.v > MAX_CHUNKS:
        rule = f"p x m x v is at most {MAX_CHUNKS:,}, for each chunk is played"
        raise PlanError("case", rule, "Use fewer micro-batches", case.p * case.m * case.v)
    kind = find_scheme(f"pipeline/{case.schedule}", "schedule")
    assert issubclass(kind, Schedule)
    for key in ("slices", "waves", "t_pair", "t_r", "memory_limit"):
        if getattr(case, key) is not None:
            raise PlanError(key, f"{case.schedule} has nothing of the kind", "Leave it out", getattr(case, key))
    shape = Shape(case.p, case.m, case.v)
    schedule = kind(("pp",), kind.Options(chunks=case.v), Mesh({"pp": case.p}))
    split = len(schedule.backward.split()) > 1
    stages = []
    for stage in range(shape.stages):
        t_f, t_b, t_w = (_time(case, name, stage, schedule.device(shape, stage)) for name in ("t_f", "t_b", "t_w"))
        stages.append(_stage(stage, t_f, t_b, t_w, split))

    def price(work: Any) -> tuple[float, float, float]:
        return (0.0, 0.0, case.hop) if isinstance(work, Transfer) else (work.seconds, 0.0, 0.0)

    table = timetable(schedule, shape)
    flat = flatten(build(table, stages, price))
    times = sweep(flat)
    # Every action is one op.
    rows = [flat.first[begin:end] for begin, end in pairwise(table.starts)]
    busy = sum(flat.seconds[at] for at in flat.first) / shape.p
    return Replay(
        table, [[times.begin[at] for at in row] for row in rows], [[times.end[at] for at in row] for row in rows], busy
    )


def answer(case: Mapping[str, Any], where: str = "case") -> dict[str, Any]:
    """The answer to one case: its figures, or ``refused`` with the reason."""
    try:
        told = validated(Case, dict(case), where, PlanError)
        run = replay(told)
    except MeshcastError as error:
        return {"status": "refused", "reason": str(error)}
    span = max(run.spans)
    found: dict[str, Any] = {
        "status": "played",
        "makespan": run.makespan,
        "span_max": span,
        "bubble_rate": 1 - run.busy / run.makespan if run.makespan else 0.0,
        "bubble_rate_span": 1 - run.busy / span if span else 0.0,
        "in_flight_b": run.in_flight("B"),
        "in_flight_w": run.in_flight("W"),
        "period": None,
        "weight_versions": None,
    }
    if told.order:
        found["order"] = [[str(action) for action in order] for order in run.table.orders]
    return found


def answers(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all cases, in their order."""
    return [answer(case, f"case {number}") for number, case in enumerate(cases, 1)]


def _time(case: Case, name: str, stage: int, device: int) -> float:
    """The time of one virtual stage."""
    given = getattr(case, name)
    if isinstance(given, list):
        if len(given) not in (case.p, case.p * case.v):
            rule = f"a list holds one time a device ({case.p}) or a virtual stage ({case.p * case.v})"
            raise PlanError(name, rule, "Correct its length", given)
        given = given[device if len(given) == case.p else stage]
    return float(given) / case.v


def _stage(stage: int, t_f: float, t_b: float, t_w: float, split: bool) -> Chain:
    """A stage of one op a pass."""
    entry, gradient = Op("in"), Op("gradient in", phase="B")
    forward = Op(f"F{stage}", work=Lasting(t_f), after=[entry])  # type: ignore[arg-type]
    first = Op(f"B{stage}", work=Lasting(t_b if split else t_b + t_w), after=[gradient], phase="B")  # type: ignore[arg-type]
    backward = [first]
    if split:
        backward.append(Op(f"W{stage}", work=Lasting(t_w), phase="W"))  # type: ignore[arg-type]
    fragment = Fragment([forward], backward, {"in": entry}, {"out": forward}, {"out": gradient}, {"in": first})
    return Chain([Link(f"stage {stage}", fragment, 1, "in", "out")])
