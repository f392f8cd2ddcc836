"""Slapo: a schedule of tensor and data parallelism whose batch size and share of recomputed layers are tuned by runs.

The tuner walks batch sizes downwards and bisects the share at each (Chen et al. 2024, arXiv 2302.08005; awslabs/slapo).
On a profile the runs are its measurements. In a job they are forecasts of the engine: the batch is that of a
micro-batch of a rank, as the batch of a step is the job's, and the walk is done for each degree of tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from meshcast.experiments.planning.cores.local_search.grid_walk import GridWalk
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_space
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.search.counting.divisions import list_divisors
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

SHARES = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25)
"""Shares of recomputed layers that the released tuner knows."""


class Slapo(Planner):
    paper = Paper("arXiv:2302.08005", "Slapo: A Schedule Language for Progressive Optimization of Large Models", 2024)
    core = "local_search/grid_walk"
    restrictions = (
        "cut a pipeline",
        "recompute less than a quarter of the layers",
        "tune kernels and fusions",
    )
    modes = ("paper", "ours")
    unit = "s of a step; of a profile s per sample"

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._tune_profile(problem) if problem.mode == "paper" else self._tune_job(problem)

    def _tune_profile(self, problem: Problem) -> Proposal:
        settings: dict[str, Any] = getattr(problem, "settings", {})
        figures = problem.graph().figures
        if not {"batch", "share", "samples_per_s"} <= figures.keys():
            rule = "Slapo needs the throughput of every batch size and share of recomputed layers"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Slapo")
        cells = zip(figures["batch"], figures["share"], figures["samples_per_s"], strict=True)
        measured = {(int(batch), float(share)): float(rate) for batch, share, rate in cells}
        largest = int(settings.get("largest_batch", max(batch for batch, _ in measured)))
        batches = sorted({batch for batch, _ in measured if batch <= largest})
        shares = sorted({share for _, share in measured}, reverse=True)
        walk = GridWalk(batches, shares, lambda batch, share: measured[batch, share])
        best = walk.run()
        if best is None:
            raise self.nothing_fits(problem, "Give smaller batches")
        plan = {"batch": best.batch, "share": best.share, "explored": [list(one[:2]) for one in walk.visited]}
        return Proposal(plan, 1 / best.throughput, len(walk.visited), None, "the profile is of a model of its own")

    def _tune_job(self, problem: Problem) -> Proposal:
        if not isinstance(problem, JobProblem):
            raise PlanError(f"problem {problem.name}", "its plans cannot be run", "Give the planner a job")
        best: tuple[float, dict[str, Any]] | None = None
        visited = 0
        for tensor, batches in self._grids(problem):

            def measure(batch: int, share: float, tensor: int = tensor) -> float:
                return problem.sequences / _forecast_cell(problem, _write_cell(problem, tensor, batch, share))

            walk = GridWalk(batches, SHARES, measure)
            found, visited = walk.run(), visited + len(walk.visited)
            if found is not None and (best is None or found.throughput > best[0]):
                best = found.throughput, _write_cell(problem, tensor, found.batch, found.share)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        return Proposal(best[1], problem.sequences / best[0], visited)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """The search over the whole grid; on nodes of several kinds, where there is none, all its forecasts."""
        if not isinstance(problem, JobProblem):
            return None
        if len(problem.job.cluster.kinds) > 1:
            cells = [
                _write_cell(problem, tensor, batch, share)
                for tensor, batches in self._grids(problem)
                for batch in batches
                for share in SHARES
            ]
            shortest = min(_forecast_cell(problem, cell) for cell in cells)
            return SpaceOptimum(shortest, "enumeration of its space", forecast=True)
        layers = int(problem.job.model.layers)
        again = sorted({max(1, round(share * layers)) for share in SHARES})
        degrees = [tensor for tensor, _ in self._grids(problem)]
        plan = {"tp": degrees, "recompute": "full", "recompute_layers": again}
        return search_space(problem, plan, "auto", problem.forecast(proposal.plan).step_time)

    def _grids(self, problem: JobProblem) -> Iterator[tuple[int, list[int]]]:
        """Degrees of tensor parallelism, each with the sizes of micro-batches of a rank."""
        most = min(problem.gpus, problem.job.cluster.gpus_per_node)
        for tensor in (2**power for power in range(most.bit_length())):
            data, left = divmod(problem.gpus, tensor)
            if not left and problem.sequences % data == 0:
                yield tensor, list_divisors(problem.sequences // data)


def _write_cell(problem: JobProblem, tensor: int, batch: int, share: float) -> dict[str, Any]:
    """The ``plan`` and ``batch`` of a cell of the grid."""
    plan: dict[str, Any] = {"tp": tensor, "dp": problem.gpus // tensor, "recompute": "full"}
    if share < 1:
        plan["recompute_layers"] = max(1, round(share * int(problem.job.model.layers)))
    return {"plan": plan, "batch": {"global": problem.sequences, "micro": batch}}


def _forecast_cell(problem: JobProblem, plan: dict[str, Any]) -> float:
    """The step of a plan; infinite if it does not fit or breaks a rule [s]."""
    try:
        step = problem.forecast(plan)
    except PlanError:
        return math.inf
    return step.step_time if step.fits else math.inf
