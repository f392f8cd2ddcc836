"""The simulated runs of a plan with a choice: days, cost, goodput, and whether two plans can be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from meshcast.experiments.search.space.run_choices import DAY
from meshcast.experiments.sweeps.simulated_runs import COLUMNS
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.metrics import Z90
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import RunPlan
from meshcast.simulator.runs.training import SimulatedRun

Simulate = Callable[[RunPlan], Sequence[SimulatedRun]]
"""Simulates all runs of a job."""


@dataclass
class RunCounts:
    """What a search has simulated.

    choices: of the run that are compared for every plan.
    seeds: runs of each plan and choice.
    simulated: plans with a choice whose runs were simulated.
    invalid: that break a rule.
    waiting: of plans that were forecast, those that were not simulated: their bound is no better than the best plans,
        unless the search was interrupted.
    """

    choices: int
    seeds: int
    seed: int
    simulated: int = 0
    invalid: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the key `runs` of the certificate."""
        return {**vars(self), "runs": self.simulated * self.seeds}


@dataclass(frozen=True)
class PlanRuns:
    """The runs of a plan with a choice.

    seconds: of every run [s].
    costs: of every run; empty without a price.
    interval_s: time between two checkpoints; None without regular ones.
    time_s: mean time by its use.
    columns: those of a sweep of simulated runs.
    days_90, cost_90: intervals that hold nine of ten runs.
    """

    seconds: tuple[float, ...]
    costs: tuple[float, ...]
    interval_s: float | None
    time_s: dict[str, float]
    columns: dict[str, float | None]
    days_90: tuple[float, float]
    goodput: float
    cost_90: tuple[float, float] | None = field(default=None)

    @classmethod
    def of(cls, answer: RunAnswer) -> PlanRuns:
        costs = [answer.cost_of(run) for run in answer.runs]
        days, cost = answer.interval_90(lambda run: run.seconds / DAY), answer.interval_90(answer.cost_of)
        assert days is not None
        every = next((tier.every for tier in answer.plan.setting.tiers if tier.every), None)
        return cls(
            seconds=tuple(run.seconds for run in answer.runs),
            costs=tuple(cost for cost in costs if cost is not None),
            interval_s=None if every is None else every * answer.plan.report.step_time,
            time_s=answer.time_s,
            columns={column.name: column.compute(answer) for column in COLUMNS},
            days_90=(days[0], days[1]),
            goodput=answer.goodput,
            cost_90=None if cost is None else (cost[0], cost[1]),
        )

    @property
    def mean_seconds(self) -> float:
        return math.fsum(self.seconds) / len(self.seconds)

    @property
    def days(self) -> float:
        return self.mean_seconds / DAY

    @property
    def cost(self) -> float | None:
        """Mean price; None without a price."""
        return math.fsum(self.costs) / len(self.costs) if self.costs else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the key `run` of a plan in the answer of ``search --json``."""
        return {
            "days": self.days,
            "days_interval_90": list(self.days_90),
            "goodput": self.goodput,
            "cost": self.cost,
            "cost_interval_90": None if self.cost_90 is None else list(self.cost_90),
            "checkpoint_every_s": self.interval_s,
            "time_s": self.time_s,
        }


def differ(first: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether the 90 % interval of the mean difference of runs with the same random numbers leaves out 0.

    first, other: a figure of every run, in equal order.
    """
    count = len(first)
    differences = [a - b for a, b in zip(first, other, strict=True)]
    mean = math.fsum(differences) / count
    if count < 2 or mean == 0.0:
        return False
    deviation = math.sqrt(math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1))
    return abs(mean) > student_90(count - 1) * deviation / math.sqrt(count)


def student_90(freedom: int) -> float:
    """Returns the two-sided 90 % quantile of Student's t distribution, within 1 % from three degrees of freedom on
    (Abramowitz and Stegun 1964, 26.7.5); exact for 1 and 2."""
    if freedom < 3:
        return (math.tan(0.45 * math.pi), 2.919986)[freedom - 1]
    z, quantile = Z90, Z90
    quantile += (z**3 + z) / (4 * freedom)
    quantile += (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return quantile + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
