"""Tarnawski et al.: the placement of least maximal load as an integer program, contiguous or not.

Binaries say which device a colour class is on; for every node and accelerator one variable says that its output leaves
it, one that it enters. Contiguity of a device: a mark is set at every node from which the device is reached; a node
that does not belong to the device, but reads from it, must not be marked (arXiv 2006.16423). Two
contiguous pieces may read from each other, which no chain of ideals has, so the program may be better than the dynamic
program. Solved by CP-SAT.
"""

from __future__ import annotations

import numpy as np

from meshcast.experiments.planning.certificate import PlanProof
from meshcast.experiments.planning.cores.placement import PlacementProgram
from meshcast.experiments.planning.device_graph import DeviceGraph
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.simulator.ir.scheme import Paper


class TarnawskiIP(Planner):
    paper = Paper("arXiv:2006.16423", "Efficient Algorithms for Device Placement of DNN Graph Operators", 2020)
    core = "placement"
    restrictions = ("shard or replicate operators",)
    modes = ("paper",)
    unit = "s per sample"
    contiguous = True
    """Whether the nodes of every device must be contiguous in the forward graph."""

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        graph = DeviceGraph(problem.graph())
        cpus = int(getattr(problem, "settings", {}).get("devices", {}).get("cpus", 0))
        program = PlacementProgram(graph, problem.gpus, cpus, problem.memory)
        if self.contiguous:
            program.require_contiguity()
        found = program.solve(budget.seconds)
        if found is None:
            raise self.nothing_fits(problem, "Give more devices or memory, or the solver more time")
        pieces = []
        for device, groups in enumerate(found.groups):
            nodes = np.flatnonzero(graph.members[groups].any(axis=0))
            kind = "accelerator" if device < problem.gpus else "cpu"
            pieces += [{"device": kind, "nodes": nodes.tolist()}] if len(nodes) else []
        proof = PlanProof(found.bound, found.load, "constraint programming")
        reason = "operators are placed on subsets of devices, one by one"
        return Proposal({"pieces": pieces}, found.load, found.branches, proof, reason)
