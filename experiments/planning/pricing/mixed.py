"""A job on any number of kinds of nodes as a problem: each kind has its prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.pricing.job import JobProblem, require_job
from meshcast.experiments.planning.pricing.stage_prices import UnitCosts
from meshcast.experiments.planning.problem import Allowed, Problem, allow_all
from meshcast.experiments.planning.stages import StageOption, StageTable
from meshcast.experiments.planning.table import Factor, FactorTable, PendingFactor, PendingTable
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.job import Job
from meshcast.simulator.report.peak_errors import EVEN


class PricedNodes(NamedTuple):
    """The nodes of a kind of a cluster.

    name: of the kind.
    gpus: their number.
    cluster: as many GPUs as the whole cluster has, all of this kind.
    problem: the job on that cluster.
    """

    name: str
    gpus: int
    cluster: Cluster
    problem: JobProblem


def link_bandwidth(kinds: Sequence[PricedNodes], rank: int, peer: int) -> float:
    """Returns the bandwidth of the slower end of the link between two ranks: inside their node, or between nodes
    [bytes/s].

    kinds: in the order of ranks.
    """
    (first, place), (second, other) = _find_place(kinds, rank), _find_place(kinds, peer)
    if (first.name, place) != (second.name, other):
        return min(float(kind.cluster.scale_out.bandwidth) for kind in (first, second))
    inside = first.cluster.scale_up if first.cluster.node.scale_up else first.cluster.host
    return float(inside.bandwidth)


def _find_place(kinds: Sequence[PricedNodes], rank: int) -> tuple[PricedNodes, int]:
    """Returns the kind of a rank's node, and the node's number among those of its kind."""
    first = 0
    for kind in kinds:
        if rank < first + kind.gpus:
            return kind, (rank - first) // kind.cluster.gpus_per_node
        first += kind.gpus
    raise ValueError(f"rank {rank} is none of {first}")


class MixedProblem(JobProblem):
    """A job without its plan, on GPUs of any number of kinds.

    Planners that know kinds ask each for its prices; to others all GPUs are as slow, and have as little memory, as
    those of some kind, cost by cost.

    kinds: in the order of the job's cluster.
    layers: of the model.
    Raises PlanError for a cluster whose kinds lie apart, or are named by a file.
    """

    one_kind = False

    def __init__(
        self,
        job: Job | str | Path | Mapping[str, Any],
        shared: SharedWork | None = None,
        microbatches: int = 0,
        memory_risk: float = EVEN,
    ) -> None:
        super().__init__(job, shared, microbatches, memory_risk)
        smallest = min(group.node.gpu.program_memory for group in self._groups or [self.job.cluster])
        self.memory = smallest / self.least_room
        self.layers = int(self.job.model.layers)
        self.kinds = tuple(self._find_kinds())

    @property
    def _groups(self) -> Sequence[Any]:
        return self.job.cluster.groups

    def _find_kinds(self) -> list[PricedNodes]:
        cluster = self.job.cluster
        if not self._groups:
            alone = JobProblem(self.job, self.shared, self.microbatches, self.memory_risk)
            return [PricedNodes(cluster.node.name, cluster.gpus, cluster, alone)]
        names = [group.node.name for group in self._groups]
        stated = self.job.to_dict()["cluster"]
        if len(set(names)) < len(names) or not isinstance(stated, Mapping):
            rule = "planners need one group of nodes of every kind, written into the job"
            raise PlanError("cluster.groups", rule, "Write each kind of node as one group", names)
        kinds = []
        for group, entry in zip(self._groups, stated["groups"], strict=True):
            nodes = -(-self.gpus // int(group.node.gpus))
            of_kind = {**self.job.to_dict(), "cluster": {"node": entry["node"], "nodes": nodes, "gpus": self.gpus}}
            problem = JobProblem(of_kind, self.shared, self.microbatches, self.memory_risk)
            gpus = int(group.nodes * group.node.gpus)
            kinds.append(PricedNodes(group.node.name, gpus, problem.job.cluster, problem))
        return kinds

    def order_kinds(self, kinds: Sequence[PricedNodes]) -> dict[str, Any]:
        """Returns the ``cluster`` of a job that has these kinds, in order, with their GPUs; empty for equal nodes."""
        if not self._groups:
            return {}
        stated = self.job.to_dict()["cluster"]
        entries = dict(zip((group.node.name for group in self._groups), stated["groups"], strict=True))
        groups = [{**entries[kind.name], "nodes": kind.gpus // kind.cluster.gpus_per_node} for kind in kinds]
        return {"cluster": {**stated, "groups": groups}}

    # ----------------------------------------------------------------------------------- as if of equal nodes

    def operators(self, axes: Mapping[str, int], allowed: Allowed = allow_all) -> FactorTable:
        """Returns the table whose operators and conversions each take as long as on the slowest kind."""
        if len(self.kinds) == 1:
            return super().operators(axes, allowed)
        return slowest_table([kind.problem.operators(axes, allowed) for kind in self.kinds])

    def pending_operators(self, axes: Mapping[str, int], allowed: Allowed = allow_all) -> PendingTable:
        """Returns the same as `operators`, where tensors are not priced yet."""
        if len(self.kinds) == 1:
            return super().pending_operators(axes, allowed)
        kinds = [kind.problem.pending_operators(axes, allowed) for kind in self.kinds]
        factors = [*map(slowest_factor, zip(*(kind.factors for kind in kinds), strict=True))]
        pending = [slowest_pending(same) for same in zip(*(kind.pending for kind in kinds), strict=True)]
        return PendingTable(kinds[0].choices, factors, pending, self.microbatches)

    def stages(self, recompute: bool = True) -> StageTable:
        """Returns the table of stages on the slowest kind, within the least memory."""
        if len(self.kinds) == 1:
            return super().stages(recompute)
        return slowest_stages([kind.problem.stages(recompute) for kind in self.kinds])

    def units_of(self, option: StageOption) -> UnitCosts:
        return slowest_units([kind.problem.units_of(option) for kind in self.kinds])

    def units_of_plan(self, changes: Mapping[str, Any]) -> UnitCosts:
        return slowest_units([kind.problem.units_of_plan(changes) for kind in self.kinds])

    # ------------------------------------------------------------------------------------------ what kinds share

    @property
    def tensor_degrees(self) -> list[int]:
        """Powers of two of GPUs inside the nodes of every kind."""
        least = min(min(self.gpus, kind.cluster.gpus_per_node) for kind in self.kinds)
        return [2**power for power in range(least.bit_length()) if least % 2**power == 0]

    def mean_units(self, option: StageOption) -> UnitCosts:
        """Returns the costs of the model's units in stages of an option: the mean of kinds, weighted by their GPUs."""
        costs = [kind.problem.units_of(option) for kind in self.kinds]
        shares = [kind.gpus / self.gpus for kind in self.kinds]
        columns = zip(*costs, strict=True)
        return UnitCosts(*(np.average(np.stack(column), axis=0, weights=shares) for column in columns))

    def message_nbytes(self, replicas: int) -> float:
        """Returns the bytes of the residual stream of a micro-batch in each of so many replicas."""
        return 2.0 * self.job.model.stream_width * self.job.model.seq * self.samples / replicas


