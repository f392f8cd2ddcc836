"""What a search has proven."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from meshcast.experiments.search.frontier.plan_runs import RunCounts
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.peak_errors import RISK

COUNTS = ("opened", "invalid", "memory_bound", "time_bound", "exact", "open", "too_large")
"""Counts that the shares of a search add up to."""


@dataclass
class Certificate:
    """What a search has proven.

    plans: distinct executions in the space.
    fields: values of the open fields.
    objectives: what is optimised.
    excluded: points that a limit of the search excludes, by limit (`experiments.search.space.limits`).
    memory_margin: share of the memory of a GPU that must stay free.
    memory_risk: most probability of lacking memory that a plan may have.
    invalid: points that break a rule.
    memory_bound: points whose memory bound exceeds the GPU.
    time_bound: points whose bounds are not better than the best plans, by more than the gap.
    exact: points that were forecast, `too_large` of them over memory.
    open: points that a search had not decided when it was interrupted.
    groups: groups of points, `opened` of them bounded point by point.
    grouped: what the points of a group have in common.
    step: step time of the best plan [s].
    incumbent: its objective, of two that of time or GPU time.
    open_bound: the best bound of this objective among points that were not forecast.
    front_gap: with two objectives, the least share such that of every plan that was not forecast some plan of the front
        is worse by no more in any objective.
    ratios: of every forecast, bounds of time and of memory over the forecast.
    cpu: CPU time [s], that of counting the plans included.
    complete: whether the search ended by itself.
    runs: what was simulated, in a search by the length or the price of runs.
    counting: whether the plans are still being counted: `plans`, `groups` and `excluded` are those so far.
    """

    plans: int
    fields: dict[str, list[Any]]
    groups: int
    objectives: tuple[str, ...] = ("time",)
    excluded: dict[str, int] = field(default_factory=dict)
    memory_margin: float = 0.0
    memory_risk: float = RISK
    opened: int = 0
    invalid: int = 0
    memory_bound: int = 0
    time_bound: int = 0
    exact: int = 0
    open: int = 0
    too_large: int = 0
    step: float = math.inf
    incumbent: float = math.inf
    open_bound: float = math.inf
    front_gap: float = 1.0
    ratios: list[tuple[float, float]] = field(default_factory=list)
    cpu: float = 0.0
    complete: bool = False
    grouped: str = "equal layers"
    runs: RunCounts | None = None
    counting: bool = False

    @property
    def gap(self) -> float:
        """Share of the objective by which a plan that was not forecast may be better than the best plan."""
        if not math.isfinite(self.incumbent):
            return 1.0
        if len(self.objectives) > 1:
            return self.front_gap
        return max(0.0, 1.0 - self.open_bound / self.incumbent)

    @property
    def admitted(self) -> int:
        """Points that no limit excludes."""
        return self.plans - sum(self.excluded.values())

    @property
    def decided(self) -> int:
        """Points that are excluded, cut, or forecast."""
        cut = self.invalid + self.memory_bound + self.time_bound
        return cut + self.exact + sum(self.excluded.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the certificate in the answer of ``search --json``."""
        finite = math.isfinite(self.step)
        # Bounds of time are searched before those of memory.
        first = next((name for name in self.objectives if name != "memory"), "memory")
        by_time = first == "time" and math.isfinite(self.open_bound)
        return {
            "objectives": list(self.objectives),
            "space": {"name": "fields of the plan", "plans": self.plans, "fields": self.fields},
            "excluded": self.excluded,
            "memory_margin": self.memory_margin,
            "memory_risk": self.memory_risk,
            "cut": {"invalid": self.invalid, "memory_bound": self.memory_bound, "time_bound": self.time_bound},
            "exact": self.exact,
            "open": self.open,
            "runs": self.runs.to_dict() if self.runs else None,
            "too_large": self.too_large,
            "groups": {"all": self.groups, "opened": self.opened},
            "incumbent_s": self.step if finite else None,
            "open_bound_s": self.open_bound if by_time else None,
            "gap": self.gap,
            "audited": len(self.ratios),
            "violations": 0,
            "complete": self.complete,
            "cpu_s": self.cpu,
        }
