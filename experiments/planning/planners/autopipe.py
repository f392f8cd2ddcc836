"""AutoPipe: balanced stages of blocks, moved out of the master stage of a simulated pipeline.

For every number of stages, each with as many replicas: the partition of least slowest stage, then moves of blocks while
the simulated step gets shorter (Liu et al. 2022, "AutoPipe", CLUSTER 2022). On a profile the blocks are those of its
chain, attention and feed-forward blocks in the paper; in a job they are layers, which its plans do not cut.
"""

from __future__ import annotations

import time

import numpy as np

from meshcast.experiments.planning.cores.local_search.block_moves import chain_table, move_blocks
from meshcast.experiments.planning.cores.stage_dp import plan_stages
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_space
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class AutoPipe(Planner):
    paper = Paper("CLUSTER 2022", "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning", 2022)
    core = "local_search/block_moves"
    restrictions = (
        "shard tensors",
        "give stages unlike replicas",
        "cut a layer of a job",
        "slice micro-batches of the warm-up (its slicer)",
    )
    modes = ("paper", "ours")

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan_blocks(problem) if problem.mode == "paper" else self._plan_layers(problem, budget)

    def _plan_blocks(self, problem: Problem) -> Proposal:
        graph = problem.graph()
        if not graph.is_chain or not {"forward", "backward"} <= graph.figures.keys():
            rule = "AutoPipe needs a chain of blocks with the seconds of both passes"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of a chain")
        order = graph.order
        table = chain_table(*(graph.figures[name][order] for name in ("forward", "backward")))
        micro = int(getattr(problem, "settings", {}).get("microbatches", problem.microbatches))
        found = move_blocks(table, problem.gpus, micro)
        if found is None:
            raise self.nothing_fits(problem, "Give no more devices than blocks")
        stages = [[order[block] for block in one.layers] for one in found.stages]
        return Proposal({"stages": stages}, found.value, found.visited, None, "stages cut layers into blocks")

    def _plan_layers(self, problem: Problem, budget: SearchBudget) -> Proposal:
        table = problem.stages()
        best: Proposal | None = None
        visited = 0
        end = time.process_time() + budget.seconds
        for number, option in enumerate(table.options):
            if best is not None and time.process_time() > end:
                break
            if option.plan.get("tp", 1) > 1 or problem.gpus % option.gpus or problem.gpus // option.gpus > table.layers:
                continue
            own = table.take([number])
            found = move_blocks(own, problem.gpus, problem.microbatches, end)
            if found is None:
                continue
            once = [float(own.once[one.layers[0], one.layers[-1], 0]) for one in found.stages]
            value, visited = found.value + float(np.max(once)), visited + found.visited
            if best is None or value < best.value:
                best = Proposal(write_stages(problem, own, found.stages), value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give GPUs of more memory, or smaller micro-batches")
        return best._replace(visited=visited)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """By forecasts on nodes of one kind, by the objective without exchanges of gradients on several."""
        if not isinstance(problem, JobProblem):
            return None
        if len(problem.job.cluster.kinds) > 1:
            table = problem.stages()
            equal = [table.take([number]) for number, one in enumerate(table.options) if one.plan.get("tp", 1) == 1]
            found = [plan_stages(one, problem.gpus, problem.microbatches, seconds=budget.seconds) for one in equal]
            bound = min((one.bound for one in found if one is not None), default=proposal.value)
            return SpaceOptimum(bound, "dynamic programming over stages")
        plan = {"pp": "auto", "schedule": "1f1b", "partition": "auto", "recompute": ["none", "full"]}
        where = [f"batch.micro * plan.dp == {problem.samples}"]
        return search_space(problem, plan, "auto", problem.forecast(proposal.plan).step_time, where)
