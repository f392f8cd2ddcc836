"""Schedules against closed forms: an order played with given times, by the same engine that plays whole jobs.

Conventions (Qi et al. 2023, arXiv 2401.10241; Narayanan et al. 2021, arXiv 2104.04473): t_f, t_b, t_w are the
times of one micro-batch through the layers of one device, a chunk costs 1/v of them, a slice its share; a backward pass
that is not in two parts takes t_b + t_w at once. A hop is a latency between two devices that does not block the sender.
No optimizer, no gradient reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hardware.errors import MeshcastError, PlanError
from hardware.load import validated
from simulator.engine.longest_path import longest_path
from simulator.engine.steady_state import cycle
from simulator.engine.task_time import pass_durations
from simulator.ir.mesh import Mesh
from simulator.ir.ops import Fragment, Op, StageOps, Transfer, UnitRun
from simulator.ir.registry import find_scheme
from simulator.program.block import Block, BlockPrices, Port, PricedBlock
from simulator.program.build import build
from simulator.program.flatten import flatten
from simulator.program.task import Task
from simulator.program.timetable import Timetable, timetable
from simulator.scheduling.no_flush import (
    cooldown_updates,
    extend_to_steady_state,
    insert_updates,
    max_cycle_updates,
    peak_weight_versions,
)
from simulator.scheduling.schedule import ACTIVATION_TRANSFERS, PipelineShape, Schedule, actions_of

Seconds = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
PerStage = Seconds | list[Seconds]

MAX_CHUNKS = 1_000_000
"""Most forward passes of chunks in a case: some ten seconds."""

DOUBLED = 4
"""How often a run without a flush is doubled at most, to find its pace."""

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
    t_pair: Seconds | None = None
    """A forward and a backward pass played together; their sum where it is not given."""
    t_r: Seconds = 0.0
    order: bool = False
    slices: int | list[float] | None = None
    waves: int | None = None
    memory_limit: float | None = None
    path: str | None = None
    """The file of an order that stands in one."""


@dataclass(frozen=True)
class Lasting:
    """Work that lasts as long as it says."""

    seconds: float

    flops = 0.0


KNOBS = ("slices", "waves", "memory_limit", "path")
"""Keys of a case that are options of some schedules."""


@dataclass(frozen=True)
class Replay:
    """A schedule played with given times: begin and end of every action, device by device."""

    table: Timetable
    begin: list[list[float]]
    end: list[list[float]]
    busy: list[float]
    """Busy time of every device."""

    @property
    def makespan(self) -> float:
        """First start to last end of a pass."""
        begins, ends = zip(*map(self._reach, range(self.table.shape.p)), strict=True)
        return max(ends) - min(begins)

    @property
    def spans(self) -> list[float]:
        """Per device, first start to last end of its own passes."""
        return [end - begin for begin, end in map(self._reach, range(self.table.shape.p))]

    def _reach(self, device: int) -> tuple[float, float]:
        """When the first pass of a device begins, and the last one ends."""
        passes = [
            i
            for i, action in enumerate(actions_of(self.table.orders[device]))
            if action.kind not in ACTIVATION_TRANSFERS
        ]
        return min(self.begin[device][i] for i in passes), max(self.end[device][i] for i in passes)

    def completed(self, device: int) -> list[float]:
        """When a device has the gradients of each micro-batch complete."""
        found = [0.0] * self.table.shape.m
        for action, end in zip(actions_of(self.table.orders[device]), self.end[device], strict=True):
            if action.kind in ("BW", "W"):
                found[action.microbatch] = max(found[action.microbatch], end)
        return found

    def in_flight(self, until: str) -> list[int]:
        """Per device, the peak number of chunk activations held from the start of F to the end of `until` (B or W).

        What is moved lies on both devices from the begin of the move to its end.
        """
        takes, ends = ("F", "K", "L"), {"B": ("B", "BW", "E", "G"), "W": ("W", "BW", "E", "G")}[until]
        peaks = []
        for order, begins, finished in zip(self.table.orders, self.begin, self.end, strict=True):
            events = []
            for action, begin, end in zip(actions_of(order), begins, finished, strict=True):
                if action.kind in takes:
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
    schedule = _schedule(case)
    if (
        chunks := case.p * case.m * schedule.chunks_per_device() // schedule.directions * len(schedule.slices)
    ) > MAX_CHUNKS:
        rule = f"p x m x v is at most {MAX_CHUNKS:,}, times the slices, for each chunk is played"
        raise PlanError("case", rule, "Use fewer micro-batches", chunks)
    shape = PipelineShape(case.p, case.m, schedule.chunks_per_device(), len(schedule.slices))
    schedule.check(shape)
    stages = [_stage(case, schedule, shape, stage, schedule.slices) for stage in range(shape.stages)]

    def price(work: Any) -> tuple[float, float, float]:
        return (0.0, 0.0, case.hop) if isinstance(work, Transfer) else (work.seconds, 0.0, 0.0)

    lasting = None
    if schedule.needs_durations:
        whole = [_stage(case, schedule, shape, stage, (1.0,))[0] for stage in range(shape.stages)]
        lasting = pass_durations(whole, [price] * shape.stages, "pp")
    table = timetable(schedule, shape, lasting)
    program = build(table, stages, price)
    program.tasks = [_together(task, case.t_pair, shape.v // schedule.directions) for task in program.tasks]
    flat = flatten(program)
    times = longest_path(flat)
    begin, end = np.zeros((2, len(flat.first)))
    for action, (first, behind) in enumerate(zip(flat.first, flat.behind, strict=True)):
        follows = table.slots[table.slot[action]].follows
        # A pass begins with the first op that takes time; a move when both devices are ready for it.
        timed = next((n for n in range(first, behind) if flat.seconds[n]), first)
        own = behind - 1 if table.actions[action].kind in ACTIVATION_TRANSFERS else timed
        begin[action] = begin[action - 1] if follows else times.begin[own]
        end[action] = end[action - 1] if follows else times.end[behind - 1]
    for action, move in enumerate(table.actions):
        if move.kind == "E":  # nothing is kept before it comes
            operators = (n for n in range(flat.first[action], flat.behind[action]) if flat.ops[n].work is not None)
            begin[table.need[action]] = times.begin[next(operators)]
    rows = [slice(*bounds) for bounds in pairwise(table.starts)]
    busy = np.bincount(flat.device, weights=flat.seconds, minlength=shape.p).tolist()
    return Replay(table, [begin[row].tolist() for row in rows], [end[row].tolist() for row in rows], busy)


def _schedule(case: Case) -> Schedule:
    """The schedule of a case. Raises PlanError for a knob that it does not have."""
    kind = find_scheme(f"pipeline/{case.schedule}", "schedule")
    assert issubclass(kind, Schedule)
    known = kind.Options.model_fields
    told = {key: value for key in KNOBS if (value := getattr(case, key)) is not None}
    for key, value in told.items():
        if key not in known:
            raise PlanError(key, f"{case.schedule} has nothing of the kind", "Leave it out", value)
    if case.v != 1 or known["chunks"].default == 1:
        told["chunks"] = case.v
    return kind(("pp",), validated(kind.Options, told, "case", PlanError), Mesh({"pp": case.p}))


def period(case: Case) -> float | None:
    """Of a schedule without a flush, the time between two updates of a device once the pipe is full [s].

    Updates take no time here, so micro-batches tell the pace, of which ever more are played until all devices repeat
    themselves. Where two are of nearly one pace that may take longer than `DOUBLED` times; the slower one tells then.
    Raises PlanError for a pipe that takes too many micro-batches to be steady.
    """
    schedule = _schedule(case)
    if schedule.flush:
        return None
    shape = PipelineShape(case.p, case.m, schedule.chunks_per_device(), len(schedule.slices))
    most, back, least = max_cycle_updates(shape, 1), cooldown_updates(shape, 1), extend_to_steady_state(shape, 1).m
    if case.p * least * case.v > MAX_CHUNKS:
        rule = f"a pipe of {case.p:,} devices is steady after {least:,} micro-batches, which are played up to p x m x v"
        raise PlanError("p", f"{rule} = {MAX_CHUNKS:,}", "Use fewer devices", case.p)
    for double in range(DOUBLED + 1):
        run = replay(case.model_copy(update={"m": least << double}))
        moments = np.array([run.completed(device)[:-back] for device in range(case.p)])
        count = cycle(moments, most)
        if count or run.table.shape.m * 2 * case.p * case.v > MAX_CHUNKS:
            break
    count = count or most
    return float((moments[:, -1] - moments[:, -1 - count]).max()) / count * schedule.microbatches_per_update(shape)


def versions(case: Case) -> list[int] | None:
    """Of a schedule without a flush, the most versions of its weights that every device holds at once."""
    schedule = _schedule(case)
    if schedule.flush:
        return None
    shape = PipelineShape(case.p, case.m, schedule.chunks_per_device(), len(schedule.slices))
    every = schedule.microbatches_per_update(shape)
    orders = schedule.orders(extend_to_steady_state(shape, every))
    return [peak_weight_versions(schedule, shape, i, insert_updates(order, every)) for i, order in enumerate(orders)]


def answer(case: Mapping[str, Any], where: str = "case") -> dict[str, Any]:
    """The answer to one case: its figures, or ``refused`` with the reason."""
    try:
        told = validated(Case, dict(case), where, PlanError)
        run = replay(told)
        endless = {"period": period(told), "weight_versions": versions(told)}
    except MeshcastError as error:
        return {"status": "refused", "reason": str(error)}
    span, busy = max(run.spans), math.fsum(run.busy) / len(run.busy)
    found: dict[str, Any] = {
        "status": "played",
        "makespan": run.makespan,
        "span_max": span,
        "bubble_rate": 1 - busy / run.makespan if run.makespan else 0.0,
        "bubble_rate_span": 1 - busy / span if span else 0.0,
        "in_flight_b": run.in_flight("B"),
        "in_flight_w": run.in_flight("W"),
        **endless,
    }
    if told.order:
        found["order"] = [[str(action) for action in order] for order in run.table.orders]
    return found


def answers(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all cases, in their order."""
    return [answer(case, f"case {number}") for number, case in enumerate(cases, 1)]


