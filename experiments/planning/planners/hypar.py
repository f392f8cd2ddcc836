"""HyPar: at every level of a binary tree of devices, data or model parallelism for every operator with weights.

Levels are solved in turn, the outermost first, each exactly below those above it (Song et al. 2019, arXiv 1901.02067).
The paper minimises bytes; here a level minimises the step time of the table. Operators without weights may have any
layout of the two kinds.
"""

from __future__ import annotations

from meshcast.experiments.planning.level_planner import LevelPlanner
from meshcast.experiments.planning.problem import Problem
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class HyPar(LevelPlanner):
    paper = Paper("arXiv:1901.02067", "HyPar: Towards Hybrid Parallelism for Deep Learning Accelerator Array", 2019)
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "shard positions or hidden channels",
        "use a number of devices that is no power of two",
        "look at memory",
    )
    dims = frozenset({"b", "a", "f", "v"})

    def widths(self, problem: Problem) -> list[int]:
        levels = problem.gpus.bit_length() - 1
        if 2**levels != problem.gpus:
            rule = f"HyPar divides devices by two at every level, and {problem.gpus} is no power of two"
            raise PlanError("cluster", rule, f"Choose {2**levels} GPUs", problem.gpus)
        return [2] * levels
