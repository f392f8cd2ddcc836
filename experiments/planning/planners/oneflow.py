"""OneFlow: the SBP signature of every operator, by eliminations and greedy steps over neighbourhoods of four.

A signature says for each axis of the mesh whether a tensor is split, broadcast, or a partial sum; the layouts of an
operator imply those of its tensors (Yuan et al. 2021, arXiv 2110.15032; Oneflow-Inc/oneflow, `core/auto_parallel`). The
released code counts bytes and a ratio for computation, here the step time of the table counts. Signatures that the user
has set are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshcast.experiments.planning.cores.local_search.neighbourhoods import search_neighbourhoods
from meshcast.experiments.planning.operator_planner import OperatorPlanner, Solved
from meshcast.experiments.planning.problem import Dims, Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable
from meshcast.simulator.ir.scheme import Paper


class OneFlow(OperatorPlanner):
    """signatures: dims by axis that the user has set for an operator."""

    paper = Paper("arXiv:2110.15032", "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021)
    core = "local_search/neighbourhoods"
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "carry partial sums through an operator",
        "look at memory",
    )

    def __init__(self, signatures: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.signatures = dict(signatures or {})

    def allows(self, name: str, layout: Dims) -> bool:
        wanted = self.signatures.get(name)
        return wanted is None or all(wanted.get(axis, "") == dim for axis, dim in layout)

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> tuple[Solved | None, int, float]:
        found = search_neighbourhoods(table)
        return found, found.visited if found else 0, float("nan")
