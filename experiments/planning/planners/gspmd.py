"""GSPMD: layouts of a few annotated operators, propagated to all others.

The annotations are those of the paper's transformers (Xu et al. 2021, arXiv 2105.04663, section 5.1): along the inner
axis the heads and the feed-forward columns of linear layers and the vocabulary of the ends, along the outer axis
samples. Everything else follows by propagation, without a price of the whole plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshcast.experiments.planning.cores.propagation import find_neighbours, propagate
from meshcast.experiments.planning.operator_planner import OperatorPlanner
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum, Option
from meshcast.simulator.ir.scheme import Paper


class GSPMD(OperatorPlanner):
    paper = Paper("arXiv:2105.04663", "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021)
    restrictions = (
        "change an annotation",
        "cut a pipeline",
        "give layers layouts of their own",
        "look at time or memory of the whole plan",
    )
    inner_dims = ("a", "f", "v")
    """Dims that the innermost axis shards at annotated operators."""

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        near = find_neighbours(table)
        annotated = {name: self._annotate(options) for name, options in table.choices.items()}
        decided = {name: place for name, place in annotated.items() if name in near.with_weights and place is not None}
        assignment = propagate(table, decided, near)
        return Optimum(assignment, table.value(assignment), len(assignment))

    def space(self, problem: Problem) -> Iterator[FactorTable]:
        """Yields the tables in which annotated operators have their annotations."""
        for table in super().space(problem):
            weighted = find_neighbours(table).with_weights
            fixed = {name: self._annotate(options) for name, options in table.choices.items() if name in weighted}
            kept = {name: table.choices[name][place] for name, place in fixed.items() if place is not None}

            def keeps(name: str, layout: Option, kept: Mapping[str, Option] = kept) -> bool:
                return kept.get(name, layout) == layout

            yield table.restrict(keeps)

    def _annotate(self, options: Sequence[Any]) -> int | None:
        """Returns the option whose innermost axis shards a dim of `inner_dims` and whose outer axes shard samples."""
        for place, layout in enumerate(options):
            if not layout:  # experts
                continue
            *outer, (_, inner) = layout
            if inner in self.inner_dims and all(dim == "b" for _, dim in outer):
                return place
        return None
