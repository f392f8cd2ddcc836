"""Work that many jobs share: lowered units, timetables and prices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.remembered import remember
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.costs import Costs, KnownPrices
from meshcast.simulator.costs.estimate import Estimate
from meshcast.simulator.costs.rank_places import PairReaches
from meshcast.simulator.costs.stragglers import slowest_pace
from meshcast.simulator.forecast.resident_memory import KnownStates
from meshcast.simulator.forecast.stages import LoweredStages
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.lowering.lower import LoweredUnits
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.resolver import KnownParts
from meshcast.simulator.program.block import CompiledBlocks
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.scheduling.schedule import PassDurations, PipelineShape, Schedule

MOST_KEPT = 300
"""Entries of one kind that are kept: one grid of plans needs fewer, and each may take a MiB."""


class SharedWork:
    """Lowered units, timetables and prices of earlier jobs, made once. Sharing changes no answer.

    calibration: the coefficients that all of them are priced with; by default those that ship with meshcast.
    units: lowered units by what they depend on.
    stages: lowered stages by what they depend on, and the updates of devices that hold them.
    blocks: the blocks compiled of them, and the tasks made of these.
    states: bytes of the states of ranks by what they depend on.
    parts_of_plans: meshes, schemes and architectures, and plans whose dims were found to divide by their axes.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration or Calibration.shipped()
        self.units: LoweredUnits = {}
        self.stages = LoweredStages()
        self.parts_of_plans = KnownParts()
        self.blocks = CompiledBlocks()
        self.states: KnownStates = {}
        self._timetables: dict[Hashable, Timetable] = {}
        self._costs: dict[Hashable, Costs] = {}
        self._kernels: dict[Hashable, dict[Work, Estimate]] = {}
        self._pairs: dict[Hashable, PairReaches] = {}

    def __reduce__(self) -> tuple[type[SharedWork], tuple[Calibration]]:
        return SharedWork, (self.calibration,)  # pickled without what it holds, which is made again

    def forget_excess(self) -> None:
        """Drops all units or stages once there are more than `MOST_KEPT`."""
        if len(self.units) > MOST_KEPT:
            self.units.clear()
            self.blocks.clear()
        if len(self.units) == 0 or max(len(self.stages), len(self.states)) > MOST_KEPT:
            self.stages.clear()
            self.blocks.forget_tasks()
            self.states.clear()
        self.parts_of_plans.forget_excess(100 * MOST_KEPT, MOST_KEPT)

    def timetable(
        self, schedule: Schedule, shape: PipelineShape, durations: PassDurations | None = None, update_interval: int = 0
    ) -> Timetable:
        """The timetable of a schedule; see `simulator.program.timetable.timetable`."""
        key = schedule.use, schedule.options, shape, durations, update_interval
        make = partial(timetable, schedule, shape, durations, update_interval)
        return remember(self._timetables, key, make, MOST_KEPT)

    def device_costs(self, plan: Plan) -> list[Costs]:
        """The costs of ops on every pipeline device of a plan."""
        pairs = [(plan.on(device), cluster) for device, cluster in enumerate(plan.ranks.clusters)]
        distinct = {(id(own), id(cluster)): (own, cluster) for own, cluster in pairs}
        known = {key: self.costs(*pair) for key, pair in distinct.items()}
        return [known[id(own), id(cluster)] for own, cluster in pairs]

    def costs(self, plan: Plan, cluster: Cluster | None = None) -> Costs:
        """The costs of ops on the plan's cluster, or on another of as many GPUs."""
        own = cluster or plan.job.cluster
        if plan.positions is None or own is plan.job.cluster:
            return self._costs_on(own, plan)
        axis, _ = plan.positions
        kinds = tuple(self._costs_on(one, plan) for one in plan.job.cluster.kinds.values())
        return self._costs_on(own, plan, (axis, kinds))

    def _costs_on(self, cluster: Cluster, plan: Plan, joint: tuple[str, tuple[Costs, ...]] | None = None) -> Costs:
        """Returns the costs of ops of the plan on a cluster. joint: see `Costs`."""
        framework, mesh = plan.job.framework, plan.mesh
        # The noise of a job has a pace for every rank.
        pace = 1.0 if plan.job.noise else slowest_pace(plan.job.cluster.gpus)
        launch = framework.exposed_launch_s, framework.hidden_launch_s
        same = cluster, replace(framework.kernel_traits, pace=pace), *launch
        kernels: dict[Work, Estimate] = remember(self._kernels, same, dict, MOST_KEPT)
        pairs: PairReaches = remember(self._pairs, cluster, dict, MOST_KEPT)
        return remember(
            self._costs,
            (same, tuple(mesh.axes.items()), tuple(mesh.places.items()), mesh.stage, mesh.first, joint),
            lambda: Costs(cluster, mesh, same[1], self.calibration, *launch, joint, KnownPrices(kernels, pairs)),
            MOST_KEPT,
        )