def open_problem(job: Job | str | Path | Mapping[str, Any], memory_risk: float = EVEN) -> JobProblem:
    """Returns a job as a problem, on any number of kinds of nodes. memory_risk: see `JobProblem`."""
    mixed = MixedProblem(job, memory_risk=memory_risk)
    return mixed if len(mixed.kinds) > 1 else JobProblem(mixed.job, mixed.shared, memory_risk=memory_risk)


def require_kinds(problem: Problem) -> MixedProblem:
    """Returns the problem as a job on any number of kinds of nodes. Raises PlanError for a profile."""
    if isinstance(problem, MixedProblem):
        return problem
    job = require_job(problem)
    return MixedProblem(job.job, job.shared, job.microbatches, job.memory_risk)


def slowest_units(kinds: Sequence[UnitCosts]) -> UnitCosts:
    """Returns the largest of every cost of units over kinds of nodes."""
    return UnitCosts(*(np.max(np.stack(column), axis=0) for column in zip(*kinds, strict=True)))


def slowest_factor(kinds: Sequence[Factor]) -> Factor:
    """Returns the largest of every cost of a factor over kinds of nodes."""
    arrays = zip(*(factor[1:] for factor in kinds), strict=True)
    return Factor(kinds[0].scope, *(np.maximum.reduce(column) for column in arrays))


def slowest_pending(kinds: Sequence[PendingFactor]) -> PendingFactor:
    """Returns the same of a factor that is not priced yet."""
    return PendingFactor(kinds[0].scope, lambda kept: slowest_factor([factor.price(kept) for factor in kinds]))


def slowest_table(kinds: Sequence[FactorTable]) -> FactorTable:
    """Returns the table whose every cost is the largest over kinds of nodes."""
    factors = [*map(slowest_factor, zip(*(table.factors for table in kinds), strict=True))]
    return FactorTable(kinds[0].choices, factors, kinds[0].microbatches)


def slowest_stages(kinds: Sequence[StageTable]) -> StageTable:
    """Returns the table of the common options of all kinds, at the slowest and least memory; PlanError without any."""
    places = [{tuple(sorted(option.plan.items())): i for i, option in enumerate(table.options)} for table in kinds]
    common = [key for key in places[0] if all(key in place for place in places)]
    if not common:
        rule = "no degrees of a stage suit all kinds of nodes"
        raise PlanError("cluster.groups", rule, "Choose micro-batches of other sizes, or other nodes")
    taken = [table.take([place[key] for key in common]) for table, place in zip(kinds, places, strict=True)]
    seconds, forward, once = (
        np.maximum.reduce([getattr(stages, name) for stages in taken]) for name in ("seconds", "forward", "once")
    )
    return StageTable(taken[0].options, seconds, forward, once, np.minimum.reduce([stages.behind for stages in taken]))
