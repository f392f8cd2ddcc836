"""Varuna: every depth of the pipeline and every size of micro-batches, each by a simulation of Varuna's schedule.

Stages are cut at equal numbers of layers, all other GPUs replicate the pipeline, and every pass is recomputed (Athlur
et al. 2022, arXiv 2111.04007, section 4). Its simulator plays the schedule with the durations of passes, transfers and
sums of gradients; here the engine does, on `pipeline/varuna`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.pricing.job import JobProblem, require_job
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper


class VarunaPlanner(Planner):
    paper = Paper("arXiv:2111.04007", "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", 2021)
    restrictions = (
        "shard tensors",
        "give stages different numbers of layers",
        "keep activations other than the inputs of stages",
    )

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        job = require_job(problem)
        plans = [*self._space(job)]
        seconds = [job.step_seconds(plan) for plan in takewhile(lambda _: not is_over(), plans)]
        best = min(seconds, default=math.inf)
        if not math.isfinite(best):
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory: Varuna shards no tensors")
        proof = PlanProof(best, best, "simulation of every plan") if len(seconds) == len(plans) else None
        return Proposal(plans[seconds.index(best)], best, len(seconds), proof)

    def _space(self, job: JobProblem) -> Iterator[dict[str, dict[str, Any]]]:
        """Yields all depths and sizes; the batch stays."""
        for depth in list_divisors(job.gpus):
            replicas = job.gpus // depth
            if job.job.model.layers % depth or job.sequences % replicas:
                continue
            pipeline = {"pp": depth, "schedule": "varuna"} if depth > 1 else {}
            plan = {"dp": replicas, "tp": 1, **pipeline, "recompute": "full"}
            for micro in list_divisors(job.sequences // replicas):
                yield {"plan": plan, "batch": {"global": job.sequences, "micro": micro}}
