"""A cluster that was looked at: its best plan, and the runs of the training on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from meshcast.experiments.sizing.kinds import SizedNode
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.formatting import describe_plan
from meshcast.simulator.report.report import Report
from meshcast.simulator.runs.answer import DAY, QUANTILES, RunAnswer
from meshcast.simulator.runs.expected_run import expect_run
from meshcast.simulator.runs.inputs import RunPlan
from meshcast.simulator.runs.training import SimulatedRun

CHANCE = 0.9
"""Share of the simulated runs that must keep a limit."""

CERTAIN = 1.25
"""Times by which the limit exceeds the expected length of a run before a size is taken to keep it unsimulated, on the
way to the smallest one, which is simulated."""

EXCESS = 1.05
"""Times by which the expected length of a run, which is its least, exceeds a limit that nine of ten do not keep."""

Simulate = Callable[[RunPlan], list[SimulatedRun]]


class SizedCluster:
    """A cluster of a kind of node, with the best plan on it.

    kind, nodes: of the cluster.
    job: as plain data with its plan; None: there is none.
    plan: its run; None: there is none.
    reason: why there is none.
    lacks_memory: whether that is because no plan fits.
    simulate: simulates a run.
    """

    def __init__(
        self,
        kind: SizedNode,
        nodes: int,
        job: Fields | None,
        plan: RunPlan | None,
        reason: str,
        lacks_memory: bool,
        simulate: Simulate,
    ) -> None:
        self.kind, self.nodes, self.job, self.plan, self.reason = kind, nodes, job, plan, reason
        self.lacks_memory, self._simulate = lacks_memory, simulate
        self.is_simulated = False

    @property
    def gpus(self) -> int:
        return self.nodes * self.kind.gpus_per_node

    @property
    def report(self) -> Report:
        """Forecast of a step."""
        assert self.plan is not None
        return self.plan.report

    @property
    def gpu_seconds(self) -> float:
        """GPU time of a token without failures [s]; infinity without a plan."""
        return math.inf if self.plan is None else self.report.step_time * self.gpus / self.report.tokens

    @cached_property
    def answer(self) -> RunAnswer:
        """The simulated runs. Raises PlanError if one does not end."""
        assert self.plan is not None
        runs = self._simulate(self.plan)
        self.is_simulated = True
        return RunAnswer(self.plan, runs)

    def find_sure(self, of: Callable[[SimulatedRun], float | None]) -> float:
        """Returns what nine of ten simulated runs do not exceed."""
        figures = [figure for run in self.answer.runs if (figure := of(run)) is not None]
        return float(np.quantile(figures, CHANCE))

    @cached_property
    def sure_days(self) -> float:
        """Days that nine of ten simulated runs do not exceed."""
        return self.find_sure(lambda run: run.seconds / DAY)

    @cached_property
    def sure_cost(self) -> float | None:
        """Money that nine of ten simulated runs do not exceed; None without a price."""
        return None if self.kind.price is None else self.find_sure(self.answer.cost_of)

    @cached_property
    def _growing(self) -> float:
        """Share of the length of a run that grows with the duration of a step."""
        times = self.answer.time_s
        return 1 - (times["checkpoint"] + times["evaluation"]) / self.answer.seconds

    def days_at(self, slower: float) -> float:
        """Returns `sure_days` if steps took `slower` times as long: all grows with it but the pauses after steps."""
        return self.sure_days * (1 + self._growing * (slower - 1))

    def find_chance(self, days: float) -> float:
        """Returns the probability that a real run ends within so many days, by the chance of a run and the error of the
        forecast of a step: of a lognormal distribution with the ends of its interval."""
        low, high = self.answer.days_interval_90
        mean = self.answer.days
        end = high if days >= mean else low
        sigma = abs(math.log(end / mean)) / NormalDist().inv_cdf(QUANTILES[1])
        return NormalDist().cdf(math.log(days / mean) / sigma) if sigma else float(days >= mean)

    def keeps(self, days: float, slower: float = 1.0, roughly: bool = False) -> bool:
        """Returns whether nine of ten runs end within so many days.

        slower: factor on the duration of steps. roughly: whether runs that are expected to be far shorter need not be
        simulated. Runs that are too long without failures, or are expected to be far longer, are not.
        """
        if self.plan is None:
            return False
        if not self.is_simulated:
            if self.plan.setting.quiet_s * min(slower, 1.0) > days * DAY:
                return False
            if self.expected_days * min(slower, 1.0) > EXCESS * days:
                return False
            if roughly and self.expected_days * max(slower, 1.0) * CERTAIN < days:
                return True
        return self.can_end() and self.days_at(slower) <= days

    @cached_property
    def expected_days(self) -> float:
        """Days that are expected of a run, at least."""
        assert self.plan is not None
        return expect_run(self.plan.setting).seconds / DAY

    def can_end(self) -> bool:
        """Simulates the runs; returns whether all end. If one does not, the cluster has no plan from then on."""
        if self.plan is not None and not self.is_simulated:
            try:
                self.answer  # noqa: B018  simulates
            except PlanError as error:
                self.plan, self.reason = None, error.rule
        return self.plan is not None

    @property
    def rough_days(self) -> float:
        """Days of a run: simulated if they are, else expected."""
        if self.plan is None:
            return math.inf
        return self.sure_days if self.is_simulated else self.expected_days

    def to_dict(self) -> dict[str, Any]:
        """Returns the cluster in the answer of ``size --json``."""
        if self.plan is None:
            return {"nodes": self.nodes, "gpus": self.gpus, "status": "no plan", "reason": self.reason}
        run = self.answer.to_dict()
        kept = ("days", "days_interval_90", "cost", "cost_interval_90", "energy_mwh", "co2_t", "goodput", "step_time_s")
        return {
            "nodes": self.nodes,
            "gpus": self.gpus,
            "status": run["status"],
            "sure_days": self.sure_days,
            "sure_cost": self.sure_cost,
            **{key: run[key] for key in kept},
            "failures": sum(run["failures"].values()),
            "mfu": self.report.mfu["palm"],
            "global_batch": self.report.job.batch.total,
            "plan": describe_plan(self.report.play.plan),
            "job": self.job,
        }
