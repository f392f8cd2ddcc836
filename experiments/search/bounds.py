"""Lower bounds of step time and memory of all points of a group, from prices of its units and states of its devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshcast.experiments.search.keys.data_schemes import collectives_of_microbatch, is_known, may_shard_gradients
from meshcast.experiments.search.space import LayerGroup, Pipeline, Place, Space, StepChoice
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.units import GIB
from meshcast.simulator.bounds.collectives import UnitCollectives
from meshcast.simulator.bounds.critical_paths import CriticalPaths, Replays, critical_paths
from meshcast.simulator.bounds.device_orders import DeviceOrder, PassMemory, PassTimes, device_orders
from meshcast.simulator.bounds.device_states import DeviceStates, device_states, hop_seconds
from meshcast.simulator.bounds.micro_batches import NotAffine
from meshcast.simulator.bounds.schedule_bound import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    WHOLE,
    StagePlaces,
    StageTimes,
    bound_devices,
    has_bound,
    least_in_flight,
    shortest_step,
)
from meshcast.simulator.bounds.unit_prices import LoweredUnits, Stages, UnitLayout, UnitPrices, lower_units, price_units
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.plan.partition import layers_of_stages
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule

Shape = tuple[Schedule, PipelineShape, StagePlaces, np.ndarray]
"""A schedule, its shape, where its stages are, and the least activations in flight on every device."""


@dataclass(frozen=True, eq=False)
class StagesOfPoint:
    """What the bounds of a point need of its pipeline.

    place: where the virtual stages are. in_flight: least activations in flight on every device.
    layers: of every part of the model. units: their units.
    """

    schedule: Schedule
    shape: PipelineShape
    place: StagePlaces
    in_flight: np.ndarray
    layers: tuple[int, ...]
    units: Stages

    @cached_property
    def known(self) -> bool:
        """Whether its schedule has bounds."""
        return has_bound(self.schedule, self.shape)


class Bounds:
    """Makes the bounds of groups, and keeps what several groups need."""

    def __init__(self, space: Space, shared: SharedWork | None = None) -> None:
        self.space, self.shared = space, shared or SharedWork()
        self._prices: dict[tuple[LayerGroup, bool], UnitPrices | None] = {}
        self._lowered: dict[tuple[LayerGroup, bool], LoweredUnits | None] = {}
        self._states: dict[Hashable, DeviceStates | None] = {}
        self._layers: dict[Hashable, tuple[int, ...] | None] = {}
        self._shapes: dict[Hashable, Shape | None] = {}
        self._plans: dict[Hashable, Plan | None] = {}
        self._paths: dict[Hashable, CriticalPaths | None] = {}
        self._replays: dict[Pipeline, Replays] = {}
        self._orders: dict[Hashable, dict[int, DeviceOrder]] = {}
        self._kernel_seconds: dict[tuple[LayerGroup, bool], float] = {}
        self._kernels: dict[LayerGroup, UnitPrices | None] = {}
        self._memory: dict[LayerGroup, np.ndarray | None] = {}
        self._layouts: dict[LayerGroup, tuple[UnitLayout | None, UnitLayout | None]] = {}
        self._affine: dict[LayerGroup, bool] = {}

    # ------------------------------------------------------------------------------------------ tables

    def prices(self, group: LayerGroup, sharded: bool = False, offloaded: bool = False) -> UnitPrices | None:
        """The prices of the units of a group; None if the group breaks a rule.

        All layers are on one stage, and weights are whole: that only leaves out waiting. sharded: for gradients that
        are reduced in every micro-batch, and so not accumulated by kernels of their own. offloaded: with the copies of
        activations that the group offloads.
        """
        loaded = self.space.loaded
        fused = sharded and not loaded.framework.fused_gradients
        key = group._replace(offload=("activations",) if offloaded else ()), fused
        if key not in self._prices:
            units = self._units(*key)
            self._prices[key] = price_units(units, self.shared) if units is not None else None
        return self._prices[key]

    def _units(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """The units of a group: lowered for the smallest micro-batches, scaled for others.

        fused: gradients are added by no kernels of their own, and not by GEMMs either.
        """
        if group.recompute == "full":
            kept, recomputed = self._units(group._replace(recompute="none"), fused), self._scale(group, fused)
            return kept.join_recomputed(recomputed) if kept is not None and recomputed is not None else None
        return self._scale(group, fused)

    def _scale(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """The units of a group, all layers recomputed alike, for its micro-batches."""
        if group.micro > 2 and not group.names_schemes:  # chunks and tiles of some schemes are not affine
            one, two = (self._lower(group._replace(micro=micro), fused) for micro in (1, 2))
            with suppress(NotAffine):
                return one.at_size(two, group.micro) if one is not None and two is not None else None
        return self._lower(group, fused)

    def _lower(self, group: LayerGroup, fused: bool) -> LoweredUnits | None:
        """The units of a group as the lowering makes them; None if the group breaks a rule."""
        if (key := (group, fused)) not in self._lowered:
            job = self.space.job_of(group, Pipeline(1, "1f1b", 1, "even"), self.space.any_step)
            job = apply_changes(job, {"batch.micro": group.micro})
            if fused:
                job = apply_changes(job, {"framework.set.fused_gradients": True})
            total = group.micro * self.space.loaded.cluster.gpus // (group.tp * group.cp)
            units = self._make_for_plan(job, total, lambda plan: lower_units(plan, self.shared))
            self._lowered[key] = units.of_new_gradients if fused and units is not None else units
        return self._lowered[key]

    def states(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> DeviceStates | None:
        """The states of devices for degrees, partition and data scheme; None if they break a rule."""
        pipeline = pipeline._replace(recomputed=None)
        schedule, shape = self.schedule(pipeline)
        ends = schedule.device(shape, 0), schedule.device(shape, shape.stages // schedule.directions - 1)
        layout = self.unit_layout(group)
        one_kind = layout is not None and not np.ptp(layout.of_layer)
        # The first unit of a stage gathers more in a micro-batch than the others: chunks have other first units.
        each = collectives_of_microbatch(step.data, pipeline.pp > 1, step.overlap_dp)
        if (
            is_known(step.data)
            and one_kind
            and ends == (0, pipeline.pp - 1)
            and schedule.directions == 1
            and not any(each)
        ):
            # Devices hold as many layers in one chunk as in several, whose gradients are reduced in larger buckets.
            partition = pipeline.partition
            if not isinstance(partition, str):
                partition = tuple(sum(partition[device :: pipeline.pp]) for device in range(pipeline.pp))
            pipeline = pipeline._replace(schedule="1f1b", chunks=1, partition=partition)
        offload = tuple(one for one in group.offload if one == "optimizer")
        # Messages between stages change no state.
        step = step._replace(overlap_pp=self.space.any_step.overlap_pp)
        degrees = group.tp, group.cp, group.ep, group.etp, group.least_micro
        key = degrees, group.schemes, group.sequence_parallel, offload, pipeline, step
        if key not in self._states:
            plain = group._replace(micro=group.least_micro, recompute="none", overlap_tp=False, offload=offload)
            job, loaded = self.space.job_of(plain, pipeline, step), self.space.loaded
            if loaded.model.moe is not None and loaded.framework.hidden_launch_s:
                # Launches on the host change no state, and would be ops of their own.
                job = apply_changes(job, {"framework.set.launch_s": 0.0})
            dp = loaded.cluster.gpus // (group.tp * group.cp * pipeline.pp)
            total = dp * pipeline.pp * 2 * group.least_micro
            found = self._make_for_plan(job, total, lambda plan: device_states(plan, self.shared))
            self._states[key] = found.at_least() if found is not None and not is_known(step.data) else found
        return self._states[key]

    def _make_for_plan(self, job: dict[str, Any], total: int, make: Any) -> Any:
        """Something of the plan of a job with another global batch; None if the plan breaks a rule."""
        job["batch"] = {**job.get("batch", {}), "global": total}
        try:
            return make(resolve_plan(load_job(job, base=self.space.base), self.shared))
        except MeshcastError:
            return None

    def shape(self, group: LayerGroup, pipeline: Pipeline) -> Shape | None:
        """Schedule, shape, placement and least activations in flight of a pipeline; None if it does not exist."""
        job = self.space.loaded
        assert job.batch.total is not None
        dp = job.cluster.gpus // (group.tp * group.cp * pipeline.pp)
        m = job.batch.total // (group.micro * dp)
        key = pipeline.order, m
        if key not in self._shapes:
            self._shapes[key] = self._make_shape(pipeline, m)
        return self._shapes[key]

    def schedule(self, pipeline: Pipeline) -> tuple[Schedule, PipelineShape]:
        """The schedule of a pipeline, and its shape with one micro-batch."""
        kind = find_scheme(f"pipeline/{pipeline.schedule if pipeline.pp > 1 else '1f1b'}")
        options = kind.Options.model_validate({"chunks": pipeline.chunks if pipeline.pp > 1 else 1})
        mesh, loaded = Mesh({"pp": pipeline.pp}, {}, []), self.space.loaded
        schedule = kind(("pp",), options, mesh, loaded.framework, (), pipeline.pp > 1)
        assert isinstance(schedule, Schedule)
        chunks = schedule.chunks_per_device()
        return schedule, PipelineShape(pipeline.pp, 1, chunks, forward_only=loaded.forward_only)

    def _make_shape(self, pipeline: Pipeline, m: int) -> Shape | None:
        schedule, one = self.schedule(pipeline)
        shape = replace(one, m=m)
        try:
            schedule.check(shape)
        except MeshcastError:
            return None
        return schedule, shape, StagePlaces(schedule, shape), least_in_flight(schedule, shape)

    # ------------------------------------------------------------------------------------------ groups

    def bound_kernels(self, group: LayerGroup) -> float:
        """A lower bound of the step time of all points of a group from its kernels: spread over all GPUs, without
        waiting [s]."""
        job, plain = self.space.loaded, self.kernel_group(group)
        again = group.recompute == "full" and self.space.values["recomputed"] == (None,)
        if (plain, again) not in self._kernel_seconds:
            self._kernel_seconds[plain, again] = self._sum_kernels(plain, again)
        assert job.batch.total is not None
        micro_batches = group.tp * group.cp / job.cluster.gpus * job.batch.total / group.micro
        return micro_batches * self._kernel_seconds[plain, again] + job.framework.step_overhead_s

    def _sum_kernels(self, group: LayerGroup, again: bool) -> float:
        """Seconds of the kernels of all layers of a group in one micro-batch; 0 if they are not known."""
        if group.names_schemes:
            own = self._lower(group, self._fuses_gradients)
            return own.kernel_seconds(own, 1, again) if own is not None else 0.0
        one, two = (self._lower(group._replace(micro=micro), self._fuses_gradients) for micro in (1, 2))
        with suppress(NotAffine):
            return one.kernel_seconds(two, group.micro, again) if one is not None and two is not None else 0.0
        return 0.0

    def kernel_times(self, group: LayerGroup) -> StageTimes | None:
        """Least durations of the passes of every kind of unit, without communication; None if there are none."""
        if (prices := self._kernel_prices(group)) is None:
            return None
        return prices.times_with_recompute if group.recompute == "full" else prices.unit_times

    def unit_layout(self, group: LayerGroup) -> UnitLayout | None:
        """The kinds of units of a group; None if there are none."""
        plain = self.kernel_group(group)
        if plain not in self._layouts:
            units = self._lower(plain if plain.names_schemes else plain._replace(micro=1), self._fuses_gradients)
            made = units.layout if units is not None else None
            self._layouts[plain] = made, made.with_recomputed() if made is not None else None
        return self._layouts[plain][group.recompute == "full"]

    def _kernel_prices(self, group: LayerGroup) -> UnitPrices | None:
        """Prices of the kernels of `kernel_group`, without communication."""
        plain = self.kernel_group(group)
        if plain not in self._kernels:
            units = self._units(plain, self._fuses_gradients)
            self._kernels[plain] = price_units(units.of_kernels, self.shared) if units is not None else None
        return self._kernels[plain]

    def kernel_group(self, group: LayerGroup) -> LayerGroup:
        """The group whose kernels take no longer: GEMMs are whole, norms are sharded, nothing is recomputed."""
        plain = group._replace(recompute="none", offload=(), overlap_tp=group.overlap_tp and group.tp == 1)
        # A host that waits for routers launches more collectives with sequence parallelism.
        sharded = group.tp > 1 and self.space.loaded.model.moe is None and group.tp_scheme is None
        divides = (self.space.loaded.batch.sequence or 0) % (group.tp * group.cp) == 0
        return plain._replace(sequence_parallel=True) if sharded and divides else plain

    def pass_prices(self, group: LayerGroup) -> UnitPrices | None:
        """Prices of the units of a group for any data scheme of the space; None if the group breaks a rule."""
        return self.prices(group, self._shards_gradients)

    def times_without_recompute(self, group: LayerGroup) -> StageTimes | None:
        """Least durations of the passes of every kind of unit, of what is recomputed those of the kernels of whole
        layers alone."""
        prices = self.pass_prices(group._replace(recompute="none"))
        if prices is None:
            return None
        return prices.times_with_recompute if group.recompute == "full" else prices.unit_times

    def unit_memory(self, group: LayerGroup) -> np.ndarray | None:
        """What the forward pass of a unit leaves for its backward pass, at least [kinds] [bytes]; None if the group
        breaks a rule."""
        plain = group._replace(offload=("activations",) if "activations" in group.offload else ())
        if plain not in self._memory:
            self._memory[plain] = self._make_memory(plain)
        return self._memory[plain]

    def _make_memory(self, group: LayerGroup) -> np.ndarray | None:
        if group.micro > 2 and not group.names_schemes:
            one, two = (self.unit_memory(group._replace(micro=micro)) for micro in (1, 2))
            if one is None or two is None:
                return None
            if self._is_affine(group._replace(micro=1)):
                return one + (group.micro - 1) * (two - one)
        units = self._units(group._replace(offload=()), self._fuses_gradients)
        return units.grown(self.shared.blocks) * (not group.offload) if units is not None else None

    def _is_affine(self, group: LayerGroup) -> bool:
        """Whether the units of a group at one and at two sequences differ in sizes alone."""
        if group not in self._affine:
            one, two = (self._units(group._replace(micro=micro, offload=()), self._fuses_gradients) for micro in (1, 2))
            try:
                self._affine[group] = one is not None and two is not None and bool(one.at_size(two, 3))
            except NotAffine:
                self._affine[group] = False
        return self._affine[group]

    @cached_property
    def _shards_gradients(self) -> bool:
        """Whether a data scheme of the space may reduce gradients in every micro-batch: no kernels then add them."""
        return any(map(may_shard_gradients, self.space.values["data"]))

    @cached_property
    def _fuses_gradients(self) -> bool:
        return self._shards_gradients and not self.space.loaded.framework.fused_gradients

    # --------------------------------------------------------------------------------------- pipelines

    def stages_of(self, group: LayerGroup, pipeline: Pipeline, prices: UnitPrices) -> StagesOfPoint | None:
        """The stages of a pipeline of a group; None if there is no such pipeline."""
        if (made := self.shape(group, pipeline)) is None:
            return None
        schedule, shape, place, in_flight = made
        if (layers := self.layers(pipeline, shape.stages // schedule.directions)) is None:
            return None
        return StagesOfPoint(schedule, shape, place, in_flight, layers, prices.stages(layers, pipeline.recomputed))

    def bound_chains(self, group: LayerGroup, pipeline: Pipeline) -> float:
        """A lower bound of the step time of the points of a pipeline from the order of its passes [s]."""
        prices, overhead = self.prices(group, self._shards_gradients), self.space.loaded.framework.step_overhead_s
        stages = self.stages_of(group, pipeline, prices) if prices is not None else None
        if prices is None or stages is None or not stages.known or not stages.schedule.barrier:
            return 0.0
        plan = self.plain_plan(group, pipeline.place)
        times = prices.stage_times(stages.units, hop_seconds(plan, prices.message_nbytes, self.shared) if plan else 0.0)
        paths = self._critical_paths(pipeline, stages, times)
        return 0.0 if paths is None else float(paths.seconds(times)[0]) + overhead

    def plain_plan(self, group: LayerGroup, place: Place, shard: int | None = None) -> Plan | None:
        """A plan of the degrees of a group, for prices of messages; None if there is none. shard: ranks that share one
        copy of the states, if not all."""
        key = group.tp, group.cp, group.ep, group.etp, place, shard, group.schemes, group.least_micro
        if key not in self._plans:
            plain = group._replace(micro=group.least_micro, recompute="none", overlap_tp=False, offload=())
            step = self.space.any_step
            step = step if shard is None else step._replace(data="zero-1", shard=shard)
            layers = self.space.loaded.model.layers
            few, more = divmod(layers, place.pp)
            divided = (few + 1,) * more + (few,) * (place.pp - more)
            whole = "even" if not more else "ends-as-layers" if (layers + 2) % place.pp == 0 else divided
            pipeline = Pipeline(place.pp, "1f1b", 1, whole, None, place.mesh_order)
            job = self.space.job_of(plain, pipeline, step)
            total = self.space.loaded.cluster.gpus // (group.tp * group.cp) * 2 * group.least_micro
            self._plans[key] = self._make_for_plan(job, total, lambda plan: plan)
        return self._plans[key]

    # ------------------------------------------------------------------------------------------ points

    def bound_points(
        self, group: LayerGroup, pipeline: Pipeline, steps: Sequence[StepChoice], least: DeviceStates | None = None
    ) -> tuple[float, float] | None:
        """Lower bounds of the step time [s] and of the memory that nvidia-smi shows on the fullest GPU [bytes], of
        points that differ in the overlap of messages between stages alone; None if they break a rule.

        Messages count as overlapping if they do in one of them. least: states to use in place of the exact ones.
        """
        step = steps[0]._replace(overlap_pp=any(one.overlap_pp for one in steps))
        prices = self.prices(group, may_shard_gradients(step.data))
        stages = self.stages_of(group, pipeline, prices) if prices is not None else None
        state = least
        if state is None and stages is not None:
            state = self.states(group, pipeline, step)
        if prices is None or stages is None or state is None:
            return None
        framework, place = state.plan.job.framework, stages.place
        activations = self._activations(group, stages, prices)
        nbytes, seconds = float((state.resident + activations).max()), 0.0
        if stages.known:
            if "activations" not in group.offload:
                # Without overlap weights are gathered, and gradients reduced, in every micro-batch.
                whole = _whole_of_stages(stages, prices, state) * step.overlap_dp
                nbytes = max(nbytes, self._order_memory(pipeline, stages, prices, state, whole))
                if stages.schedule.pairs_passes and whole.any():  # both directions have begun at the peak
                    nbytes = max(nbytes, float((state.resident + activations + place.sum(whole[0])).max()))
            times = prices.stage_times(stages.units, hop_seconds(state.plan, prices.message_nbytes, self.shared))
            bound = bound_devices(stages.schedule, stages.shape, place, times, not step.overlap_pp)
            copies = (state.plan.model_parts.model.layers // stages.shape.p - 1) * self.copy_seconds(group)
            bound = bound._replace(computed=bound.computed + state.summed)
            for collectives in state.collectives:  # streams run side by side
                sides = collectives.of_stages(stages.layers, place.part)
                every = place.sum(place.turns * sides.each + sides.once)
                beside = max(stages.shape.m * copies, float(every.max()))
                if not (stages.schedule.pairs_passes or self._gathers_ahead(step)):
                    # Nothing of a pass computes while weights are gathered for it.
                    kernels = times.busy[place.part, :, 0]
                    backward = np.minimum(kernels[:, WHOLE], kernels[:, INPUTS] + kernels[:, WEIGHTS])
                    serial = place.sum(place.turns * (kernels[:, FORWARD] + backward + sides.each_between))
                    beside = max(beside, float(serial.max()))
                own = shortest_step(stages.schedule, bound, state.update, place.least(sides.last), beside)
                seconds = max(seconds, own)
                if stages.schedule.barrier:
                    last = self._last_in_order(pipeline, stages, times, sides)
                    if (paths := self._critical_paths(pipeline, stages, times)) is not None:
                        # All chains begin with the first forward pass of the first stage, which waits for its weights.
                        late = max(float(sides.first[0] - times.stream[place.part[0], 0, 0]), 0.0)
                        last = max(last, paths.last_reduction(times, sides.last, sides.first, sides.each_last, late))
                    last += float(state.summed.min())
                    seconds = max(seconds, last + float(state.update.max()))
        return seconds + framework.step_overhead_s, nbytes + framework.memory.context_gib * GIB

    def _gathers_ahead(self, step: StepChoice) -> bool:
        """Whether sharded weights are gathered during the computation before."""
        stated = self.space.loaded.framework.overlap.sharded_weights if step.prefetch is None else step.prefetch > 0
        return step.overlap_dp if stated is None else stated

    def _critical_paths(self, pipeline: Pipeline, stages: StagesOfPoint, times: StageTimes) -> CriticalPaths | None:
        schedule, shape = stages.schedule, stages.shape
        if (key := (pipeline.order, shape.m)) not in self._paths:
            known = self._replays.setdefault(pipeline.order, {})
            self._paths[key] = critical_paths(schedule, shape, times, {0, shape.p - 1}, known)
        return self._paths[key]

    def _order_memory(
        self,
        pipeline: Pipeline,
        stages: StagesOfPoint,
        prices: UnitPrices,
        state: DeviceStates,
        whole_of_stages: np.ndarray,
    ) -> float:
        """Least memory of some devices, from the orders of their passes [bytes]. whole_of_stages: what lives from the
        first to the last micro-batch [2, stages] [bytes]."""
        place, found, memory = stages.place, 0.0, prices.pass_memory(stages.units)
        for device, order in self._device_orders(pipeline, stages).items():
            whole, own = np.zeros((2, len(stages.units))), place.device == device
            for of_parts, of_stages in zip(whole, whole_of_stages, strict=True):
                np.add.at(of_parts, place.part[own], of_stages[own])
            found = max(found, float(state.resident[device]) + order.peak(PassMemory(*memory, *whole)))
        return found

    def _last_in_order(
        self, pipeline: Pipeline, stages: StagesOfPoint, times: StageTimes, sides: UnitCollectives
    ) -> float:
        """When the passes of the first and of the last device and the collectives beside them have ended, at the
        earliest [s]."""
        if not sides.once.any() or stages.schedule.pairs_passes or stages.schedule.directions > 1:
            return 0.0
        devices = self._device_orders(pipeline, stages)
        orders = [devices[one] for one in {0, stages.shape.p - 1} if one in devices and devices[one].whole]
        layers = [units[0][1] if len(units) == 1 else np.inf for units in stages.units]
        seconds = times.stream[:, :, 0]
        own = PassTimes(seconds, seconds / np.array(layers)[:, None], sides.first, sides.again, sides.last)
        return max((order.last_end(own) for order in orders), default=0.0)

    def _device_orders(self, pipeline: Pipeline, stages: StagesOfPoint) -> dict[int, DeviceOrder]:
        """The orders of some devices: of the first and the last one, and of such as have neither embedding nor loss."""
        if (key := (pipeline.order, stages.shape.m)) not in self._orders:
            p = stages.shape.p
            self._orders[key] = device_orders(stages.schedule, stages.shape, sorted({0, min(1, p - 1), p // 2, p - 1}))
        return self._orders[key]

    def copy_seconds(self, group: LayerGroup) -> float:
        """Time of the copies of the activations of a layer to the host, or back [s]."""
        if "activations" not in group.offload:
            return 0.0
        prices = self.prices(group, offloaded=True)
        return max(prices.stream_seconds(OUT, "F"), prices.stream_seconds(IN, "BW")) if prices else 0.0

    def layers(self, pipeline: Pipeline, parts: int) -> tuple[int, ...] | None:
        """The layers of every part of the model; None if they cannot be divided so."""
        key = pipeline.partition, parts
        if key not in self._layers:
            try:
                self._layers[key] = tuple(layers_of_stages(pipeline.partition, self.space.loaded.model.layers, parts))
            except MeshcastError:
                self._layers[key] = None
        return self._layers[key]

    def _activations(self, group: LayerGroup, stages: StagesOfPoint, prices: UnitPrices) -> np.ndarray:
        """Least memory of activations at the peak of every device [bytes]."""
        in_flight, place = stages.in_flight, stages.place
        found = np.zeros(len(in_flight))
        if "activations" in group.offload or not stages.known:
            return found
        grown, forward, backward = place.least(prices.activations(stages.units)[place.part]).T
        if stages.schedule.pairs_passes:  # a forward pass takes the memory that a backward pass gives back
            return (in_flight - 1) * grown
        return np.maximum((in_flight - 1) * grown + forward, in_flight * grown + backward)


def _whole_of_stages(stages: StagesOfPoint, prices: UnitPrices, state: DeviceStates) -> np.ndarray:
    """Gathered weights and unreduced gradients that live from the first to the last micro-batch [2, stages] [bytes]."""
    place = stages.place
    if state.whole.shape[1] == len(place.part):
        return state.whole
    # States are those of a pipeline with one stage a device: its chunks have shares of them. A matrix that embedding
    # and output layer share is no part of the share of either.
    own = prices.elements(stages.units)[place.part]
    counted = prices.elements(stages.units, not state.plan.model_parts.model.tied)[place.part]
    return np.asarray(state.whole[:, place.device] * counted / np.maximum(place.sum(own)[place.device], 1.0))
