"""Tarnawski et al.: the contiguous placement of least maximal load, by dynamic programming over ideals.

A piece on an accelerator loads it with the seconds of its nodes and of the transfer of every output that crosses its
border; on a CPU with the seconds of its nodes. Nodes of one colour (a layer and its gradient) are on one device, and
pieces are contiguous in the forward graph (arXiv 2006.16423).
"""

from __future__ import annotations

import numpy as np

from meshcast.experiments.planning.certificate import PlanProof
from meshcast.experiments.planning.cores.ideals import PartitionTable, PieceOption
from meshcast.experiments.planning.device_graph import DeviceGraph
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.simulator.ir.scheme import Paper


class TarnawskiDP(Planner):
    paper = Paper("arXiv:2006.16423", "Efficient Algorithms for Device Placement of DNN Graph Operators", 2020)
    restrictions = ("shard or replicate operators", "give a device pieces that are not contiguous")
    modes = ("paper",)
    unit = "s per sample"

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        graph = DeviceGraph(problem.graph())
        ideals = graph.groups.ideals()
        accelerator, cpu = graph.loads(ideals, problem.memory)
        cpus = int(getattr(problem, "settings", {}).get("devices", {}).get("cpus", 0))
        options = [PieceOption((1, 0), accelerator), PieceOption((0, 1), cpu)]
        table = PartitionTable(options, (problem.gpus, cpus))
        found = table.plan()
        if found is None:
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        devices = []
        for piece in found.pieces:
            groups = ideals[piece.after] & ~ideals[piece.before]
            nodes = np.flatnonzero(graph.members[groups].any(axis=0))
            devices.append({"device": ("accelerator", "cpu")[piece.option], "nodes": nodes.tolist()})
        proof = PlanProof(found.value, found.value, "dynamic programming over ideals")
        reason = "operators are placed on subsets of devices, one by one"
        return Proposal({"pieces": devices}, found.value, found.visited, proof, reason)
