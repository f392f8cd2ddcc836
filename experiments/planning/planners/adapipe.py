"""AdaPipe: every stage keeps what its memory allows, and layers are divided by what is then recomputed.

For all degrees: a knapsack for every range of layers on every stage (of equal layers as many as there is room for), and
dynamic programming over the stages of 1F1B, whose first ones have most micro-batches in flight. With the times F and B
of each stage, for p stages and n micro-batches:

    W_s = F_s + max(W_{s+1} + B_{s+1}, (p - s - 1) F_s)      warm-up: until the first gradient has arrived
    E_s = B_s + max(E_{s+1} + F_{s+1}, (p - s - 1) B_s)      ending: from the last forward pass on
    step = W_0 + E_0 + (n - p) max_s (F_s + B_s)

and stages are prepended: for every first layer the suffix of the shortest step is kept (Sun et al. 2024,
https://doi.org/10.1145/3620666.3651359, section 5). All three sums grow with those of the suffix, so that suffixes
which no other beats in all of them give the optimum. The scheme `memory/adapipe` makes the same choice for a plan,
from forecasts of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.cores.ordered_stages import Partition
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem, require_job
from meshcast.experiments.planning.pricing.pipelines import UniformPipeline, uniform_pipelines
from meshcast.experiments.planning.pricing.stage_prices import range_totals
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

UNEQUAL = "AdaPipe's plan recomputes the first layers of a stage, and this model's are of several kinds"


class StagePrices(NamedTuple):
    """Prices of a stage with the layers from first to last [layers, layers].

    forward, backward: seconds of its passes, infinite where even full recomputation does not fit [s].
    recomputed: layers that it recomputes.
    """

    forward: np.ndarray
    backward: np.ndarray
    recomputed: np.ndarray


class Suffix(NamedTuple):
    """The stages from a place on.

    warm_up, ending: as the stage before sees them [s].
    slowest: seconds of the slowest stage [s].
    layers: of every stage.
    first: seconds of the first of these stages, which are in both sums [s].
    """

    warm_up: float
    ending: float
    slowest: float
    layers: tuple[int, ...]
    first: float = 0.0

    def prepend(self, layers: int, forward: float, backward: float, behind: int) -> Suffix:
        """Returns the suffix with a further stage in front, with `behind` + 1 micro-batches in flight."""
        both = forward + backward
        return Suffix(
            both + max(self.warm_up, behind * forward),
            both + max(self.ending, behind * backward),
            max(both, self.slowest),
            (layers, *self.layers),
            both,
        )

    def step(self, steady: int) -> float:
        """Returns the seconds of a step if no stage is before, with so many micro-batches in the steady state."""
        return self.warm_up + self.ending - self.first + steady * self.slowest


def plan_phases(stages: Sequence[StagePrices], microbatches: int, keep: int = 1) -> Partition | None:
    """Returns the stages of the shortest step that was met; None if nothing fits.

    stages: prices of every stage.
    keep: suffixes kept for a first layer; 1: the paper's search. 0: all that may matter, and the plan is the optimum.
    Raises OutOfTime.
    """
    depth, layers = len(stages), len(stages[0].forward)
    suffixes: list[list[Suffix]] = [[] for _ in range(layers)] + [[Suffix(0.0, 0.0, 0.0, ())]]
    visited = 0
    for stage in range(depth - 1, -1, -1):
        behind = min(microbatches, depth - stage) - 1
        forward, backward = stages[stage].forward.tolist(), stages[stage].backward.tolist()
        longer: list[list[Suffix]] = [[] for _ in range(layers + 1)]
        for first in range(layers):
            check_time()
            for last in range(first, layers):
                seconds = forward[first][last], backward[first][last]
                if not math.isfinite(sum(seconds)):
                    continue
                visited += len(suffixes[last + 1])
                longer[first] += [after.prepend(last - first + 1, *seconds, behind) for after in suffixes[last + 1]]
        steady = max(0, microbatches - (depth - stage))
        # The rank of the first stage depends on its passes: all of its suffixes are compared below.
        suffixes = [_prune(some, steady, keep) for some in longer] if stage else longer
    # The first stage has no stage before: its warm-up ends, and its ending begins, with its passes.
    steps = [suffix.step(max(0, microbatches - depth)) for suffix in suffixes[0]]
    value = min(steps, default=math.inf)
    return Partition(suffixes[0][steps.index(value)].layers, value, visited) if math.isfinite(value) else None


def _prune(suffixes: list[Suffix], steady: int, keep: int) -> list[Suffix]:
    """Returns the suffixes of the shortest steps, or all that no other beats in its three sums."""
    ranked = sorted(suffixes, key=lambda suffix: (suffix.step(steady), suffix.layers))
    if keep:
        return ranked[:keep]
    kept: list[Suffix] = []
    for suffix in ranked:
        if not any(all(a <= b for a, b in zip(better[:3], suffix[:3], strict=True)) for better in kept):
            kept.append(suffix)
    return kept


class AdaPipePlanner(Planner):
    paper = Paper(
        "https://doi.org/10.1145/3620666.3651359",
        "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning",
        2024,
    )
    restrictions = ("recompute a part of a layer", "use stages of heterogeneous degrees", "cut inside a layer")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan(problem, keep=1)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns the optimum by the same search, which keeps all suffixes that may matter."""
        optimum = self._plan(problem, keep=0)
        return SpaceOptimum(optimum.value, "dynamic programming over all suffixes")

    def _plan(self, problem: Problem, keep: int) -> Proposal:
        job = require_job(problem)
        table = job.stages()
        pipelines = [*uniform_pipelines(job, table)]
        best: Proposal | None = None
        visited = 0
        for plain in pipelines:
            degrees = {**plain.option.plan, "recompute": "full"}
            full = next((other for other in pipelines if dict(other.option.plan) == degrees), None)
            if plain.option.plan["recompute"] != "none" or full is None:
                continue
            stages = [self._price(job, plain, full, stage) for stage in range(plain.depth)]
            plan = plan_phases(stages, job.microbatches, keep)
            visited += plain.depth * table.layers**2
            if plan is None:
                continue
            visited += plan.visited
            ends = np.cumsum(plan.layers).tolist()
            cells = [(end - count, end - 1) for end, count in zip(ends, plan.layers, strict=True)]
            value = plan.value + max(float(table.once[(*cell, plain.number)]) for cell in cells)
            if best is None or value < best.value:
                counts = [int(stage.recomputed[cell]) for cell, stage in zip(cells, stages, strict=True)]
                best = Proposal(self._write(job, plain, plan.layers, counts), value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        return best._replace(visited=visited)

    def _price(self, job: JobProblem, plain: UniformPipeline, full: UniformPipeline, stage: int) -> StagePrices:
        """Returns the prices of a stage that recomputes as few layers as it must."""
        units, slow = plain.units, full.units
        flights = min(job.microbatches, plain.depth - stage)
        slower = (slow.forward + slow.backward - units.forward - units.backward)[1:-1]
        saved = flights * np.maximum(0.0, units.kept - slow.kept)[1:-1]
        if np.ptp(slower) > 1e-9 * abs(slower).max() or np.ptp(saved) > 1e-9 * abs(saved).max():
            raise PlanError("model", UNEQUAL, "Choose a model of equal layers", str(job.job.model.name))
        seconds = max(float(slower.mean()), 0.0)
        room = job.memory - full.stage_bytes(stage, job.microbatches)
        first, last = np.indices(room.shape)
        kept = np.minimum(last - first + 1, np.floor(np.maximum(room, 0.0) / max(float(saved.mean()), 1e-300) + 1e-9))
        extra = np.where(room >= 0, seconds * (last - first + 1 - kept), np.inf)
        extra = np.where(plain.stage_bytes(stage, job.microbatches) <= job.memory, 0.0, extra)
        recomputed = np.rint(np.where(np.isfinite(extra), extra, 0.0) / max(seconds, 1e-300))
        inside = np.where(first <= last, 0.0, np.inf)
        forward, backward = range_totals(units.forward) + inside, range_totals(units.backward) + extra + inside
        return StagePrices(forward, backward, recomputed)

    def _write(
        self, job: JobProblem, pipeline: UniformPipeline, layers: tuple[int, ...], counts: list[int]
    ) -> dict[str, dict[str, object]]:
        entries = []
        for held, count in zip(layers, counts, strict=True):
            recompute = {"recompute": "full", "recompute_layers": count} if count else {"recompute": "none"}
            entries.append({**pipeline.option.plan, **recompute, "layers": held})
        return job.entries_plan(entries, {})
