"""Where a log and the job that is named for it disagree on what a step is."""

from __future__ import annotations

from collections.abc import Iterable

from meshcast.experiments.diagnosis.steps import StepTimes
from meshcast.simulator.report.report import Report

ROUNDED = 0.03
"""Relative difference of tokens that logs with three digits leave open."""


def list_questions(steps: StepTimes, report: Report) -> Iterable[str]:
    """Yields questions: another global batch, other tokens of a step."""
    batch = report.job.batch
    stated = [interval for interval in steps.intervals if interval.line.samples]
    other = [interval for interval in stated if interval.line.samples != batch.total]
    if other:
        line = other[0].line
        if len(other) < len(stated):
            yield (
                f"{line.where}: the global batch is {line.samples} here and {batch.total} elsewhere: does it ramp up? "
                "--skip leaves its lines out"
            )
        else:
            yield f"{line.where}: the log's global batch is {line.samples}, the job's {batch.total}: which one ran?"
    tokens = report.tokens
    for interval in steps.intervals:
        logged = interval.line.tokens
        if logged and abs(logged / tokens - 1) > ROUNDED:
            yield (
                f"{interval.line.where}: the log has {logged:,.0f} tokens a step, the job {tokens:,}: which batch, or "
                f"which sequence length ({batch.sequence:,} in the job), ran?"
            )
            return
