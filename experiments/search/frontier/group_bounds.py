"""Lower bounds of all pipelines of a group at once, and the points of a group that may fit."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np

from meshcast.experiments.search.frontier.bounds import PointBounds, kinds_of
from meshcast.experiments.search.space.data_schemes import gathers_once, layers_of_unit
from meshcast.experiments.search.space.space import NODE, LayerGroup, Pipeline, Place, Space, StepChoice
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember, remembered, remembered_by
from meshcast.hardware.units import GIB
from meshcast.simulator.bounds.collectives import LARGE, AxesOfGroups, collective_rates, copy_rates
from meshcast.simulator.bounds.least_states import ParameterCosts, least_states
from meshcast.simulator.bounds.order_bounds import OrderBounds
from meshcast.simulator.bounds.pipeline_table import (
    Collectives,
    DeviceUnits,
    PipelineTable,
    PipelineUnits,
    sum_passes,
)
from meshcast.simulator.bounds.schedule_bound import Mode, StageTimes, has_bound
from meshcast.simulator.bounds.unit_prices import UnitLayout, add_recomputed
from meshcast.simulator.ir.ops import BYTES, GATHERED_FORMATS, STORED_FORMATS
from meshcast.simulator.job.job import Job

MAX_PASSES = 100
"""Groups of whose pipelines the time of all passes is kept: those that differ in what they hold follow each other."""

COLUMNS = ("places", "schemes", "seconds", "nbytes", "points")
"""What an `OpenGroup` has of every pipeline with a data scheme."""

WHOLE = {"weights": {"ddp", "zero-1", "zero-2"}, "gradients": {"ddp", "zero-1"}, "optimizer": {"ddp"}}
"""Data schemes that keep whole weights, gradients and optimizer states on every rank."""


class GroupPipelines(NamedTuple):
    """The pipelines of groups with equal degrees and micro-batches.

    pipelines: those that exist.
    wrong: those that break a rule.
    units: what the devices of the former run and hold.
    micro_batches, devices: of each of them [pipelines].
    places: numbers of pipelines with equal stages and order of the mesh, by these.
    """

    pipelines: list[Pipeline]
    wrong: list[Pipeline]
    units: PipelineTable
    micro_batches: np.ndarray
    devices: np.ndarray
    places: dict[Place, np.ndarray]


class Known(IntEnum):
    """What the bounds of a group consider, each more than the last.

    WITHOUT_RECOMPUTE: passes without what is recomputed, but for its kernels; and data-parallel collectives.
    MEMORY: also memory.
    PASSES: passes as they are.
    """

    WITHOUT_RECOMPUTE = 0
    MEMORY = 1
    PASSES = 2


@dataclass(frozen=True, eq=False)
class OpenGroup:
    """The pipelines of a group with each data scheme, the smallest bound first.

    table: all pipelines of the group.
    places, schemes: numbers of the pipelines and of their data schemes [choices].
    seconds, nbytes: lower bounds of their step times and of their memory [choices] [s] [bytes].
    points: numbers of their points [choices].
    by_memory: whether they are in the order of their memory.
    known: what the bounds consider.
    """

    group: LayerGroup
    table: GroupPipelines
    places: np.ndarray
    schemes: np.ndarray
    seconds: np.ndarray
    nbytes: np.ndarray
    points: np.ndarray
    by_memory: bool = False
    known: Known = Known.WITHOUT_RECOMPUTE

    @property
    def left(self) -> int:
        return int(self.points.sum())

    def in_order(self) -> OpenGroup:
        return self.select(np.argsort(self.nbytes if self.by_memory else self.seconds, kind="stable"))

    def select(self, which: np.ndarray) -> OpenGroup:
        columns = {name: getattr(self, name)[which] for name in COLUMNS}
        return replace(self, **columns)

    def least(self, at: int, seconds: float, nbytes: float) -> tuple[float, float]:
        """Returns lower bounds of all pipelines from a place in the order on, in what they are in the order of.
        seconds, nbytes: bounds that are known already [s] [bytes]."""
        if self.by_memory:
            return seconds, max(nbytes, float(self.nbytes[at]))
        return max(seconds, float(self.seconds[at])), nbytes

    def pipeline(self, at: int) -> Pipeline:
        return self.table.pipelines[self.places[at]]


def _what_operators_do(bounds: GroupBounds, group: LayerGroup) -> Hashable:
    """Returns what the works of the operators of a group follow from."""
    return *kinds_of(group), group.micro, group.recompute == "full"


class GroupBounds:
    """Bounds all pipelines of a group at once.

    by_memory: in the order of their memory.
    """

    def __init__(self, space: Space, bounds: PointBounds, by_memory: bool = False) -> None:
        self.space, self.bounds, self.prices, self.by_memory = space, bounds, bounds.prices, by_memory
        # The copies of what a data scheme shards are another scheme, whatever their number.
        pairs: list[tuple[str, int | str | None]] = [(name, None) for name in space.values["data"]]
        shards = [shard for shard in space.values["shard"] if shard is not None]
        pairs += [(name, shard) for name in space.values["data"] if name in space.with_copies for shard in shards]
        self._schemes = {pair: number for number, pair in enumerate(pairs)}
        self._known_passes: dict[Hashable, np.ndarray] = {}

    @remembered_by(_what_operators_do)
    def bound_operators(self, group: LayerGroup) -> float:
        """Returns a lower bound of the step time of a group without lowering its layers [s]: that of its passes by the
        works of their operators; where these are not known, that of the kernels of its lowered layers."""
        modes, known = self._modes(group), self._operators(group)
        if known is None or not modes:
            return self.prices.bound_kernels(group)
        return self._bound_sums(group, modes, *known)

    def _operators(self, group: LayerGroup) -> tuple[StageTimes, UnitLayout] | None:
        """Returns the least durations of the passes of the units of a group, and their kinds, without lowering them;
        None if they are not known."""
        if (least := self.prices.least_times(group)) is None:
            return None
        times, layout = least.times[group.micro], UnitLayout(np.zeros(least.kinds), {}, {}, least.of_layer, None)
        if group.recompute != "full":
            return times, layout
        return add_recomputed(times, least.longest[group.micro]), layout.with_recomputed()

    @remembered_by(lambda bounds, group: (_what_operators_do(bounds, group), group.recompute, group.offload))
    def bound_fitting(self, group: LayerGroup) -> float | None:
        """Returns a lower bound of the step time of those plans of a group that may fit in memory [s], without lowering
        its layers; infinite if none may; None if nothing is known of the operators.

        A pipeline holds the activations of its schedule: what operators save, where it is recomputed nothing. It takes
        the time of its passes, the waiting for each other included. So groups in which only pipelines with long waits
        fit are seen to be slow before they are opened. States and data-parallel collectives count as nothing.
        """
        known, saved = self._operators(group), self.prices.least_saved(group)
        if known is None or saved is None:
            return None
        times, layout = known
        table = self._table(group, layout)
        states = np.zeros((table.units.size, 1))
        nbytes = table.units.memory(saved, layout.elements, states)[:, 0]
        fits = nbytes + self.space.loaded.framework.memory.context_gib * GIB <= self.space.capacity
        seconds = self._pass_seconds(group, table, times)[fits]
        return float(seconds.min(initial=np.inf)) + self.space.loaded.framework.step_overhead_s

    def _pass_seconds(self, group: LayerGroup, table: GroupPipelines, times: StageTimes) -> np.ndarray:
        """Returns lower bounds of the time of all passes of the pipelines of a group [pipelines] [s], by the operators
        of its layers."""
        return remember(
            self._known_passes, _what_operators_do(self, group), lambda: table.units.pass_seconds(times), MAX_PASSES
        )

    def bound_passes(self, group: LayerGroup) -> float:
        """Returns a lower bound of the step time of a group from the passes of its units, over all devices without
        waiting [s]; 0 if there is none."""
        units, layout = self.prices.times_without_recompute(group), self.prices.unit_layout(group)
        modes = self._modes(group)
        if units is None or layout is None or not modes:
            return 0.0
        return self._bound_sums(group, modes, units, layout)

    def _bound_sums(self, group: LayerGroup, modes: set[Mode], units: StageTimes, layout: UnitLayout) -> float:
        # Stages may recompute some of their layers alone.
        recomputed = None if self.space.values["recomputed"] == (None,) else 0
        counts = layout.count_units((len(layout.of_layer),), recomputed)
        seconds = min(sum_passes(mode, units, counts) for mode in modes)
        return self.prices.micro_batches(group) * seconds + self.space.loaded.framework.step_overhead_s

    @remembered_by(lambda bounds, group: (group.tp * group.cp, group.micro))
    def _modes(self, group: LayerGroup) -> set[Mode] | None:
        """Returns how the schedules of a group run passes; None if there are no bounds of some."""
        distinct = {(pipeline.schedule, pipeline.pp > 1): pipeline for pipeline in self.space.pipelines(group)}
        pairs = [self.bounds.states.schedule(pipeline) for pipeline in distinct.values()]
        return {Mode.of(schedule) for schedule, _ in pairs} if all(has_bound(*pair) for pair in pairs) else None

    def open(self, group: LayerGroup) -> tuple[OpenGroup | None, int]:
        """Returns the pipelines of a group, bounded by their passes without what is recomputed and by data-parallel
        collectives; and invalid points."""
        opened, wrong = self._open(group)
        return replace(opened, group=group) if opened is not None else None, wrong

    def _what_opens(self, group: LayerGroup) -> Hashable:
        """Returns what the pipelines of a group follow from: memory changes no passes."""
        plain = group._replace(recompute="full" if group.recompute == "full" else "none", offload=())
        return group if self.space.limits_points else (plain, "activations" in group.offload)

    @remembered_by(_what_opens)
    def _open(self, group: LayerGroup) -> tuple[OpenGroup | None, int]:
        layout, units = self.prices.unit_layout(group), self.prices.times_without_recompute(group)
        if layout is None or units is None:
            return None, self.space.size(group)
        table = self._table(group, layout)
        points = self._points(group, table.pipelines, table.places)
        places, schemes = np.nonzero(points)
        seconds = self._seconds(group, table, units, layout)[places, schemes]
        columns = places, schemes, seconds, np.zeros(len(places)), points[places, schemes]
        opened = OpenGroup(group, table, *columns, self.by_memory)
        wrong = self._points(group, table.wrong, find_places(table.wrong))
        return opened.in_order() if len(places) else None, int(wrong.sum())

    def _fit(self, opened: OpenGroup) -> OpenGroup | None:
        """Returns the pipelines that may fit in memory, by what their devices hold at least."""
        nbytes = self.bound_memory(opened)
        if nbytes is None:
            return None
        left = replace(opened, nbytes=nbytes, known=Known.MEMORY).select(nbytes <= self.space.capacity)
        return left.in_order() if len(left.places) else None

    def bound_memory(self, opened: OpenGroup) -> np.ndarray | None:
        """Returns what devices of pipelines of a group hold at least [choices] [bytes]; None if it breaks a rule."""
        group, table = opened.group, opened.table
        layout, grown = self.prices.unit_layout(group), self.prices.unit_memory(group)
        if layout is None or grown is None:
            return None
        states, whole = self._state_nbytes(group, table), self._whole_weights(group, table, layout)
        least = table.units.memory(grown, layout.elements, states, whole)
        return (least + self.space.loaded.framework.memory.context_gib * GIB)[opened.places, opened.schemes]

    def least_memory(self, group: LayerGroup) -> float:
        """Returns a lower bound of the memory of all points of a group [bytes]: on the fullest GPU, with no fewer
        parameters than the average, states that are divided by as many ranks as can be; 0 if it breaks a rule."""
        layout = self.prices.unit_layout(group)
        if layout is None:
            return 0.0
        every = float(layout.elements[0] + layout.elements[layout.of_layer].sum() + layout.elements[-1])
        states = [self._whole_and_shared(group, name) for name, _ in self._schemes]
        places = {pipeline.place for pipeline, _ in self.space.count_pipelines(group)}
        nbytes = [
            every / place.pp * (whole + shared / self._shards(group, place, value))
            for place in places
            for (_, value), (whole, shared) in zip(self._schemes, states, strict=True)
        ]
        return min(nbytes, default=0.0) + self.space.loaded.framework.memory.context_gib * GIB

    def refine(self, opened: OpenGroup) -> OpenGroup | None:
        """Returns the same pipelines with better bounds, or those that may fit in memory; None: there are none."""
        if opened.known < Known.MEMORY:
            return self._fit(opened)
        units, layout = self.prices.times(opened.group), self.prices.unit_layout(opened.group)
        if units is None or layout is None:
            return None
        seconds = self._seconds(opened.group, opened.table, units, layout)[opened.places, opened.schemes]
        return replace(opened, seconds=np.maximum(opened.seconds, seconds), known=Known.PASSES).in_order()

    def steps(self, opened: OpenGroup, at: int) -> list[StepChoice]:
        """Returns the choices of a pipeline with a data scheme."""
        choices, scheme = self.space.choices(opened.group, opened.pipeline(at)), opened.schemes[at]
        return [step for step in choices if self.scheme_of(step) == scheme]

    def scheme_of(self, step: StepChoice) -> int:
        shard = step.shard
        return self._schemes[step.data, NODE if shard is not None and NODE in self.space.values["shard"] else shard]

    def _points(self, group: LayerGroup, pipelines: list[Pipeline], places: Mapping[Place, np.ndarray]) -> np.ndarray:
        """Returns the numbers of the points of pipelines [pipelines, data schemes]. places: see `find_places`."""
        points = np.zeros((len(pipelines), len(self._schemes)), int)
        if self.space.limits_points:
            for row, pipeline in zip(points, pipelines, strict=True):
                row += self._count(self.space.choices(group, pipeline))
        else:
            for place, at in places.items():
                points[at] = self._count(self.space.steps(group, *place))
        return points

    @remembered
    def _count(self, choices: tuple[StepChoice, ...]) -> np.ndarray:
        """Returns the numbers of choices [data schemes]."""
        return np.bincount([self.scheme_of(step) for step in choices], minlength=len(self._schemes))

    @remembered_by(
        lambda bounds, group, layout: (
            *(group.tp * group.cp, group.micro, group.recompute == "full"),
            layout.of_layer.tobytes(),
        )
    )
    def _table(self, group: LayerGroup, layout: UnitLayout) -> GroupPipelines:
        pipelines, wrong, units = list[Pipeline](), list[Pipeline](), list[PipelineUnits]()
        for unchanged, same_order in groupby(self.space.pipelines(group), lambda pipeline: pipeline.order):
            variants, order = tuple(same_order), self.bounds.order(group, unchanged)
            if order is None:
                wrong += variants
                continue
            pipelines += variants
            held = self._device_units(layout, variants, order)
            units.append(PipelineUnits(order.schedule, order.shape, held, order.in_flight))
        shapes = [unit.shape for unit in units for _ in unit.devices.work[0]]
        micro_batches, devices = (np.array([getattr(shape, name) for shape in shapes]) for name in ("m", "p"))
        return GroupPipelines(pipelines, wrong, PipelineTable(units), micro_batches, devices, find_places(pipelines))

    @remembered_by(
        # Where all micro-batches take the same way, all devices run all of them.
        lambda bounds, layout, variants, order: (
            variants,
            order.shape.m if np.ptp(order.place.turns) else 0,
            layout.of_recomputed is None,
            layout.of_layer.tobytes(),
        )
    )
    def _device_units(self, layout: UnitLayout, variants: tuple[Pipeline, ...], order: OrderBounds) -> DeviceUnits:
        """Returns what devices run and hold, of pipelines that differ in the layers that they recompute."""
        counts = np.stack([layout.count_units(order.layers, variant.recomputed) for variant in variants], axis=1)
        return DeviceUnits.of(order.place, counts, order.shape.m)

    def _seconds(self, group: LayerGroup, table: GroupPipelines, units: StageTimes, layout: UnitLayout) -> np.ndarray:
        """Returns lower bounds of the step times of the pipelines of a group [pipelines, data schemes] [s]."""
        seconds = table.units.step_seconds(units, self._collectives(group, table, layout))
        if copies := self.prices.copy_seconds(group):
            # The layer before the loss keeps its activations on the GPU.
            layers = self.space.loaded.model.layers // table.devices - 1
            seconds = np.maximum(seconds, (table.micro_batches * copies * layers)[:, None])
        return seconds + self.space.loaded.framework.step_overhead_s

    def _collectives(self, group: LayerGroup, table: GroupPipelines, layout: UnitLayout) -> Collectives:
        """Returns the data-parallel collectives of the pipelines of a group, at the rates of very large messages."""
        groups, shape = tuple(layout.reduced), (len(layout.reduced), len(layout.elements))
        each_reduction, each_gather = self._turns(table)
        elements, matrices = (
            np.array([sizes[axes] for axes in groups]).reshape(shape) for sizes in (layout.reduced, layout.matrices)
        )
        seconds = self._collective_rates(group, table, layout, each_reduction > 0)
        for place, at in table.places.items():
            for (name, value), number in self._schemes.items():
                if value is not None and name in self.space.data_schemes.known:
                    seconds[:, at, number] = self._copy_rates(group, place, value, groups, elements)[:, None]
        seconds[0] *= BYTES[self.space.loaded.framework.gradients]
        seconds[1] *= least_weight_bytes(self.space.loaded)
        return Collectives(elements, matrices, seconds[0], seconds[1], each_reduction, each_gather)

    def _collective_rates(
        self, group: LayerGroup, table: GroupPipelines, layout: UnitLayout, reduces_each: np.ndarray
    ) -> np.ndarray:
        """Returns the least seconds a byte of reductions and gathers [2, pipelines, data schemes, groups].

        reduces_each: whether every micro-batch reduces gradients, then unit by unit [pipelines, data schemes].
        """
        groups, schemes, number = tuple(layout.reduced), self.space.data_schemes, np.zeros(table.units.size, int)
        sharded, known = (
            np.array([name in names for name, _ in self._schemes])[:, None]
            for names in (schemes.known - {"ddp"}, schemes.known)
        )
        of_unit = [(axes, *largest_unit(layout, axes, schemes.most_layers)) for axes in groups]
        sizes = [(axes, 0, 0) for axes in groups], of_unit
        rates = np.zeros((len(table.places), 2, len(groups), 3))
        for i, (place, at) in enumerate(table.places.items()):
            number[at] = i
            for each, of_groups in enumerate(sizes):
                for j, size in enumerate(of_groups):
                    rates[i, each, j] = self._rates(group, place, *size)
        reduce, scatter, gather = np.moveaxis(rates[number[:, None], reduces_each.astype(int)], -1, 0)
        return np.stack([known * np.where(sharded, scatter, reduce), sharded * gather])

    def _turns(self, table: GroupPipelines) -> tuple[np.ndarray, np.ndarray]:
        """Returns how often a micro-batch reduces gradients, and gathers weights [pipelines, data schemes]."""
        overlaps, names = any(self.space.values["overlap_dp"]), [name for name, _ in self._schemes]
        turns_of = self.space.data_schemes.collectives_of_microbatch
        alone, piped = ([turns_of(name, several, overlaps) for name in names] for several in (False, True))
        turns = np.where((table.devices > 1)[:, None, None], piped, alone)
        if gathered_once := self.space.data_schemes.gathered_once:
            kept = [name in gathered_once for name in names]
            turns[:, :, 1] = np.where(kept, np.minimum(turns[:, :, 1], 1), turns[:, :, 1])
        return turns[:, :, 0], turns[:, :, 1]

    @remembered_by(lambda bounds, group, place, value, groups, elements: (group.degrees, place, value, groups))
    def _copy_rates(
        self, group: LayerGroup, place: Place, value: int | str, groups: AxesOfGroups, elements: np.ndarray
    ) -> np.ndarray:
        """Returns the least seconds a byte of the reductions and of the gathers of a scheme with copies [2, groups].
        value: of the field. groups, elements: as `copy_rates` takes them."""
        shard = self.space.shard_ranks(value, *self.space.data_ranks(group, place))
        usual, plan = (self.bounds.states.plain_plan(group, place, ranks) if shard else None for ranks in (None, shard))
        if usual is None or plan is None:
            return np.zeros((2, len(groups)))
        return copy_rates(usual, plan, groups, elements, self.bounds.shared)

    @remembered_by(lambda bounds, group, *rest: (group.degrees, *rest))
    def _rates(
        self, group: LayerGroup, place: Place, axes: tuple[str, ...], reduced: int = 0, gathered: int = 0
    ) -> tuple[float, ...]:
        """Returns the least seconds a byte of an all-reduce, a reduce-scatter and an all-gather along some axes.
        reduced, gathered: most parameters of a collective; 0: any number."""
        plan, framework = self.bounds.states.plain_plan(group, place), self.space.loaded.framework
        reduction = int(reduced) * BYTES[framework.gradients] or LARGE
        nbytes = reduction, reduction, round(int(gathered) * least_weight_bytes(self.space.loaded)) or LARGE
        return collective_rates(plan, axes, self.bounds.shared, nbytes) if plan else (0.0, 0.0, 0.0)

    def _state_nbytes(self, group: LayerGroup, table: GroupPipelines) -> np.ndarray:
        """Returns the bytes of states of a parameter, divided by as many ranks as can be [pipelines, data schemes]."""
        whole, shared = np.array([self._whole_and_shared(group, name) for name, _ in self._schemes]).T
        parts = np.zeros((table.units.size, len(self._schemes)))
        for (_, value), number in self._schemes.items():
            for place, at in table.places.items():
                parts[at, number] = self._shards(group, place, value)
        return whole + shared / parts

    def _whole_weights(self, group: LayerGroup, table: GroupPipelines, layout: UnitLayout) -> np.ndarray | None:
        """Returns the bytes of the weights of a unit that are gathered from the first to the last micro-batch
        [pipelines, data schemes, kinds]: those of FSDP under a pipeline, where all choices overlap; None: none are."""
        number, overlaps = self._schemes.get(("fsdp", None)), all(self.space.values["overlap_dp"])
        known = "fsdp" in self.space.data_schemes.known and "activations" not in group.offload
        if number is None or not known or not overlaps:
            return None
        nbytes = np.zeros((table.units.size, len(self._schemes), len(layout.elements)))
        for place, at in table.places.items():
            if place.pp > 1:
                sharded = (sizes for axes, sizes in layout.matrices.items() if self._rates(group, place, axes)[0] > 0.0)
                nbytes[at, number] = least_weight_bytes(self.space.loaded) * sum(sharded, 0 * layout.elements)
        return nbytes

    def _whole_and_shared(self, group: LayerGroup, data: str) -> tuple[float, float]:
        """Returns the bytes of states of a parameter that a data scheme keeps on every rank, and that it shards."""
        if data not in self.space.data_schemes.known:
            return 0.0, 0.0
        framework, cuts_weights = self.space.loaded.framework, data not in WHOLE["weights"]
        full, compute = BYTES[framework.main_weights], least_weight_bytes(self.space.loaded)
        nbytes = {
            "weights": compute,
            # With a single micro-batch a step those that are set to None are not there at the peak.
            "gradients": 0 if framework.update.gradients_to_none else BYTES[framework.gradients],
            "optimizer": framework.update.states.least_bytes(framework.moments),
        }
        if self.space.loaded.train.mode != "full":
            nbytes["gradients"] = nbytes["optimizer"] = 0
        elif "optimizer" in group.offload:
            nbytes["optimizer"] = 0
        elif cuts_weights:  # the shards are the optimizer's copy
            nbytes["weights"] = max(full, compute)
        else:
            nbytes["optimizer"] += framework.main_copy_bytes
        whole = sum(nbytes[state] for state in nbytes if data in WHOLE[state])
        return whole, sum(nbytes.values()) - whole

    def _shards(self, group: LayerGroup, place: Place, value: int | str | None) -> float:
        """Returns the most ranks that share a copy of a parameter of a rank. value: of the field shard."""
        dp, inside = self.space.data_ranks(group, place)
        ranks = self.space.loaded.cluster.gpus / place.pp / (group.tp if self.space.loaded.model.moe is None else 1)
        copies = dp // (self.space.shard_ranks(value, dp, inside) or dp) if value is not None else 1
        return ranks / copies

    # ------------------------------------------------------------------------------------------ points

    def bound_before_states(
        self, group: LayerGroup, pipeline: Pipeline, steps: Sequence[StepChoice]
    ) -> tuple[float, float] | None:
        """Returns lower bounds as `PointBounds.bound_points` does, with the least states by shares of the units."""
        step = steps[0]
        layout, stages = self.prices.unit_layout(group), self.bounds.stages(group, pipeline, step.data)
        plan = self.bounds.states.plain_plan(group, pipeline.place, step.shard)
        if layout is None or stages is None or plan is None:
            return None
        costs = self._parameter_costs(group, pipeline.place, step, layout)
        states = least_states(plan, layout, stages.units, stages.order.place, costs)
        return self.bounds.bound_points(group, pipeline, steps, states)

    def _parameter_costs(self, group: LayerGroup, place: Place, step: StepChoice, layout: UnitLayout) -> ParameterCosts:
        """Returns what the data scheme of a choice does with a parameter, at least."""
        whole, shared = self._whole_and_shared(group, step.data)
        nbytes = whole + shared / self._shards(group, place, step.shard)
        framework, schemes = self.space.loaded.framework, self.space.data_schemes
        known = step.shard is None and step.data in schemes.known
        each, often = schemes.collectives_of_microbatch(step.data, place.pp > 1, step.overlap_dp)
        often, layers = min(often, 1) if gathers_once(step.option) else often, layers_of_unit(step.option)
        reductions, gathers = dict.fromkeys(layout.reduced, 0.0), dict.fromkeys(layout.reduced, 0.0)
        for axes in layout.reduced if known else ():
            rates = self._rates(group, place, axes, *(largest_unit(layout, axes, layers) if each else (0, 0)))
            reductions[axes] = rates[0 if step.data == "ddp" else 1] * BYTES[framework.gradients]
            gathers[axes] = rates[2] * least_weight_bytes(self.space.loaded)
        # Under a pipeline that overlaps, FSDP keeps weights gathered and gradients whole through all micro-batches.
        kept = step.data == "fsdp" and not each and known
        both = (least_weight_bytes(self.space.loaded), BYTES[framework.gradients]) if kept else (0, 0)
        return ParameterCosts(nbytes, both, reductions, gathers, each, often, layers)


def group_by_overlap(steps: Sequence[StepChoice]) -> list[list[StepChoice]]:
    """Returns choices with a data scheme by what of its collectives overlaps, and by its units."""
    families: dict[Hashable, list[StepChoice]] = {}
    for step in steps:
        families.setdefault((step.overlap_dp, step.updated_weights, step.options), []).append(step)
    return [*families.values()]


def least_weight_bytes(job: Job) -> float:
    """Returns the least bytes in which a weight of a job is stored and gathered."""
    stored, framework = job.train.frozen_weights, job.framework
    compute = BYTES[framework.weights]
    if framework.update.quantised_weights:
        compute = min(compute, GATHERED_FORMATS.get(framework.quantised, compute))
    return float(compute if stored is None else min(compute, STORED_FORMATS[stored].codes))


def largest_unit(layout: UnitLayout, axes: tuple[str, ...], layers: int) -> tuple[int, int]:
    """Returns the parameters that the largest unit of some layers reduces along axes, and the matrices it gathers."""
    return layers * layout.reduced[axes].max(), layers * layout.matrices[axes].max()


def find_places(pipelines: list[Pipeline]) -> dict[Place, np.ndarray]:
    """Returns the numbers of pipelines with equal stages and order of the mesh."""
    numbers_of: dict[Place, list[int]] = {}
    for number, pipeline in enumerate(pipelines):
        numbers_of.setdefault(pipeline.place, []).append(number)
    return {place: np.array(numbers) for place, numbers in numbers_of.items()}
