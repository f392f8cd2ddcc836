"""Piper: contiguous stages, each with degrees of data and tensor parallelism, and a variant for every layer.

The bottleneck of the time of a sample is minimised. A stage of d replicas takes (seconds + bytes / B) / d, with twice
the bytes of every edge that crosses its border, and 4 (d - 1) / d of the parameters' bytes once a batch of N; it keeps
ceil(s / d) micro-batches in flight, s the replicas of this stage and of all later ones. The best of all sums of
replicas counts (Tarnawski et al. 2021, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021, and the
released code msr-fiddle/piper).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.cores.partition_dp import LastPiece, PartitionDP, start_costs
from meshcast.experiments.planning.graph import LayerGraph, find_contained
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget, Settings, settings_of
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class LayerVariants(NamedTuple):
    """The variants of all layers at a degree of tensor parallelism [layers, variants].

    seconds: of a sample [s].
    parameters: of a rank [bytes].
    in_flight: for every micro-batch in flight [bytes].
    fixed: other memory [bytes].
    edges: bytes of a sample over every edge, at its source and at its target [edges, 2].
    """

    seconds: np.ndarray
    parameters: np.ndarray
    in_flight: np.ndarray
    fixed: np.ndarray
    edges: np.ndarray


def read_variants(settings: Settings, graph: LayerGraph, edges: list[tuple[int, int]]) -> dict[int, LayerVariants]:
    """Returns the variants of a profile by degree; what a layer does not have takes infinite time and memory.

    settings: of the profile, with ``variants``, ``sync`` and ``edge_bytes``.
    edges: in the order of ``edge_bytes``.
    """
    rows = np.array(settings["variants"], float)
    by_degree = {}
    for degree in np.unique(rows[:, 1]).astype(int).tolist():
        variants = rows[rows[:, 1] == degree]
        cells = variants[:, 0].astype(int), variants[:, 2].astype(int)
        figures = np.zeros((4, len(graph.names), cells[1].max() + 1))
        figures[[0, 3]] = np.inf
        figures[:, cells[0], cells[1]] = variants[:, 3:].T
        seconds, parameters, in_flight, fixed = figures
        sent = _sent_bytes(settings, edges, degree)
        by_degree[degree] = LayerVariants(seconds, parameters, in_flight, fixed, sent)
    return by_degree


def _sent_bytes(settings: Settings, edges: list[tuple[int, int]], degree: int) -> np.ndarray:
    """Returns the bytes of a sample over every edge, at its source and at its target, for a degree [edges, 2]."""
    sent = np.repeat(np.array(settings["edge_bytes"], float)[:, None], 2, axis=1)
    for layer, _, incoming, outgoing in (row for row in settings["sync"] if row[1] == degree):
        for end, extra in ((1, incoming), (0, outgoing)):
            sent[[edge[end] == layer for edge in edges], end] += extra
    return sent


def choose_variants(seconds: np.ndarray, memory: np.ndarray, limit: float) -> np.ndarray:
    """Returns the least seconds of a piece, with a variant for each layer, within a memory; infinite if none fits.

    Starts from the fastest variants and takes the ones that save most bytes a second, until all fits: Piper's fast
    heuristic for its knapsack (Tarnawski et al. 2021, appendix), which may save more than it needs.
    seconds: [layers, variants]. memory: of several cases [cases, layers, variants]. Returns [cases].
    """
    layers = np.arange(seconds.shape[0])
    fastest = seconds.argmin(axis=1)
    start = memory[:, layers, fastest]
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = start[:, :, None] - memory
        price = seconds - seconds[layers, fastest][:, None]
        rates = np.where(saved > 1e-9, price[None] / saved, np.inf).reshape(len(memory), -1)
    order = np.argsort(rates, axis=1, kind="stable")
    useful = np.isfinite(np.take_along_axis(rates, order, axis=1))
    gains = np.where(useful, np.take_along_axis(saved.reshape(len(memory), -1), order, axis=1), 0.0)
    prices = np.where(useful, np.broadcast_to(price.ravel(), rates.shape)[np.arange(len(memory))[:, None], order], 0.0)
    excess = start.sum(axis=1) - limit
    before = np.cumsum(gains, axis=1) - gains
    taken = useful & (excess[:, None] - before >= 1e-9)
    total = seconds[layers, fastest].sum() + (prices * taken).sum(axis=1)
    return np.where(excess - (gains * taken).sum(axis=1) <= 1e-9, total, np.inf)


class Piper(Planner):
    paper = Paper("NeurIPS 2021, volume 34", "Piper: Multidimensional Planner for DNN Parallelization", 2021)
    restrictions = ("give a stage layers of several degrees", "use replicas whose number does not divide the batch")
    modes = ("paper",)
    unit = "s per sample"

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        settings = settings_of(problem)
        if "variants" not in settings or "batch" not in settings or "bandwidth" not in settings:
            rule = "Piper needs the variants of every layer, the micro-batches of a batch and a bandwidth"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Piper and give batch and bandwidth")
        graph = problem.graph()
        edges = [tuple(edge) for edge in settings["edge_order"]]
        states = LayerGraph(graph.names, [(b, a) for a, b in graph.edges], {}).ideals()
        stages = {
            (tensor, data): self._price(problem, settings, states, edges, variants, data)
            for tensor, variants in read_variants(settings, graph, edges).items()
            for data in range(1, problem.gpus // tensor + 1)
            if settings["batch"] % data == 0
        }
        table = _fill(stages, len(states))
        replicas = range(1, min(problem.gpus, settings["batch"]) + 1)
        values = [float(table.costs((problem.gpus, most))[-1, 0]) for most in replicas]
        value = min(values)
        if not np.isfinite(value):
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        whole = problem.gpus, replicas[values.index(value)]
        plan = [
            {"nodes": np.flatnonzero(states[behind] & ~states[before]).tolist(), "tp": tensor, "dp": data}
            for before, behind, (tensor, data) in reversed(table.trace(whole))
        ]
        reason = "replicas take micro-batches in turn, and layers of a stage have variants of their own"
        # The published code fills the whole table. Variants are chosen by a heuristic, so nothing is proven.
        entries = (problem.gpus + 1) ** 2 * len(states) ** 2 * len(stages)
        return Proposal({"stages": plan}, value, entries, None, reason)

    def _price(
        self,
        problem: Problem,
        settings: Settings,
        states: np.ndarray,
        edges: list[tuple[int, ...]],
        variants: LayerVariants,
        data: int,
    ) -> np.ndarray:
        """Returns the seconds of a sample of pieces by micro-batches in flight [flights, states, states]."""
        flights = np.arange(1, -(-problem.gpus // data) + 1)
        resync = 4 * (data - 1) / data / settings["batch"] * variants.parameters
        layer_seconds = variants.seconds / data + resync / settings["bandwidth"]
        memory = flights[:, None, None] * variants.in_flight[None] + variants.fixed[None]
        ends = np.array(edges)
        prices = np.full((len(flights) + 1, len(states), len(states)), np.inf)
        for before, behind in zip(*np.nonzero(find_contained(states)), strict=True):
            check_time()
            piece = states[behind] & ~states[before]
            inside = piece[ends]
            crossing = sum(2 * float(variants.edges[inside[:, end] & ~inside[:, 1 - end], end].sum()) for end in (0, 1))
            seconds = choose_variants(layer_seconds[piece], memory[:, piece], problem.memory)
            prices[1:, before, behind] = seconds + crossing / data / settings["bandwidth"]
        return prices


def _fill(stages: Mapping[tuple[int, int], np.ndarray], states: int) -> PartitionDP:
    """Returns the least bottlenecks on at most so many GPUs, with memory for the flights of so many replicas."""

    def end(devices: tuple[int, int]) -> Iterator[LastPiece]:
        gpus, replicas = devices
        for (tensor, data), seconds in stages.items():
            left = gpus - tensor * data
            if left >= 0 and data <= replicas:
                yield LastPiece((left, min(left, replicas - data)), seconds[-(-replicas // data)], (tensor, data))

    return PartitionDP(lambda devices: start_costs(states), end)
