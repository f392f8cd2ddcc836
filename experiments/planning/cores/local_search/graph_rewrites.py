"""Unity's search: best-first over rewritten graphs, each at the price of its best placement.

A rewritten graph says along which dims every operator is partitioned (its parallel operators); a placement says which
axes of the mesh each of these dims has. A rewrite gives one operator, or all operators of one tensor, other dims.
Graphs of more than `ALPHA` times the best price are not rewritten further (Unger et al. 2022, "Unity", OSDI 2022;
flexflow/FlexFlow, `src/runtime/substitution.cc`). Placements are found exactly, by elimination.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshcast.experiments.planning.cores.elimination import Optimum, eliminate
from meshcast.experiments.planning.problem import Dims
from meshcast.experiments.planning.table import Factor, FactorTable

ALPHA = 1.2
"""The released code's limit of the price of graphs that are rewritten further, in prices of the best."""

Partition = frozenset[str]
"""The dims along which an operator is partitioned."""

Graph = tuple[Partition, ...]
"""The partition of every operator, in the order of the table."""


class RewriteSearch:
    """The search over one table.

    weight: of memory in the objective [s/byte]. most: graphs that are priced. alpha: prices above so many times the
    best are pruned.
    """

    def __init__(self, table: FactorTable, weight: float = 0.0, most: int = 1000, alpha: float = ALPHA) -> None:
        self.table, self.most, self.alpha, self.visited = table, most, alpha, 0
        self.names = list(table.choices)
        self.factors = [(one.scope, table.objective(one) + weight * one.nbytes) for one in table.factors]
        self.options: list[dict[Partition, list[int]]] = []
        for given in table.choices.values():
            options: Sequence[Dims] = given  # type: ignore[assignment]
            own: dict[Partition, list[int]] = {}
            for number, layout in enumerate(options):
                own.setdefault(frozenset(dim for _, dim in layout if dim), []).append(number)
            self.options.append(own)
        self.position = {name: number for number, name in enumerate(self.names)}
        self._restricted: dict[tuple[int, Graph], tuple[Factor, float]] = {}
        scopes = {tuple(sorted({self.position[name] for name in scope})) for scope, _ in self.factors}
        self.patterns = sorted({*scopes, *((number,) for number in range(len(self.names)))})

    def run(self, starts: Sequence[Graph]) -> Optimum | None:
        """The best placement of all graphs that rewrites of `starts` reach; None if none is allowed."""
        best: Optimum | None = None
        queue: list[tuple[float, int, Graph]] = []
        seen = set(starts)
        for number, start in enumerate(starts):
            found = self.place(start)
            heapq.heappush(queue, (found.value if found else math.inf, number, start))
            best = _better(best, found)
        while queue and self.visited < self.most:
            value, _, graph = heapq.heappop(queue)
            if best is not None and value > self.alpha * best.value:
                break
            for rewritten in self.rewrites(graph):
                if rewritten in seen or self.visited >= self.most:
                    continue
                seen.add(rewritten)
                if best is not None and self.bound(rewritten) > self.alpha * best.value:
                    self.visited += 1
                    continue
                found = self.place(rewritten)
                if found is None:
                    continue
                best = _better(best, found)
                if best is not None and found.value <= self.alpha * best.value:
                    heapq.heappush(queue, (found.value, len(seen), rewritten))
        return best

    def bound(self, graph: Graph) -> float:
        """A price that no placement of a graph is below: the least of every factor."""
        return sum(self._restrict(number, graph)[1] for number in range(len(self.factors)))

    def _restrict(self, number: int, graph: Graph) -> tuple[Factor, float]:
        """A factor for the options that a graph leaves, and its least cell."""
        scope, array = self.factors[number]
        key = number, tuple(graph[self.position[name]] for name in scope)
        if key not in self._restricted:
            rows = [self.options[self.position[name]][graph[self.position[name]]] for name in scope]
            part = array[np.ix_(*rows)]
            zero = np.broadcast_to(0.0, part.shape)
            self._restricted[key] = Factor(scope, part, zero, zero), float(part.min())
        return self._restricted[key]

    def place(self, graph: Graph) -> Optimum | None:
        """The best placement of a graph, with the numbers of its options in the whole table."""
        self.visited += 1
        kept = {name: own[part] for name, own, part in zip(self.names, self.options, graph, strict=True)}
        if all(len(numbers) == 1 for numbers in kept.values()):
            value = self.bound(graph)
            only = {name: numbers[0] for name, numbers in kept.items()}
            return Optimum(only, value, 1) if math.isfinite(value) else None
        factors = [self._restrict(number, graph)[0] for number in range(len(self.factors))]
        found = eliminate(FactorTable(kept, factors))
        if found is None:
            return None
        return found._replace(assignment={name: kept[name][number] for name, number in found.assignment.items()})

    def graph_of(self, wanted: Mapping[str, Partition]) -> Graph:
        """The graph in which operators have these partitions where they may, and no others."""
        parts = (wanted.get(name, frozenset()) for name in self.names)
        return tuple(part if part in own else min(own, key=len) for part, own in zip(parts, self.options, strict=True))

    def rewrites(self, graph: Graph) -> Iterator[Graph]:
        """All graphs one rewrite away; operators of a tensor get a partition that all of them may have."""
        for pattern in self.patterns:
            common = set.intersection(*({*self.options[one]} for one in pattern))
            for part in sorted(common, key=sorted):
                made = list(graph)
                for one in pattern:
                    made[one] = part
                if tuple(made) != graph:
                    yield tuple(made)


def _better(one: Optimum | None, other: Optimum | None) -> Optimum | None:
    return other if one is None or (other is not None and other.value < one.value) else one
