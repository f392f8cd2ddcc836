"""Unity: parallelisation by rewrites of the graph, jointly with the placement of its operators on axes of the mesh.

Graphs are searched best-first from data parallelism and from the whole model on every GPU; each has the price of
its best placement. If the fastest plan does not fit, memory gets a share of the objective, by ten bisections (Unger et
al. 2022, "Unity", OSDI 2022; flexflow/FlexFlow, `src/runtime/graph.cc`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshcast.experiments.planning.cores.descent import bisect_weight
from meshcast.experiments.planning.cores.elimination import Optimum
from meshcast.experiments.planning.cores.local_search.graph_rewrites import RewriteSearch
from meshcast.experiments.planning.operator_planner import OperatorPlanner, Solved, physical_mesh
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable
from meshcast.simulator.ir.scheme import Paper


class Unity(OperatorPlanner):
    title = (
        "Unity: Accelerating DNN Training Through Joint Optimization of Algebraic Transformations and Parallelization"
    )
    paper = Paper("OSDI 2022", title, 2022)
    core = "local_search/graph_rewrites"
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "fuse or replace operators",
        "place branches on unlike GPUs",
    )

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        """Nodes and their GPUs; on one node pairs of neighbours, too, so that a placement has a choice."""
        physical = physical_mesh(problem)
        yield physical
        if len(physical) == 1 and problem.gpus % 2 == 0 and problem.gpus > 2:
            yield {"x": problem.gpus // 2, "y": 2}

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> tuple[Solved | None, int, float]:
        walks: list[RewriteSearch] = []
        unit = 0.0  # seconds of a byte, in which the fastest plan's time and memory weigh the same

        def search(share: float) -> Optimum | None:
            """The best plan where memory has a share of the objective, and time the rest."""
            walk = RewriteSearch(table, unit * share / max(1e-6, 1 - share), max(1, budget.steps // 8))
            walks.append(walk)
            data = {name: frozenset("b") for name in table.choices}
            return walk.run([walk.graph_of(data), walk.graph_of({})])

        def fits(found: Optimum | None) -> bool:
            return found is not None and table.cost(found.assignment).nbytes <= problem.memory

        found = search(0.0)
        if found is not None and not fits(found):
            unit = found.value / table.cost(found.assignment).nbytes
            found = bisect_weight(search, fits, 1.0)
        visited = sum(walk.visited for walk in walks)
        solved = found._replace(value=table.value(found.assignment)) if found is not None else None
        return solved, visited, float("nan")
