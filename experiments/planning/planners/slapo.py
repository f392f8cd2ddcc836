"""Slapo: a schedule of tensor and data parallelism whose batch size and share of recomputed layers are tuned by runs.

The tuner walks batch sizes downwards and bisects the share at each (Chen et al. 2024, arXiv 2302.08005; awslabs/slapo).
On a profile the runs are its measurements. In a job they are forecasts of the engine: the batch is that of a
micro-batch of a rank, as the batch of a step is the job's, and the walk is done for each degree of tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_space
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper

SHARES = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25)
"""Shares of recomputed layers that the released tuner knows."""


class Slapo(Planner):
    paper = Paper("arXiv:2302.08005", "Slapo: A Schedule Language for Progressive Optimization of Large Models", 2024)
    restrictions = ("cut a pipeline", "recompute less than a quarter of the layers", "tune kernels and fusions")
    modes = ("paper", "ours")
    unit = "s of a step; of a profile s per sample"

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._tune_profile(problem) if problem.mode == "paper" else self._tune_job(problem)

    def _tune_profile(self, problem: Problem) -> Proposal:
        settings = settings_of(problem)
        figures = problem.graph().figures
        if not {"batch", "share", "samples_per_s"} <= figures.keys():
            rule = "Slapo needs the throughput of every batch size and share of recomputed layers"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Slapo")
        cells = zip(figures["batch"], figures["share"], figures["samples_per_s"], strict=True)
        measured = {(int(batch), float(share)): float(rate) for batch, share, rate in cells}
        largest = int(settings.get("largest_batch", max(batch for batch, _ in measured)))
        batches = sorted({batch for batch, _ in measured if batch <= largest})
        shares = sorted({share for _, share in measured}, reverse=True)
        best, explored = walk_grid(batches, shares, lambda batch, share: measured[batch, share])
        if best is None:
            raise self.nothing_fits(problem, "Give smaller batches")
        plan = {"batch": best.batch, "share": best.share, "explored": [list(point[:2]) for point in explored]}
        return Proposal(plan, 1 / best.throughput, len(explored), None, "the profile is of a model of its own")

    def _tune_job(self, problem: Problem) -> Proposal:
        if not isinstance(problem, JobProblem):
            raise PlanError(f"problem {problem.name}", "its plans cannot be run", "Give the planner a job")
        best: tuple[float, dict[str, Any]] | None = None
        visited = 0
        for tensor, batches in self._grids(problem):

            def measure(batch: int, share: float, tensor: int = tensor) -> float:
                return problem.sequences / problem.step_seconds(_write_cell(problem, tensor, batch, share))

            point, explored = walk_grid(batches, SHARES, measure)
            visited += len(explored)
            if point is not None and (best is None or point.throughput > best[0]):
                best = point.throughput, _write_cell(problem, tensor, point.batch, point.share)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        return Proposal(best[1], problem.sequences / best[0], visited)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns the search over the whole grid; on nodes of several kinds, where there is none, all its forecasts."""
        if not isinstance(problem, JobProblem):
            return None
        if len(problem.job.cluster.kinds) > 1:
            cells = [
                _write_cell(problem, tensor, batch, share)
                for tensor, batches in self._grids(problem)
                for batch in batches
                for share in SHARES
            ]
            shortest = min(map(problem.step_seconds, cells))
            return SpaceOptimum(shortest, "enumeration of its space", forecast=True)
        layers = int(problem.job.model.layers)
        again = sorted({max(1, round(share * layers)) for share in SHARES})
        degrees = [tensor for tensor, _ in self._grids(problem)]
        plan = {"tp": degrees, "recompute": "full", "recompute_layers": again}
        return search_space(problem, plan, "auto", problem.forecast(proposal.plan).step_time)

    def _grids(self, problem: JobProblem) -> Iterator[tuple[int, list[int]]]:
        """Yields degrees of tensor parallelism, each with the sizes of micro-batches of a rank."""
        most = min(problem.gpus, problem.job.cluster.gpus_per_node)
        for tensor in (2**power for power in range(most.bit_length())):
            data, left = divmod(problem.gpus, tensor)
            if not left and problem.sequences % data == 0:
                yield tensor, list_divisors(problem.sequences // data)


def _write_cell(problem: JobProblem, tensor: int, batch: int, share: float) -> dict[str, Any]:
    """Returns the ``plan`` and ``batch`` of a cell of the grid."""
    plan: dict[str, Any] = {"tp": tensor, "dp": problem.gpus // tensor, "recompute": "full"}
    if share < 1:
        plan["recompute_layers"] = max(1, round(share * int(problem.job.model.layers)))
    return {"plan": plan, "batch": {"global": problem.sequences, "micro": batch}}


Cell = tuple[int, float]
"""A batch size and a share of recomputed layers."""


class GridPoint(NamedTuple):
    """A batch size and a share of recomputed layers, with its throughput; 0: it does not fit."""

    batch: int
    share: float
    throughput: float


class GridWalk:
    """The walk over batch sizes.

    It starts with the largest batch and everything recomputed; if that does not fit, batches are bisected. From there
    downwards, the smallest share that fits is bisected (awslabs/slapo, `slapo/autotune/tune.py`).

    batches: in ascending order.
    shares: in descending order, so that later ones take more memory.
    measure: the throughput of a batch and a share; 0 if it does not fit or is not allowed.
    patience: measurements without a gain after which the walk stops.
    explored: the points that were measured.
    """

    def __init__(
        self, batches: Sequence[int], shares: Sequence[float], measure: Callable[[int, float], float], patience: int
    ) -> None:
        self.batches, self.shares, self.measure, self.patience, self.idle = batches, shares, measure, patience, 0
        self.explored: list[GridPoint] = []

    def price(self, cell: Cell) -> float:
        """Returns the rank of a cell: minus its throughput, infinite if it does not fit."""
        throughput = self.measure(*cell)
        self.explored.append(GridPoint(*cell, throughput))
        return -throughput if throughput > 0 else math.inf

    def _bisect(self, search: LocalSearch[Cell], low: int, cells: Sequence[Cell]) -> Generator[Ranked[Cell], None, int]:
        """Returns the last place that fits, or `low` - 1 (not below 0), once patience has ended."""
        last, high = max(0, low - 1), len(cells) - 1
        while low <= high and self.idle < self.patience:
            middle, best = (low + high) // 2, search.best
            yield (tried := search.price(cells[middle]))
            self.idle = self.idle + 1 if search.best is best else 0
            if math.isfinite(tried.rank):
                last, low = middle, middle + 1
            else:
                high = middle - 1
        return last

    def walk(self, search: LocalSearch[Cell]) -> Iterator[Ranked[Cell]]:
        largest, place = len(self.batches) - 1, 0
        yield (tried := search.price((self.batches[-1], self.shares[0])))
        if not math.isfinite(tried.rank):
            self.idle = 1
            largest = yield from self._bisect(search, 0, [(batch, self.shares[0]) for batch in self.batches[:-1]])
            self.idle = 0
        for batch in reversed(self.batches[: largest + 1]):
            place = yield from self._bisect(search, place, [(batch, share) for share in self.shares])
            if self.idle >= self.patience:
                return


def walk_grid(
    batches: Sequence[int], shares: Sequence[float], measure: Callable[[int, float], float], patience: int = 5
) -> tuple[GridPoint | None, list[GridPoint]]:
    """Returns the best point of a `GridWalk`, None if none fits, and all that were measured."""
    grid = GridWalk(batches, shares, measure, patience)
    best = LocalSearch(grid.price, grid.walk).run()
    return (GridPoint(*best.state, -best.rank) if math.isfinite(best.rank) else None), grid.explored
