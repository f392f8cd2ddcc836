"""Forecasts of grids of plans: step time and memory of each, equal to those of `forecast_step`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remember
from meshcast.hardware.units import GIB
from meshcast.simulator.batch.blocks import Streams, stream_numbers
from meshcast.simulator.batch.compiled import HAS_COMPILER
from meshcast.simulator.batch.kernels import find_peaks, play_passes, play_updates
from meshcast.simulator.batch.passes import PassKinds, PassMaker, flatten_task
from meshcast.simulator.batch.tables import TableArrays, flatten_timetable
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.evaluation import make_evaluation, make_reference
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import host_launch_seconds, plans_orders
from meshcast.simulator.forecast.resident_memory import (
    DeviceParams,
    count_outside_steps,
    growing_gradients,
    offloaded_of_devices,
    resident_of_devices,
)
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params, lower_stages
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.ir.ops import StageOps, Transfer
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.scatter_gather import has_backward
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.build import build_updates
from meshcast.simulator.program.flatten import FlatProgram, flatten_updates
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import Task, make_task, price_side_ops
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.schedule import ActionKind

Answer = StepAndMemory | MeshcastError
"""Of a job: its step and memory, or its first mistake."""


class GridForecaster:
    """Forecasts plans one after the other, with compiled loops where a plan is plain."""

    def __init__(self, shared_work: SharedWork | None = None) -> None:
        self.shared = shared_work or SharedWork()
        self.streams = Streams()
        self._tables: dict[Timetable, TableArrays | None] = {}

    def answer(self, job: Job | Plan) -> StepAndMemory:
        """Forecasts a job. Raises PlanError for the first rule that its plan breaks."""
        self.shared.forget_excess()
        plan = job if isinstance(job, Plan) else resolve_plan(job, self.shared)
        return self.play(plan) or forecast_step(plan, self.shared)

    def play(self, plan: Plan) -> StepAndMemory | None:
        """Forecasts a plan by compiled loops; None if it is not plain."""
        if not is_plain(plan):
            return None
        with locate_errors(*plan.job.origin):
            costs = self.shared.costs(plan)
        stages, updates = lower_stages(plan, self.shared.units, self.shared.stages)
        if not all(isinstance(stage, StageOps) and _is_plain_stage(stage) for stage in stages):
            return None
        table = self.shared.timetable(plan.schedule, plan.passes.played_shape)
        arrays = remember(self._tables, table, lambda: flatten_timetable(table))
        if arrays is None:
            return None
        return _PlayedPlan(self, plan, costs, stages, updates, table, arrays).answer()


def is_plain(plan: Plan) -> bool:
    """Says whether the compiled loops play a plan, as far as it shows before its stages are lowered: a single kind of
    micro-batch passes stages of equal ranks in an order that no duration decides, and all steps are equal."""
    job, passes = plan.job, plan.passes
    if plan.stage_plans or plan.pipelines or job.forward_only or job.cluster.groups or job.noise is not None:
        return False
    if len(plan.slice_lengths) > 1 or job.batch.lengths or passes.update_interval or not plan.schedule.flush:
        return False
    if passes.steps > 1 or passes.period > 1 or plans_orders(plan):
        return False
    framework = job.framework
    if framework.memory.frees_behind and framework.overlap.gathers_ahead:
        return False
    return make_evaluation(plan) is None and make_reference(plan) is None


def _is_plain_stage(stage: StageOps) -> bool:
    """Says whether a stage has whole weights and gradients all the time, and side ops that are known beforehand."""
    sides = *stage.ahead, *stage.behind
    if stage.again or stage.whole_weights or stage.whole_gradients or stage.held or stage.batch_loss is not None:
        return False
    return not any(side.formed or len(side.waits) or side.after for side in sides)


class _PlayedPlan:
    """A plain plan while it is played."""

    def __init__(
        self,
        forecaster: GridForecaster,
        plan: Plan,
        costs: Costs,
        stages: Sequence[StageOps],
        updates: Sequence[Any],
        table: Timetable,
        arrays: TableArrays,
    ) -> None:
        self.shared, self.streams = forecaster.shared, forecaster.streams
        self.plan, self.costs, self.stages, self.updates = plan, costs, stages, updates
        self.table, self.arrays = table, arrays
        self.host = host_launch_seconds(plan)
        self.overlap = plan.job.framework.overlap.pp

    def answer(self) -> StepAndMemory | None:
        """Returns step time and memory; None if the plan offloads anything."""
        plan, arrays, shared = self.plan, self.arrays, self.shared
        every_params = device_params(plan, self.stages, shared.stages)
        if any(nbytes for by in offloaded_of_devices(plan, every_params) for nbytes in by.values()):
            return None
        pass_of, kinds, tasks = self._make_passes()
        if any(part.copies_to_host for task in tasks for part, _ in task.parts):
            return None
        ports, message, moved = self._price_messages()
        behind = np.zeros((plan.shape.p, 2))
        span = play_passes(
            arrays.starts, arrays.sequence, arrays.need, arrays.slot, pass_of, kinds.matrices, kinds.walked,
            kinds.used, kinds.issue, ports, message, self.host, not self.overlap, kinds.table, kinds.whole,
            kinds.reals, kinds.room, behind,
        )  # fmt: skip
        tails, meetings = build_updates(self.updates, [self.costs.estimate] * plan.shape.p, shared.blocks)
        program = Program(self.table, [], [], [], tails, meetings, self.overlap, self.host)
        flat = flatten_updates(program)
        ends = remember(tails[0].engine_results, ("arrays", id(flat)), lambda: _flatten_tail(flat))
        span = max(span, play_updates(*ends, behind))
        peaks = np.zeros((plan.shape.p, 4))
        find_peaks(arrays.starts, arrays.slot, pass_of, kinds.memory, moved, self.overlap, peaks)
        return self._summarise(span, peaks, tails, every_params)

    def _make_passes(self) -> tuple[np.ndarray, PassKinds, list[Any]]:
        """Returns by slot the number of its kind of pass, and all kinds."""
        arrays, maker = self.arrays, PassMaker(self.streams, self.host)
        growth = growing_gradients(self.plan)
        distinct = {id(stage): stage for stage in self.stages}
        place = {key: number for number, key in enumerate(distinct)}
        kinds, tasks = np.zeros((len(distinct), 2, 2), np.int64), []
        price, blocks = self.costs.estimate, self.shared.blocks
        for number, stage in enumerate(distinct.values()):
            for backward, kind in enumerate((ActionKind.FORWARD, ActionKind.BACKWARD)):
                task = make_task(stage, kind, price, blocks, again=False, growth=growth)
                flat = flatten_task(task, self.streams)
                tasks.append(flat)
                kinds[number, backward] = maker.add(flat)
                besides = stage.behind if backward else stage.ahead
                if besides:
                    sides = price_side_ops(besides, task, price, self.host, blocks)
                    kinds[number, backward, 1] = maker.add(flat, *(((), sides) if backward else (sides, ())))
        of_stage = np.array([place[id(stage)] for stage in self.stages])
        at_end = np.where(arrays.backward > 0, arrays.last, arrays.first)
        pass_of = kinds[of_stage[arrays.stages], arrays.backward, at_end.astype(np.int64)]
        return pass_of, maker.finish(), tasks

    def _price_messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns by slot the port of its message, or -1; its seconds and latency; and the bytes that it sends and
        receives."""
        arrays, count = self.arrays, len(self.stages)
        sent = np.zeros((2, count, 4))  # port, seconds, latency, bytes
        sent[:, :, 0] = -1
        received = np.zeros((2, count))
        axis = self.plan.ranks.pipeline_axis
        for backward, following in enumerate((arrays.successors, arrays.predecessors)):
            for stage, other in enumerate(following.tolist()):
                source, target = int(arrays.devices[stage]), int(arrays.devices[other])
                if other < 0 or source == target:
                    continue
                stated = self.stages[other if backward else stage]
                nbytes = stated.message_nbytes if not backward or has_backward(stated) else 0
                seconds, _, latency = self.costs.estimate(Transfer(nbytes, axis, source, target))
                sent[backward, stage] = backward, seconds, latency, nbytes
                received[backward, other] = nbytes
        of_slot = sent[arrays.backward, arrays.stages]
        moved = np.column_stack([of_slot[:, 3], received[arrays.backward, arrays.stages]])
        return of_slot[:, 0].astype(np.int64), np.ascontiguousarray(of_slot[:, 1:3]), moved

    def _summarise(
        self, span: float, peaks: np.ndarray, tails: Sequence[Task], every_params: Sequence[DeviceParams]
    ) -> StepAndMemory:
        """Returns the figures of a played step. peaks: see `find_peaks`."""
        plan, shared, framework = self.plan, self.shared, self.plan.job.framework
        memory, context = framework.memory, framework.memory.context_gib * GIB
        resting = resident_of_devices(plan, every_params, None, shared.states)
        usable = plan.job.cluster.gpu.program_memory
        loads = [0.0] * len(resting)
        if memory.loads != "shards":
            outside = count_outside_steps(plan, every_params, shared.states, shared.outside)
            loads = [device.loading for device in outside]
        needs, held = [], []
        for states, load, update, (top, left, gradients, all_gradients) in zip(
            resting, loads, tails, peaks.tolist(), strict=True
        ):
            kept = sum(states.values())
            total, cached = kept + top, max(0.0, all_gradients - gradients)
            behind = kept + left + update.memory.peak
            if behind > total:
                total, cached = behind, 0.0
            total, cached = max((total, cached), (load, 0.0)) if load else (total, cached)
            reserved = min(memory.reserve(total + cached, kept + cached) + context, usable)
            needs.append(max(total + context, reserved))
            held.append(total + context)
        room = min(*(usable / need for need in held), math.inf)
        return StepAndMemory(
            span + framework.step_overhead_s, max(held) - context, max(needs), max(held), room
        )


def _flatten_tail(flat: FlatProgram) -> tuple[np.ndarray, ...]:
    """Returns the arrays of updates that `kernels.play_updates` reads."""
    first = np.cumsum([0, *map(len, flat.after)])
    after = np.array([other for others in flat.after for other in others], np.int64)
    columns = (np.array(column, float) for column in (flat.seconds, flat.latency, flat.issue))
    return *columns, first, after, np.array(flat.device, np.int64), stream_numbers(flat.ops, flat.device)


def forecast_jobs(
    jobs: Iterable[Job | Mapping[str, Any]], shared_work: SharedWork | None = None
) -> Iterator[Answer]:
    """Yields the step and memory of every job, in order; of a job that breaks a rule its error.

    They equal those of `forecast_step` to 1e-9, and come faster where numba is installed.
    """
    forecaster = GridForecaster(shared_work)
    for job in jobs:
        try:
            loaded = job if isinstance(job, Job) else load_job(job)
            yield forecaster.answer(loaded) if HAS_COMPILER else forecast_step(loaded, forecaster.shared)
        except MeshcastError as error:
            yield error


Key = Hashable
