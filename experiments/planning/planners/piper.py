"""Piper: contiguous stages, each with degrees of data and tensor parallelism, and a variant for every layer.

The bottleneck of the time of a sample is minimised. A stage of d replicas takes (seconds + bytes / B) / d, with twice
the bytes of every edge that crosses its border, and 4 (d - 1) / d of the parameters' bytes once a batch of N; it keeps
ceil(s / d) micro-batches in flight, s the replicas of this stage and of all later ones (Tarnawski et al. 2021, "Piper:
Multidimensional Planner for DNN Parallelization", NeurIPS 2021, and the released code msr-fiddle/piper).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.experiments.planning.cores.ideals import find_contained
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.variants import LayerVariants, choose_variants, read_variants
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class Piper(Planner):
    paper = Paper("NeurIPS 2021, volume 34", "Piper: Multidimensional Planner for DNN Parallelization", 2021)
    restrictions = ("give a stage layers of several degrees", "use replicas whose number does not divide the batch")
    modes = ("paper",)
    unit = "s per sample"

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        settings: dict[str, Any] = getattr(problem, "settings", {})
        if "variants" not in settings or "batch" not in settings or "bandwidth" not in settings:
            rule = "Piper needs the variants of every layer, the micro-batches of a batch and a bandwidth"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Piper and give batch and bandwidth")
        graph = problem.graph()
        edges = [tuple(edge) for edge in settings["edge_order"]]
        states = LayerGraph(graph.names, [(b, a) for a, b in graph.edges], {}).ideals()
        later = find_contained(states)
        stages = {}
        for tensor, variants in read_variants(settings, graph, edges).items():
            for data in range(1, problem.gpus // tensor + 1):
                if settings["batch"] % data == 0:
                    stages[tensor, data] = self._price(problem, settings, states, later, edges, variants, data)
        best, links = _fill(stages, problem.gpus, len(states))
        value = float(best[problem.gpus, problem.gpus, -1])
        if not np.isfinite(value):
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        plan, at, gpus, replicas = [], len(states) - 1, problem.gpus, problem.gpus
        while at:
            before, number = links[gpus, replicas, at]
            tensor, data = [*stages][number]
            nodes = np.flatnonzero(states[at] & ~states[before]).tolist()
            plan.append({"nodes": nodes, "tp": tensor, "dp": data})
            at, gpus, replicas = int(before), gpus - tensor * data, replicas - data
        reason = "replicas take micro-batches in turn, and layers of a stage have variants of their own"
        # Variants are chosen by a heuristic, so nothing is proven.
        return Proposal({"stages": plan}, value, best.size * len(stages) * len(states), None, reason)

    def _price(
        self,
        problem: Problem,
        settings: dict[str, Any],
        states: np.ndarray,
        later: np.ndarray,
        edges: list[tuple[int, ...]],
        variants: LayerVariants,
        data: int,
    ) -> np.ndarray:
        """Seconds of a sample of pieces between two states, by micro-batches in flight [states, states, flights]."""
        flights = np.arange(1, -(-problem.gpus // data) + 1)
        resync = 4 * (data - 1) / data / settings["batch"] * variants.parameters
        own = variants.seconds / data + resync / settings["bandwidth"]
        memory = flights[:, None, None] * variants.in_flight[None] + variants.fixed[None]
        ends = np.array(edges)
        found = np.full((*later.shape, len(flights) + 1), np.inf)
        for before, after in zip(*np.nonzero(later), strict=True):
            piece = states[after] & ~states[before]
            inside = piece[ends]
            crossing = sum(2 * float(variants.edges[inside[:, end] & ~inside[:, 1 - end], end].sum()) for end in (0, 1))
            seconds = choose_variants(own[piece], memory[:, piece], problem.memory)
            found[before, after, 1:] = seconds + crossing / data / settings["bandwidth"]
        return found


def _fill(stages: dict[tuple[int, int], np.ndarray], gpus: int, states: int) -> tuple[np.ndarray, np.ndarray]:
    """Least bottlenecks of at most so many GPUs and replicas [GPUs, replicas, states], with the last stage of each."""
    best = np.full((gpus + 1, gpus + 1, states), np.inf)
    best[:, :, 0] = 0.0
    links = np.zeros((*best.shape, 2), int)
    for have in range(1, gpus + 1):
        for replicas in range(1, have + 1):
            for number, ((tensor, data), seconds) in enumerate(stages.items()):
                if tensor * data <= have and data <= replicas:
                    before = best[have - tensor * data, replicas - data]
                    joined = np.maximum(before[:, None], seconds[:, :, -(-replicas // data)])
                    source = joined.argmin(axis=0)
                    value = joined[source, np.arange(states)]
                    better = value < best[have, replicas]
                    best[have, replicas][better] = value[better]
                    links[have, replicas][better] = np.stack([source, np.full(states, number)], axis=1)[better]
        best[have, have + 1 :] = best[have, have]
        links[have, have + 1 :] = links[have, have]
    return best, links