def _time(case: Case, name: str, schedule: Schedule, shape: PipelineShape, stage: int) -> float:
    """The time of one virtual stage."""
    given = getattr(case, name)
    parts = shape.stages // schedule.directions
    if isinstance(given, list):
        if len(given) not in (shape.p, parts):
            rule = f"a list holds one time a device ({shape.p}) or a virtual stage ({parts})"
            raise PlanError(name, rule, "Correct its length", given)
        given = given[schedule.model_part(shape, stage) if len(given) == parts else schedule.device(shape, stage)]
    return float(given) * shape.p / parts


def _stage(case: Case, schedule: Schedule, shape: PipelineShape, stage: int, slices: Sequence[float]) -> list[StageOps]:
    """A stage of one op for every part of a pass, by slice."""
    times = [_time(case, name, schedule, shape, stage) for name in ("t_f", "t_b", "t_w", "t_r")]
    return [_chain(f"{stage}", *(share * time for time in times)) for share in slices]


def _chain(name: str, t_f: float, t_b: float, t_w: float, t_r: float) -> StageOps:
    entry, gradient = Op("in"), Op("gradient in", phase="B")
    forward = Op(f"F{name}", work=Lasting(t_f), after=[entry])  # type: ignore[arg-type]
    again = Op(f"R{name}", work=Lasting(t_r), after=[gradient], phase="R")  # type: ignore[arg-type]
    inputs = Op(f"B{name}", work=Lasting(t_b), after=[gradient], phase="B")  # type: ignore[arg-type]
    weights = Op(f"W{name}", work=Lasting(t_w), phase="W")  # type: ignore[arg-type]
    # The result of a pass at once is there when all of it is done; apart, the weights' part is of another pass.
    given = Op("given", after=[inputs, weights], phase="B")
    backward = [again, inputs, weights]
    fragment = Fragment([forward], backward, {"in": entry}, {"out": forward}, {"out": gradient}, {"in": given})
    return StageOps([UnitRun(f"stage {name}", fragment, 1, "in", "out")])


def _together(task: Task, seconds: float | None, chunks: int) -> Task:
    """Of a pair one op that lasts as long as is told, or as both; what comes out of both is there at its end."""
    if task.ports == 1:
        return task
    (part,) = task.parts
    lasts = sum(part.seconds) if seconds is None else seconds / chunks
    port = Port((0,), (0,), through=False)
    block = Block([Op("pair")], [()], (port, port), [])
    return replace(task, parts=(PricedBlock(BlockPrices(block, (lasts,), (0.0,), (0.0,)), 1),), marks=[()])
