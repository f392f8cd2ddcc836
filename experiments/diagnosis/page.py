"""The page of ``meshcast explain``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.diagnosis.detector import Cause
from meshcast.experiments.diagnosis.explanation import Explanation
from meshcast.experiments.render.terminal.tables import labelled_line, show_table
from meshcast.experiments.views.table import Column, Table, formatted_numbers
from meshcast.simulator.report.formatting import format_seconds


def page(explanation: Explanation) -> RenderableType:
    """Returns the whole page."""
    report = explanation.evidence.report
    name = f"{report.job.model.name} on {report.job.cluster.name}" if report is not None else explanation.files[0][0]
    blocks: list[RenderableType] = [Text(f"{name}: why it is slower", "bold"), Text()]
    if report is not None:
        low, high = report.interval_90
        words = f"{format_seconds(report.step_time)} a step, {format_seconds(low)} to {format_seconds(high)} with 90 %"
        blocks.append(labelled_line("expected", words))
    blocks += _list_measured(explanation)
    blocks += [labelled_line("question", question, style="bold yellow") for question in explanation.questions]
    blocks.append(Text())
    blocks += _list_causes(explanation)
    blocks += [labelled_line("unknown", words) for words in _list_unexplained(explanation)]
    blocks += [labelled_line("pattern", pattern) for pattern in explanation.patterns]
    blocks += [labelled_line("note", note, style="dim") for note in explanation.notes]
    return Group(*blocks)


def _list_measured(explanation: Explanation) -> Iterator[RenderableType]:
    steps, mean = explanation.evidence.steps, explanation.measured
    if steps is not None:
        range_ = f"{format_seconds(steps.percentile(5))} to {format_seconds(steps.percentile(95))} from 5 % to 95 %"
        yield labelled_line(
            "measured", f"{format_seconds(steps.typical)} a step (median), {range_}, mean {format_seconds(steps.mean)}"
        )
        count = sum(interval.steps for interval in steps.warm)
        left = f"; the first{f' {count}' if count > 1 else ''} left out as warm-up" if count else ""
        yield labelled_line("", f"{steps.steps:,} steps of {steps.log.program}{left}")
        if steps.drift is not None:
            first, last, step = steps.drift
            change = f"{last / first - 1:+.1%}"
            yield labelled_line(
                "drift", f"{format_seconds(first)} to {format_seconds(last)} ({change}), at step {step:,}"
            )
    elif mean is not None:
        yield labelled_line("measured", f"{format_seconds(mean)} a step, traced")
    if explanation.steady_excess is not None and explanation.expected:
        excess = explanation.steady_excess
        share = f"{abs(excess) / explanation.expected:.0%} {'slower' if excess >= 0 else 'faster'} than forecast"
        inside = explanation.interval is not None and (
            explanation.interval[0] <= explanation.evidence.step <= explanation.interval[1]
        )
        yield labelled_line("slower", f"{share} without pauses, {'inside' if inside else 'outside'} the interval")
    if explanation.pauses and steps is not None:
        yield labelled_line(
            "pauses", f"{format_seconds(explanation.pauses)} for each step, in {len(steps.pauses)} places"
        )


def _list_causes(explanation: Explanation) -> Iterator[RenderableType]:
    if not explanation.causes:
        yield Text("No cause has evidence.")
        yield Text()
        return
    step = explanation.measured
    table = Table(
        Column("", align="right"),
        "cause",
        *formatted_numbers(("a step", ""), ("%", "")),
        Column("evidence"),
        edges=False,
    )
    for number, cause in enumerate(explanation.causes, 1):
        share = f"{cause.seconds / step:.1%}".rstrip("%") if cause.seconds is not None and step else ""
        table.add(str(number), cause.name, _format(cause), share, cause.evidence)
    yield show_table(table)
    yield Text()
    yield Text("what would help", "bold")
    for number, cause in enumerate(explanation.causes, 1):
        yield labelled_line(f"{number:>2}", cause.help)
    yield Text()


def _format(cause: Cause) -> str:
    return "not known" if cause.seconds is None else format_seconds(cause.seconds)


def _list_unexplained(explanation: Explanation) -> Iterator[str]:
    """Yields what has no cause."""
    if explanation.unexplained:
        yield f"{format_seconds(explanation.unexplained)} of every step beyond the forecast have no cause with evidence"
    if explanation.unexplained_pauses >= 0.001 * (explanation.measured or 0.0) > 0:
        yield f"{format_seconds(explanation.unexplained_pauses)} for each step, of pauses, have none either"
