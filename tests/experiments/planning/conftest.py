"""Problems that several tests price once."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshcast.experiments.planning.planner import Proposal, find_planner
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.problem import SearchBudget
from tests.experiments.shared_work import one_work

__all__ = ["one_work"]

HUGE = {"model": "gpt3-175b", "cluster": "dgx-h100:1", "batch": {"global": 64, "micro": 1}, "plan": {"tp": 8}}
"""A job that no plan makes fit."""


def problem_of(model: str = "gpt3-5b", gpus: int = 8, layers: int = 4, **batch: Any) -> JobProblem:
    """A few layers of a model on one or more nodes of H100s, with 4 micro-batches of 16 sequences."""
    return JobProblem(
        {
            "model": {"preset": model, "layers": layers},
            "cluster": {"node": "dgx-h100", "nodes": -(-gpus // 8), "gpus": gpus},
            "batch": batch or {"global": 64, "micro": 32 // gpus},
            "plan": {"tp": 1, "dp": 1, "pp": 1} if gpus == 1 else {"tp": 2, "dp": gpus // 2},
        }
    )


@cache
def gpt() -> JobProblem:
    return problem_of()


@cache
def propose(name: str) -> Proposal:
    """Returns what a planner proposes for four layers of GPT-3 5B on eight GPUs."""
    return find_planner(name)().plan(gpt(), SearchBudget())
