"""Aceso: iterative relief of the bottleneck stage, by trades of GPUs, layers, degrees and recomputation.

A primitive doubles or halves a degree of a stage; the objective is the sum of the stages' seconds and m - 1 times the
slowest, as Alpa's. For every number of stages the search starts from a balanced plan (Liu et al. 2024, "Aceso:
Efficient Parallel DNN Training through Iterative Bottleneck Alleviation", EuroSys 2024; microsoft/SuperScaler). In the
paper operators are cut, recomputed and sharded one by one. On a profile of operators they are cut and recomputed so
here, too; in a job layers are cut, and a stage recomputes all or nothing.
"""

from __future__ import annotations

from typing import Any

from meshcast.experiments.planning.cores.local_search.bottleneck_walk import BottleneckWalk
from meshcast.experiments.planning.cores.local_search.operator_walk import OperatorProfile, walk_profile
from meshcast.experiments.planning.cores.stage_dp import plan_stages
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class Aceso(Planner):
    paper = Paper(
        "EuroSys 2024", "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck Alleviation", 2024
    )
    core = "local_search/bottleneck_walk"
    restrictions = (
        "change the size of micro-batches of a job, or on the way",
        "cut or recompute a part of a layer of a job",
        "give operators of a stage degrees of their own",
        "leave GPUs unused",
    )

    modes = ("paper", "ours")

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return (self._plan_operators if problem.mode == "paper" else self._plan_layers)(problem, budget)

    def _plan_operators(self, problem: Problem, budget: SearchBudget) -> Proposal:
        settings: dict[str, Any] = getattr(problem, "settings", {})
        if missing := [key for key in ("tables", "repeat", "micro_batches", "batch") if key not in settings]:
            rule = f"Aceso needs times of operators by degree and size of micro-batches, and there is no `{missing[0]}`"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Aceso's operators")
        profile = OperatorProfile(settings, problem.memory / 2**20)
        sizes, most = settings["micro_batches"], max(1, budget.steps // 10)
        found = walk_profile(profile, problem.gpus, settings["batch"], sizes, most)
        if found is None:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        walk, state = found
        stages = []
        for place, one in enumerate(state):
            again = walk.price_stage(one, len(state) - 1 - place).recomputed
            recomputed = [one.first + at for at, chosen in enumerate(again) if chosen]
            degrees = {"tp": one.shape.tensor, "dp": one.shape.data}
            stages.append({"nodes": [*range(one.first, one.stop)], **degrees, "recomputed": recomputed})
        reason = "its stages cut and recompute parts of layers"
        plan = {"stages": stages, "micro_batch": walk.micro}
        return Proposal(plan, walk.price(state).value, walk.visited, None, reason)

    def _plan_layers(self, problem: Problem, budget: SearchBudget) -> Proposal:
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
