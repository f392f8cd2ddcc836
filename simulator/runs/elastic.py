"""What a run does while nodes are missing: it waits, or goes on with the others.

fewer-replicas: all processes start again from a checkpoint, with the depth of the pipelines and the number of replicas
    that are fastest on the nodes that are left (Varuna's job morphing, Athlur et al. 2022, EuroSys, arXiv 2111.04007).
templates: a pipeline that loses nodes goes on with fewer stages, and the micro-batches are spread so that all pipelines
    end at the same time. One that has too few nodes for its memory borrows nodes, or is dissolved. Nothing restarts,
    since other pipelines hold all states (Oobleck, Jang et al. 2023, SOSP, arXiv 2309.08125).
reroute: peers of a missing node, which hold the same layers in other replicas, take its micro-batches into the bubbles
    of their pipelines: backward passes are split and updates staggered (ReCycle, Gandhi et al. 2024, SOSP, arXiv
    2405.14009). Several missing nodes cost as much as a single node if they hold different layers.
redundant: every node also computes the stage of the node after it, in the bubble of the pipeline, and takes over when
    that node fails. Once the loss of more than `MAX_EXPOSED` of the nodes would be fatal, the run goes on with fewer
    pipelines, and the other nodes replace those that fail (Bamboo, Thorpe et al. 2023, NSDI, arXiv 2204.12013). If two
    neighbours fail, it starts again from a checkpoint.
quorum: the replicas that are there agree on who takes part in a step, each with its own micro-batches, and drop a step
    in which one fails. A replica that lost a node starts again, and fetches the states from a healthy one, while the
    others go on (torchft, https://github.com/meta-pytorch/torchft, torchft/manager.py, `use_async_quorum`). Its steps
    train fewer tokens: as many as of a whole step take R / (R - k) steps with k of R replicas missing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.job.run_keys import ElasticPolicy

MAX_EXPOSED = 0.05
"""Share of nodes that compute two stages, or whose stage no other node holds, above which a redundant run is
reconfigured (`simulate_should_reconfigure` of Bamboo's simulator, uclasystem/bamboo @8080929)."""


class PipelineTime(NamedTuple):
    """Duration of a step of a pipeline.

    nodes: on which it runs.
    fixed: part that does not depend on micro-batches [s].
    each: of a micro-batch [s].
    """

    nodes: int
    fixed: float
    each: float


@dataclass(frozen=True)
class Elasticity:
    """The policy of a run.

    step_s: duration of a step by the number of replicas that are missing [s]; as long as the most that may be, plus 1.
    policy: what it does while nodes are missing.
    replicas: data-parallel replicas.
    nodes_per_replica: of each of them; below 1 several replicas share a node.
    doubled_stage: duration of a step over the usual while a node computes two stages.
    reconfigure: pause in which policies without a restart adapt [s].
    overhead: share by which every step of `redundant` is longer.
    pipelines: pipelines of other depths, by their nodes; () where replicas are only dropped as a whole.
    batches: micro-batches of a step, of all replicas.
    outside: time of a step outside its pipelines [s].
    most_missing: nodes that may be missing at most, where there are pipelines of other depths.
    rejoin: from the moment at which a node is there until its replica takes part, while the others go on [s]; 0: it
        takes part at once.
    """

    step_s: tuple[float, ...]
    policy: ElasticPolicy = "none"
    replicas: int = 1
    nodes_per_replica: float = 1.0
    doubled_stage: float = 1.0
    reconfigure: float = 0.0
    overhead: float = 0.0
    pipelines: tuple[PipelineTime, ...] = ()
    batches: int = 0
    outside: float = 0.0
    most_missing: int = 0
    rejoin: float = 0.0

    @property
    def nodes(self) -> int:
        """Nodes of all replicas."""
        return round(self.replicas * self.nodes_per_replica)

    @property
    def replica_nodes(self) -> int:
        """Whole nodes of a replica, at least 1."""
        return max(1, round(self.nodes_per_replica))

    @property
    def most_nodes(self) -> float:
        """Nodes that may be missing while the run goes on, wherever they are: never more."""
        if self.policy == "none":
            return 0.0
        if self.pipelines:
            return self.most_missing
        most = (min(len(self.step_s), self.replicas) - 1) * max(self.nodes_per_replica, 1.0)
        covered = MAX_EXPOSED * self.nodes / (2 + MAX_EXPOSED) if self.policy == "redundant" else 0.0
        return max(most, covered)

    def missing_replicas(self, nodes: Collection[int]) -> int:
        """Replicas whose work others have to do while these nodes are missing."""
        if self.policy == "redundant":
            return self.replicas - (self.nodes - len(nodes)) // self.replica_nodes
        if self.policy == "quorum" and self.nodes_per_replica >= 1:
            return len({node // self.replica_nodes for node in nodes})
        if self.policy in ("fewer-replicas", "templates") or self.nodes_per_replica < 1:
            return math.ceil(len(nodes) / self.nodes_per_replica - 1e-9)
        places = Counter(node % self.replica_nodes for node in nodes)
        return max(places.values(), default=0)

    def goes_on(self, nodes: Collection[int]) -> bool:
        """Returns whether the run can go on while these nodes are missing."""
        if not nodes:
            return True
        if self.policy == "none":
            return False
        if self.pipelines:
            left = self.regroup(nodes) if self.policy == "templates" else [self.nodes - len(nodes)]
            return len(nodes) <= self.most_missing and max(left, default=0) >= self.pipelines[0].nodes
        if self.policy == "redundant" and self._is_covered(nodes):
            return True
        return self.missing_replicas(nodes) < min(len(self.step_s), self.replicas)

    def keeps_work(self, nodes: Collection[int], failed: Collection[int]) -> bool:
        """Returns whether only the running step is lost when nodes fail, since the states of all are elsewhere.

        nodes: all that are missing then.
        failed: those that failed now.
        """
        if self.policy in ("none", "fewer-replicas") or not failed or not self.goes_on(nodes):
            return False
        before = set(nodes).difference(failed)
        if self.policy == "redundant":
            return self._are_apart(nodes if self._is_covered(before) else failed)
        return not self.pipelines or len(self.regroup(before)) > 1

    def step_seconds(self, nodes: Collection[int]) -> float:
        """Returns the duration of a step without stragglers while these nodes are missing [s]."""
        usual = 1 + self.overhead
        if not nodes:
            return self.step_s[0] * usual
        if self.policy == "redundant" and self._is_covered(nodes):  # the doubled stage holds no redundant work
            return self.step_s[0] * max(usual, self.doubled_stage)
        if not self.pipelines:
            return self.step_s[self.missing_replicas(nodes)] * usual
        if self.policy == "templates":
            seconds = self._balance(self.regroup(nodes))
        else:
            seconds = min(self._repeat(pipeline, self.nodes - len(nodes)) for pipeline in self.pipelines)
        return max(seconds + self.outside, self.step_s[0])

    def regroup(self, nodes: Collection[int]) -> list[int]:
        """Returns the nodes of every pipeline while these are missing: those that lost some go on with fewer, borrow a
        node from the pipeline with the most, or are dissolved (Oobleck, section 5)."""
        missing = Counter(node // self.replica_nodes for node in nodes)
        sizes = [self.replica_nodes - missing[replica] for replica in range(self.replicas)]
        least, most = self.pipelines[0].nodes, self.pipelines[-1].nodes
        while sizes and min(sizes) < least:
            short, rich = sizes.index(min(sizes)), sizes.index(max(sizes))
            if sizes[rich] > least:
                sizes[rich] -= 1
                sizes[short] += 1
            else:
                for _ in range(sizes.pop(short)):
                    smallest = min(range(len(sizes)), key=sizes.__getitem__, default=None)
                    if smallest is not None and sizes[smallest] < most:
                        sizes[smallest] += 1
        return sizes

    def _balance(self, sizes: list[int]) -> float:
        """Returns the time of a step whose micro-batches are spread over heterogeneous pipelines so that the last ends
        soonest [s]."""
        times = {pipeline.nodes: pipeline for pipeline in self.pipelines}
        chosen = [times[size] for size in sizes]
        ends = (self.batches + sum(pipeline.fixed / pipeline.each for pipeline in chosen)) / sum(
            1 / pipeline.each for pipeline in chosen
        )
        counts = [max(0, math.floor((ends - pipeline.fixed) / pipeline.each)) for pipeline in chosen]
        queue = [
            (pipeline.fixed + (count + 1) * pipeline.each, pipeline)
            for pipeline, count in zip(chosen, counts, strict=True)
        ]
        heapq.heapify(queue)
        last = max(pipeline.fixed + count * pipeline.each for pipeline, count in zip(chosen, counts, strict=True))
        for _ in range(self.batches - sum(counts)):
            last, pipeline = queue[0]
            heapq.heapreplace(queue, (last + pipeline.each, pipeline))
        return last

    def _repeat(self, pipeline: PipelineTime, nodes: int) -> float:
        """Returns the time of a step of as many equal pipelines as there are nodes for [s]."""
        count = nodes // pipeline.nodes
        return pipeline.fixed + math.ceil(self.batches / count) * pipeline.each if count else math.inf

    def _is_covered(self, nodes: Collection[int]) -> bool:
        """Returns whether neighbours compute the stages of all missing nodes, and few enough are exposed meanwhile."""
        exposed = 2 * len(nodes) <= MAX_EXPOSED * (self.nodes - len(nodes))
        return exposed and self._are_apart(nodes)

    def _are_apart(self, nodes: Collection[int]) -> bool:
        """Returns whether no two of these nodes hold successive stages, the last and the first included."""
        size = self.replica_nodes
        after = {node - node % size + (node + 1) % size for node in nodes}
        return not nodes or (size > 1 and after.isdisjoint(nodes))
