"""PipeDream's partitioner: contiguous stages, each replicated, over the levels of a network, by dynamic programming.

The bottleneck of all stages is minimised. A stage of seconds T and parameters W on r replicas over links of bandwidth B
takes (T + 4 (r - 1) W / (r B)) / r, its input and output 2 x bytes / (r B). T of an outer level is the bottleneck of
the inner level on all its devices (Narayanan et al. 2019, DOI 10.1145/3341301.3359646, section 3.1). By the rule of the
released code, on which the oracles rest (msr-fiddle/pipedream, `optimizer/optimizer_graph_hierarchical.py`), the first
stage of an outer level exchanges gradients over as many links as the inner level has devices, and pays for no messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshcast.experiments.planning.cores.partition_dp import LastPiece, PartitionDP, start_costs
from meshcast.experiments.planning.graph import LayerGraph, antichain_states, output_bytes, piece_totals
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class PipeDreamPartitioner(Planner):
    paper = Paper("10.1145/3341301.3359646", "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019)
    restrictions = ("shard tensors", "leave devices unused", "flush the pipeline: micro-batches of steps overlap")
    modes = ("paper",)
    unit = "s per mini-batch"
    most_replicas = 0
    """Limit of the replicas of a stage at every level; 0: none. 1 is the authors' option ``straight_pipeline``."""

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        levels: tuple[NetworkLevel, ...] = getattr(problem, "levels", ())
        if not levels:
            rule = "PipeDream's formula needs the levels of the network, with devices and bandwidth of each"
            raise PlanError(f"problem {problem.name}", rule, "Give levels, the innermost first")
        graph = problem.graph()
        states = antichain_states(graph)
        tables, value = self._bottlenecks(graph, states, levels)
        stages = list(_stages(tables, levels, states, 0, len(states) - 1))
        visited = sum(table.visited for by_start in tables for table in by_start.values())
        proof = PlanProof(value, value, "dynamic programming over ideals")
        reason = "replicas take mini-batches in turn, and stages have their own numbers of replicas"
        return Proposal({"stages": stages}, value, visited, proof, reason)

    def _bottlenecks(
        self, graph: LayerGraph, states: np.ndarray, levels: Sequence[NetworkLevel]
    ) -> tuple[list[dict[int, PartitionDP]], float]:
        """Returns for every level, the innermost first, the bottlenecks from every state on, and that of the whole."""
        seconds = piece_totals(states, graph.figures["forward"] + graph.figures["backward"])
        weights, sent = piece_totals(states, graph.figures["parameters"]), output_bytes(graph, states)
        tables: list[dict[int, PartitionDP]] = []
        inner = 1
        for level in levels:
            starts = [0] if len(tables) + 1 == len(levels) else range(len(states) - 1)
            tables.append(
                {start: _partition(seconds, weights, sent, level, inner, start, self.most_replicas) for start in starts}
            )
            bottlenecks = np.full(seconds.shape, np.inf)
            for start, table in tables[-1].items():
                bottlenecks[start] = table.costs(level.width)[:, 0]
                bottlenecks[start, start] = np.inf
            seconds, inner = bottlenecks, level.width
        return tables, float(seconds[0, -1])


def _partition(
    seconds: np.ndarray,
    weights: np.ndarray,
    sent: np.ndarray,
    level: NetworkLevel,
    inner: int,
    start: int,
    most_replicas: int,
) -> PartitionDP:
    """Returns the bottlenecks of a level from the state `start` on, by devices. inner: devices of the level below."""
    loads = []
    for replicas in range(1, (most_replicas or level.width) + 1):
        exchange = np.where(np.isfinite(weights), weights, 0.0) * 4 * (replicas - 1) / (level.bandwidth * replicas)
        messages = 2 * sent / (level.bandwidth * replicas)
        load = np.maximum((seconds + exchange) / replicas, messages[:, None])
        load[:, :-1] = np.maximum(load[:, :-1], messages[None, :-1])
        load[start] = (seconds[start] + exchange[start] / inner) / replicas
        loads.append(load)

    def begin(devices: int) -> np.ndarray:
        return start_costs(len(sent), -1 if devices else start)

    def end(devices: int) -> Iterator[LastPiece]:
        for replicas, load in enumerate(loads[:devices], 1):
            yield LastPiece(devices - replicas, load, replicas)

    return PartitionDP(begin, end)


def _stages(
    tables: Sequence[dict[int, PartitionDP]], levels: Sequence[NetworkLevel], states: np.ndarray, start: int, end: int
) -> Iterator[dict[str, Any]]:
    """Yields the stages between two states on all devices of the outermost level, with replicas at every level."""
    for piece in tables[-1][start].trace(levels[-1].width, end):
        if len(tables) == 1:
            nodes = states[piece.behind] & ~states[piece.before]
            yield {"nodes": np.flatnonzero(nodes).tolist(), "replicas": [piece.option]}
        else:
            for stage in _stages(tables[:-1], levels[:-1], states, piece.before, piece.behind):
                yield {**stage, "replicas": [*stage["replicas"], piece.option]}
