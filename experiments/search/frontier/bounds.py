"""Lower bounds of step time and memory of points: of which plan each needs the units, states and orders that bound it
(`simulator.bounds`), computed once for all points that need the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from meshcast.experiments.search.space.data_schemes import gathers_ahead
from meshcast.experiments.search.space.space import LayerGroup, Pipeline, Place, Space, StepChoice
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remember, remembered, remembered_by
from meshcast.hardware.units import GIB
from meshcast.simulator.bounds.device_states import DeviceStates, device_states
from meshcast.simulator.bounds.micro_batches import SizedUnits
from meshcast.simulator.bounds.operators.least_times import KnownTimes, LeastTimes, least_times
from meshcast.simulator.bounds.order_bounds import KnownOrders, KnownShapes, OrderBounds, StageBounds
from meshcast.simulator.bounds.schedule_bound import StageTimes
from meshcast.simulator.bounds.unit_prices import LoweredUnits, UnitLayout, UnitPrices, lower_units
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.loading.load import load_job, set_field
from meshcast.simulator.models.model import sharded_lengths
from meshcast.simulator.plan.partition import layers_of_stages
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule, make_schedule

Bound = TypeVar("Bound")

MAX_STAGES = 5_000
"""Pipelines with priced stages that are kept: a few KiB each."""


def kinds_of(group: LayerGroup) -> tuple[Hashable, ...]:
    """Returns what the operators of the units of a group follow from, but for the size of their micro-batches."""
    return *group.degrees, group.sequence_parallel, group.overlap_tp


class PriceBounds:
    """Makes the units of groups, and the bounds that these give alone."""

    def __init__(self, space: Space, shared: SharedWork) -> None:
        self.space, self.shared = space, shared
        self._known_times = KnownTimes(space.values["micro"])

    def make_for_plan(
        self, point: tuple[LayerGroup, Pipeline, StepChoice], make: Callable[[Plan], Bound], **changes: object
    ) -> Bound | None:
        """Makes something of the plan of a point with two micro-batches a stage; None if it breaks a rule.

        changes: of options of its framework.
        """
        (group, *_), gpus, job = point, self.space.loaded.cluster.gpus, self.space.job_of(*point)
        set_field(job, "batch.global", 2 * group.micro * gpus // (group.tp * group.cp), "batch.global")
        for name, value in changes.items():
            set_field(job, f"framework.set.{name}", value, "framework")
        try:
            return make(resolve_plan(load_job(job, base=self.space.base), self.shared))
        except MeshcastError:
            return None

    # ------------------------------------------------------------------------------------------- units

    @remembered_by(lambda bounds, group, fused: (group._replace(micro=1), fused))
    def _units(self, group: LayerGroup, fused: bool) -> SizedUnits:
        """Returns the units of a group for any micro-batches. fused: neither kernels nor GEMMs add gradients."""
        lower = lambda size: self._lower(group._replace(micro=size), fused)  # noqa: E731
        return SizedUnits(lower, not group.names_schemes, self.shared, self.space.values["micro"])

    @remembered
    def _lower(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group, with those that are not recomputed; None if it breaks a rule."""
        point = group, Pipeline(1, "1f1b", 1, "even"), self.space.any_step
        changes = {"fused_gradients": True} if fused else {}
        units = self.make_for_plan(point, lambda plan: lower_units(plan, self.shared), **changes)
        units = units.of_new_gradients if fused and units is not None else units
        if group.recompute != "full" or units is None:
            return units
        kept = self._lower(group._replace(recompute="none"), fused)
        return kept.join_recomputed(units) if kept is not None else None

    @remembered
    def _fuses_gradients(self, data: str | None = None) -> bool:
        """Returns whether no separate kernels add gradients: the scheme, or any, may reduce them in a micro-batch."""
        schemes = self.space.values["data"] if data is None else (data,)
        sharded = any(map(self.space.data_schemes.may_shard_gradients, schemes))
        return sharded and not self.space.loaded.framework.fused_gradients

    # ------------------------------------------------------------------------------------------ passes

    def prices(self, group: LayerGroup, data: str | None = None, offloaded: bool = False) -> UnitPrices | None:
        """Returns the prices of the units of a group with a data scheme, or with any of the space; None if the group
        breaks a rule.

        All layers are on a single stage, and weights are whole: that only leaves out waiting. offloaded: with the
        copies of activations that the group offloads.
        """
        plain = group._replace(offload=("activations",) if offloaded else ())
        return self._units(plain, self._fuses_gradients(data)).prices(group.micro)

    def times(self, group: LayerGroup) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit; None if the group breaks a rule."""
        return self._units(group._replace(offload=()), self._fuses_gradients()).times(group.micro, False)

    def times_without_recompute(self, group: LayerGroup) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit; recomputed are kernels of layers alone."""
        units = self._units(group._replace(recompute="none", offload=()), self._fuses_gradients())
        return units.times(group.micro, group.recompute == "full")

    def copy_seconds(self, group: LayerGroup) -> float:
        """Returns the time of the copies of the activations of a layer to the host, or back [s]."""
        prices = self.prices(group, offloaded=True) if "activations" in group.offload else None
        return prices.copy_seconds if prices is not None else 0.0

    # --------------------------------------------------------------------------------------- operators

    @remembered_by(lambda bounds, group: kinds_of(group))
    def least_times(self, group: LayerGroup) -> LeastTimes | None:
        """Returns the least durations of the passes of every kind of unit of a group from the works of its operators,
        without recomputation, for any micro-batches; None if there are none, or if the group breaks a rule."""
        if group.names_schemes:
            return None
        fused = self._fuses_gradients()
        changes = {"fused_gradients": True} if fused else {}

        def make(size: int) -> Plan | None:
            plain = group._replace(micro=size, recompute="none", offload=())
            point = plain, Pipeline(1, "1f1b", 1, "even"), self.space.any_step
            return self.make_for_plan(point, lambda plan: plan, **changes)

        if (plan := make(1)) is None:
            return None
        degrees = group.tp, group.cp, group.sequence_parallel, group.overlap_tp
        out_of_place = fused or not self.space.loaded.framework.fused_gradients
        return least_times(plan, lambda: make(2), self._known_times, degrees, self.shared, out_of_place)

    def least_saved(self, group: LayerGroup) -> np.ndarray | None:
        """Returns what the forward pass of a unit leaves at least, by its operators [kinds] [bytes], in the order of
        `unit_memory`; None if nothing is known of them."""
        if (least := self.least_times(group)) is None:
            return None
        whole, without_attention = least.saved[group.micro]
        if "activations" in group.offload or group.recompute not in ("none", "selective", "full"):
            return 0.0 * whole
        if group.recompute == "full":  # every kind of layer once more, recomputed
            return np.concatenate([whole[:-1], 0.0 * whole[1:-1], whole[-1:]])
        return np.asarray(whole if group.recompute == "none" else without_attention)

    # ----------------------------------------------------------------------------------------- kernels

    @remembered_by(lambda bounds, group: kinds_of(group))
    def kind_of_units(self, group: LayerGroup) -> LayerGroup:
        """Returns the group, with micro-batches of one sequence, whose kernels take no longer: norms are sharded,
        nothing is recomputed.

        GEMMs that are cut to overlap the collectives of sharded rows stay cut: parts of a GEMM may end before the power
        limit slows them, and take less than the whole.
        """
        plain = group._replace(recompute="none", offload=(), micro=1)
        if group.tp > 1 and not group.sequence_parallel:  # rows are not sharded, and nothing is cut
            plain = plain._replace(overlap_tp=False)
        # A host that waits for routers launches more collectives with sequence parallelism.
        sharded = group.tp > 1 and self.space.loaded.model.moe is None and group.tensor is None
        lengths = sharded_lengths(self.space.loaded.model, self.space.loaded.batch.sequence or 0)
        divides = not any(length % (group.tp * group.cp) for length in lengths)
        return plain._replace(sequence_parallel=True) if sharded and divides else plain

    def _kernel_units(self, group: LayerGroup) -> SizedUnits:
        return self._units(self.kind_of_units(group), self._fuses_gradients())

    def bound_kernels(self, group: LayerGroup) -> float:
        """Returns a lower bound of the step time of a group from its kernels, over all GPUs without waiting [s]."""
        again = group.recompute == "full" and self.space.values["recomputed"] == (None,)
        seconds = self._kernel_units(group).kernel_seconds(group.micro, again)
        return self.micro_batches(group) * seconds + self.space.loaded.framework.step_overhead_s

    def micro_batches(self, group: LayerGroup) -> float:
        """Returns the micro-batches of a step over the stages of a pipeline: their product with the work of a
        micro-batch on all stages is that of a device, on average."""
        job = self.space.loaded
        assert job.batch.total is not None
        return group.tp * group.cp / job.cluster.gpus * job.batch.total / group.micro

    def unit_layout(self, group: LayerGroup) -> UnitLayout | None:
        """Returns the kinds of units of a group; None if there are none."""
        return self._kernel_units(group).layout(group.micro, group.recompute == "full")

    def unit_memory(self, group: LayerGroup) -> np.ndarray | None:
        """Returns what the forward pass of a unit leaves at least [kinds] [bytes]; None if the group breaks a rule."""
        nbytes = self._units(group._replace(offload=()), self._fuses_gradients()).memory(group.micro)
        return nbytes * ("activations" not in group.offload) if nbytes is not None else None


