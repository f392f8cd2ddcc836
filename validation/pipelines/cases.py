"""Schedules played with given times of passes, by the engine that plays whole jobs: `meshcast validate pipeline`.

Conventions (Qi et al. 2023, arXiv 2401.10241; Narayanan et al. 2021, arXiv 2104.04473): t_f, t_b and t_w are times of
a micro-batch through all layers of a device; a chunk takes 1/v of them, a slice its share; a whole backward pass
takes t_b + t_w. A hop is a latency between two devices that does not block the sender. There is no optimizer and no
gradient reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.hardware.load import validate_data
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field
from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.engine.steady_state import cycle
from meshcast.simulator.engine.task_time import pass_durations
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Fragment, Op, ShardMessages, StageOps, Transfer, UnitRun
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.program.block import Block, BlockPrices, CompiledBlocks, Port, PricedBlock
from meshcast.simulator.program.build import build
from meshcast.simulator.program.flatten import flatten
from meshcast.simulator.program.task import Task
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.scheduling.no_flush import (
    cooldown_updates,
    extend_to_steady_state,
    insert_updates,
    max_cycle_updates,
    peak_weight_versions,
)
from meshcast.simulator.scheduling.schedule import ACTIVATION_TRANSFERS, ActionKind, PipelineShape, Schedule, actions_of
from meshcast.simulator.scheduling.vocabulary import find_shards

Seconds = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
PerStage = Seconds | list[Seconds]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Shares = Share | list[Share]

MAX_CHUNKS = 1_000_000
"""Most forward passes of chunks in a case; so many take some ten seconds."""

MAX_DOUBLINGS = 4
"""Most times that a run without a flush is doubled in search of its steady state."""

EXAMPLES: list[dict[str, Any]] = [
    {"schedule": "gpipe", "p": 4, "m": 8, "t_f": 1, "t_b": 1, "t_w": 1},
    {"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1},
    {"schedule": "1f1b", "p": 4, "m": 8, "t_f": 1, "t_b": 1, "t_w": 1, "hop": 0.25},
    {"schedule": "interleaved-1f1b", "p": 2, "m": 4, "v": 2, "t_f": 2, "t_b": 2, "t_w": 2},
]
"""Cases that are played if no file is given."""


class ScheduleCase(BaseModel):
    """A line of the input. Times are numbers, or lists with one entry a device or a virtual stage."""

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
    """Time of overlapped passes; by default the sum of both."""
    t_r: Seconds = 0.0
    t_loss: Seconds | None = None
    """Time of a loss that couples the samples of a batch, once all its outputs are made; by default none does."""
    order: bool = False
    slices: int | list[float] | None = None
    waves: int | None = None
    group: int | None = None
    pairs: int | None = None
    concatenation: str | None = None
    policy: str | None = None
    in_flight: int | None = None
    placement: str | None = None
    split_backward: bool | None = None
    barriers: int | None = None
    memory_limit: float | None = None
    m_w: Shares | None = None
    """Share of the activations of a forward pass that stays from the end of B to the end of W (M_W over M_B of the
    zero-bubble papers); by default not known."""
    barrier: bool = False
    """Whether the devices wait for each other at the end of a step, as for the clipping of gradients."""
    path: str | None = None
    """CSV file of an order, for `from-file`."""


@dataclass(frozen=True)
class FixedDuration:
    """Work of a given duration [s]."""

    seconds: float

    flops = 0.0


SCHEDULE_OPTIONS = (
    "slices", "waves", "group", "pairs", "concatenation", "policy", "in_flight", "memory_limit",
    "placement", "split_backward", "barriers", "path",
)  # fmt: skip
"""Keys of a case that are options of some schedules."""


@dataclass(frozen=True)
class ScheduleReplay:
    """A schedule that was played with given times.

    begin: of every action, by device [s].
    end: of every action, by device [s].
    busy: busy time of every device [s].
    """

    table: Timetable
    begin: list[list[float]]
    end: list[list[float]]
    busy: list[float]

    @property
    def makespan(self) -> float:
        """From the begin of the first pass to the end of the last [s]."""
        begins, ends = zip(*map(self._reach, range(self.table.shape.p)), strict=True)
        return max(ends) - min(begins)

    @property
    def spans(self) -> list[float]:
        """By device, from the begin of its first pass to the end of its last [s]."""
        return [end - begin for begin, end in map(self._reach, range(self.table.shape.p))]

    def _reach(self, device: int) -> tuple[float, float]:
        """Returns the begin of the first pass of a device, and end of its last [s]."""
        passes = [
            i
            for i, action in enumerate(actions_of(self.table.orders[device]))
            if action.kind not in ACTIVATION_TRANSFERS
        ]
        return min(self.begin[device][i] for i in passes), max(self.end[device][i] for i in passes)

    def gradient_times(self, device: int) -> list[float]:
        """Returns by micro-batch when its weight gradients are complete on a device [s]."""
        ends = [0.0] * self.table.shape.m
        for action, end in zip(actions_of(self.table.orders[device]), self.end[device], strict=True):
            if action.kind in ("BW", "W"):
                ends[action.microbatch] = max(ends[action.microbatch], end)
        return ends

    def in_flight(self, until: str) -> list[int]:
        """Returns by device the peak number of chunk activations held from the begin of F to the end of `until` (B or
        W).

        Where several backward passes follow one forward pass, those of each count. Activations in transfer are held by
        both devices until the transfer has ended.
        """
        shape, parts = self.table.shape, self.table.stages.backwards_per_forward
        return list(map(round, self.peak_held([1.0] * shape.slices * parts, [float(until == "W")] * shape.stages)))

    def peak_held(self, sizes: Sequence[float], kept: Sequence[float]) -> list[float]:
        """Returns by device the peak of activations held, in the unit of `sizes`.

        sizes: activations of a chunk, by slice, or by part that has a backward pass of its own.
        kept: share of them that stays from the end of B to the end of W, by stage.
        """
        whole = dict.fromkeys(("F", ActionKind.KEEP, ActionKind.LOAD), 1.0)
        whole |= dict.fromkeys(("BW", ActionKind.EVICT, ActionKind.GIVE_BACK), -1.0)
        peaks = []
        for order, begins, finished in zip(self.table.orders, self.begin, self.end, strict=True):
            events = []
            for action, begin, end in zip(actions_of(order), begins, finished, strict=True):
                share = kept[action.stage]
                size = sizes[action.slice] * (self.table.stages.backwards_per_forward if action.kind == "F" else 1)
                change = {"B": share - 1, "W": -share, **whole}.get(action.kind, 0.0) * size
                events.append((begin if change > 0 else end, change))
            held = peak = 0.0
            # A device runs a single action at a time, so at equal times the release belongs to the earlier action.
            for _, change in sorted(events):
                held += change
                peak = max(peak, held)
            peaks.append(peak)
        return peaks


def replay(case: ScheduleCase) -> ScheduleReplay:
    """Plays a case.

    Raises PlanError or ScheduleError if the schedule does not exist for the shape of the case.
    """
    schedule = _schedule(case)
    chunks = case.p * case.m * schedule.chunks_per_device() // schedule.directions * len(schedule.slices)
    if chunks > MAX_CHUNKS:
        rule = f"p x m x v x slices is at most {MAX_CHUNKS:,}: every chunk is played"
        raise PlanError("case", rule, "Use fewer micro-batches", chunks)
    joint, parts = schedule.microbatches_per_forward, schedule.backwards_per_forward
    if case.m % joint:
        raise PlanError("m", f"{joint} micro-batches share a forward pass", f"{case.m + 1} would work", case.m)
    shape = PipelineShape(case.p, case.m // joint, schedule.chunks_per_device(), len(schedule.slices))
    shape = replace(shape, batch_loss=case.t_loss is not None)
    schedule.check(shape)
    passes = (float(joint), joint / parts) if parts > 1 else schedule.slices
    stages = [_stage(case, schedule, shape, stage, passes) for stage in range(shape.stages)]

    def price(work: Any) -> tuple[float, float, float]:
        return (0.0, 0.0, case.hop) if isinstance(work, Transfer) else (work.seconds, 0.0, 0.0)

    durations = None
    if schedule.needs_durations:
        whole = [_stage(case, schedule, shape, stage, (1.0,))[0] for stage in range(shape.stages)]
        durations = pass_durations(whole, [price] * shape.stages, "pp", 0.0, CompiledBlocks())
        durations = replace(durations, kept_for_weights=_kept_for_weights(case, schedule, shape), barrier=case.barrier)
    table = timetable(schedule, shape, durations, gradient_sums=False)
    program = build(table, stages, price)
    program.tasks = [_merge_overlapped(task, case.t_pair, shape.v // schedule.directions) for task in program.tasks]
    flat = flatten(program)
    times = longest_path(flat)
    begin, end = np.zeros((2, len(flat.first)))
    for action, (first, behind) in enumerate(zip(flat.first, flat.behind, strict=True)):
        follows = table.slots[table.slot[action]].follows
        # A pass begins with its first op that takes time; a transfer when both devices are ready.
        timed = next((n for n in range(first, behind) if flat.seconds[n]), first)
        cause = behind - 1 if table.actions[action].kind in ACTIVATION_TRANSFERS else timed
        begin[action] = begin[action - 1] if follows else times.begin[cause]
        end[action] = end[action - 1] if follows else times.end[behind - 1]
    for action, transfer in enumerate(table.actions):
        if transfer.kind == ActionKind.EVICT:  # the other device holds nothing before the transfer begins
            sends = (n for n in range(flat.first[action], flat.behind[action]) if flat.ops[n].work is not None)
            begin[table.need[action]] = times.begin[next(sends)]
    rows = [slice(*bounds) for bounds in pairwise(table.starts)]
    busy = np.bincount(flat.device, weights=flat.seconds, minlength=shape.p).tolist()
    return ScheduleReplay(table, [begin[row].tolist() for row in rows], [end[row].tolist() for row in rows], busy)


def _schedule(case: ScheduleCase) -> Schedule:
    """Returns the schedule of a case. Raises PlanError for an option that the schedule does not have."""
    kind = find_scheme(f"pipeline/{case.schedule}", "schedule")
    assert issubclass(kind, Schedule)
    known = kind.Options.model_fields
    options = {key: value for key in SCHEDULE_OPTIONS if (value := getattr(case, key)) is not None}
    for key, value in options.items():
        if key not in known:
            raise PlanError(key, f"{case.schedule} has no such option", "Leave it out", value)
    if case.v != 1 or known["chunks"].default == 1:
        options["chunks"] = case.v
    return kind(("pp",), validate_data(kind.Options, options, "case", PlanError), Mesh({"pp": case.p}))


def period(case: ScheduleCase) -> float | None:
    """Returns the time between two updates of a device in steady state, of a schedule without a flush [s].

    Updates take no time here, so the period is read from micro-batches. The run is doubled until all devices repeat
    themselves; if they do not after `MAX_DOUBLINGS`, as with two devices of nearly equal speed, the slowest is read.
    Raises PlanError for a pipeline that takes too many micro-batches to reach its steady state.
    """
    schedule = _schedule(case)
    if schedule.flush:
        return None
    shape = PipelineShape(case.p, case.m, schedule.chunks_per_device(), len(schedule.slices))
    longest, cooldown = max_cycle_updates(shape, 1), cooldown_updates(shape, 1)
    least = extend_to_steady_state(shape, 1).m
    if case.p * least * case.v > MAX_CHUNKS:
        rule = f"{case.p:,} devices are in steady state after {least:,} micro-batches, and at most p x m x v"
        raise PlanError("p", f"{rule} = {MAX_CHUNKS:,} chunks are played", "Use fewer devices", case.p)
    for double in range(MAX_DOUBLINGS + 1):
        run = replay(case.model_copy(update={"m": least << double}))
        moments = np.array([run.gradient_times(device)[:-cooldown] for device in range(case.p)])
        count = cycle(moments, longest)
        if count or run.table.shape.m * 2 * case.p * case.v > MAX_CHUNKS:
            break
    count = count or longest
    return float((moments[:, -1] - moments[:, -1 - count]).max()) / count * schedule.microbatches_per_update(shape)


def count_weight_versions(case: ScheduleCase) -> list[int] | None:
    """Returns the peak number of weight versions on every device, of a schedule without a flush."""
    schedule = _schedule(case)
    if schedule.flush:
        return None
    shape = PipelineShape(case.p, case.m, schedule.chunks_per_device(), len(schedule.slices))
    every = schedule.microbatches_per_update(shape)
    orders = schedule.orders(extend_to_steady_state(shape, every))
    return [peak_weight_versions(schedule, shape, i, insert_updates(order, every)) for i, order in enumerate(orders)]


def peak_microbatches(case: ScheduleCase, run: ScheduleReplay) -> list[float]:
    """Returns by device the peak of activations held, in those of a micro-batch through all layers of a device."""
    schedule, shape = _schedule(case), run.table.shape
    parts = schedule.backwards_per_forward
    shares = [schedule.microbatches_per_forward / parts] * parts if parts > 1 else schedule.slices
    sizes = [share * shape.p * schedule.directions / shape.stages for share in shares]
    return run.peak_held(sizes, _kept_for_weights(case, schedule, shape) or (1.0,) * shape.stages)


def answer(case: Mapping[str, Any], where: str = "case") -> dict[str, Any]:
    """Returns the answer to a case: its figures, or ``refused`` with the reason."""
    try:
        checked = validate_data(ScheduleCase, dict(case), where, PlanError)
        run = replay(checked)
        without_flush = {"period": period(checked), "weight_versions": count_weight_versions(checked)}
        memory = {} if checked.m_w is None else {"memory": peak_microbatches(checked, run)}
    except MeshcastError as error:
        return {"status": "refused", "reason": str(error)}
    span, busy = max(run.spans), math.fsum(run.busy) / len(run.busy)
    figures: dict[str, Any] = {
        "status": "played",
        "makespan": run.makespan,
        "span_max": span,
        "bubble_rate": 1 - busy / run.makespan if run.makespan else 0.0,
        "bubble_rate_span": 1 - busy / span if span else 0.0,
        "in_flight_b": run.in_flight("B"),
        "in_flight_w": run.in_flight("W"),
        **memory,
        **without_flush,
    }
    if checked.order:
        figures["order"] = [[str(action) for action in order] for order in run.table.orders]
    return figures


def answers(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answers to all cases, in their order."""
    return [answer(case, f"case {number}") for number, case in enumerate(cases, 1)]


