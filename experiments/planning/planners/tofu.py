"""Tofu: recursive partition, by a dim of every operator at each step, of all tensors over all devices.

Steps are the prime factors of the number of devices, the largest first; each is solved exactly behind those before it
(Wang et al. 2019, arXiv 1807.08887). The paper minimises bytes, here a step minimises the step time of the
table. No operator may do the same on several ranks.
"""

from __future__ import annotations

from meshcast.experiments.planning.level_planner import LevelPlanner
from meshcast.experiments.planning.problem import Dims, Problem
from meshcast.simulator.ir.scheme import Paper


class Tofu(LevelPlanner):
    paper = Paper("arXiv:1807.08887", "Supporting Very Large Models using Automatic Dataflow Graph Partitioning", 2019)
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "leave an operator undivided along an axis",
        "look at memory",
    )

    def allows(self, name: str, layout: Dims) -> bool:
        return all(dim for _, dim in layout)

    def widths(self, problem: Problem) -> list[int]:
        left, factors = problem.gpus, []
        for factor in range(2, problem.gpus + 1):
            while left % factor == 0:
                factors.append(factor)
                left //= factor
        return factors[::-1]
