"""Lower bounds of step time and memory of points, from prices of units, states of devices and orders of passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from meshcast.experiments.search.keys.data_schemes import gathers_ahead
from meshcast.experiments.search.space import LayerGroup, Pipeline, Place, Space, StepChoice
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.hardware.units import GIB
from meshcast.simulator.bounds.critical_paths import Replays
from meshcast.simulator.bounds.device_states import DeviceStates, device_states
from meshcast.simulator.bounds.micro_batches import NotAffine
from meshcast.simulator.bounds.order_bounds import OrderBounds, StageBounds
from meshcast.simulator.bounds.schedule_bound import StageTimes
from meshcast.simulator.bounds.unit_prices import LoweredUnits, UnitLayout, UnitPrices, lower_units, price_units
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.plan.partition import layers_of_stages
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule

Made = TypeVar("Made")


class PriceBounds:
    """Makes the prices of groups."""

    def __init__(self, space: Space, shared: SharedWork) -> None:
        self.space, self.shared = space, shared

    def make_for_plan(self, job: dict[str, Any], total: int, make: Callable[[Plan], Made]) -> Made | None:
        """Makes something of the plan of a job with another global batch; None if the plan breaks a rule."""
        job["batch"] = {**job.get("batch", {}), "global": total}
        try:
            return make(resolve_plan(load_job(job, base=self.space.base), self.shared))
        except MeshcastError:
            return None

    # ------------------------------------------------------------------------------------------- units

    def _units(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group: lowered for the smallest micro-batches, scaled for others.

        fused: gradients are added by no kernels of their own, and not by GEMMs either.
        """
        if group.recompute == "full":
            kept, recomputed = self._units(group._replace(recompute="none"), fused), self._scale(group, fused)
            return kept.join_recomputed(recomputed) if kept is not None and recomputed is not None else None
        return self._scale(group, fused)

    def _scale(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group, all layers recomputed alike, for its micro-batches."""
        if group.micro > 2 and not group.names_schemes:  # chunks and tiles of some schemes are not affine
            first, second = self._lower_smallest(group, fused)
            with suppress(NotAffine):
                return first.at_size(second, group.micro) if first is not None and second is not None else None
        return self._lower(group, fused)

    def _lower_smallest(self, group: LayerGroup, fused: bool) -> list[LoweredUnits | None]:
        return [self._lower(group._replace(micro=micro), fused) for micro in (1, 2)]

    @remembered
    def _lower(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """Returns the units of a group as the lowering makes them; None if the group breaks a rule."""
        job = self.space.job_of(group, Pipeline(1, "1f1b", 1, "even"), self.space.any_step)
        job = apply_changes(job, {"batch.micro": group.micro})
        if fused:
            job = apply_changes(job, {"framework.set.fused_gradients": True})
        total = group.micro * self.space.loaded.cluster.gpus // (group.tp * group.cp)
        units = self.make_for_plan(job, total, lambda plan: lower_units(plan, self.shared))
        return units.of_new_gradients if fused and units is not None else units

    @cached_property
    def _shards_gradients(self) -> bool:
        """Whether a data scheme of the space may reduce gradients in every micro-batch: no kernels then add them."""
        return any(map(self.space.data_schemes.may_shard_gradients, self.space.values["data"]))

    @cached_property
    def _fuses_gradients(self) -> bool:
        return self._shards_gradients and not self.space.loaded.framework.fused_gradients

    # ------------------------------------------------------------------------------------------ passes

    def prices(self, group: LayerGroup, sharded: bool = False, offloaded: bool = False) -> UnitPrices | None:
        """Returns the prices of the units of a group; None if the group breaks a rule.

        All layers are on one stage, and weights are whole: that only leaves out waiting. sharded: for gradients that
        are reduced in every micro-batch, and so not accumulated by kernels of their own. offloaded: with the copies of
        activations that the group offloads.
        """
        fused = sharded and not self.space.loaded.framework.fused_gradients
        return self._price(group._replace(offload=("activations",) if offloaded else ()), fused)

    @remembered
    def _price(self, group: LayerGroup, fused: bool) -> UnitPrices | None:
        units = self._units(group, fused)
        return price_units(units, self.shared) if units is not None else None

    def pass_prices(self, group: LayerGroup) -> UnitPrices | None:
        """Returns the prices of the units of a group for any data scheme of the space; None if it breaks a rule."""
        return self.prices(group, self._shards_gradients)

    def times_without_recompute(self, group: LayerGroup) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit, of what is recomputed those of the kernels
        of whole layers alone."""
        prices = self.pass_prices(group._replace(recompute="none"))
        return _unit_times(group, prices) if prices is not None else None

    def copy_seconds(self, group: LayerGroup) -> float:
        """Returns the time of the copies of the activations of a layer to the host, or back [s]."""
        if "activations" not in group.offload:
            return 0.0
        prices = self.prices(group, offloaded=True)
        return max(prices.stream_seconds(OUT, "F"), prices.stream_seconds(IN, "BW")) if prices else 0.0

    # ----------------------------------------------------------------------------------------- kernels

    def kernel_group(self, group: LayerGroup) -> LayerGroup:
        """Returns the group whose kernels take no longer: GEMMs are whole, norms are sharded, nothing is recomputed."""
        plain = group._replace(recompute="none", offload=(), overlap_tp=group.overlap_tp and group.tp == 1)
        # A host that waits for routers launches more collectives with sequence parallelism.
        sharded = group.tp > 1 and self.space.loaded.model.moe is None and group.tensor is None
        divides = (self.space.loaded.batch.sequence or 0) % (group.tp * group.cp) == 0
        return plain._replace(sequence_parallel=True) if sharded and divides else plain

    def bound_kernels(self, group: LayerGroup) -> float:
        """Returns a lower bound of the step time of all points of a group from its kernels: spread over all GPUs,
        without waiting [s]."""
        job, again = self.space.loaded, group.recompute == "full" and self.space.values["recomputed"] == (None,)
        assert job.batch.total is not None
        micro_batches = group.tp * group.cp / job.cluster.gpus * job.batch.total / group.micro
        return micro_batches * self._sum_kernels(self.kernel_group(group), again) + job.framework.step_overhead_s

    @remembered
    def _sum_kernels(self, group: LayerGroup, again: bool) -> float:
        """Returns the seconds of the kernels of all layers of a group in one micro-batch; 0 if they are not known."""
        if group.names_schemes:
            units = self._lower(group, self._fuses_gradients)
            return units.kernel_seconds(units, 1, again) if units is not None else 0.0
        first, second = self._lower_smallest(group, self._fuses_gradients)
        with suppress(NotAffine):
            return first.kernel_seconds(second, group.micro, again) if first and second else 0.0
        return 0.0

    def kernel_times(self, group: LayerGroup) -> StageTimes | None:
        """Returns the least durations of the passes of every kind of unit, without communication; None if there are
        none."""
        prices = self._price_kernels(self.kernel_group(group))
        return _unit_times(group, prices) if prices is not None else None

    @remembered
    def _price_kernels(self, group: LayerGroup) -> UnitPrices | None:
        units = self._units(group, self._fuses_gradients)
        return price_units(units.of_kernels, self.shared) if units is not None else None

    def unit_layout(self, group: LayerGroup) -> UnitLayout | None:
        """Returns the kinds of units of a group; None if there are none."""
        return self._layout(self.kernel_group(group), group.recompute == "full")

    @remembered
    def _layout(self, group: LayerGroup, recomputes: bool) -> UnitLayout | None:
        if recomputes:
            layout = self._layout(group, False)
            return layout.with_recomputed() if layout is not None else None
        units = self._lower(group if group.names_schemes else group._replace(micro=1), self._fuses_gradients)
        return units.layout if units is not None else None

    # ------------------------------------------------------------------------------------------ memory

    def unit_memory(self, group: LayerGroup) -> np.ndarray | None:
        """Returns what the forward pass of a unit leaves for its backward pass, at least [kinds] [bytes]; None if the
        group breaks a rule."""
        return self._memory(group._replace(offload=("activations",) if "activations" in group.offload else ()))

    @remembered
    def _memory(self, group: LayerGroup) -> np.ndarray | None:
        if group.micro > 2 and not group.names_schemes:
            first, second = (self.unit_memory(group._replace(micro=micro)) for micro in (1, 2))
            if first is None or second is None:
                return None
            if self._is_affine(group):
                return first + (group.micro - 1) * (second - first)
        units = self._units(group._replace(offload=()), self._fuses_gradients)
        return units.grown(self.shared.blocks) * (not group.offload) if units is not None else None

    @remembered_by(lambda bounds, group: group._replace(micro=1, offload=()))
    def _is_affine(self, group: LayerGroup) -> bool:
        """Returns whether the units of a group at one and at two sequences differ in sizes alone."""
        first, second = (
            self._units(group._replace(micro=micro, offload=()), self._fuses_gradients) for micro in (1, 2)
        )
        try:
            return first is not None and second is not None and bool(first.at_size(second, 3))
        except NotAffine:
            return False


class StateBounds:
    """Makes the states of devices. prices: of the same points."""

    def __init__(self, prices: PriceBounds) -> None:
        self.prices, self.space, self.shared = prices, prices.space, prices.shared

    def schedule(self, pipeline: Pipeline) -> tuple[Schedule, PipelineShape]:
        """Returns the schedule of a pipeline, and its shape with one micro-batch."""
        kind = find_scheme(f"pipeline/{pipeline.schedule if pipeline.pp > 1 else '1f1b'}")
        options = kind.Options.model_validate({"chunks": pipeline.chunks if pipeline.pp > 1 else 1})
        mesh, loaded = Mesh({"pp": pipeline.pp}, {}, []), self.space.loaded
        schedule = kind(("pp",), options, mesh, loaded.framework, (), pipeline.pp > 1)
        assert isinstance(schedule, Schedule)
        chunks = schedule.chunks_per_device()
        return schedule, PipelineShape(pipeline.pp, 1, chunks, forward_only=loaded.forward_only)

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
        """Returns a pipeline with one stage a device whose states are no larger, or the pipeline itself.

        Devices hold as many layers in one chunk as in several, whose gradients are reduced in larger buckets. But the
        first unit of a stage gathers more in a micro-batch than the others, and chunks have other first units.
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
        job, loaded = self.space.job_of(group, pipeline, step), self.space.loaded
        if loaded.model.moe is not None and loaded.framework.hidden_launch_s:
            # Launches on the host change no state, and would be ops of their own.
            job = apply_changes(job, {"framework.set.launch_s": 0.0})
        dp = loaded.cluster.gpus // (group.tp * group.cp * pipeline.pp)
        total = dp * pipeline.pp * 2 * group.micro
        states = self.prices.make_for_plan(job, total, lambda plan: device_states(plan, self.shared))
        return states.at_least() if states is not None and step.data not in self.space.data_schemes.known else states

    @remembered_by(lambda bounds, group, *rest: (group.degrees, group.least_micro, *rest))
    def plain_plan(self, group: LayerGroup, place: Place, shard: int | None = None) -> Plan | None:
        """Returns a plan of the degrees of a group, for prices of messages; None if there is none. shard: ranks that
        share one copy of the states, if not all."""
        plain = group._replace(micro=group.least_micro, recompute="none", overlap_tp=False, offload=())
        step = self.space.any_step
        step = step if shard is None else step._replace(data="zero-1", shard=shard)
        layers = self.space.loaded.model.layers
        few, more = divmod(layers, place.pp)
        divided = (few + 1,) * more + (few,) * (place.pp - more)
        whole = "even" if not more else "ends-as-layers" if (layers + 2) % place.pp == 0 else divided
        pipeline = Pipeline(place.pp, "1f1b", 1, whole, None, place.mesh_order)
        total = self.space.loaded.cluster.gpus // (group.tp * group.cp) * 2 * group.least_micro
        return self.prices.make_for_plan(self.space.job_of(plain, pipeline, step), total, lambda plan: plan)


class PointBounds:
    """Makes the bounds of points, and keeps what several of them need.

    prices: bounds from prices of units.
    states: bounds from states of devices.
    """

    def __init__(self, space: Space, shared: SharedWork | None = None) -> None:
        self.space, self.shared = space, shared or SharedWork()
        self.prices = PriceBounds(space, self.shared)
        self.states = StateBounds(self.prices)
        self._replays: defaultdict[Pipeline, Replays] = defaultdict(dict)

    def order(self, group: LayerGroup, pipeline: Pipeline) -> OrderBounds | None:
        """Returns the bounds from the order of the passes of a pipeline; None if it does not exist."""
        job = self.space.loaded
        assert job.batch.total is not None
        dp = job.cluster.gpus // (group.tp * group.cp * pipeline.pp)
        return self._order(pipeline.order, job.batch.total // (group.micro * dp))

    @remembered
    def _order(self, pipeline: Pipeline, m: int) -> OrderBounds | None:
        schedule, single = self.states.schedule(pipeline)
        shape = replace(single, m=m)
        try:
            schedule.check(shape)
        except MeshcastError:
            return None
        return OrderBounds(schedule, shape, self._replays[pipeline])

    def layers(self, pipeline: Pipeline, order: OrderBounds) -> tuple[int, ...] | None:
        """Returns the layers of every part of the model; None if they cannot be divided so."""
        return self._divide_layers(pipeline.partition, order.shape.stages // order.schedule.directions)

    @remembered
    def _divide_layers(self, partition: str | tuple[int, ...], parts: int) -> tuple[int, ...] | None:
        try:
            return tuple(layers_of_stages(partition, self.space.loaded.model.layers, parts))
        except MeshcastError:
            return None

    def stages(self, group: LayerGroup, pipeline: Pipeline, prices: UnitPrices | None) -> StageBounds | None:
        """Returns the bounds of a pipeline of a group with priced units; None if there is no such pipeline."""
        if prices is None or (order := self.order(group, pipeline)) is None:
            return None
        if (layers := self.layers(pipeline, order)) is None:
            return None
        return StageBounds(order, layers, prices.stages(layers, pipeline.recomputed), prices, self.shared)

    def bound_chains(self, group: LayerGroup, pipeline: Pipeline) -> float:
        """Returns a lower bound of the step time of the points of a pipeline from the order of its passes [s]."""
        stages = self.stages(group, pipeline, self.prices.pass_prices(group))
        if stages is None or not stages.order.known:
            return 0.0
        plan = self.states.plain_plan(group, pipeline.place)
        return stages.chain_seconds(plan) + self.space.loaded.framework.step_overhead_s

    def bound_points(
        self, group: LayerGroup, pipeline: Pipeline, steps: Sequence[StepChoice], least: DeviceStates | None = None
    ) -> tuple[float, float] | None:
        """Returns lower bounds of the step time [s] and of the memory that nvidia-smi shows on the fullest GPU [bytes],
        of points that differ in the overlap of messages between stages alone; None if they break a rule.

        Messages count as overlapping if they do in one of them. least: states to use in place of the exact ones.
        """
        step = steps[0]._replace(overlap_pp=any(other.overlap_pp for other in steps))
        stages = self.stages(
            group, pipeline, self.prices.prices(group, self.space.data_schemes.may_shard_gradients(step.data))
        )
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


def _unit_times(group: LayerGroup, prices: UnitPrices) -> StageTimes:
    return prices.times_with_recompute if group.recompute == "full" else prices.unit_times