def _value(case: ScheduleCase, name: str, schedule: Schedule, shape: PipelineShape, stage: int) -> float:
    """Returns the value of `name` for a virtual stage."""
    value = getattr(case, name)
    parts = shape.stages // schedule.directions
    if isinstance(value, list):
        if len(value) not in (shape.p, parts):
            entry = "share" if name == "m_w" else "time"
            rule = f"a list has one {entry} a device ({shape.p}) or a virtual stage ({parts})"
            raise PlanError(name, rule, "Correct its length", value)
        value = value[schedule.model_part(shape, stage) if len(value) == parts else schedule.device(shape, stage)]
    return float(value)


def _kept_for_weights(case: ScheduleCase, schedule: Schedule, shape: PipelineShape) -> tuple[float, ...] | None:
    """Returns by stage the share of its activations that stays until W; None if the case does not state it."""
    if case.m_w is None:
        return None
    return tuple(_value(case, "m_w", schedule, shape, stage) for stage in range(shape.stages))


def _stage(
    case: ScheduleCase, schedule: Schedule, shape: PipelineShape, stage: int, slices: Sequence[float]
) -> list[StageOps]:
    """Makes the ops of a stage, by slice (or by share of the samples): an op for each kind of pass."""
    values = (_value(case, name, schedule, shape, stage) for name in ("t_f", "t_b", "t_w", "t_r"))
    times = [time * shape.p * schedule.directions / shape.stages for time in values]
    loss = Op("loss", work=FixedDuration(case.t_loss or 0.0))  # type: ignore[arg-type]
    units = [_stage_ops(f"{stage}", *(share * time for time in times)) for share in slices]
    shards = find_shards(schedule, shape)
    if shards is not None and stage not in shards.layers:
        return [replace(unit, shard_messages=ShardMessages(0, (0,), (0,))) for unit in units]
    return (
        [replace(unit, batch_loss=UnitRun("loss", Fragment([loss]))) for unit in units] if shape.batch_loss else units
    )


