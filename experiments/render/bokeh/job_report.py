"""The report of a job: its forecast, and the sections that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshcast.experiments.explain.sensitivity import explain
from meshcast.experiments.render.bokeh.page import render_page
from meshcast.experiments.render.bokeh.sections import (
    assumptions,
    breakdown,
    communication,
    memory,
    roofline,
    sensitivity,
    summary,
    timeline,
)
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.job import Job
from meshcast.simulator.report.formatting import format_seconds
from meshcast.simulator.report.report import Report

Track = Callable[[Iterable[Any], str], Iterable[Any]]
"""Passes the steps of a long work on, as a progress bar with these words does."""


def track_silently(steps: Iterable[Any], _: str) -> Iterable[Any]:
    """Passes steps on without a progress bar."""
    return steps


def report_job(
    job: Job,
    report: Report,
    sensitivities: bool = True,
    track: Track = track_silently,
    title: str | None = None,
    shared_work: SharedWork | None = None,
) -> str:
    """Returns the HTML page of a forecast.

    report: the forecast of `job`, played by matrices.
    sensitivities: whether to forecast the job again with every figure of its hardware and every assumed field changed.
    shared_work: of the forecast, see `explain`.
    """
    sections = [
        summary.make_section(report),
        breakdown.make_section(report),
        memory.make_section(report),
        timeline.make_section(report, lambda steps: track(steps, "timeline")),
        roofline.make_section(report),
        communication.make_section(report),
        _sensitivity(job, sensitivities, track, shared_work),
        assumptions.make_section(report),
    ]
    words = title or f"{report.job.model.name} on {report.job.cluster.name}: {format_seconds(report.step_time)} a step"
    return render_page(words, summary.make_lead(report), sections)


def _sensitivity(job: Job, wanted: bool, track: Track, shared_work: SharedWork | None) -> Any:
    if not wanted:
        return sensitivity.make_note("Left out: the report was made with --no-sensitivity.")
    try:
        sensitivities = explain(job, lambda steps: track(list(steps), "sensitivity"), shared_work)
    except PlanError as error:
        return sensitivity.make_note(f"Left out: {error}")
    return sensitivity.make_section(sensitivities)
