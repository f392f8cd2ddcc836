"""AdaPipe: every stage keeps what its memory allows, and layers are divided by what is then recomputed.

For all degrees: a knapsack for every range of layers on every stage, and dynamic programming over the stages of 1F1B,
whose first ones have most micro-batches in flight (Sun et al. 2024, https://doi.org/10.1145/3620666.3651359, section
5). The scheme `memory/adapipe` makes the same choice for one plan, from forecasts of its memory.
"""

from __future__ import annotations

import math
import time

import numpy as np

from meshcast.experiments.planning.cores.pipelines.recompute_phases import keep_most, plan_phases
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem, require_job
from meshcast.experiments.planning.pricing.pipelines import UniformPipeline, uniform_pipelines
from meshcast.experiments.planning.pricing.stage_prices import range_totals
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class AdaPipePlanner(Planner):
    paper = Paper(
        "https://doi.org/10.1145/3620666.3651359",
        "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning",
        2024,
    )
    restrictions = ("recompute a part of a layer", "use stages of heterogeneous degrees", "cut inside a layer")

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan(problem, keep=1)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """The same search, which keeps all suffixes that may matter."""
        found = self._plan(problem, 0, time.process_time() + budget.seconds)
        return SpaceOptimum(found.value, "dynamic programming over all suffixes")

    def _plan(self, problem: Problem, keep: int, end: float = math.inf) -> Proposal:
        job = require_job(problem)
        table = job.stages()
        pipelines = [*uniform_pipelines(job, table)]
        best: Proposal | None = None
        visited = 0
        for plain in pipelines:
            if plain.option.plan["recompute"] != "none":
                continue
            degrees = {**plain.option.plan, "recompute": "full"}
            again = next((one for one in pipelines if dict(one.option.plan) == degrees), None)
            if again is None:
                continue
            costs = [self._price(job, plain, again, stage) for stage in range(plain.depth)]
            found = plan_phases([one[0] for one in costs], [one[1] for one in costs], job.microbatches, keep, end)
            visited += plain.depth * table.layers**2
            if found is None:
                continue
            visited += found.visited
            ends = np.cumsum(found.layers).tolist()
            cells = [(end - count, end - 1) for end, count in zip(ends, found.layers, strict=True)]
            once = max(float(table.once[(*cell, plain.number)]) for cell in cells)
            if best is None or found.value + once < best.value:
                counts = [int(again[cell]) for cell, (_, _, again) in zip(cells, costs, strict=True)]
                best = Proposal(self._write(job, plain, found.layers, counts), found.value + once, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        return best._replace(visited=visited)

    def _price(
        self, job: JobProblem, plain: UniformPipeline, again: UniformPipeline, stage: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of the passes of a stage with every range of layers, infinite where even full recomputation does not
        fit, and the layers that it recomputes."""
        units, other = plain.units, again.units
        flights = min(job.microbatches, plain.depth - stage)
        slower = (other.forward + other.backward - units.forward - units.backward)[1:-1]
        saved = flights * np.maximum(0.0, units.kept - other.kept)[1:-1]
        if np.ptp(slower) > 1e-9 * abs(slower).max() or np.ptp(saved) > 1e-9 * abs(saved).max():
            rule = "AdaPipe's plan recomputes the first layers of a stage, and this model's are of several kinds"
            raise PlanError("model", rule, "Choose a model of equal layers", str(job.job.model.name))
        seconds, saved = np.full(len(slower), max(float(slower.mean()), 0.0)), np.full(len(saved), float(saved.mean()))
        room = job.memory - again.stage_bytes(stage, job.microbatches)
        extra = keep_most(seconds, saved, room, units=2000)
        extra = np.where(plain.stage_bytes(stage, job.microbatches) <= job.memory, 0.0, extra)
        counts = np.rint(np.where(np.isfinite(extra), extra, 0.0) / max(float(seconds.max()), 1e-300))
        inside = np.where(np.less_equal(*np.indices(extra.shape)), 0.0, np.inf)
        return range_totals(units.forward) + inside, range_totals(units.backward) + extra + inside, counts

    def _write(
        self, job: JobProblem, pipeline: UniformPipeline, layers: tuple[int, ...], counts: list[int]
    ) -> dict[str, dict[str, object]]:
        entries = []
        for held, count in zip(layers, counts, strict=True):
            recompute = {"recompute": "full", "recompute_layers": count} if count else {"recompute": "none"}
            entries.append({**pipeline.option.plan, **recompute, "layers": held})
        return job.entries_plan(entries, {})
