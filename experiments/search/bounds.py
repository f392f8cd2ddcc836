"""Lower bounds of step time and memory of points, from prices of units, states of devices and orders of passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from meshcast.experiments.search.keys.data_schemes import may_shard_gradients
from meshcast.experiments.search.price_bounds import PriceBounds
from meshcast.experiments.search.space import LayerGroup, Pipeline, Space, StepChoice
from meshcast.experiments.search.state_bounds import StateBounds
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remembered
from meshcast.hardware.units import GIB
from meshcast.simulator.bounds.critical_paths import Replays
from meshcast.simulator.bounds.device_states import DeviceStates
from meshcast.simulator.bounds.order_bounds import OrderBounds, StageBounds
from meshcast.simulator.bounds.unit_prices import UnitPrices
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.plan.partition import layers_of_stages


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
        stages = self.stages(group, pipeline, self.prices.prices(group, may_shard_gradients(step.data)))
        if stages is None:
            return None
        state = least if least is not None else self.states.states(group, pipeline, step)
        if state is None:
            return None
        # Without overlap weights are gathered, and gradients reduced, in every micro-batch.
        nbytes = stages.memory(state, "activations" in group.offload, step.overlap_dp)
        copies, ahead = self.prices.copy_seconds(group), self._gathers_ahead(step)
        seconds = stages.seconds(state, not step.overlap_pp, ahead, copies)
        framework = state.plan.job.framework
        return seconds + framework.step_overhead_s, nbytes + framework.memory.context_gib * GIB

    def _gathers_ahead(self, step: StepChoice) -> bool:
        """Returns whether sharded weights are gathered during the computation before."""
        stated = self.space.loaded.framework.overlap.sharded_weights if step.prefetch is None else step.prefetch > 0
        return step.overlap_dp if stated is None else stated
