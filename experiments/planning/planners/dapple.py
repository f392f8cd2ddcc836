"""DAPPLE: stages of a synchronous pipeline with replicas, by the latency of warm-up, steady phase and ending.

Prefixes of stages grow one by one, and the latency of a step decides (Fan et al. 2021, arXiv 2007.01045). Stages are on
the next free GPUs.
"""

from __future__ import annotations

import math

from experiments.planning.cores.stage_prefixes import PrefixSearch
from experiments.planning.planner import Planner, Proposal, write_stages
from experiments.planning.problem import Problem, SearchBudget
from simulator.ir.scheme import Paper


class DapplePlanner(Planner):
    paper = Paper("arXiv:2007.01045", "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021)
    core = "stage_prefixes"
    restrictions = ("shard tensors", "recompute", "place a stage elsewhere than on the next free GPUs")

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        table = problem.stages()
        kept = [
            number
            for number, option in enumerate(table.options)
            if option.plan.get("tp", 1) == 1 and option.plan.get("recompute", "none") == "none"
        ]
        if not kept:
            raise self.nothing_fits(problem, "Give micro-batches of more sequences, so that replicas divide them")
        search = PrefixSearch(table.take(kept), problem.gpus, problem.microbatches)
        stages, value = search.run()
        if not math.isfinite(value):
            raise self.nothing_fits(problem, "Give GPUs of more memory, or smaller micro-batches")
        return Proposal(write_stages(problem, search.table, stages), value, search.visited)
