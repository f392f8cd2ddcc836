"""GraphPipe: stages of a graph, whose branches run at the same time, each on replicas of its own.

The bottleneck of all stages is minimised, and of plans of the least bottleneck the depth: micro-batches in flight, and
with them activations and the bubble, grow along the longest path alone (Jeon et al. 2024, arXiv 2406.17145, section 5).
A stage of d replicas takes (T + 4 (d - 1) W / (d B)) / d, or 2 x bytes / (d B) for what it receives or sends, if
that is longer, as in PipeDream's formula; of its k micro-batches in flight each replica keeps an equal share.
"""

from __future__ import annotations

import numpy as np

from meshcast.experiments.planning.certificate import PlanProof
from meshcast.experiments.planning.cores.pipelines.stage_graph import decompose, plan_graph
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class GraphPipePlanner(Planner):
    paper = Paper(
        "arXiv:2406.17145",
        "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism",
        2024,
    )
    restrictions = (
        "shard tensors",
        "give a stage branches that are no neighbours in their list",
        "use micro-batches of different sizes",
    )
    modes = ("paper",)
    copies = 4
    """Weights, gradients and two moments of Adam, as often as `parameters` says."""

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        levels: tuple[NetworkLevel, ...] = tuple(getattr(problem, "levels", ()))
        if len(levels) != 1:
            rule = "GraphPipe needs one level of the network"
            raise PlanError(f"problem {problem.name}", rule, "Give levels=[NetworkLevel(devices, bandwidth)]")
        graph = problem.graph()
        try:
            series = decompose(graph)
        except ValueError as error:
            raise PlanError(f"problem {problem.name}", str(error), "Give a series-parallel graph") from None
        figures, bandwidth = graph.figures, levels[0].bandwidth
        ends = np.array(graph.edges, int).reshape(-1, 2)

        def cost(nodes: tuple[int, ...], devices: int) -> float:
            inside = np.zeros(len(graph.names), bool)
            inside[[*nodes]] = True
            own = float((figures["forward"] + figures["backward"])[inside].sum())
            gradients = 4 * (devices - 1) / devices * float(figures["parameters"][inside].sum()) / bandwidth
            received = {a for a, b in ends if inside[b] and not inside[a]}
            sent = {a for a, b in ends if inside[a] and not inside[b]}
            message = max(float(figures["activations"][[*side]].sum()) if side else 0.0 for side in (received, sent))
            return max((own + gradients) / devices, 2 * message / bandwidth / devices)

        def fits(nodes: tuple[int, ...], devices: int, in_flight: int) -> bool:
            states = self.copies * float(figures["parameters"][[*nodes]].sum())
            kept = float(figures["activations"][[*nodes]].sum())
            return states + in_flight * kept / devices <= problem.memory

        found = plan_graph(series, problem.gpus, cost, fits)
        if found is None:
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        stages = [{"nodes": [*one.nodes], "replicas": one.devices, "in_flight": one.in_flight} for one in found.stages]
        proof = PlanProof(found.value, found.value, "bisection over dynamic programs")
        reason = "layers of a graph are placed on subsets of devices, and only models with branches are jobs"
        return Proposal({"stages": stages, "depth": found.depth}, found.value, found.visited, proof, reason)