def _stage_ops(name: str, t_f: float, t_b: float, t_w: float, t_r: float) -> StageOps:
    entry, gradient = Op("in"), Op("gradient in", phase="B")
    forward = Op(f"F{name}", work=FixedDuration(t_f), after=[entry])  # type: ignore[arg-type]
    again = Op(f"R{name}", work=FixedDuration(t_r), after=[gradient], phase="R")  # type: ignore[arg-type]
    inputs = Op(f"B{name}", work=FixedDuration(t_b), after=[gradient], phase="B")  # type: ignore[arg-type]
    weights = Op(f"W{name}", work=FixedDuration(t_w), phase="W")  # type: ignore[arg-type]
    # A whole backward pass sends its result when both halves are done; a split pass does not wait for W.
    written = Op("given", after=[inputs, weights], phase="B")
    backward = [again, inputs, weights]
    fragment = Fragment([forward], backward, {"in": entry}, {"out": forward}, {"out": gradient}, {"in": written})
    return StageOps([UnitRun(f"stage {name}", fragment, 1, "in", "out")])


def _merge_overlapped(task: Task, seconds: float | None, chunks: int) -> Task:
    """Replaces overlapped passes by an op of the given time, or of the sum of both; all outputs are there at its end.

    seconds: of a device's layers. chunks: of a device; a task is of a single chunk.
    """
    if task.ports == 1:
        return task
    (part,) = task.parts
    duration = sum(part.seconds) if seconds is None else seconds / chunks
    port = Port((0,), (0,), through=False)
    block = Block([Op("pair")], [()], (port, port), [])
    return replace(task, parts=(PricedBlock(BlockPrices(block, (duration,), (0.0,), (0.0,)), 1),), marks=[()])
