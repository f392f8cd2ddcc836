"""Monte Carlo tree search over the assignments of a table, by upper confidence bounds (UCT).

The search of Automap (Schaarschmidt et al. 2021, arXiv 2112.02958) and of PartIR's automatic tactic (Alabed
et al. 2025, arXiv 2401.11202): a node is a list of decisions, an edge one more, a rollout completes them,
and the reward falls with the cost of the completed plan. Here decisions are the options of variables in a given order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshcast.experiments.planning.cores.elimination import Optimum
from meshcast.experiments.planning.table import Assignment, FactorTable

Complete = Callable[[dict[str, int], random.Random], dict[str, int]]
"""Completes some decisions to an assignment of all variables."""


@dataclass
class _TreeNode:
    children: dict[int, _TreeNode] = field(default_factory=dict)
    visits: int = 0
    reward: float = 0.0
    closed: bool = False


def search_tree(
    table: FactorTable,
    rollouts: int,
    order: Sequence[str] = (),
    complete: Complete | None = None,
    exploration: float = 0.3,
    seed: int = 0,
    value_of: Callable[[Assignment], float] | None = None,
) -> Optimum:
    """The best assignment of all rollouts.

    order: variables in the order of their decisions; by default as the table has them. Others are left to `complete`.
    complete: by default draws the options of all variables that are not decided, at random.
    exploration: weight of the confidence bound against rewards, which lie between 0 and 1.
    value_of: what is minimised; by default the objective of the table.
    """
    draw = random.Random(seed)
    names, measure = tuple(order) or tuple(table.choices), value_of or table.value
    finish = complete or (
        lambda made, rng: {
            name: made[name] if name in made else rng.randrange(len(options)) for name, options in table.choices.items()
        }
    )
    root, best, worst, visited = _TreeNode(), None, 0.0, 0
    for _ in range(rollouts):
        if root.closed:
            break
        path, made, node = [root], dict[str, int](), root
        while len(made) < len(names) and (node.visits or node is root):
            name = names[len(made)]
            option = _choose(node, len(table.choices[name]), exploration, draw)
            made[name] = option
            node = node.children.setdefault(option, _TreeNode())
            path.append(node)
        assignment = finish(dict(made), draw)
        value, visited = measure(assignment), visited + 1
        if best is None or value < best.value:
            best = Optimum(assignment, value, visited)
        worst = max(worst, value if math.isfinite(value) else 0.0)
        # Rewards compare with the best value so far: 1 for as good a plan, near 0 for one of many times its cost.
        reward = best.value / value if math.isfinite(value) and value > 0 else 0.0
        for one in path:
            one.visits += 1
            one.reward += reward
        _close(path, [len(table.choices[name]) for name in names], len(made) == len(names))
    assert best is not None, "a search has at least one rollout"
    return best._replace(visited=visited)


def _choose(node: _TreeNode, options: int, exploration: float, draw: random.Random) -> int:
    """An option that was not tried yet, else that of the highest confidence bound of those not searched through."""
    if fresh := [option for option in range(options) if option not in node.children]:
        return draw.choice(fresh)
    log = math.log(max(2, node.visits))

    def bound(option: int) -> float:
        child = node.children[option]
        return child.reward / max(1, child.visits) + exploration * math.sqrt(log / max(1, child.visits))

    return max((option for option in range(options) if not node.children[option].closed), key=bound)


def _close(path: Sequence[_TreeNode], options: Sequence[int], ended: bool) -> None:
    """Closes nodes below which every assignment was tried."""
    path[-1].closed = ended
    for depth in range(len(path) - 2, -1, -1):
        children = path[depth].children
        path[depth].closed = len(children) == options[depth] and all(one.closed for one in children.values())
