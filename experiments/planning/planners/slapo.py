"""Slapo: a schedule of primitives with tunable values, tuned by runs.

A schedule has the values of its primitives: `shard` the degrees of tensor parallelism, `cut_pipeline_stage` the numbers
of stages, `fuse` and `replace` whether a compiler fuses kernels and whether attention is a single one, `checkpoint` the
shares of recomputed layers; the user may forbid combinations. For each of the others the tuner walks batch sizes
downwards and bisects the share (Chen et al. 2024, arXiv 2302.08005; awslabs/slapo). On a profile the runs are its
measurements. In a job they are forecasts of the engine, and the batch is that of a micro-batch of a rank, as the batch
of a step is the job's. Without a schedule `shard` has all degrees and the kernels are the job's, as in the released
examples. Where the largest batch does not fit, the released tuner begins the shares at the place of the batch that
does; here with the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_space
from meshcast.experiments.planning.problem import Changes, Problem, SearchBudget, settings_of
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper

SHARES = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25)
"""Shares of recomputed layers that the released tuner knows."""


class SlapoSchedule(NamedTuple):
    """The values of the primitives of a schedule, of which a tuner takes one each.

    degrees: of tensor parallelism (`shard`); empty: all powers of two inside a node.
    stages: of the pipeline (`cut_pipeline_stage`).
    fuse: whether a compiler fuses kernels (``framework.set.compile``); None: what the job says.
    replace: whether attention is replaced by a fused kernel (``framework.set.attention``); None: what the job says.
    checkpoint: shares of recomputed layers, falling.
    allows: whether these degrees, stages, fused kernels and replaced attention go together.
    """

    degrees: tuple[int, ...] = ()
    stages: tuple[int, ...] = (1,)
    fuse: tuple[bool | None, ...] = (None,)
    replace: tuple[bool | None, ...] = (None,)
    checkpoint: tuple[float, ...] = SHARES
    allows: Callable[[int, int, bool | None, bool | None], bool] = lambda *values: True


class ScheduledPlan(NamedTuple):
    """A choice of all values of a schedule but the share of recomputed layers."""

    tensor: int
    stages: int
    fuse: bool | None
    replace: bool | None

    def write(self, problem: JobProblem, batch: int, share: float) -> Changes:
        """Returns the changes of the job with a batch and a share."""
        data, layers = problem.gpus // (self.tensor * self.stages), int(problem.job.model.layers)
        plan: dict[str, object] = {"tp": self.tensor, "dp": data, "recompute": "full"}
        if self.stages > 1:
            plan |= {"pp": self.stages, "schedule": "1f1b", "partition": "even"}
        if share < 1:
            plan["recompute_layers"] = max(1, round(share * layers / self.stages))
        kernels: dict[str, object] = {} if self.fuse is None else {"compile": self.fuse}
        if self.replace is not None:
            kernels["attention"] = "flash" if self.replace else "unfused"
        more = {"framework": {"set": kernels}} if kernels else {}
        return {"plan": plan, "batch": {"global": problem.sequences, "micro": batch}, **more}


class Slapo(Planner):
    """The planner with the schedule that it tunes."""

    paper = Paper("arXiv:2302.08005", "Slapo: A Schedule Language for Progressive Optimization of Large Models", 2024)
    restrictions = (
        "cut a pipeline or choose kernels, unless the user's schedule says so",
        "recompute less than a quarter of the layers",
    )
    modes = ("paper", "ours")
    unit = "s of a step; of a profile s per sample"

    def __init__(self, schedule: SlapoSchedule | None = None) -> None:
        self.schedule = schedule or SlapoSchedule()

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
        best: tuple[float, Changes] | None = None
        visited = 0
        for scheduled, batches in self._grids(problem):

            def measure(batch: int, share: float, scheduled: ScheduledPlan = scheduled) -> float:
                return problem.sequences / problem.step_seconds(scheduled.write(problem, batch, share))

            point, explored = walk_grid(batches, self.schedule.checkpoint, measure)
            visited += len(explored)
            if point is not None and (best is None or point.throughput > best[0]):
                best = point.throughput, scheduled.write(problem, point.batch, point.share)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        return Proposal(best[1], problem.sequences / best[0], visited)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns the search over the whole grid; on nodes of several kinds, where there is none, and for a schedule
        with stages or kernels all its forecasts."""
        if not isinstance(problem, JobProblem):
            return None
        grids = [*self._grids(problem)]
        if len(problem.job.cluster.kinds) > 1 or any(scheduled[1:] != (1, None, None) for scheduled, _ in grids):
            cells = [
                scheduled.write(problem, batch, share)
                for scheduled, batches in grids
                for batch in batches
                for share in self.schedule.checkpoint
            ]
            shortest = min(map(problem.step_seconds, cells))
            return SpaceOptimum(shortest, "enumeration of its space", forecast=True)
        layers = int(problem.job.model.layers)
        again = sorted({max(1, round(share * layers)) for share in self.schedule.checkpoint})
        plan = {"tp": [scheduled.tensor for scheduled, _ in grids], "recompute": "full", "recompute_layers": again}
        return search_space(problem, plan, "auto", problem.forecast(proposal.plan).step_time)

    def _grids(self, problem: JobProblem) -> Iterator[tuple[ScheduledPlan, list[int]]]:
        """Yields the choices of the schedule, each with the sizes of micro-batches of a rank."""
        most = min(problem.gpus, problem.job.cluster.gpus_per_node)
        degrees = self.schedule.degrees or tuple(2**power for power in range(most.bit_length()))
        for values in product(degrees, self.schedule.stages, self.schedule.fuse, self.schedule.replace):
            tensor, stages = values[:2]
            data, left = divmod(problem.gpus, tensor * stages)
            even = not left and data and problem.sequences % data == 0 and problem.job.model.layers % stages == 0
            if even and self.schedule.allows(*values):
                yield ScheduledPlan(*values), list_divisors(problem.sequences // data)


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
