"""What a search gives: the best plans with their whole forecasts, and the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.search.search import Certificate, FoundPlan, Search
from hardware.units import GIB
from simulator.forecast.simulate import simulate
from simulator.job.load import load_job
from simulator.report.report import Report
from validation.published.measured_range.beyond import beyond_envelope, describe_envelope
from validation.published.measured_range.envelope import published_envelope


class RankedPlan(NamedTuple):
    """One of the best plans. found: as the search found it. report: its whole forecast."""

    found: FoundPlan
    report: Report

    @property
    def changes(self) -> dict[str, Any]:
        """Values of the open fields, such as ``{"plan.tp": 4}``."""
        return self.found.changes

    @property
    def job(self) -> dict[str, Any]:
        """The job with this plan as plain data: what a job file holds."""
        return self.found.job

    def to_dict(self) -> dict[str, Any]:
        """The plan in the answer of ``search --json``."""
        return {
            "plan": self.found.changes,
            "step_time_s": self.report.step_time,
            "interval_90_s": list(self.report.interval_90),
            "tokens_per_s_per_gpu": self.report.tokens_per_s_per_gpu,
            "peak_device_gib": self.report.peak_device / GIB,
            "mfu": self.report.mfu,
            "cost": self.report.cost,
        }


@dataclass(frozen=True)
class SearchResult:
    """The best plans of a space.

    best: plans that fit, the best first; empty if none does.
    certificate: what the space holds, what was cut by which bound, and the gap that is proven.
    forecasts: all plans that were forecast, those that do not fit included, in that order.
    """

    best: Sequence[RankedPlan]
    certificate: Certificate
    forecasts: Sequence[FoundPlan] = ()

    def to_dict(self) -> dict[str, Any]:
        """The answer of ``search --json``."""
        envelope = published_envelope(self.best[0].report.job) if self.best else None
        beyond = beyond_envelope(self.best[0].report) if self.best else None
        return {
            "best": [one.to_dict() for one in self.best],
            "front": None,
            "certificate": self.certificate.to_dict(),
            "published_envelope": describe_envelope(envelope) if envelope else None,
            "beyond_envelope": str(beyond) if beyond else None,
        }


def rank(search: Search) -> list[RankedPlan]:
    """The best plans of a search with their whole forecasts, the fastest first."""
    jobs = [load_job(one.job, base=search.space.base) for one in search.best]
    reports = [simulate(job, shared_work=search.shared) for job in jobs]
    return [RankedPlan(one, report) for one, report in zip(search.best, reports, strict=True)]
