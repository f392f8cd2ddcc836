"""Forecasts of published runs, with all that the tables of this room are made of: utilisation, plans and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.report import Report
from meshcast.validation.published.answer import Answer, map_chunks
from meshcast.validation.published.measured_range.combinations import MeasuredPlan
from meshcast.validation.published.measured_range.envelope import class_of, format_of
from meshcast.validation.published.measured_range.plan_fields import fields_of_plan, task_of_job
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedFigures, PublishedRun


@dataclass(frozen=True)
class SurveyedRun:
    """A published run with a measured step and a forecast.

    plan: task, fields and source.
    gpu, number, kind: keys of the envelope: GPU, number format of the GEMMs, class of model.
    mfu, causal, hfu: measured utilisation, in the convention of PaLM, with half of attention, and of the hardware.
    log_ratio: logarithm of measured over forecast step time.
    bias: of its regime.
    sigma: of the forecast.
    step_time: forecast [s].
    fits: whether the forecast fits in memory.
    packed: samples are packed, and attend within themselves.
    job: of the forecast.
    """

    id: str
    plan: MeasuredPlan
    gpu: str
    number: str
    kind: str
    packed: bool
    model: str
    gpus: int
    mfu: float
    causal: float
    hfu: float
    log_ratio: float
    bias: float
    sigma: float
    step_time: float
    fits: bool
    measured: PublishedFigures
    citation: str
    trust: str | None
    job: dict[str, Any]


def survey_runs(runs: Sequence[PublishedRun], workers: int | None = None) -> Iterator[SurveyedRun | None]:
    """Yields the runs as surveyed, in order; None for a run without a forecast or a measured step."""
    for answer in map_chunks(_survey_chunk, runs, workers):
        yield answer["run"]


def _survey_chunk(runs: Sequence[PublishedRun]) -> list[Answer]:
    shared = SharedWork()
    return [{"run": survey(run, shared)} for run in runs]


def survey(run: PublishedRun, shared: SharedWork | None = None) -> SurveyedRun | None:
    """Returns a run as surveyed; None without a forecast or a measured step."""
    if run.step_time is None:
        return None
    try:
        mapped, report = forecast_run(run, shared)
    except MeshcastError:
        return None
    return _describe(run, mapped.job, report)


def _describe(run: PublishedRun, job: dict[str, Any], report: Report) -> SurveyedRun:
    assert run.step_time is not None
    plan, faster = report.play.plan, report.step_time / run.step_time
    fields, *_ = fields_of_plan(plan)
    return SurveyedRun(
        id=run.id,
        plan=MeasuredPlan(task_of_job(plan.job, run.spec.stack), fields, run.source),
        gpu=run.spec.gpu or "",
        number=format_of(report.job),
        kind=class_of(report.job),
        packed=run.spec.kind == "sft-packed",
        model=run.model_name,
        gpus=report.job.cluster.gpus,
        mfu=report.mfu["palm"] * faster,
        causal=report.mfu["causal"] * faster,
        hfu=report.hfu * faster,
        log_ratio=-math.log(faster),
        bias=report.residual.bias,
        sigma=report.sigma,
        step_time=report.step_time,
        fits=report.fits,
        measured=run.measured,
        citation=run.citation,
        trust=run.trust if isinstance(run.trust, str) else None,
        job=job,
    )