class StateBounds:
    """Makes the states of devices.

    prices: of the same points.
    """

    def __init__(self, prices: PriceBounds) -> None:
        self.prices, self.space, self.shared = prices, prices.space, prices.shared

    def schedule(self, pipeline: Pipeline, m: int = 1) -> tuple[Schedule, PipelineShape]:
        """Returns the schedule of a pipeline, and its shape with m micro-batches."""
        name, chunks = (pipeline.schedule, pipeline.chunks) if pipeline.pp > 1 else ("1f1b", 1)
        schedule = make_schedule(name, pipeline.pp, chunks, self.space.loaded.framework)
        alone = self.space.loaded.forward_only
        return schedule, PipelineShape(pipeline.pp, m, schedule.chunks_per_device(), forward_only=alone)

    def states(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> DeviceStates | None:
        """Returns the states of devices for degrees, partition and data scheme; None if they break a rule."""
        plain = group._replace(
            micro=group.least_micro,
            recompute="none",
            overlap_tp=False,
            offload=tuple(part for part in group.offload if part == "optimizer"),
        )
        pipeline = self._without_chunks(group, pipeline._replace(recomputed=None), step)
        # Messages between stages change no state.
        return self._states(plain, pipeline, step._replace(overlap_pp=self.space.any_step.overlap_pp))

    def _without_chunks(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> Pipeline:
        """Returns a pipeline with a single stage on each device whose states are no larger, or the pipeline itself.

        Devices hold as many layers in a single chunk as in several, whose gradients are reduced in larger buckets. But
        the first unit of a stage gathers more in a micro-batch than the others, and chunks have other first units.
        """
        schedule, shape = self.schedule(pipeline)
        ends = schedule.device(shape, 0), schedule.device(shape, shape.stages // schedule.directions - 1)
        layout = self.prices.unit_layout(group)
        if (
            step.data not in self.space.data_schemes.known
            or layout is None
            or np.ptp(layout.of_layer)
            or ends != (0, pipeline.pp - 1)
            or schedule.directions > 1
            or any(self.space.data_schemes.collectives_of_microbatch(step.data, pipeline.pp > 1, step.overlap_dp))
        ):
            return pipeline
        partition = pipeline.partition
        if not isinstance(partition, str):
            partition = tuple(sum(partition[device :: pipeline.pp]) for device in range(pipeline.pp))
        return pipeline._replace(schedule="1f1b", chunks=1, partition=partition)

    @remembered
    def _states(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> DeviceStates | None:
        model, framework = self.space.loaded.model, self.space.loaded.framework
        # Launches on the host change no state, and would be separate ops.
        changes = {"launch_s": 0.0} if model.moe is not None and hidden_launch_s(framework) else {}
        point = group, pipeline, step
        states = self.prices.make_for_plan(point, lambda plan: device_states(plan, self.shared), **changes)
        return states.at_least() if states is not None and step.data not in self.space.data_schemes.known else states

    @remembered_by(lambda bounds, group, *rest: (group.degrees, group.least_micro, *rest))
    def plain_plan(self, group: LayerGroup, place: Place, shard: int | None = None) -> Plan | None:
        """Returns a plan of the degrees of a group, for prices of messages. shard: ranks of a copy of states."""
        plain = group._replace(micro=group.least_micro, recompute="none", overlap_tp=False, offload=())
        step = self.space.any_step
        step = step if shard is None else step._replace(data="zero-1", shard=shard)
        layers = self.space.loaded.model.layers
        few, more = divmod(layers, place.pp)
        divided = (few + 1,) * more + (few,) * (place.pp - more)
        whole = "even" if not more else "ends-as-layers" if (layers + 2) % place.pp == 0 else divided
        pipeline = Pipeline(place.pp, "1f1b", 1, whole, None, place.mesh_order)
        return self.prices.make_for_plan((plain, pipeline, step), lambda plan: plan)


class PointBounds:
    """Makes the bounds of points, and keeps what several of them need.

    prices: bounds from prices of units.
    states: bounds from states of devices.
    """

    def __init__(self, space: Space, shared: SharedWork | None = None) -> None:
        self.space, self.shared = space, shared or SharedWork()
        self.prices = PriceBounds(space, self.shared)
        self.states = StateBounds(self.prices)
        self._known_shapes = defaultdict[Pipeline, KnownShapes](KnownShapes)
        self._stages: dict[tuple[int, int, int | None], StageBounds] = {}

    def order(self, group: LayerGroup, pipeline: Pipeline) -> OrderBounds | None:
        """Returns the bounds from the order of the passes of a pipeline; None if it does not exist."""
        job = self.space.loaded
        assert job.batch.total is not None
        dp = job.cluster.gpus // (group.tp * group.cp * pipeline.pp)
        return self._order(pipeline.order, job.batch.total // (group.micro * dp))

    @remembered
    def _order(self, pipeline: Pipeline, m: int) -> OrderBounds | None:
        schedule, shape = self.states.schedule(pipeline, m)
        try:
            schedule.check(shape)
            parts = shape.stages // schedule.directions
            layers = tuple(layers_of_stages(pipeline.partition, self.space.loaded.model.layers, parts))
        except MeshcastError:
            return None
        return OrderBounds(schedule, shape, layers, self._known_orders(pipeline))

    @remembered
    def _known_orders(self, pipeline: Pipeline) -> KnownOrders:
        return KnownOrders(shapes=self._known_shapes[pipeline._replace(partition="")])

    def stages(self, group: LayerGroup, pipeline: Pipeline, data: str | None = None) -> StageBounds | None:
        """Returns the bounds of a pipeline of a group with a data scheme, or with any of the space, or None."""
        prices, order = self.prices.prices(group, data), self.order(group, pipeline)
        if prices is None or order is None:
            return None

        def bound() -> StageBounds:
            return StageBounds(order, prices.stages(order.layers, pipeline.recomputed), prices, self.shared)

        # Data schemes, and places of the ranks, change little of what bounds a pipeline.
        return remember(self._stages, (id(prices), id(order), pipeline.recomputed), bound, MAX_STAGES)

    @remembered_by(lambda bounds, group, pipeline: (group._replace(offload=()), pipeline))
    def bound_chains(self, group: LayerGroup, pipeline: Pipeline) -> float:
        """Returns a lower bound of the step time of the points of a pipeline from the order of its passes [s]."""
        stages = self.stages(group, pipeline)
        if stages is None or not stages.order.known:
            return 0.0
        plan = self.states.plain_plan(group, pipeline.place)
        return stages.chain_seconds(plan) + self.space.loaded.framework.step_overhead_s

    def bound_points(
        self, group: LayerGroup, pipeline: Pipeline, steps: Sequence[StepChoice], least: DeviceStates | None = None
    ) -> tuple[float, float] | None:
        """Returns lower bounds of the step time [s] and of the memory that nvidia-smi shows on the fullest GPU [bytes],
        of points that differ in the overlap of messages between stages alone; None if they break a rule.

        Messages count as overlapping if they do in any of them. least: states to use in place of the exact states.
        """
        step = steps[0]._replace(overlap_pp=any(other.overlap_pp for other in steps))
        stages = self.stages(group, pipeline, step.data)
        if stages is None:
            return None
        state = least if least is not None else self.states.states(group, pipeline, step)
        if state is None:
            return None
        # Without overlap weights are gathered, and gradients reduced, in every micro-batch.
        nbytes = stages.memory(state, "activations" in group.offload, step.overlap_dp)
        framework, copies = state.plan.job.framework, self.prices.copy_seconds(group)
        ahead = gathers_ahead(step.option, step.overlap_dp, framework)
        seconds = stages.seconds(state, not step.overlap_pp, ahead, copies)
        return seconds + framework.step_overhead_s, nbytes + framework.memory.context_gib * GIB
