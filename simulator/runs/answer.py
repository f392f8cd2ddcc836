"""What many simulated runs of a job have in common: their length, where the time goes, failures, money and energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.report.energy import KWH
from meshcast.simulator.report.version import product_version
from meshcast.simulator.runs.formulas import daly_interval, expected_goodput, young_interval
from meshcast.simulator.runs.inputs import RunPlan
from meshcast.simulator.runs.training import TIMES, SimulatedRun

DAY = 86_400.0

LABELS = {
    "productive": "productive steps",
    "lost_work": "lost work",
    "checkpoint": "checkpoints",
    "restart": "restarts",
    "detection": "detection",
    "straggling": "stragglers",
    "waiting_for_spares": "waiting for spares",
    "evaluation": "evaluation",
    "data_stalls": "data stalls",
    "elasticity": "missing replicas",
}
"""Names of `TIMES` on pages and plots."""

BUSY = ("productive", "lost_work", "straggling", "elasticity")
"""Times in which steps run."""

QUANTILES = (0.05, 0.95)
"""Ends of an interval that holds nine of ten runs."""


@dataclass(frozen=True)
class RunAnswer:
    """The answer of ``meshcast run``.

    runs: those with numbers 0, 1, 2, ...
    """

    plan: RunPlan
    runs: Sequence[SimulatedRun]

    @cached_property
    def time_s(self) -> dict[str, float]:
        """Mean time of a run by its use [s]."""
        return {name: math.fsum(run.time_s[name] for run in self.runs) / len(self.runs) for name in TIMES}

    @cached_property
    def seconds(self) -> float:
        """Mean duration of a run [s]."""
        return math.fsum(run.seconds for run in self.runs) / len(self.runs)

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def goodput(self) -> float:
        """Share of the time that is steps which are kept, at their forecast duration."""
        return self.time_s["productive"] / self.seconds

    @property
    def effective_ratio(self) -> float:
        """Effective training time ratio: steps which are kept at the duration that they had, over the time."""
        return (self.time_s["productive"] + self.time_s["straggling"]) / self.seconds

    @property
    def steps(self) -> float:
        """Mean number of steps of a run."""
        return math.fsum(run.steps for run in self.runs) / len(self.runs)

    @property
    def failures(self) -> dict[str, float]:
        """Mean number of failures of a run by component."""
        names = sorted({name for run in self.runs for name in run.failures})
        return {name: math.fsum(run.failures.get(name, 0) for run in self.runs) / len(self.runs) for name in names}

    def cost_of(self, run: SimulatedRun) -> float | None:
        """Returns the price of a run; None if the job states no price."""
        price, cluster = self.plan.job.run.price_per_gpu_hour, self.plan.job.cluster
        if price is None:
            return None
        gpus = cluster.gpus + (self.plan.setting.spares or 0) * cluster.gpus_per_node
        return run.seconds / 3600 * gpus * price

    def energy_of(self, run: SimulatedRun) -> float:
        """Returns the energy of a run, of nodes and data centre [MWh]."""
        busy = math.fsum(run.time_s[name] for name in BUSY)
        joules = busy * self.plan.busy_watts + (run.seconds - busy) * self.plan.idle_watts
        return joules / KWH / 1000

    def mean(self, of: Callable[[SimulatedRun], float | None]) -> float | None:
        """Returns the mean over all runs; None if a run has no such figure."""
        figures = [of(run) for run in self.runs]
        return (
            math.fsum(figure for figure in figures if figure is not None) / len(figures)
            if None not in figures
            else None
        )

    def interval_90(self, of: Callable[[SimulatedRun], float | None]) -> list[float] | None:
        """Returns the interval that holds nine of ten simulated runs; None if a run has no such figure."""
        figures = [figure for run in self.runs if (figure := of(run)) is not None]
        return [float(bound) for bound in np.quantile(figures, QUANTILES)] if len(figures) == len(self.runs) else None

    @property
    def days_interval_90(self) -> list[float]:
        """Interval that should hold nine of ten real runs [days]: by the chance of a run and the forecast of a step."""
        days = self.interval_90(lambda run: run.seconds / DAY) or []
        return days if self.ends_by_time else self._widen(days, self.days)

    @property
    def tokens_interval_90(self) -> list[float]:
        """Interval that should hold the tokens of nine of ten real runs."""
        per_step = self.plan.report.tokens
        tokens = self.interval_90(lambda run: run.steps * per_step) or []
        return self._widen(tokens, self.steps * per_step, inverse=True) if self.ends_by_time else tokens

    @property
    def cost_interval_90(self) -> list[float] | None:
        """Interval that should hold the price of nine of ten real runs; None if the job states no price."""
        interval, mean = self.interval_90(self.cost_of), self.mean(self.cost_of)
        if interval is None or mean is None or self.ends_by_time:
            return interval
        return self._widen(interval, mean)

    @property
    def ends_by_time(self) -> bool:
        """Whether the job states how long its run takes."""
        return math.isfinite(self.plan.setting.horizon)

    def _widen(self, ends: Sequence[float], mean: float, inverse: bool = False) -> list[float]:
        """Returns an interval of simulated runs, wider by the interval of the step: both are independent.

        Failures come by time, so all but the pauses after steps grows with the duration of a step.
        inverse: for what falls with the duration of a step.
        """
        if not mean:
            return [*ends]
        growing = 1 - (self.time_s["checkpoint"] + self.time_s["evaluation"]) / self.seconds
        step = self.plan.report.step_time
        low, high = (1 + growing * (end / step - 1) for end in self.plan.report.interval_90)
        if inverse:
            low, high = 1 / high, 1 / low
        below = math.hypot(max(0.0, math.log(mean / ends[0])), math.log(low)) if ends[0] else math.inf
        above = math.hypot(math.log(max(ends[1] / mean, 1.0)), math.log(high))
        return [mean * math.exp(-below), mean * math.exp(above)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON answer."""
        plan, carbon = self.plan, self.plan.job.run.carbon_kg_per_kwh
        energy = self.mean(self.energy_of) or 0.0
        return {
            "id": plan.job.id,
            "meshcast": product_version(),
            "days": self.days,
            "days_interval_90": self.days_interval_90,
            "days_interval_90_simulated": self.interval_90(lambda run: run.seconds / DAY),
            "goodput": self.goodput,
            "goodput_interval_90": self.interval_90(lambda run: run.time_s["productive"] / run.seconds),
            "effective_training_time_ratio": self.effective_ratio,
            "time_s": self.time_s,
            "failures": self.failures,
            "cost": self.mean(self.cost_of),
            "cost_interval_90": self.cost_interval_90,
            "energy_mwh": energy,
            "co2_t": None if carbon is None else energy * carbon,
            "seeds": len(self.runs),
            "steps": self.steps,
            "tokens": self.steps * plan.report.tokens,
            "tokens_interval_90": self.tokens_interval_90,
            "step_time_s": plan.report.step_time,
            "step_interval_90_s": list(plan.report.interval_90),
            "mtbf_hours": plan.mtbf / 3600 if math.isfinite(plan.mtbf) else None,
            "checkpoints": self.describe_checkpoints(),
            "status": plan.report.fit.verdict,
            "assumed": list(plan.assumed),
        }

    def describe_checkpoints(self) -> dict[str, Any]:
        """Returns size, times and interval of the checkpoints, with the best intervals by formulas."""
        plan, described = self.plan, dict[str, Any]()
        regular = [tier for tier in plan.setting.tiers if tier.every]
        described["gb"] = plan.size.nbytes / 1e9 if plan.setting.tiers else None
        described["tiers"] = [
            {
                "every_steps": tier.every or None,
                "every_s": tier.every * plan.report.step_time or None,
                "stall_s": tier.stall,
                "write_s": tier.write,
                "load_s": tier.load,
            }
            for tier in plan.setting.tiers
        ]
        if regular and math.isfinite(plan.mtbf):
            stall, setting = regular[0].stall, plan.setting
            restart = setting.detection + setting.restart + regular[0].load
            described["young_s"] = young_interval(stall, plan.mtbf)
            described["daly_s"] = daly_interval(stall, plan.mtbf)
            interval = regular[0].every * plan.report.step_time
            described["daly_goodput"] = expected_goodput(interval, stall, restart, plan.mtbf)
        return described
