"""AMP: all degrees and sizes of micro-batches; for each a partition by dynamic programming; the best ten are tried.

A step of m micro-batches takes sum + (m - 1) x the slowest of p stages, their messages, and the sum of gradients of the
slowest stage, 2 (d - 1) / d of its parameters' bytes over its links (Li et al. 2022, arXiv 2210.07297, section 3, and
the released code). On GPUs of several kinds a layer takes the mean of its times on them, weighted by their numbers.
Memory is no part of it: trials find out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import takewhile

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.ordered_stages import costs_of, partition_stages
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.mixed import MixedProblem, link_bandwidth, require_kinds
from meshcast.experiments.planning.pricing.pipelines import pipeline_plan
from meshcast.experiments.planning.pricing.space_search import search_space
from meshcast.experiments.planning.pricing.stage_prices import range_totals
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.stages import StageOption
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper


class Amp(Planner):
    paper = Paper(
        "arXiv:2210.07297", "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity Awareness", 2022
    )
    restrictions = (
        "use stages, or replicas, of heterogeneous degrees",
        "look at memory before its trials",
        "tell GPUs of several kinds apart, but by the mean of their times",
        "recompute",
    )
    trials = 10
    """Candidates that are tried in full."""

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        mixed = require_kinds(problem)
        priced = [*takewhile(lambda _: not is_over(), self._price_all(mixed))]
        tried = heapq.nsmallest(self.trials, priced, key=lambda candidate: candidate.value)
        seconds = [mixed.step_seconds(candidate.plan) for candidate in tried]
        if not math.isfinite(min(seconds, default=math.inf)):
            remedy = f"None of its {self.trials} trials fits: give more GPUs, or GPUs of more memory"
            raise self.nothing_fits(problem, remedy)
        best = tried[seconds.index(min(seconds))]
        return best._replace(visited=sum(candidate.visited for candidate in priced))

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds by forecasts on equal nodes, by the objective of all candidates, fitting or not, on several kinds."""
        mixed = require_kinds(problem)
        if len(mixed.kinds) > 1:
            least = min(candidate.value for candidate in self._price_all(mixed))
            return SpaceOptimum(least, "enumeration of its space")
        plan = {"tp": mixed.tensor_degrees, "pp": "auto", "schedule": "1f1b", "partition": "auto", "recompute": "none"}
        return search_space(mixed, plan, "auto", mixed.forecast(proposal.plan).step_time)

    def _price_all(self, mixed: MixedProblem) -> Iterator[Proposal]:
        layers = mixed.layers
        for tensor in reversed(mixed.tensor_degrees):  # pipelines of few stages are priced first
            for depth in list_divisors(mixed.gpus // tensor):
                replicas = mixed.gpus // tensor // depth
                if depth > layers or mixed.sequences % replicas:
                    continue
                for micro in list_divisors(mixed.sequences // replicas):
                    option = StageOption(tensor * replicas, {"tp": tensor, "dp": replicas, "recompute": "none"})
                    try:
                        yield self._price(mixed.with_microbatches(mixed.sequences // replicas // micro), option, depth)
                    except PlanError:  # degrees that the model does not have
                        continue

    def _price(self, mixed: MixedProblem, option: StageOption, depth: int) -> Proposal:
        """Returns the best partition of a candidate. Raises PlanError for degrees that break a rule."""
        units = mixed.mean_units(option)
        seconds = range_totals(units.forward + units.backward)
        partition = partition_stages([seconds] * depth, mixed.microbatches)
        assert partition is not None
        tensor, replicas, width = int(option.plan["tp"]), int(option.plan["dp"]), option.gpus
        messages = [
            mixed.message_nbytes(replicas)
            / min(link_bandwidth(mixed.kinds, rank, rank + width) for rank in range(stage * width, (stage + 1) * width))
            for stage in range(depth - 1)
        ]
        gradients = []
        nbytes = costs_of([range_totals(2 * units.elements)] * depth, partition.layers)
        for stage, held in enumerate(nbytes):
            ring = [stage * width + number * tensor for number in range(replicas)]
            slowest = min(link_bandwidth(mixed.kinds, *pair) for pair in zip(ring, [*ring[1:], ring[0]], strict=True))
            gradients.append(2 * (replicas - 1) / replicas * held / slowest)
        value = partition.value + sum(messages) + max(gradients)
        return Proposal(pipeline_plan(mixed, option, partition.layers), value, partition.visited)
