"""Step time and memory of plain plans, by compiled loops over what they share."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.hardware.units import GIB
from meshcast.simulator.batch.blocks import SideArrays, Streams, flatten_side
from meshcast.simulator.batch.kernels import find_peaks, play_passes, play_updates
from meshcast.simulator.batch.messages import MessagePrices
from meshcast.simulator.batch.passes import PassMaker, PricedBlocks, PricedForm, TaskForm, make_form
from meshcast.simulator.batch.plain import inner_schemes, is_plain
from meshcast.simulator.batch.stages import Sides, StageForm, StageForms, StageKind
from meshcast.simulator.batch.states import DeviceStates, make_states
from meshcast.simulator.batch.tables import TableArrays, flatten_timetable
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.forecast.resident_memory import growing_gradients
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.ir.ops import StageOps
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.memory_profile import Growth
from meshcast.simulator.program.task import price_side
from meshcast.simulator.program.timetable import Timetable

MAX_PARTS = 20_000
"""Parts of plans that are kept, some tens of KiB each."""

Stages = list[tuple[StageKind, int]]
"""By stage, its kind and number of layers."""


class Forecaster:
    """Forecasts plans one after the other, plain ones by compiled loops."""

    def __init__(self, shared_work: SharedWork | None = None) -> None:
        self.shared = shared_work or SharedWork()
        self._start()

    def _start(self) -> None:
        """Begins without parts of earlier plans."""
        self.streams, self.forms, self.messages = Streams(), StageForms(self.shared), MessagePrices()
        self._tables: dict[Timetable, TableArrays | None] = {}
        self.blocks = PricedBlocks(self.streams)
        self._tasks: dict[Hashable, TaskForm] = {}
        self._priced: dict[Hashable, PricedForm] = {}
        self._states: dict[Hashable, DeviceStates] = {}
        self._sides: dict[Hashable, list[SideArrays]] = {}

    def answer(self, job: Job | Plan) -> StepAndMemory:
        """Forecasts a job. Raises PlanError for the first rule that its plan breaks."""
        self.shared.forget_excess()
        if len(self._priced) + len(self._states) > MAX_PARTS:
            self._start()
        plan = job if isinstance(job, Plan) else resolve_plan(job, self.shared)
        return self.play(plan) or forecast_step(plan, self.shared)

    def play(self, plan: Plan) -> StepAndMemory | None:
        """Forecasts a plan by compiled loops; None if it is not plain."""
        if not is_plain(plan):
            return None
        with locate_errors(*plan.job.origin):
            costs = self.shared.costs(plan)
        timetable = self.shared.timetable(plan.schedule, plan.passes.played_shape)
        table = remember(self._tables, timetable, partial(flatten_timetable, timetable))
        if table is None:
            return None
        stages = list_stages(plan, table)
        forms = {stage: self.forms.form(plan, stage[0]) for stage in dict.fromkeys(stages)}
        sides = {stage: self.forms.sides(plan, form, stage[1]) for stage, form in forms.items()}
        states = self._find_states(plan, costs, timetable, stages, forms, sides)
        if states is None or states.offloads:
            return None
        host, overlap = host_launch_seconds(plan), plan.job.framework.overlap.pp
        maker = PassMaker()
        pass_of = self._find_passes(plan, costs, table, stages, forms, sides, maker, host)
        if maker.copies_to_host:
            return None
        kinds = maker.finish()
        nbytes = [forms[stage].message_nbytes for stage in stages]
        back = [forms[stage].message_nbytes * forms[stage].has_backward for stage in stages]
        messages = self.messages.price(costs, table, plan.ranks.pipeline_axis, nbytes, back)
        behind, peaks = np.zeros((plan.shape.p, 2)), np.zeros((plan.shape.p, 4))
        span = play_passes(
            table.starts, table.sequence, table.need, table.slot, pass_of, kinds.matrices, kinds.walked, kinds.used,
            kinds.issue, messages.ports, messages.prices, host, not overlap, kinds.table, kinds.whole, kinds.reals,
            kinds.room, behind,
        )  # fmt: skip
        span = max(span, play_updates(*states.updates, behind))
        find_peaks(table.starts, table.slot, pass_of, kinds.memory, messages.moved, overlap, peaks)
        return summarise(plan, span, states.memory, peaks)

    def _find_passes(
        self,
        plan: Plan,
        costs: Costs,
        table: TableArrays,
        stages: Stages,
        forms: dict[tuple[StageKind, int], StageForm],
        sides: dict[tuple[StageKind, int], Sides | None],
        maker: PassMaker,
        host: float,
    ) -> np.ndarray:
        """Adds the kinds of passes of a plan to a maker, and returns by slot the number of its kind."""
        growth = growing_gradients(plan)
        passes = list[tuple[int, int, PricedForm, list[SideArrays]]]()
        for stage, form in forms.items():
            besides = sides[stage]
            assert besides is not None
            for backward in (0, 1):
                task = self._find_form(form, backward, costs, growth)
                passes.append((stage[1], backward, task, self._find_sides(besides, backward, costs)))
        # Now all streams have their coordinates.
        size, numbers = self.streams.size, np.zeros((len(passes), 2), np.int64)
        for number, (layers, backward, form, beside) in enumerate(passes):
            task = form.with_layers(layers, size, host)
            numbers[number] = maker.add(task)
            if beside:
                numbers[number, 1] = maker.add(task, *(((), beside) if backward else (beside, ())))
        place = {stage: number for number, stage in enumerate(forms)}
        of_stage = np.array([place[stage] for stage in stages])
        at_end = np.where(table.backward > 0, table.last, table.first).astype(np.int64)
        return numbers[2 * of_stage[table.stages] + table.backward, at_end]

    def _find_form(self, form: StageForm, backward: int, costs: Costs, growth: Growth | None) -> PricedForm:
        """Returns the form of a pass of a kind of stage."""

        def price() -> PricedForm:
            make = partial(make_form, form, backward > 0, costs.estimate, growth, self.shared.blocks)
            return remember(self._tasks, (form, backward, growth), make).price(costs.estimate, self.blocks)

        return remember(self._priced, (form, backward, costs, growth), price)

    def _find_sides(self, sides: Sides, backward: int, costs: Costs) -> list[SideArrays]:
        """Returns the side ops of the first forward or the last backward passes of a stage at their prices."""
        besides = sides.behind if backward else sides.ahead

        def price() -> list[SideArrays]:
            return [flatten_side(price_side(side, costs.estimate), self.streams) for side in besides]

        return remember(self._sides, (id(sides), backward, costs), price) if besides else []

    def _find_states(
        self,
        plan: Plan,
        costs: Costs,
        timetable: Timetable,
        stages: Stages,
        forms: dict[tuple[StageKind, int], StageForm],
        sides: dict[tuple[StageKind, int], Sides | None],
    ) -> DeviceStates | None:
        """Returns what the devices of a plan do and hold beside their passes; None if a stage is not plain."""
        if any(side is None for side in sides.values()):
            return None
        held = [[False, False, False, 0] for _ in range(plan.shape.p)]
        devices = self._tables[timetable].devices.tolist()
        for (kind, layers), device in zip(stages, devices, strict=True):
            of_device = held[device]
            of_device[0] |= kind.first
            of_device[1] |= kind.last
            of_device[2] |= kind.embeds
            of_device[3] += layers
        job = plan.job
        schemes = tuple(scheme for scheme in inner_schemes(plan) if scheme.family != "memory")
        traits = frozenset(form.traits for form in forms.values())
        key = (
            costs, schemes, tuple(map(tuple, held)), traits, id(job.framework), plan.shape.m == 1, job.batch.micro == 0
        )  # fmt: skip

        def make() -> DeviceStates:
            ops: dict[tuple[StageKind, int], StageOps] = {stage: form.with_layers(stage[1]) for stage, form in forms.items()}
            return make_states(plan, [ops[stage] for stage in stages], costs, timetable, self.shared)

        return remember(self._states, key, make)


def list_stages(plan: Plan, table: TableArrays) -> Stages:
    """Returns the kind and number of layers of every stage of a plain plan."""
    devices, layers, last = table.devices.tolist(), plan.layers, plan.shape.stages - 1
    shares = plan.job.framework.scatter_gather_tensors_in_pipeline
    stages = []
    for stage, device in enumerate(devices):
        gathers = shares and stage > 0 and devices[stage - 1] != device, shares and stage < last and devices[stage + 1] != device
        embeds = stage == last and device == devices[0]
        stages.append((StageKind(stage == 0, stage == last, layers[stage] > 0, embeds, gathers), layers[stage]))
    return stages


def summarise(plan: Plan, span: float, resting: np.ndarray, peaks: np.ndarray) -> StepAndMemory:
    """Returns the figures of a played step.

    resting: see `DeviceStates.memory`; peaks: see `kernels.find_peaks`.
    """
    framework, memory = plan.job.framework, plan.job.framework.memory
    context, usable = memory.context_gib * GIB, plan.job.cluster.gpu.program_memory
    allocated = need = 0.0
    for (kept, update, load), (top, left, gradients, all_gradients) in zip(
        resting.tolist(), peaks.tolist(), strict=True
    ):
        total, cached = kept + top, max(0.0, all_gradients - gradients)
        if (behind := kept + left + update) > total:
            total, cached = behind, 0.0
        total, cached = max((total, cached), (load, 0.0)) if load else (total, cached)
        reserved = min(memory.reserve(total + cached, kept + cached) + context, usable)
        allocated, need = max(allocated, total), max(need, total + context, reserved)
    held = allocated + context
    return StepAndMemory(span + framework.step_overhead_s, allocated, need, held, min(usable / held, math.inf))
