"""What a run does while nodes are missing: it waits, or goes on with the others.

fewer-replicas: all processes start again from a checkpoint, with as many replicas as the nodes that are left can form
    (Varuna's job morphing, Athlur et al. 2022, EuroSys, arXiv 2111.04007).
templates: nodes are regrouped into fewer pipelines without a restart, since other replicas hold all states (Oobleck,
    Jang et al. 2023, SOSP, arXiv 2309.08125).
reroute: peers of a missing node, which hold the same layers in other replicas, take its micro-batches (ReCycle, Gandhi
    et al. 2024, SOSP, arXiv 2405.14009). Several missing nodes cost as much as one if they hold unlike layers.
redundant: every node also computes the stage of the one before it, in the bubble of the pipeline; it takes over when
    that one fails (Bamboo, Thorpe et al. 2023, NSDI, arXiv 2204.12013). Two neighbours that are missing stop the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from simulator.job.run_keys.keys import ElasticPolicy


@dataclass(frozen=True)
class Elasticity:
    """The policy of a run.

    policy: what it does while nodes are missing.
    replicas: data-parallel replicas. nodes_per_replica: of one of them; below 1 several replicas share a node.
    step_s: duration of a step by the number of replicas that are missing [s]; as long as the most that may be, plus 1.
    doubled_stage: duration of a step over the usual one while a node computes two stages.
    reconfigure: pause in which policies without a restart adapt [s].
    overhead: share by which every step of `redundant` is longer.
    """

    step_s: tuple[float, ...]
    policy: ElasticPolicy = "none"
    replicas: int = 1
    nodes_per_replica: float = 1.0
    doubled_stage: float = 1.0
    reconfigure: float = 0.0
    overhead: float = 0.0

    @property
    def keeps_states(self) -> bool:
        """Whether the states of missing nodes are elsewhere, so that no work is lost but the step that fails."""
        return self.policy in ("templates", "reroute", "redundant")

    def missing_replicas(self, nodes: Collection[int]) -> int:
        """Replicas whose work others have to do while these nodes are missing."""
        if self.policy in ("fewer-replicas", "templates") or self.nodes_per_replica < 1:
            return math.ceil(len(nodes) / self.nodes_per_replica - 1e-9)
        places = Counter(node % round(self.nodes_per_replica) for node in nodes)
        return max(places.values(), default=0)

    def goes_on(self, nodes: Collection[int]) -> bool:
        """Whether the run can go on while these nodes are missing."""
        if not nodes:
            return True
        if self.policy == "none":
            return False
        if self.policy == "redundant":
            size = max(1, round(self.nodes_per_replica))
            after = {node - node % size + (node + 1) % size for node in nodes}
            return size > 1 and after.isdisjoint(nodes)
        return self.missing_replicas(nodes) < len(self.step_s)

    def step_seconds(self, nodes: Collection[int]) -> float:
        """Duration of a step without stragglers while these nodes are missing [s]."""
        usual = self.step_s[0] * (1 + self.overhead)
        if not nodes:
            return usual
        return usual * self.doubled_stage if self.policy == "redundant" else self.step_s[self.missing_replicas(nodes)]
