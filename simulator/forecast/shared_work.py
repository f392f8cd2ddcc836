"""Work that many jobs share: lowered units, timetables and prices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakKeyDictionary

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.remembered import AgingStore, RecentResults, remember
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.costs import Costs, KnownPrices
from meshcast.simulator.costs.estimate import Estimate, Use
from meshcast.simulator.costs.rank_places import KnownReaches
from meshcast.simulator.costs.stragglers import slowest_pace
from meshcast.simulator.forecast.first_step import FirstStep
from meshcast.simulator.forecast.stages import LoweredStages
from meshcast.simulator.ir.ops import UnitRun, Work
from meshcast.simulator.job.host_launches import exposed_launch_s, hidden_launch_s
from meshcast.simulator.lowering.equal_ops import EqualOps
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.resolver import KnownParts
from meshcast.simulator.program.block import CompiledBlocks
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.report.forecast import OutsideSteps
from meshcast.simulator.scheduling.schedule import PassDurations, PipelineShape, Schedule

MAX_PRICES = 30_000
"""Prices of work that are kept, half a KiB each with the work."""

MAX_CLUSTERS = 300
"""Clusters, and meshes on them, that prices are kept of."""

MAX_BYTES = 80_000_000
"""Bytes of all else that is kept, roughly: half of it of the forecasts before the last time that unused results were
dropped. A grid of 350 plans of GPT-3 fits, which takes a third of what is counted, as most of its parts are shared; in
a sweep of Llama 3 70B with ZeRO-3 as much is taken as is counted."""

ACTION_BYTES = 45
"""Of an action of a timetable, roughly."""

STATE_BYTES = 500
"""Of the memory of a rank outside of its steps, roughly."""

KEY_BYTES = 8_000
"""Of a framework and what else the states of a rank depend on, roughly."""


class SharedWork:
    """Lowered units, timetables and prices of earlier jobs, made once. Sharing changes no answer.

    calibration: the coefficients that all of them are priced with; by default those that ship with meshcast.
    related: whether most jobs differ in what changes no ops, as those that explain a forecast do: equal stages are then
        looked for, which costs a tenth of their lowering, and played once.
    units: lowered units by what they depend on.
    stages: lowered stages by what they depend on, and the updates of devices that hold them.
    blocks: the blocks compiled of them, and the tasks made of these.
    first_step: the program of the first job.
    states: bytes of the states of ranks by what they depend on.
    outside: memory of ranks outside of their steps, by the same.
    parts_of_plans: meshes, schemes and architectures, and plans whose dims divide by their axes.
    """

    def __init__(self, calibration: Calibration | None = None, related: bool = False) -> None:
        self.calibration, self.related = calibration or Calibration.shipped(), related
        self.units: RecentResults[Hashable, UnitRun] = RecentResults(lambda unit: unit.fragment.count_bytes())
        self.stages = LoweredStages(EqualOps() if related else None)
        self.parts_of_plans = KnownParts()
        self.blocks = CompiledBlocks()
        self.states: RecentResults[Hashable, dict[str, float]] = RecentResults(lambda _: KEY_BYTES)
        self.outside: RecentResults[Hashable, OutsideSteps] = RecentResults(lambda _: STATE_BYTES)
        self.first_step = FirstStep()
        self._timetables: RecentResults[Hashable, Timetable] = RecentResults(
            lambda table: ACTION_BYTES * len(table.slot_array)
        )
        self._costs: dict[Hashable, Costs] = {}
        self._costs_of_plans: WeakKeyDictionary[Plan, list[Costs]] = WeakKeyDictionary()
        self._kernels: dict[Hashable, dict[Work, Estimate]] = {}
        self._communication: dict[Hashable, dict[Work, Estimate]] = {}
        self._uses: dict[Hashable, dict[Work, Use]] = {}
        self._pairs: dict[Hashable, dict[tuple[int, int], Reach]] = {}
        self._groups: dict[Hashable, dict[Hashable, tuple[Reach, ...]]] = {}

    def __reduce__(self) -> tuple[type[SharedWork], tuple[Calibration, bool]]:
        return SharedWork, (self.calibration, self.related)  # pickled without what it holds, which is made again

    def forget_excess(self) -> None:
        """Drops what was not used for long, once more is kept than `MAX_BYTES`; all prices, once there are more than
        `MAX_PRICES`."""
        if self.price_count > MAX_PRICES:
            self._costs.clear()
            self._costs_of_plans.clear()
            self._kernels.clear()
            self._communication.clear()
            self._uses.clear()
            self._pairs.clear()
            self._groups.clear()
        if sum(store.nbytes for store in self.stores) > MAX_BYTES / 2:
            for store in self.stores:
                store.age()

    @property
    def stores(self) -> list[AgingStore]:
        """All stores but those of prices."""
        of_plans = [*self.parts_of_plans.stores, self.units, *self.stages.stores, self.states, self.outside]
        return [*of_plans, self._timetables, *self.blocks.stores]

    @property
    def price_count(self) -> int:
        """Number of prices of work, and of reaches of messages, that are kept."""
        of_work = *self._kernels.values(), *self._communication.values()
        return sum(map(len, of_work)) + sum(map(len, self._uses.values())) + sum(map(len, self._pairs.values()))

    def timetable(
        self, schedule: Schedule, shape: PipelineShape, durations: PassDurations | None = None, update_interval: int = 0
    ) -> Timetable:
        """Returns the timetable of a schedule; see `simulator.program.timetable.timetable`."""
        key = schedule.use, schedule.options, shape, durations, update_interval
        return remember(self._timetables, key, lambda: timetable(schedule, shape, durations, update_interval))

    def device_costs(self, plan: Plan) -> list[Costs]:
        """Returns the costs of ops on every pipeline device of a plan."""
        return remember(self._costs_of_plans, plan, lambda: self._make_device_costs(plan))

    def _make_device_costs(self, plan: Plan) -> list[Costs]:
        pairs = [(plan.on(device), cluster) for device, cluster in enumerate(plan.ranks.clusters)]
        distinct = {(id(device_plan), id(cluster)): (device_plan, cluster) for device_plan, cluster in pairs}
        known = {key: self.costs(*pair) for key, pair in distinct.items()}
        return [known[id(device_plan), id(cluster)] for device_plan, cluster in pairs]

    def costs(self, plan: Plan, cluster: Cluster | None = None) -> Costs:
        """Returns the costs of ops on the plan's cluster, or on another of as many GPUs."""
        placed = cluster or plan.job.cluster
        if plan.positions is None or placed is plan.job.cluster:
            return self._costs_on(placed, plan)
        axis, _ = plan.positions
        kinds = tuple(self._costs_on(kind, plan) for kind in plan.job.cluster.kinds.values())
        return self._costs_on(placed, plan, (axis, kinds))

    def _costs_on(self, cluster: Cluster, plan: Plan, joint: tuple[str, tuple[Costs, ...]] | None = None) -> Costs:
        """Returns the costs of ops of the plan on a cluster. joint: see `Costs`."""
        framework, mesh = plan.job.framework, plan.mesh
        # The noise of a job has a pace for every rank.
        pace = 1.0 if plan.job.noise else slowest_pace(plan.job.cluster.gpus)
        launch = exposed_launch_s(framework), hidden_launch_s(framework)
        same = cluster, replace(framework.kernel_traits, pace=pace), *launch
        on_mesh = tuple(mesh.axes.items()), tuple(mesh.places.items()), mesh.stage, mesh.first
        key = same, *on_mesh, joint

        def make() -> Costs:
            of_gpu = cluster.gpu, same[1], launch[0]
            kernels: dict[Work, Estimate] = remember(self._kernels, of_gpu, dict, MAX_CLUSTERS)
            pairs: dict[tuple[int, int], Reach] = remember(self._pairs, cluster.layout, dict, MAX_CLUSTERS)
            on_layout = cluster.layout, *on_mesh
            groups: dict[Hashable, tuple[Reach, ...]] = remember(self._groups, on_layout, dict, MAX_CLUSTERS)
            communication: dict[Work, Estimate] = remember(self._communication, key, dict, MAX_CLUSTERS)
            uses: dict[Work, Use] = remember(self._uses, key, dict, MAX_CLUSTERS)
            known = KnownPrices(kernels, KnownReaches(pairs, groups), communication, uses)
            return Costs(cluster, mesh, same[1], self.calibration, *launch, joint, known)

        return remember(self._costs, key, make, MAX_CLUSTERS)
