"""Slapo: a schedule of tensor and data parallelism whose batch size and share of recomputed layers are tuned by runs.

The tuner walks batch sizes downwards and bisects the share at each (Chen et al. 2024, arXiv 2302.08005; awslabs/slapo).
On a profile the runs are its measurements. In a job they are forecasts of the engine: the batch is that of a
micro-batch of a rank, as the batch of a step is the job's, and the walk is done for each degree of tensor parallelism.
"""

from __future__ import annotations

from typing import Any

from experiments.planning.cores.local_search.grid_walk import GridWalk
from experiments.planning.planner import Planner, Proposal, SpaceOptimum
from experiments.planning.pricing.job import JobProblem
from experiments.planning.pricing.space_search import search_space
from experiments.planning.problem import Problem, SearchBudget
from hardware.errors import PlanError
from simulator.ir.scheme import Paper

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
        job, forecast = getattr(problem, "job", None), getattr(problem, "forecast", None)
        if job is None or forecast is None:
            raise PlanError(f"problem {problem.name}", "its plans cannot be run", "Give the planner a job")
        sequences, layers = int(job.to_dict()["batch"]["global"]), int(job.model.layers)
        plans: dict[tuple[int, int, float], dict[str, Any]] = {}
        best: tuple[float, tuple[int, int, float]] | None = None
        visited = 0
        for tensor in (2**power for power in range(min(problem.gpus, job.cluster.gpus_per_node).bit_length())):
            data = problem.gpus // tensor
            if problem.gpus % tensor or sequences % data:
                continue

            def measure(batch: int, share: float, tensor: int = tensor, data: int = data) -> float:
                again = {"recompute": "full"} | (
                    {} if share == 1 else {"recompute_layers": max(1, round(share * layers))}
                )
                plan = {"plan": {"tp": tensor, "dp": data, **again}, "batch": {"global": sequences, "micro": batch}}
                plans[tensor, batch, share] = plan
                try:
                    step = forecast(plan)
                except PlanError:
                    return 0.0
                return sequences / step.step_time if step.fits else 0.0

            most = sequences // data
            walk = GridWalk([one for one in range(1, most + 1) if most % one == 0], SHARES, measure)
            found, visited = walk.run(), visited + len(walk.visited)
            if found is not None and (best is None or found.throughput > best[0]):
                best = found.throughput, (tensor, found.batch, found.share)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        return Proposal(plans[best[1]], sequences / best[0], visited)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """The search over the whole grid."""
        if not isinstance(problem, JobProblem):
            return None
        layers = int(problem.job.model.layers)
        again = sorted({max(1, round(share * layers)) for share in SHARES})
        plan = {"tp": self._degrees(problem), "recompute": "full", "recompute_layers": again}
        return search_space(problem, plan, "auto", problem.forecast(proposal.plan).step_time)

    def _degrees(self, problem: JobProblem) -> list[int]:
        most = min(problem.gpus, problem.job.cluster.gpus_per_node)
        return [2**power for power in range(most.bit_length()) if problem.gpus % 2**power == 0]
