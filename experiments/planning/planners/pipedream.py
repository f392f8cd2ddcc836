"""PipeDream's partitioner: contiguous stages, each replicated, over the levels of a network, by dynamic programming.

The bottleneck of all stages is minimised. A stage of seconds T and parameters W on r replicas over links of bandwidth B
takes (T + 4 (r - 1) W / (r B)) / r, its input and output 2 x bytes / (r B). T of an outer level is the bottleneck of
the inner level on all its devices (Narayanan et al. 2019, DOI 10.1145/3341301.3359646, section 3.1). By the rule of the
released code, on which the oracles rest (msr-fiddle/pipedream, `optimizer/optimizer_graph_hierarchical.py`), the first
stage of an outer level exchanges gradients over as many links as the inner level has devices, and pays for no messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.experiments.planning.antichains import output_bytes, states_of
from meshcast.experiments.planning.certificate import PlanProof
from meshcast.experiments.planning.cores.ideals import PartitionTable, PieceOption, differences
from meshcast.experiments.planning.planner import Planner, Proposal
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

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        levels: tuple[NetworkLevel, ...] = getattr(problem, "levels", ())
        if not levels:
            rule = "PipeDream's formula needs the levels of the network, with devices and bandwidth of each"
            raise PlanError(f"problem {problem.name}", rule, "Give levels, the innermost first")
        graph = problem.graph()
        states = states_of(graph)
        seconds = differences(states, graph.figures["forward"] + graph.figures["backward"])
        weights = differences(states, graph.figures["parameters"])
        sent = output_bytes(graph, states)
        tables: list[dict[int, PartitionTable]] = []
        inner = 1
        for number, level in enumerate(levels):
            starts = [0] if number + 1 == len(levels) else range(len(states) - 1)
            made = {
                start: _partition(seconds, weights, sent, level, inner, start, self.most_replicas) for start in starts
            }
            tables.append(made)
            seconds = np.full(seconds.shape, np.inf)
            for start, table in made.items():
                seconds[start] = table.best[level.width]
                seconds[start, start] = np.inf
            inner = level.width
        whole = tables[-1][0]
        stages = list(_stages(tables, states, len(levels) - 1, 0, len(states) - 1))
        visited = sum(one.visited for made in tables for one in made.values())
        proof = PlanProof(whole.value(), whole.value(), "dynamic programming over ideals")
        reason = "replicas take mini-batches in turn, and stages have their own numbers of replicas"
        return Proposal({"stages": stages}, whole.value(), visited, proof, reason)


def _partition(
    seconds: np.ndarray,
    weights: np.ndarray,
    sent: np.ndarray,
    level: NetworkLevel,
    inner: int,
    start: int,
    most_replicas: int,
) -> PartitionTable:
    """The bottlenecks of one level from the state `start` on. inner: devices of the level below."""
    options = []
    for replicas in range(1, (most_replicas or level.width) + 1):
        exchange = np.where(np.isfinite(weights), weights, 0.0) * 4 * (replicas - 1) / (level.bandwidth * replicas)
        messages = 2 * sent / (level.bandwidth * replicas)
        load = np.maximum((seconds + exchange) / replicas, messages[:, None])
        load[:, :-1] = np.maximum(load[:, :-1], messages[None, :-1])
        load[start] = (seconds[start] + exchange[start] / inner) / replicas
        options.append(PieceOption((replicas,), load))
    return PartitionTable(options, (level.width,), start, exact=True)


def _stages(
    tables: list[dict[int, PartitionTable]], states: np.ndarray, level: int, start: int, end: int
) -> list[dict[str, Any]]:
    """The stages between two states on all devices of a level: nodes of each, and replicas at every level."""
    found = tables[level][start].plan(end)
    assert found is not None
    stages = []
    for piece in found.pieces:
        replicas = piece.option + 1
        if level == 0:
            nodes = states[piece.after] & ~states[piece.before]
            stages.append({"nodes": np.flatnonzero(nodes).tolist(), "replicas": [replicas]})
        else:
            inside = _stages(tables, states, level - 1, piece.before, piece.after)
            stages += [{**one, "replicas": [*one["replicas"], replicas]} for one in inside]
    return stages
