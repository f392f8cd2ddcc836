"""Lower bounds of step time and memory of all points of a group, from prices of its units and states of its devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from experiments.search.space import LayerGroup, Pipeline, Space, StepChoice
from experiments.sweeps.grid import apply_changes
from hardware.errors import MeshcastError
from hardware.units import GIB
from simulator.bounds.critical_paths import CriticalPaths, critical_paths
from simulator.bounds.device_states import DeviceStates, device_states
from simulator.bounds.order_memory import DeviceOrder, PassMemory, device_orders
from simulator.bounds.schedule_bound import (
    StagePlaces,
    StageTimes,
    bound_devices,
    has_bound,
    least_in_flight,
    shortest_step,
)
from simulator.bounds.unit_prices import UnitPrices, price_units
from simulator.forecast.planning import resolve_plan
from simulator.forecast.shared_work import SharedWork
from simulator.ir.mesh import Mesh
from simulator.ir.registry import find_scheme
from simulator.job.load import load_job
from simulator.lowering.offload import IN, OUT
from simulator.plan.partition import layers_of_stages
from simulator.scheduling.schedule import PipelineShape, Schedule

SHARDED = {"zero-2", "zero-3", "fsdp"}
"""Data schemes that reduce gradients in every micro-batch."""


Shape = tuple[Schedule, PipelineShape, StagePlaces, np.ndarray]
"""A schedule, its shape, where its stages are, and the least activations in flight on every device."""


@dataclass(frozen=True, eq=False)
class BoundedPoints:
    """The points of a group that no rule forbids, with their bounds.

    pipelines, steps: of every point.
    seconds: lower bound of the step time [points] [s].
    nbytes: lower bound of the memory that nvidia-smi shows on the fullest GPU [points].
    invalid: number of points that break a rule.
    """

    pipelines: list[Pipeline]
    steps: list[StepChoice]
    seconds: np.ndarray
    nbytes: np.ndarray
    invalid: int


class Bounds:
    """Makes the bounds of groups, and keeps what several groups need."""

    def __init__(self, space: Space, shared: SharedWork | None = None) -> None:
        self.space, self.shared = space, shared or SharedWork()
        self._prices: dict[tuple[LayerGroup, bool], UnitPrices | None] = {}
        self._states: dict[Hashable, DeviceStates | None] = {}
        self._layers: dict[Hashable, tuple[int, ...] | None] = {}
        self._shapes: dict[Hashable, Shape | None] = {}
        self._paths: dict[Hashable, CriticalPaths | None] = {}
        self._orders: dict[Hashable, list[DeviceOrder]] = {}

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
            step = StepChoice("ddp", True, True, True)
            job = self.space.job_of(key[0], Pipeline(1, "1f1b", 1, "even"), step)
            if fused:
                job = apply_changes(job, {"framework.set.fused_gradients": True})
            total = group.micro * loaded.cluster.gpus // (group.tp * group.cp)
            self._prices[key] = self._make_for_plan(job, total, lambda plan: price_units(plan, self.shared))
        return self._prices[key]

    def states(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> DeviceStates | None:
        """The states of devices for degrees, partition and data scheme; None if they break a rule."""
        schedule, shape = self.schedule(pipeline)
        ends = schedule.device(shape, 0), schedule.device(shape, shape.stages // schedule.directions - 1)
        if ends == (0, pipeline.pp - 1) and schedule.directions == 1:
            # Devices hold as many layers in one chunk as in several, whose gradients are reduced in larger buckets.
            pipeline = Pipeline(pipeline.pp, "1f1b", 1, pipeline.partition)
        offload = tuple(one for one in group.offload if one == "optimizer")
        # What other choices change makes a step no shorter.
        step = StepChoice(step.data, True, True, True)
        key = group.tp, group.cp, group.ep, group.sequence_parallel, offload, pipeline, step
        if key not in self._states:
            plain = group._replace(micro=1, recompute="none", overlap_tp=False, offload=offload)
            job = self.space.job_of(plain, pipeline, step)
            dp = self.space.loaded.cluster.gpus // (group.tp * group.cp * pipeline.pp)
            total = dp * pipeline.pp * 2
            self._states[key] = self._make_for_plan(job, total, lambda plan: device_states(plan, self.shared))
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
        key = pipeline, m
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
        """A lower bound of the step time of all points of a group from the kernels of a group like it, which neither
        recomputes nor divides GEMMs nor shares norms: spread over all GPUs, without waiting."""
        like = group._replace(recompute="none", offload=())
        if group.tp > 1:
            like = like._replace(sequence_parallel=True, overlap_tp=False)
        return self._mean_step(like, True)

    def bound_passes(self, group: LayerGroup) -> float:
        """The same from the passes of its own layers, with what they wait for inside a pass."""
        return self._mean_step(group, self._pairs_passes)

    @cached_property
    def _pairs_passes(self) -> bool:
        """Whether a schedule of the space may run two passes together, which wait less than one by one."""
        kinds = [find_scheme(f"pipeline/{name}") for name in self.space.values["schedule"]]
        return any(kind.pairs_passes is not Schedule.pairs_passes for kind in kinds)  # type: ignore[attr-defined]

    def _mean_step(self, group: LayerGroup, busy: bool) -> float:
        prices, job = self.prices(group, bool(SHARDED & {*self.space.values["data"]})), self.space.loaded
        if prices is None:
            return 0.0
        assert job.batch.total is not None
        micro_batches = group.tp * group.cp / job.cluster.gpus * job.batch.total / group.micro
        return micro_batches * prices.layer_seconds(busy) + job.framework.step_overhead_s

    def bound_points(self, group: LayerGroup) -> BoundedPoints:
        """The points of a group with their bounds."""
        pipelines, steps, seconds, nbytes, invalid = [], [], [], [], 0
        for pipeline in self.space.pipelines(group):
            choices = self.space.steps(group, pipeline.pp)
            found = self.bound_pipeline(group, pipeline, choices)
            invalid += len(choices) - len(found)
            for step, time, memory in found:
                pipelines.append(pipeline)
                steps.append(step)
                seconds.append(time)
                nbytes.append(memory)
        return BoundedPoints(pipelines, steps, np.array(seconds), np.array(nbytes), invalid)

    def bound_pipeline(
        self, group: LayerGroup, pipeline: Pipeline, choices: Sequence[StepChoice]
    ) -> list[tuple[StepChoice, float, float]]:
        """The choices that no rule forbids, each with the lower bounds of its step time [s] and its memory [bytes]."""
        tables = {sharded: self.prices(group, sharded) for sharded in {one.data in SHARDED for one in choices}}
        return [
            found
            for sharded, prices in tables.items()
            if prices is not None
            for found in self._bound(
                group, pipeline, [one for one in choices if (one.data in SHARDED) == sharded], prices
            )
        ]

    def _bound(
        self, group: LayerGroup, pipeline: Pipeline, choices: Sequence[StepChoice], prices: UnitPrices
    ) -> list[tuple[StepChoice, float, float]]:
        states = {step: found for step in choices if (found := self.states(group, pipeline, step)) is not None}
        if not states:
            return []
        plan = next(iter(states.values())).plan
        if (made := self.shape(group, pipeline)) is None:
            return []
        schedule, shape, place, in_flight = made
        if (layers := self.layers(pipeline, shape.stages // schedule.directions)) is None:
            return []
        stages = prices.stages(layers)
        times = prices.stage_times(stages, next(iter(states.values())).hop(prices.message_nbytes))
        activations = self._activations(group, schedule, place, in_flight, prices, stages)
        framework, known = plan.job.framework, has_bound(schedule, shape)
        context = framework.memory.context_gib * GIB
        bounds = {
            sends: bound_devices(schedule, shape, place, times, not sends)
            for sends in {step.overlap_pp for step in states if known}
        }
        # The layer before the loss keeps its activations on the GPU.
        copies = (plan.model.layers // shape.p - 1) * self._copy_seconds(group)
        points, seconds = [], 0.0
        for step, state in states.items():
            if known:
                done = bounds[step.overlap_pp]
                beside = shape.m * max(float(state.each.max()), copies)
                seconds = shortest_step(schedule, done, state.update, state.reductions, beside)
            nbytes = float((state.resident + activations).max()) + context
            points.append((step, seconds + framework.step_overhead_s, nbytes))
        return points

    def sharpen(
        self, group: LayerGroup, pipeline: Pipeline, step: StepChoice, seconds: float, nbytes: float
    ) -> tuple[float, float]:
        """Larger lower bounds of a point, from the order in which its schedule runs the passes.

        seconds, nbytes: its bounds so far [s], [bytes].
        """
        prices, state = self.prices(group, step.data in SHARDED), self.states(group, pipeline, step)
        made = self.shape(group, pipeline)
        if prices is None or state is None or made is None:
            return seconds, nbytes
        schedule, shape, place, _ = made
        layers = self.layers(pipeline, shape.stages // schedule.directions)
        if layers is None or not has_bound(schedule, shape):
            return seconds, nbytes
        stages = prices.stages(layers)
        shares = _shares(prices.elements(stages), place)
        if "activations" not in group.offload:
            # Without overlap weights are gathered, and gradients reduced, in every micro-batch.
            whole = shares if step.overlap_dp else np.zeros_like(shares)
            nbytes = max(nbytes, self._order_memory(pipeline, made, prices, state, stages, whole))
        times = prices.stage_times(stages, state.hop(prices.message_nbytes))
        chains = self._critical_paths(pipeline, made, times)
        if chains is not None and schedule.barrier:
            done = self._done(chains, times, place, state, layers, shares)
            seconds = max(seconds, done + float(state.update.max()) + state.plan.job.framework.step_overhead_s)
        return seconds, nbytes

    def _critical_paths(self, pipeline: Pipeline, made: Shape, times: StageTimes) -> CriticalPaths | None:
        schedule, shape = made[:2]
        if (key := (pipeline, shape.m)) not in self._paths:
            self._paths[key] = critical_paths(schedule, shape, times, {0, shape.p - 1})
        return self._paths[key]

    def _order_memory(
        self,
        pipeline: Pipeline,
        made: Shape,
        prices: UnitPrices,
        state: DeviceStates,
        stages: list[Any],
        shares: np.ndarray,
    ) -> float:
        """Least memory of the first and the last device, from the orders of their passes [bytes]."""
        schedule, shape, place = made[:3]
        devices = sorted({0, shape.p - 1})
        if (key := (pipeline, shape.m)) not in self._orders:
            self._orders[key] = device_orders(schedule, shape, devices)
        whole = np.zeros((2, len(stages)))
        np.add.at(whole[0], place.part, state.whole_weights[place.device] * shares)
        np.add.at(whole[1], place.part, state.whole_gradients[place.device] * shares)
        memory = PassMemory(*prices.pass_memory(stages), *whole)
        context = state.plan.job.framework.memory.context_gib * GIB
        peaks = [order.peak(memory) for order in self._orders[key]]
        return (
            max((state.resident[one] + peak for one, peak in zip(devices, peaks, strict=False)), default=0.0) + context
        )

    def _done(
        self,
        paths: CriticalPaths,
        times: StageTimes,
        place: StagePlaces,
        state: DeviceStates,
        layers: tuple[int, ...],
        shares: np.ndarray,
    ) -> float:
        """When all passes have ended and all gradients are reduced, at the earliest [s].

        times: durations of passes.
        Gradients are reduced from the last backward pass of their stage on, one stage after another, and its first
        forward pass ends no earlier than the weights of all stages so far are gathered. A part of the weights of a
        device takes at least its share of the time: larger buckets are no slower a byte.
        """
        stages, chains, count = paths.stages, paths.seconds(times), len(paths.stages)
        # All chains begin with the first forward pass of the first stage.
        gathered = float(state.gathers[0] * shares[0]) if state.plan.model.moe is None else 0.0
        late = max(gathered - float(times.stream[place.part[0], 0, 0]), 0.0)
        done, to_last, from_first = (
            float(chains[0]) + late,
            chains[1 : 1 + count] + late,
            chains[1 + count : 1 + 2 * count],
        )
        of_part = np.zeros(len(layers))
        np.add.at(of_part, place.part, state.each_backward[place.device] * shares)
        if state.plan.model.moe is None and len(paths.devices):
            drains = chains[1 + 2 * count :].reshape(len(paths.devices), 2) + late + paths.drained @ of_part
            done = max(done, float(drains.max()))
        for device in {int(place.device[stage]) for stage in stages}:
            own = [i for i, stage in enumerate(stages) if place.device[stage] == device]
            share = shares[[stages[i] for i in own]]
            if state.plan.model.moe is not None:  # ranks share weights of experts and others unlike
                count_of = np.array([layers[place.part[stages[i]]] for i in own])
                share = count_of / max(count_of.sum(), 1)
            reductions, gathers = (
                values[device] if state.plan.model.moe is None else values[1:-1].min() if len(values) > 2 else 0.0
                for values in (state.reductions + state.each_backward, state.gathers)
            )
            order = np.argsort(to_last[own])[::-1]
            done = max(done, float((to_last[own][order] + np.cumsum(reductions * share[order])).max()))
            done = max(done, float((np.cumsum(gathers * share) + from_first[own]).max()))
        return done

    def _copy_seconds(self, group: LayerGroup) -> float:
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

    def _activations(
        self,
        group: LayerGroup,
        schedule: Schedule,
        place: StagePlaces,
        in_flight: np.ndarray,
        prices: UnitPrices,
        stages: list[Any],
    ) -> np.ndarray:
        """Least memory of activations at the peak of every device [bytes]."""
        found = np.zeros(len(in_flight))
        if "activations" in group.offload or not has_bound(schedule, PipelineShape(len(in_flight), 1)):
            return found
        grown, forward, backward = np.full((3, len(found)), np.inf)
        known = {stage: prices.stage_memory(stage) for stage in dict.fromkeys(stages)}
        every = np.array([known[stage] for stage in stages])[place.part]
        for least, values in zip((grown, forward, backward), every.T, strict=True):
            np.minimum.at(least, place.device, values)
        if schedule.pairs_passes:  # a forward pass takes the memory that a backward pass gives back
            return (in_flight - 1) * grown
        return np.maximum((in_flight - 1) * grown + forward, in_flight * grown + backward)


def _shares(elements: np.ndarray, place: StagePlaces) -> np.ndarray:
    """Share of every virtual stage in the parameters of its device [stages]."""
    own = elements[place.part]
    total = np.bincount(place.device, own)
    return own / np.maximum(total[place.device], 1.0)
