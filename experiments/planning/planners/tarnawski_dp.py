"""Tarnawski et al.: the contiguous placement of least maximal load, by dynamic programming over ideals.

A piece on an accelerator loads it with the seconds of its nodes and of the transfer of every output that crosses its
border; on a CPU with the seconds of its nodes. Nodes of equal colour (a layer and its gradient) share a device, and
pieces are contiguous in the forward graph (arXiv 2006.16423).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from meshcast.experiments.planning.cores.partition_dp import LastPiece, PartitionDP, start_costs
from meshcast.experiments.planning.device_graph import DeviceGraph
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.simulator.ir.scheme import Paper


class TarnawskiDP(Planner):
    paper = Paper("arXiv:2006.16423", "Efficient Algorithms for Device Placement of DNN Graph Operators", 2020)
    restrictions = ("shard or replicate operators", "give a device pieces that are not contiguous")
    modes = ("paper",)
    unit = "s per sample"

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        graph = DeviceGraph(problem.graph())
        ideals = graph.groups.ideals()
        seconds = graph.loads(ideals, problem.memory)
        cpus = int(settings_of(problem).get("devices", {}).get("cpus", 0))

        def end(devices: tuple[int, int]) -> Iterator[LastPiece]:
            accelerators, cpus = devices
            if accelerators:
                yield LastPiece((accelerators - 1, cpus), seconds[0], 0)
            if cpus:
                yield LastPiece((accelerators, cpus - 1), seconds[1], 1)

        table = PartitionDP(lambda devices: start_costs(len(ideals)), end)
        value = float(table.costs((problem.gpus, cpus))[-1, 0])
        if not math.isfinite(value):
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        pieces = []
        for before, behind, kind in table.trace((problem.gpus, cpus)):
            groups = ideals[behind] & ~ideals[before]
            nodes = np.flatnonzero(graph.members[groups].any(axis=0))
            pieces.append({"device": ("accelerator", "cpu")[kind], "nodes": nodes.tolist()})
        proof = PlanProof(value, value, "dynamic programming over ideals")
        reason = "operators are placed on subsets of devices, one by one"
        return Proposal({"pieces": pieces}, value, table.visited, proof, reason)
