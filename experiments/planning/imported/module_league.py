"""Planners of layer graphs on a module: which there are, and what each of them proposes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshcast.experiments.planning.imported.module_problem import ModuleProblem
from meshcast.experiments.planning.planner import Proposal, find_planner, planner_names
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.hardware.errors import PlanError

PROFILES_ALONE = ("aceso", "auto-mtf", "slapo")
"""Planners in mode ``paper`` whose profiles are no layer graphs: operators by degree, named dims, a grid of runs."""


class LayerStage(NamedTuple):
    """A stage, or a piece on a device: its layers by their places, and where they run."""

    nodes: tuple[int, ...]
    devices: str


@dataclass(frozen=True)
class ModuleRow:
    """The proposal of one planner, in the unit of its objective; None where it refused the module, and why."""

    name: str
    unit: str
    cpu_s: float
    proposal: Proposal | None = None
    refused: PlanError | None = None

    @property
    def stages(self) -> list[LayerStage]:
        """The stages of the plan, whatever its planner calls them."""
        found = []
        plan = self.proposal.plan if self.proposal is not None else {}
        for stage in plan.get("stages", plan.get("pieces", ())):
            if isinstance(stage, dict):
                rest = [_describe(key, value) for key, value in stage.items() if key != "nodes"]
                found.append(LayerStage(tuple(stage["nodes"]), ", ".join(rest)))
            else:
                found.append(LayerStage(tuple(stage), ""))
        return found


def _describe(key: str, value: Any) -> str:
    """A property of a stage in words: GPUs by their numbers, replicas at every level of the network."""
    if key == "gpus" and value == [*range(value[0], value[0] + len(value))] and len(value) > 1:
        return f"GPUs {value[0]} to {value[-1]}"
    sign = ", " if key == "gpus" else " x "
    words = sign.join(str(one) for one in value) if isinstance(value, list | tuple) else str(value)
    return f"{'GPUs' if key == 'gpus' else key} {words}"


def planners_of_graphs() -> list[str]:
    """The planners that solve layer graphs."""
    return [name for name in planner_names() if "paper" in find_planner(name).modes and name not in PROFILES_ALONE]


def choose_graph_planners(given: str) -> list[str]:
    """The planners of a list with commas; ``all``: those of layer graphs.

    Raises PlanError for a name without a planner, and for planners of jobs alone.
    """
    known = planners_of_graphs()
    names = known if given == "all" else [name.strip() for name in given.split(",")]
    for name in names:
        find_planner(name)
        if name not in known:
            raise PlanError("--with", "it plans no layer graphs", f"Choose some of {', '.join(known)}", name)
    return names


def ask_planners(problem: ModuleProblem, names: Sequence[str], budget: SearchBudget) -> list[ModuleRow]:
    """The proposals of planners in the order of their names."""
    problem.graph()
    rows = []
    for name in names:
        begin, planner = time.process_time(), find_planner(name)
        try:
            proposal, refused = planner().plan(problem, budget), None
        except PlanError as error:
            proposal, refused = None, error
        rows.append(ModuleRow(name, planner.unit, time.process_time() - begin, proposal, refused))
    return rows


def to_answer(problem: ModuleProblem, rows: Sequence[ModuleRow]) -> dict[str, Any]:
    """The graph and the proposals as plain data."""
    graph = problem.graph()
    columns = {name: values.tolist() for name, values in graph.figures.items() if name != "cpu"}
    layers = [
        {"name": name, **{key: column[at] for key, column in columns.items()}} for at, name in enumerate(graph.names)
    ]
    plans = []
    for row in rows:
        if row.proposal is None:
            assert row.refused is not None
            plans.append({"planner": row.name, "refused": row.refused.to_dict(), "cpu_s": row.cpu_s})
            continue
        proof = row.proposal.proof
        stages = [{"layers": [graph.names[node] for node in one.nodes], "devices": one.devices} for one in row.stages]
        plans.append(
            {
                **{"planner": row.name, "objective": row.proposal.value, "unit": row.unit, "stages": stages},
                **{"proven_within": proof.gap if proof else None, "plan": dict(row.proposal.plan), "cpu_s": row.cpu_s},
            }
        )
    return {"module": problem.name, "layers": layers, "edges": [[*edge] for edge in graph.edges], "plans": plans}
