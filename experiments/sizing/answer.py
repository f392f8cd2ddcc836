"""The answer to a question of size: clusters by kind of node, the front of cost against days, what changes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshcast.experiments.sizing.kinds import SizedNode
from meshcast.experiments.sizing.question import SizeQuestion
from meshcast.experiments.sizing.sized_cluster import CHANCE, SizedCluster
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.version import product_version

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class OtherMfu:
    """What the answer would be if steps had another duration.

    mfu: factor on the model FLOPs utilization.
    smallest: the cluster that would be needed; None: none.
    days: of the cluster of the answer, which nine of ten runs would not exceed.
    cost: of the same; None without a price.
    """

    mfu: float
    smallest: SizedCluster | None
    days: float
    cost: float | None

    def to_dict(self) -> dict[str, Any]:
        nodes = None if self.smallest is None else self.smallest.nodes
        return {"mfu": self.mfu, "nodes": nodes, "sure_days": self.days, "sure_cost": self.cost}


@dataclass(frozen=True)
class KindAnswer:
    """The answer for a kind of node.

    chosen: the smallest cluster that meets the deadline, or without one the fastest within the budget; None: none.
    nearest: without one, the fastest cluster that was looked at; None: none has a plan.
    clusters: all that were looked at and simulated, by their size.
    sensitivity: by another MFU.
    largest_without: the largest cluster on which no plan fits; None: all sizes that were looked at have one.
    """

    kind: SizedNode
    chosen: SizedCluster | None
    nearest: SizedCluster | None
    clusters: Sequence[SizedCluster]
    sensitivity: Sequence[OtherMfu] = ()
    largest_without: SizedCluster | None = None

    @cached_property
    def front(self) -> list[SizedCluster]:
        """Clusters to which no other one of this kind is both faster and cheaper, or smaller where prices are unknown:
        the fastest first."""
        front: list[SizedCluster] = []
        for cluster in sorted(self.clusters, key=lambda cluster: (cluster.sure_days, _measure(cluster))):
            if not front or _measure(cluster) < _measure(front[-1]):
                front.append(cluster)
        return front


def _measure(cluster: SizedCluster) -> float:
    """Returns the money of a cluster, its GPU days without a price."""
    return cluster.sure_cost if cluster.sure_cost is not None else cluster.sure_days * cluster.gpus


def _cost_of_chosen(kind: KindAnswer) -> float:
    assert kind.chosen is not None and kind.chosen.sure_cost is not None
    return kind.chosen.sure_cost


@dataclass(frozen=True)
class SizeAnswer:
    """The answer of ``meshcast size``.

    question: what was asked.
    kinds: the answer for each kind of node.
    """

    question: SizeQuestion
    kinds: Sequence[KindAnswer]

    def keeps_budget(self, cluster: SizedCluster) -> bool | None:
        """Returns whether nine of ten runs keep the budget; None without one."""
        if self.question.budget is None or cluster.sure_cost is None:
            return None
        return cluster.sure_cost <= self.question.budget

    @cached_property
    def cheapest(self) -> KindAnswer | None:
        """The kind whose cluster costs least, within the budget if there is one; None if none is priced and fits."""
        priced = [
            kind
            for kind in self.kinds
            if kind.chosen is not None
            and kind.chosen.sure_cost is not None
            and self.keeps_budget(kind.chosen) is not False
        ]
        return min(priced, key=_cost_of_chosen, default=None)

    def find_even_price(self, kind: KindAnswer) -> float | None:
        """Returns the price of a GPU and hour at which a kind of node would cost as much as the cheapest other one;
        None if there is none, or no price."""
        others = [
            other.chosen.sure_cost
            for other in self.kinds
            if other is not kind and other.chosen is not None and other.chosen.sure_cost is not None
        ]
        if not others or kind.chosen is None or kind.chosen.sure_cost is None or kind.kind.price is None:
            return None
        return kind.kind.price.value * min(others) / kind.chosen.sure_cost

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON answer."""
        question, cheapest = self.question, self.cheapest
        return {
            "meshcast": product_version(),
            "model": question.model.name,
            "tokens": question.tokens,
            "days": question.days,
            "budget": question.budget,
            "chance": CHANCE,
            "batch": {"least": question.limits.least, "most": question.limits.most, "reason": question.limits.reason},
            "cheapest": None if cheapest is None else cheapest.kind.name,
            "nodes": [self._describe(kind) for kind in self.kinds],
            "assumed": list(question.assumed),
        }

    def _describe(self, answer: KindAnswer) -> dict[str, Any]:
        kind, chosen, without = answer.kind, answer.chosen, answer.largest_without
        price, days = kind.price, self.question.days
        return {
            "node": kind.name,
            "gpus_per_node": kind.gpus_per_node,
            "price_per_gpu_hour": None if price is None else price.value,
            "currency": None if price is None else price.currency or None,
            "price_source": None if price is None else price.source,
            "answer": None if chosen is None else chosen.to_dict(),
            "chance_of_real_run": None if chosen is None or not days else chosen.find_chance(days),
            "keeps_budget": None if chosen is None else self.keeps_budget(chosen),
            "nearest": None if answer.nearest is None else answer.nearest.to_dict(),
            "front": [cluster.to_dict() for cluster in answer.front],
            "sensitivity": [entry.to_dict() for entry in answer.sensitivity],
            "even_price": self.find_even_price(answer),
            "largest_without_plan": None if without is None else without.to_dict(),
        }

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each cluster that was looked at and simulated: kind of node, size, days, money, energy."""
        import pandas

        rows = [
            {"node": answer.kind.name, "chosen": cluster is answer.chosen}
            | {key: value for key, value in cluster.to_dict().items() if key not in ("job", "plan")}
            for answer in self.kinds
            for cluster in answer.clusters
        ]
        return pandas.DataFrame(rows)
