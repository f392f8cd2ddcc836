"""Alpa: contiguous stages, each on a submesh, by dynamic programming over the prices of stages.

Minimises sum of the stages' seconds + (m - 1) x the slowest (Zheng et al. 2022, arXiv 2201.12023, section 5.2).
Submeshes are powers of two of the GPUs of a node, or whole nodes; a stage fits with the activations of the
micro-batches in flight, as many as stages from it on. Inside a stage operators have the layouts that the program of
`alpa-intra` finds for the stage's own layers, GPUs and logical mesh, or Megatron's of any degree with a sharded
optimizer: the dynamic program takes what is best. Programs have half of the time of the search, the fewest GPUs first;
models with experts have Megatron's layouts alone, since their scheme shards experts.
"""

from __future__ import annotations

from typing import ClassVar

from meshcast.experiments.planning.clock import limiting_time, seconds_left
from meshcast.experiments.planning.cores.stage_dp import plan_stages
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal, write_stages
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.stages import StageTable
from meshcast.simulator.ir.scheme import Paper


def submeshes(table: StageTable, per_node: int) -> StageTable:
    """Returns the options that Alpa's submesh shapes admit: (1, 2^i) inside a node, (n, all) over n nodes."""
    return table.select(
        lambda option: option.gpus % per_node == 0 or (option.gpus < per_node and option.gpus.bit_count() == 1)
    )


class Alpa(Planner):
    paper = Paper("arXiv:2201.12023", "Alpa: Automating Inter- and Intra-Operator Parallelism", 2022)
    restrictions = (
        "use submeshes other than powers of two inside a node, or whole nodes, or put one across nodes",
        "leave GPUs unused",
        "recompute some stages only: all or none do",
    )

    recompute: ClassVar[tuple[str, ...]] = ("none", "full")
    """What its plans may recompute; the authors' runs always recompute."""

    programs: ClassVar[bool] = True
    """Whether operators of stages have layouts of their own."""

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        job = getattr(problem, "job", None)
        per_node = job.cluster.gpus_per_node if job is not None else problem.gpus
        price_layouts = getattr(problem, "layout_stages", None) if self.programs else None
        table = submeshes(problem.stages().join(price_layouts() if price_layouts else None), per_node)
        best: Proposal | None = None
        visited, bound = 0, float("inf")
        for number, again in enumerate(self.recompute):
            options = table.select(lambda option, again=again: option.plan.get("recompute", "none") == again)  # type: ignore[misc]
            if not options.options:
                continue
            with limiting_time(seconds_left() / (len(self.recompute) - number)):
                division = plan_stages(options, problem.gpus, problem.microbatches, per_node=per_node)
            if division is None:
                continue
            visited, bound = visited + division.visited, min(bound, division.bound)
            if best is None or division.value < best.value:
                best = Proposal(write_stages(problem, options, division.stages), division.value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        return best._replace(visited=visited, proof=PlanProof(bound, best.value, "dynamic programming over stages"))
