"""Plans and states of the degrees of a group: what devices hold, and how long their collectives take, at least."""

from __future__ import annotations

import numpy as np

from meshcast.experiments.search.keys.data_schemes import collectives_of_microbatch, is_known
from meshcast.experiments.search.price_bounds import PriceBounds
from meshcast.experiments.search.space import LayerGroup, Pipeline, Place, StepChoice
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.bounds.device_states import DeviceStates, device_states
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule


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
            not is_known(step.data)
            or layout is None
            or np.ptp(layout.of_layer)
            or ends != (0, pipeline.pp - 1)
            or schedule.directions > 1
            or any(collectives_of_microbatch(step.data, pipeline.pp > 1, step.overlap_dp))
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
        return states.at_least() if states is not None and not is_known(step.data) else states

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
