"""Step time and memory of plain plans, by compiled loops over what they share."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import numpy as np

from meshcast.hardware.remembered import RecentResults, remember
from meshcast.hardware.units import GIB
from meshcast.simulator.batch.blocks import SideArrays, Streams, flatten_side
from meshcast.simulator.batch.loops.arrays import NEVER, Notes, SlotMessages
from meshcast.simulator.batch.loops.busy import measure_levels
from meshcast.simulator.batch.loops.peaks import find_peaks
from meshcast.simulator.batch.loops.play import play_passes, play_updates
from meshcast.simulator.batch.messages import MessagePrices
from meshcast.simulator.batch.passes import PassMaker, PricedBlocks, PricedForm, make_form
from meshcast.simulator.batch.plain import inner_schemes, is_plain
from meshcast.simulator.batch.played import LoopFigures, LoopForecast
from meshcast.simulator.batch.stages import Sides, StageForm, StageForms
from meshcast.simulator.batch.states import LEVELS, RestingDevices, make_states
from meshcast.simulator.batch.tables import Layout, TableArrays, lay_out, make_table
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.power import PowerModel
from meshcast.simulator.costs.regimes import least_known
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.forecast.resident_memory import growing_gradients
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step, play_job
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.categories import HOST, KINDS, axis_of_stream
from meshcast.simulator.program.memory_profile import CATEGORIES, Growth
from meshcast.simulator.program.task import price_side
from meshcast.simulator.report.breakdown import slowest_device
from meshcast.simulator.report.report import Report

MAX_WALKED = 1_000_000
"""Most ops of a device that are walked for a breakdown: some 20 ms; a device of more is played by matrices."""

PIPELINE = KINDS.index("pp")
GRADIENTS = CATEGORIES.index("gradients")

NOTHING = Notes(-1, np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
"""Of no device."""

MAX_BYTES = 30_000_000
"""Bytes of timetables that are kept, half of them of those that were used before."""

MAX_PARTS = 20_000
"""Parts of plans that are kept, some tens of KiB each."""

BETWEEN = 4
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
        self._tables: RecentResults[Hashable, TableArrays | None] = RecentResults(
            lambda table: table.nbytes if table else 0.0
        )
        self._states: dict[Hashable, RestingDevices] = {}
        self._kept: list[object] = []  # whose ids are in keys

    def answer(self, job: Job | Plan, plain: bool | None = None) -> StepAndMemory:
        """Forecasts step and memory of a job. plain: whether it is plain; None: it is looked up.

        Raises PlanError for the first rule that its plan breaks.
        """
        plan, plain = self._begin(job, plain)
        parts = self._find_parts(plan) if plain else None
        if parts is None:
            return forecast_step(plan, self.shared)
        span, peaks = parts.play(NOTHING)
        return summarise(plan, span, parts.states.memory, peaks)

    def report(self, job: Job | Plan, plain: bool | None = None) -> Report:
        """Forecasts a job. plain: whether it is plain; None: it is looked up.

        Raises PlanError for the first rule that its plan breaks.
        """
        plan, plain = self._begin(job, plain)
        played = self.play(plan) if plain else None
        return Report(played) if played is not None else Report(*play_job(plan, self.shared))

    def _begin(self, job: Job | Plan, plain: bool | None) -> tuple[Plan, bool]:
        """Returns the plan of a job and whether it is plain, after a look at how much is kept."""
        if self._answered % BETWEEN == 0:
            self.shared.forget_excess()
        if self._answered % (8 * BETWEEN) == 0:  # counting takes longer
            if self._forms.count + len(self._states) > MAX_PARTS:
                self._start()
        if self._tables.nbytes > MAX_BYTES / 2:
            self._tables.age()
        self._answered += 1
        plan = job if isinstance(job, Plan) else resolve_plan(job, self.shared)
        return plan, is_plain(plan) if plain is None else plain

    def play(self, plan: Plan) -> LoopForecast | None:
        """Forecasts a plan by compiled loops; None if its stages or its timetable show that it is not plain."""
        parts = self._find_parts(plan)
        if parts is None:
            return None
        runs = parts.count_runs()
        sums = parts.add_up(runs)
        device = slowest_device(sums)
        if (notes := parts.make_notes(device, runs[device])) is None:
            return None
        span, peaks = parts.play(notes)
        lengths = parts.measure(notes, self._streams)
        figures = LoopFigures(span, peaks, sums, device, lengths, partial(parts.count_joules, runs))
        regime = least_known(plan.job.framework.regime, self._find_costs(plan).regime)
        return LoopForecast(plan, figures, parts.states, regime, lambda: play_job(plan, self.shared)[0])

    def _find_parts(self, plan: Plan) -> PlanParts | None:
        """Returns what a plan is played of; None if its stages or its timetable show that it is not plain."""
        costs = self._find_costs(plan)
        schedule, shape = plan.schedule, plan.shape
        key = schedule.use, schedule.options, shape
        table = remember(self._tables, key, partial(make_table, schedule, shape))
        if table is None:
            return None
        shares = plan.job.framework.scatter_gather_tensors_in_pipeline
        layout = remember(table.layouts, (plan.layers, shares), lambda: lay_out(table, plan.layers, shares))
        number = self._forms.number_of(plan)
        forms = [self._forms.form(plan, number, *stage) for stage in layout.stages]
        held = zip(forms, layout.stages, strict=True)
        sides = [self._forms.sides(plan, form, layers) for form, (_, layers) in held]
        if any(beside is None for beside in sides):
            return None
        states = self._find_states(plan, costs, layout, forms)
        host = host_launch_seconds(plan)
        pass_of, maker = self._find_passes(plan, costs, layout, forms, [each for each in sides if each], host)
        if states.offloads or maker.copies_to_host:
            return None
        messages = self._price_messages(plan, costs, table, layout, forms)
        return PlanParts(table, pass_of, maker, messages, states, host, plan.job.framework.overlap.pp)

    def _find_costs(self, plan: Plan) -> Costs:
        def find() -> Costs:
            self._kept.append((plan.job.framework, plan.job.cluster))
            with locate_errors(*plan.job.origin):
                return self.shared.costs(plan)

        return remember(self._costs, (plan.mesh, id(plan.job.framework), id(plan.job.cluster)), find)

    def _find_passes(
        self, plan: Plan, costs: Costs, layout: Layout, forms: list[StageForm], sides: list[Sides], host: float
    ) -> tuple[np.ndarray, PassMaker]:
        """Returns by slot the number of its kind of pass, and all kinds."""
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
        return numbers[layout.rows, layout.at_end], maker

    def _find_form(self, form: StageForm, backward: int, costs: Costs, growth: Growth | None) -> PricedForm:
        """Returns the form of a pass of a kind of stage."""

        def price() -> PricedForm:
            make = partial(make_form, form, backward > 0, growth, self.shared.blocks)
            blocks = self._blocks
            if form.sides is not None:  # no other stage has its blocks
                blocks = remember(form.priced, "blocks", lambda: PricedBlocks(self._streams))
            return remember(form.priced, ("task", backward, growth), make).price(costs.estimate, blocks)

        return remember(form.priced, ("priced", backward, costs, growth), price)

    def _find_sides(self, sides: Sides, backward: int, costs: Costs) -> list[SideArrays]:
        """Returns the side ops of the first forward or the last backward passes of a stage at their prices."""
        besides = sides.behind if backward else sides.ahead

        def price() -> list[SideArrays]:
            return [flatten_side(price_side(side, costs.estimate), self._streams) for side in besides]

        return remember(sides.priced, (backward, costs), price) if besides else []

    def _find_states(self, plan: Plan, costs: Costs, layout: Layout, forms: list[StageForm]) -> RestingDevices:
        """Returns what the devices of a plan do and hold beside their passes."""
        framework = plan.job.framework
        schemes = tuple(scheme for scheme in inner_schemes(plan) if scheme.family != "memory")
        traits = frozenset(form.traits for form in forms)
        key = costs, schemes, layout.held, traits, id(framework), plan.shape.m == 1

        def make() -> RestingDevices:
            ops = [form.with_layers(layers) for form, (_, layers) in zip(forms, layout.stages, strict=True)]
            stages = [ops[number] for number in layout.of_stage.tolist()]
            return make_states(plan, stages, costs, self.shared)

        return remember(self._states, key, make)

    def _price_messages(
        self, plan: Plan, costs: Costs, table: TableArrays, layout: Layout, forms: list[StageForm]
    ) -> SlotMessages:
        """Prices the messages of a plan."""
        nbytes = np.array([form.message_nbytes for form in forms])
        back = nbytes * np.array([form.has_backward for form in forms])
        axis = plan.ranks.pipeline_axis
        return self._messages.price(costs, table, axis, nbytes[layout.of_stage], back[layout.of_stage])


class PlanParts(NamedTuple):
    """What a plan is played of.

    pass_of: by slot, the number of its kind of pass.
    maker: of all kinds of passes.
    host: time of the host to launch an op [s].
    overlap: whether a device goes on while it sends.
    """

    table: TableArrays
    pass_of: np.ndarray
    maker: PassMaker
    messages: SlotMessages
    states: RestingDevices
    host: float
    overlap: bool

    @property
    def devices(self) -> int:
        """Number of pipeline devices."""
        return len(self.states.memory)

    def play(self, notes: Notes) -> tuple[float, np.ndarray]:
        """Plays the step, and returns its end [s] and the peaks of memory (see `find_peaks`). notes: filled in."""
        order, kinds = self.table.order, self.maker.pack(notes.device >= 0)
        behind, peaks = np.zeros((self.devices, 2)), np.zeros((self.devices, 2, len(CATEGORIES) + 1))
        span = play_passes(
            order, self.pass_of, kinds, self._sends(kinds.issue), self.host, not self.overlap, behind, notes
        )
        lists = 2 * self.maker.size + 2 * self.devices
        span = max(span, play_updates(*self.states.updates, behind, notes, lists))
        find_peaks(order, self.pass_of, kinds, self.messages, self.overlap, peaks)
        return span, peaks

    def _sends(self, issue: np.ndarray) -> np.ndarray:
        """Returns by slot seconds and latency of its message, and when the host has launched it behind its pass. issue:
        see `PassKinds`."""
        sends = self.messages.prices.copy()
        sends[:, 2] = issue[self.pass_of] + self.host if self.host else NEVER
        return sends

    def count_runs(self) -> np.ndarray:
        """Counts how often every device runs each kind of pass [devices, kinds]."""
        kinds = self.maker.count
        places = self.table.devices[self.table.stages] * kinds + self.pass_of
        runs = np.bincount(places, self.table.turns, self.devices * kinds)
        return runs.reshape(self.devices, kinds)

    def add_up(self, runs: np.ndarray) -> np.ndarray:
        """Returns `SUMS` of every device. runs: see `count_runs`."""
        sums = np.tensordot(runs, self.maker.sums, 1) + self.states.sums
        seconds, latency, sigma = self.messages.prices.T
        self._add_messages(sums[:, PIPELINE], np.array([seconds, seconds * sigma, seconds + latency, 0 * seconds]).T)
        return sums

    def count_joules(self, runs: np.ndarray, model: PowerModel) -> np.ndarray:
        """Returns the energy of the kernels and of the communication of every device beyond the idle power [J]. runs:
        see `count_runs`."""
        joules = runs @ self.maker.joules(model) + self.states.joules(model)
        lasting = self.messages.prices[:, :2].sum(axis=1)
        self._add_messages(joules[:, 1], model.communication * model.limit * lasting)
        return joules

    def _add_messages(self, totals: np.ndarray, each: np.ndarray) -> None:
        """Adds something of the messages to that of their ends, by device. each: by slot."""
        sent = np.flatnonzero(self.table.ports >= 0)
        added = (each[sent].T * self.table.turns[sent]).T
        for ends in (self.table.devices[self.table.stages[sent]], self.table.targets[sent]):
            np.add.at(totals, ends, added)

    def make_notes(self, device: int, runs: np.ndarray) -> Notes | None:
        """Makes room for the intervals in which a device is busy; None if there are too many. runs: of its kinds."""
        of_streams = (runs @ self.maker.ops).astype(np.int64)
        if of_streams.sum() > MAX_WALKED:
            return None
        table, senders = self.table, self.table.devices[self.table.stages]
        sent = (table.ports >= 0) & ((senders == device) | (table.targets == device))
        numbers = 2 * senders[sent] + table.ports[sent]
        of_devices = np.bincount(numbers, table.turns[sent], 2 * self.devices).astype(np.int64)
        of_updates = np.bincount(self.states.updates.stream)
        room = np.concatenate([of_streams, of_streams, of_devices, of_updates, of_updates])
        starts = np.concatenate([[0], np.cumsum(room)])
        return Notes(device, starts, np.zeros(len(room), np.int64), *np.empty((2, starts[-1])))

    def measure(self, notes: Notes, streams: Streams) -> dict[str, float]:
        """Returns the `LoopFigures.lengths` of what was noted."""
        size, names = self.maker.size, streams.names
        of_streams = [LEVELS.index(axis_of_stream(names[at])) if at in names else 0 for at in range(size)]
        waits, of_updates = LEVELS.index(HOST), self.states.levels
        levels = np.concatenate([
            of_streams, [waits] * size, [LEVELS.index("pp")] * 2 * self.devices, of_updates, [waits] * len(of_updates)
        ])  # fmt: skip
        of_device = self.states.updates.stream[self.states.updates.device == notes.device]
        has_ops = np.diff(notes.starts) > 0
        has_ops[2 * size :] = notes.counts[2 * size :] > 0
        has_ops[size : 2 * size] = notes.counts[size : 2 * size] > 0
        has_ops[2 * size + 2 * self.devices + of_device] = True
        present = {LEVELS[level] for level in levels[has_ops].tolist()}
        lengths = measure_levels(notes, levels, len(LEVELS)).tolist()
        return {axis: length for axis, length in zip(LEVELS, lengths, strict=True) if axis in present}


def summarise(plan: Plan, span: float, resting: np.ndarray, peaks: np.ndarray) -> StepAndMemory:
    """Returns the figures of a played step.

    resting: see `RestingDevices.memory`; peaks: see `find_peaks`.
    """
    memory, usable = plan.job.framework.memory, plan.job.cluster.gpu.program_memory
    context, allocated, need = memory.context_gib * GIB, 0.0, 0.0
    of_passes = peaks[:, :, (-1, GRADIENTS)].tolist()
    for of_device, (held, left) in zip(resting.tolist(), of_passes, strict=True):
        total, cached = _find_height(*of_device, *held, *left)
        reserved = memory.reserve(total + cached, of_device[0] + cached) + context
        allocated, need = max(allocated, total), max(need, total + context, min(reserved, usable))
    room = min(usable / (allocated + context), math.inf)
    step = span + plan.job.framework.step_overhead_s
    return StepAndMemory(step, allocated, need, allocated + context, room)


def _find_height(
    kept: float, update: float, load: float, top: float, at_top: float, left: float, gradients: float
) -> tuple[float, float]:
    """Returns the largest memory of tensors on a device, and what the allocator has cached beside it [bytes].

    kept, update, load: held all the time, at the peak of the update, and while weights are loaded.
    top, at_top: the peak of the passes, and its gradients.
    left, gradients: what the passes leave, and its gradients.
    """
    height = kept + top, max(0.0, gradients - at_top)
    if kept + left + update > height[0]:
        height = kept + left + update, 0.0
    return max(height, (load, 0.0)) if load else height
