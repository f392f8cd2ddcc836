"""Aceso: iterative relief of the bottleneck stage, by trades of GPUs, layers, degrees and recomputation.

A primitive doubles or halves a degree of a stage; the objective is the sum of the stages' seconds and m - 1 times the
slowest, as Alpa's. For every number of stages the search starts from a balanced plan (Liu et al. 2024, "Aceso:
Efficient Parallel DNN Training through Iterative Bottleneck Alleviation", EuroSys 2024; microsoft/SuperScaler). In the
paper operators are cut, recomputed and sharded one by one; here layers are, and a stage recomputes all or nothing.
"""

from __future__ import annotations

from experiments.planning.cores.local_search.bottleneck_walk import BottleneckWalk
from experiments.planning.cores.stage_dp import plan_stages
from experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from experiments.planning.problem import Problem, SearchBudget
from simulator.ir.scheme import Paper


class Aceso(Planner):
    paper = Paper(
        "EuroSys 2024", "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck Alleviation", 2024
    )
    core = "local_search/bottleneck_walk"
    restrictions = (
        "change the size of micro-batches",
        "cut or recompute a part of a layer of a job",
        "give operators of a stage degrees of their own",
        "leave GPUs unused",
    )

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        table = problem.stages()
        search = BottleneckWalk(table, problem.gpus, problem.microbatches, max(1, budget.steps // 10), budget.seconds)
        found = search.run()
        if found is None:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        return Proposal(write_stages(problem, table, found.stages), found.value, found.visited)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Alpa's dynamic program over the same stages: the objective is the same."""
        found = plan_stages(problem.stages(), problem.gpus, problem.microbatches, seconds=budget.seconds)
        return SpaceOptimum(found.bound, "dynamic programming over stages") if found else None
