"""Automap: Monte Carlo tree search over the layouts of a few operators, which propagate to all others.

A decision shards a weight (its operator) along a dim of the axis, or leaves it; the layouts of operators without
weights follow by propagation from their producers, then from their readers (Schaarschmidt et al. 2021, arXiv
2112.02958). The reward falls with the step time, and with memory over the limit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked
from meshcast.experiments.planning.cores.propagation import Neighbours, find_neighbours, propagate
from meshcast.experiments.planning.operator_planner import OperatorPlanner
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import Assignment, FactorTable, Optimum
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.scheme import Paper


class Automap(OperatorPlanner):
    paper = Paper("arXiv:2112.02958", "Automap: Towards Ergonomic Automated Parallelism for ML Models", 2021)
    restrictions = ("cut a pipeline", "give layers layouts of their own", "decide operators without weights")

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        near: Neighbours = find_neighbours(table)
        decided = [name for name in table.choices if name in near.with_weights]

        def complete(options: dict[str, int], draw: random.Random) -> dict[str, int]:
            drawn = {name: draw.randrange(len(table.choices[name])) for name in decided}
            return propagate(table, {**drawn, **options}, near)

        def measure(assignment: Assignment) -> float:
            cost = table.cost(assignment)
            over = max(0.0, cost.nbytes / problem.memory - 1.0)
            return (table.microbatches * cost.seconds + cost.once) * (1.0 + 10.0 * over)

        best = search_tree(table, budget.steps // 10, decided, complete, budget.seed, measure)
        return self.price_fitting(table, problem, best.assignment, best.visited)


EXPLORATION = 0.3
"""Weight of the confidence bound against rewards, which lie between 0 and 1."""


@dataclass
class TreeNode:
    """A list of decisions, the options of the first variables: the nodes of a further decision, by option; the rollouts
    through it and their rewards; and whether every assignment below was tried."""

    children: dict[int, TreeNode] = field(default_factory=dict)
    visits: int = 0
    reward: float = 0.0
    closed: bool = False

    def choose(self, options: int, draw: random.Random) -> int:
        """Returns an option that was not tried yet, else that of the highest confidence bound among open ones (UCT)."""
        if fresh := [option for option in range(options) if option not in self.children]:
            return draw.choice(fresh)
        log = math.log(max(2, self.visits))

        def bound(option: int) -> float:
            child = self.children[option]
            return child.reward / max(1, child.visits) + EXPLORATION * math.sqrt(log / max(1, child.visits))

        return max((option for option in range(options) if not self.children[option].closed), key=bound)


def search_tree(
    table: FactorTable,
    rollouts: int,
    order: Sequence[str],
    complete: Callable[[dict[str, int], random.Random], dict[str, int]],
    seed: int,
    measure: Callable[[Assignment], float],
) -> Optimum:
    """Returns the best assignment of all rollouts of a Monte Carlo tree search.

    order: variables in the order of their decisions. complete: makes an assignment of decisions.
    measure: what is minimised.
    """
    draw, root = random.Random(seed), TreeNode()
    counts = [len(table.choices[name]) for name in order]

    def roll_out(search: LocalSearch[Assignment]) -> Iterator[Ranked[Assignment]]:
        while not root.closed:
            path, options = [root], dict[str, int]()
            while len(options) < len(order) and (path[-1].visits or path[-1] is root):
                option = path[-1].choose(counts[len(options)], draw)
                options[order[len(options)]] = option
                path.append(path[-1].children.setdefault(option, TreeNode()))
            tried = search.price(complete(options, draw))
            yield tried
            # Rewards compare with the best value so far: 1 for as good a plan, near 0 for many times its cost.
            reward = search.best.rank / tried.rank if math.isfinite(tried.rank) and tried.rank > 0 else 0.0
            for node in path:
                node.visits += 1
                node.reward += reward
            path[-1].closed = len(options) == len(order)
            for node, count in reversed([*zip(path[:-1], counts, strict=False)]):
                node.closed = len(node.children) == count and all(child.closed for child in node.children.values())

    search = LocalSearch(measure, roll_out, budget=rollouts)
    assignment, value = search.run()
    return Optimum(dict(assignment), value, search.visited)
