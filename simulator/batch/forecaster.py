"""Step time and memory of plain plans, by compiled loops over what they share."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.hardware.units import GIB
from meshcast.simulator.batch.blocks import SideArrays, Streams, flatten_side
from meshcast.simulator.batch.kernels import PassKinds, SlotMessages, find_peaks, play_passes, play_updates
from meshcast.simulator.batch.messages import MessagePrices
from meshcast.simulator.batch.passes import PassMaker, PricedBlocks, PricedForm, TaskForm, make_form
from meshcast.simulator.batch.plain import inner_schemes, is_plain
from meshcast.simulator.batch.stages import Sides, StageForm, StageForms
from meshcast.simulator.batch.states import RestingDevices, make_states
from meshcast.simulator.batch.tables import Layout, TableArrays, flatten_timetable, lay_out
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.forecast.resident_memory import growing_gradients
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.memory_profile import Growth
from meshcast.simulator.program.task import price_side
from meshcast.simulator.program.timetable import Timetable

MAX_PARTS = 20_000
"""Parts of plans that are kept, some tens of KiB each."""

BETWEEN = 32
"""Plans between two looks at how much shared work is kept."""


class BatchForecaster:
    """Forecasts plans one after the other, plain ones by compiled loops."""

    def __init__(self, shared_work: SharedWork | None = None) -> None:
        self.shared = shared_work or SharedWork()
        self._answered = 0
        self._start()

    def _start(self) -> None:
        """Begins without parts of earlier plans."""
        self._streams, self._forms, self._messages = Streams(), StageForms(self.shared), MessagePrices()
        self._blocks = PricedBlocks(self._streams)
        self._costs: dict[Hashable, Costs] = {}
        self._tables: dict[Timetable, TableArrays | None] = {}
        self._layouts: dict[Hashable, Layout] = {}
        self._tasks: dict[Hashable, TaskForm] = {}
        self._priced: dict[Hashable, PricedForm] = {}
        self._states: dict[Hashable, RestingDevices] = {}
        self._sides: dict[Hashable, list[SideArrays]] = {}
        self._kept: list[object] = []  # whose ids are in keys

    def answer(self, job: Job | Plan, plain: bool | None = None) -> StepAndMemory:
        """Forecasts a job. plain: whether it is plain; None: it is looked up.

        Raises PlanError for the first rule that its plan breaks.
        """
        if self._answered % BETWEEN == 0:
            self.shared.forget_excess()
            if len(self._priced) + len(self._states) > MAX_PARTS:
                self._start()
        self._answered += 1
        plan = job if isinstance(job, Plan) else resolve_plan(job, self.shared)
        played = self.play(plan) if plain or (plain is None and is_plain(plan)) else None
        return played or forecast_step(plan, self.shared)

    def play(self, plan: Plan) -> StepAndMemory | None:
        """Forecasts a plan by compiled loops; None if its stages or its timetable show that it is not plain."""
        costs = self._find_costs(plan)
        timetable = self.shared.timetable(plan.schedule, plan.passes.played_shape)
        table = remember(self._tables, timetable, partial(flatten_timetable, timetable))
        if table is None:
            return None
        shares = plan.job.framework.scatter_gather_tensors_in_pipeline
        layout = remember(self._layouts, (table, plan.layers, shares), lambda: lay_out(table, plan.layers, shares))
        number = self._forms.number_of(plan)
        forms = [self._forms.form(plan, number, kind) for kind, _ in layout.stages]
        held = zip(forms, layout.stages, strict=True)
        sides = [self._forms.sides(plan, form, layers) for form, (_, layers) in held]
        if any(beside is None for beside in sides):
            return None
        states = self._find_states(plan, costs, timetable, layout, forms)
        host, overlap = host_launch_seconds(plan), plan.job.framework.overlap.pp
        pass_of, kinds = self._find_passes(plan, costs, layout, forms, [each for each in sides if each], host)
        if states.offloads or kinds is None:
            return None
        messages = self._price_messages(plan, costs, table, layout, forms)
        behind, peaks = np.zeros((plan.shape.p, 2)), np.zeros((plan.shape.p, 4))
        span = play_passes(table.order, pass_of, kinds, messages, host, not overlap, behind)
        span = max(span, play_updates(*states.updates, behind))
        find_peaks(table.order, pass_of, kinds, messages, overlap, peaks)
        return summarise(plan, span, states.memory, peaks)

    def _find_costs(self, plan: Plan) -> Costs:
        def find() -> Costs:
            self._kept.append((plan.job.framework, plan.job.cluster))
            with locate_errors(*plan.job.origin):
                return self.shared.costs(plan)

        return remember(self._costs, (plan.mesh, id(plan.job.framework), id(plan.job.cluster)), find)

    def _find_passes(
        self, plan: Plan, costs: Costs, layout: Layout, forms: list[StageForm], sides: list[Sides], host: float
    ) -> tuple[np.ndarray, PassKinds | None]:
        """Returns by slot the number of its kind of pass, and all kinds; None if a pass offloads anything."""
        growth, maker = growing_gradients(plan), PassMaker()
        passes = [
            (layers, backward, self._find_form(form, backward, costs, growth), self._find_sides(added, backward, costs))
            for form, added, (_, layers) in zip(forms, sides, layout.stages, strict=True)
            for backward in (0, 1)
        ]
        # Now all streams have their coordinates.
        size, numbers = self._streams.size, np.zeros((len(passes), 2), np.int64)
        for number, (layers, backward, form_of_pass, beside) in enumerate(passes):
            pass_alone = form_of_pass.with_layers(layers, size, host)
            numbers[number] = maker.add(pass_alone)
            if beside:
                numbers[number, 1] = maker.add(pass_alone, *(((), beside) if backward else (beside, ())))
        kinds = None if maker.copies_to_host else maker.finish()
        return numbers[layout.rows, layout.at_end], kinds

    def _find_form(self, form: StageForm, backward: int, costs: Costs, growth: Growth | None) -> PricedForm:
        """Returns the form of a pass of a kind of stage."""

        def price() -> PricedForm:
            make = partial(make_form, form, backward > 0, costs.estimate, growth, self.shared.blocks)
            return remember(self._tasks, (form, backward, growth), make).price(costs.estimate, self._blocks)

        return remember(self._priced, (form, backward, costs, growth), price)

    def _find_sides(self, sides: Sides, backward: int, costs: Costs) -> list[SideArrays]:
        """Returns the side ops of the first forward or the last backward passes of a stage at their prices."""
        besides = sides.behind if backward else sides.ahead

        def price() -> list[SideArrays]:
            return [flatten_side(price_side(side, costs.estimate), self._streams) for side in besides]

        return remember(self._sides, (sides, backward, costs), price) if besides else []

    def _find_states(
        self, plan: Plan, costs: Costs, timetable: Timetable, layout: Layout, forms: list[StageForm]
    ) -> RestingDevices:
        """Returns what the devices of a plan do and hold beside their passes."""
        framework = plan.job.framework
        schemes = tuple(scheme for scheme in inner_schemes(plan) if scheme.family != "memory")
        traits = frozenset(form.traits for form in forms)
        key = costs, schemes, layout.held, traits, id(framework), plan.shape.m == 1

        def make() -> RestingDevices:
            ops = [form.with_layers(layers) for form, (_, layers) in zip(forms, layout.stages, strict=True)]
            stages = [ops[number] for number in layout.of_stage.tolist()]
            return make_states(plan, stages, costs, timetable, self.shared)

        return remember(self._states, key, make)

    def _price_messages(
        self, plan: Plan, costs: Costs, table: TableArrays, layout: Layout, forms: list[StageForm]
    ) -> SlotMessages:
        """Prices the messages of a plan."""
        nbytes = np.array([form.message_nbytes for form in forms])
        back = nbytes * np.array([form.has_backward for form in forms])
        axis = plan.ranks.pipeline_axis
        return self._messages.price(costs, table, axis, nbytes[layout.of_stage], back[layout.of_stage])


def summarise(plan: Plan, span: float, resting: np.ndarray, peaks: np.ndarray) -> StepAndMemory:
    """Returns the figures of a played step.

    resting: see `RestingDevices.memory`; peaks: see `kernels.find_peaks`.
    """
    framework, usable = plan.job.framework, plan.job.cluster.gpu.program_memory
    context, allocated, need = framework.memory.context_gib * GIB, 0.0, 0.0
    for (kept, update, load), of_passes in zip(resting.tolist(), peaks.tolist(), strict=True):
        total, cached = _find_height(kept, update, load, *of_passes)
        reserved = framework.memory.reserve(total + cached, kept + cached) + context
        allocated, need = max(allocated, total), max(need, total + context, min(reserved, usable))
    held = allocated + context
    return StepAndMemory(span + framework.step_overhead_s, allocated, need, held, min(usable / held, math.inf))


def _find_height(
    kept: float, update: float, load: float, top: float, left: float, at_top: float, gradients: float
) -> tuple[float, float]:
    """Returns the largest memory of tensors on a device, and what the allocator has cached beside it [bytes].

    kept, update, load: held all the time, at the peak of the update, and while weights are loaded.
    top, left: the peak of the passes, and what they leave; at_top, gradients: of both the gradients.
    """
    height = kept + top, max(0.0, gradients - at_top)
    if kept + left + update > height[0]:
        height = kept + left + update, 0.0
    return max(height, (load, 0.0)) if load else height
