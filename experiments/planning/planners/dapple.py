"""DAPPLE: stages of a synchronous pipeline with replicas, by the latency of warm-up, steady phase and ending.

Prefixes of stages grow one by one, and the latency of a step decides (Fan et al. 2021, arXiv 2007.01045). In a job,
stages are on the next free GPUs. On a profile the planner is the one that the authors released, which names GPUs:
`cores/pipelines/placed_stages.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshcast.experiments.planning.antichains import output_bytes, states_of
from meshcast.experiments.planning.cores.ideals import find_contained
from meshcast.experiments.planning.cores.pipelines.latency_bound import LatencyBound
from meshcast.experiments.planning.cores.pipelines.placed_stages import MachineNetwork, PlacedPipelines
from meshcast.experiments.planning.cores.stage_prefixes import PrefixSearch
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.experiments.planning.stages import StageTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class DapplePlanner(Planner):
    paper = Paper("arXiv:2007.01045", "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021)
    restrictions = ("shard tensors", "recompute", "place a stage of a job elsewhere than on the next free GPUs")
    modes = ("paper", "ours")

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan_graph(problem) if problem.mode == "paper" else self._plan_layers(problem)

    def _plan_graph(self, problem: Problem) -> Proposal:
        levels: tuple[NetworkLevel, ...] = tuple(getattr(problem, "levels", ()))
        settings: dict[str, Any] = getattr(problem, "settings", {})
        if len(levels) not in (1, 2) or "batch" not in settings:
            rule = "DAPPLE needs one or two levels of the network (GPUs of a machine, machines), and a batch"
            raise PlanError(f"problem {problem.name}", rule, "Give levels, the innermost first, and batch=samples")
        inner, outer = (*levels, NetworkLevel(1, levels[0].bandwidth))[:2]
        message = float(settings.get("message_bandwidth", outer.bandwidth))
        network = MachineNetwork(outer.width, inner.width, inner.bandwidth, outer.bandwidth, message)
        graph = problem.graph()
        states = states_of(graph)
        states = states[np.argsort(states.sum(axis=1), kind="stable")]
        times = settings["batch"] / settings.get("profile_batch", 1)
        pipelines = PlacedPipelines(
            network,
            times * (states @ (graph.figures["forward"] + graph.figures["backward"])),
            states @ graph.figures["parameters"],
            times * output_bytes(graph, states),
            find_contained(states),
            int(settings["batch"]),
            int(settings.get("micro_batch", 1)),
        )
        found, visited = pipelines.run()
        stages = [
            {"nodes": np.flatnonzero(states[end] & ~states[begin]).tolist(), "gpus": sorted(devices)}
            for begin, end, devices in found.stages
        ]
        reason = "its stages are on GPUs by number, and cut graphs between any two layers"
        return Proposal({"stages": stages, "copies": found.copies}, found.seconds, visited, None, reason)

    def _plan_layers(self, problem: Problem) -> Proposal:
        table = self._choose_options(problem)
        search = PrefixSearch(table, problem.gpus, problem.microbatches)
        stages, value = search.run()
        if not math.isfinite(value):
            raise self.nothing_fits(problem, "Give GPUs of more memory, or smaller micro-batches")
        return Proposal(write_stages(problem, table, stages), value, search.visited)

    def _choose_options(self, problem: Problem) -> StageTable:
        """The table of stages with replicas alone."""
        table = problem.stages()
        kept = [
            number
            for number, option in enumerate(table.options)
            if option.plan.get("tp", 1) == 1 and option.plan.get("recompute", "none") == "none"
        ]
        if not kept:
            raise self.nothing_fits(problem, "Give micro-batches of more sequences, so that replicas divide them")
        return table.take(kept)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """A bound over all sequences of stages."""
        if problem.mode == "paper" or problem.microbatches == 1:
            return None
        bound = LatencyBound(self._choose_options(problem), problem.gpus, problem.microbatches)
        return SpaceOptimum(bound.bound(proposal.value), "bound of the latency")
