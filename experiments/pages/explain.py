"""The pages of ``meshcast compare`` and ``meshcast why``."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshcast.experiments.explain.assumed_fields import Alternative, AssumedFieldEffect
from meshcast.experiments.explain.comparison import HEADLINES, ForecastComparison
from meshcast.experiments.explain.fitting_changes import MemoryChanges
from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities
from meshcast.experiments.pages.forecast import list_memory_changes
from meshcast.experiments.pages.tables import list_broken_rules, number_columns, ruled_table
from meshcast.simulator.job.hardware_figures import HardwareFigure
from meshcast.simulator.report.figures import FIGURES, name_contribution, parts_of_step
from meshcast.simulator.report.formatting import format_number, format_seconds
from meshcast.simulator.report.metrics import NAMED

LEAST = 1e-4
"""Share of the step below which a figure of the hardware has no row of its own."""

LEAST_GIB = 0.005
"""Memory below which a category has no row of its own [GiB]."""

LEAST_FIELD, LEAST_FIELD_GIB = 1e-3, 0.5
"""Share of the step and memory [GiB] below both of which an assumed field has no row of its own."""

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def comparison_page(found: ForecastComparison) -> RenderableType:
    """What differs in the jobs, then the headline figures, the parts of the step and the memory of both."""
    changes = _table("field", "A", "B")
    for change in found.changes:
        changes.add_row(change.field, _value(change.first), _value(change.second))
    if not found.changes:
        changes.add_row("none", "", "")

    figures = _table("", "A", "B", "B - A", "%")
    for name in HEADLINES:
        figure = FIGURES[name]
        pair = [figure.read(report.to_dict()) for report in (found.first, found.second)]
        scale = 100 if figure.form.endswith("%}") else 1
        cells = [figure.cell(value) for value in pair]
        figures.add_row(figure.title, *cells, format_signed(scale * (pair[1] - pair[0])), _percent(*pair))

    total = found.first.step_time, found.second.step_time
    parts = _table("part of the step", "A ms", "B ms", "B - A ms", "% of A's step", footer=True)
    for key, (one, other) in sorted(found.parts.items(), key=lambda item: -abs(item[1][1] - item[1][0])):
        share = (other - one) / total[0]
        parts.add_row(
            parts_of_step()[key].label,
            f"{1e3 * one:,.1f}",
            f"{1e3 * other:,.1f}",
            f"{1e3 * (other - one):+,.1f}",
            f"{share:+.1%}"[:-1],
        )
    feet = [f"{1e3 * time:,.1f}" for time in total]
    feet += [f"{1e3 * (total[1] - total[0]):+,.1f}", f"{(total[1] - total[0]) / total[0]:+.1%}"[:-1]]
    for column, foot in zip(parts.columns, ["step", *feet], strict=True):
        column.footer = foot

    memory = _table("fullest stage", "A GiB", "B GiB", "B - A GiB")
    for category, (one, other) in found.memory.items():
        if max(one, other) < LEAST_GIB:
            continue
        memory.add_row(category, f"{one:,.2f}", f"{other:,.2f}", f"{round(other - one, 2) + 0.0:+,.2f}")
    fits = [f"{name} {report.fit_in_words}." for name, report in (("A", found.first), ("B", found.second))]
    blocks: list[RenderableType] = [changes, figures, parts, memory, Text(" ".join(fits))]
    apart = [one for block in blocks for one in (Text(), block)]
    broken = [*list_broken_rules(found.first, "A"), *list_broken_rules(found.second, "B")]
    return Group(Text(found.sentence(), "bold"), *apart, *broken)


def sensitivity_page(found: Sensitivities, changes: MemoryChanges | None = None) -> RenderableType:
    """The limit, the critical path by kind, every figure of the hardware and every assumed field that matters.

    changes: that make a plan fit that is tight or does not.
    """
    report = found.report
    head = f"{report.job.model.name} on {report.job.cluster.name}: a step takes {format_seconds(report.step_time)}"
    blocks: list[RenderableType] = [
        Text(head, "bold"),
        Text(report.limits),
        *list_memory_changes(changes, report.capacity),
    ]
    blocks += [Text(), _path_table(found), Text(), *_hardware_blocks(found), Text(), *_assumed_blocks(found)]
    blocks += [Text(), Text(_interval_sentence(found))]
    blocks += list_broken_rules(report)
    blocks += [Text(f"assumed: {sentence}", "dim") for sentence in report.assumed]
    return Group(*blocks)


def _path_table(found: Sensitivities) -> Table:
    """The parts of the step on the critical path, the longest first."""
    report = found.report
    table = _table("critical path", "time", "% of the step")
    times = {figure.label: figure.compute(report) or 0.0 for figure in parts_of_step().values()}
    for label, seconds in sorted(times.items(), key=lambda item: -item[1]):
        if seconds >= LEAST * report.step_time:
            table.add_row(label, format_seconds(seconds), f"{seconds / report.step_time:.1%}"[:-1])
    return table


def _hardware_blocks(found: Sensitivities) -> list[RenderableType]:
    """A row for every figure of the hardware that changes the step, and the names of the others."""
    step = found.report.step_time
    table = _table("hardware", "now", "1 % saves", f"{RANGE:.0%} better", f"{RANGE:.0%} worse", "swing %")
    rest = []
    for one in found.found:
        if one.swing_s < LEAST * step:
            rest.append(one.figure.label)
            continue
        table.add_row(
            one.figure.label,
            format_value(one.figure),
            format_seconds(one.saved_s),
            format_seconds(one.better_s),
            format_seconds(one.worse_s),
            f"{one.swing_s / step:.1%}"[:-1],
        )
    return [table, *_without_effect(rest)]


def _assumed_blocks(found: Sensitivities) -> list[RenderableType]:
    """The extremes of every assumed field that matters, and the names of the other fields."""
    if not found.assumed:
        return []
    table = _table("not stated", "assumed", "if it is", "step %", "memory GiB")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    rest = []
    for one in found.assumed:
        shown = _extremes(one)
        if not shown:
            rest.append(one.field.name)
        for row, other in enumerate(shown):
            memory = f"{round(other.peak_device_gib - one.peak_device_gib, 1) + 0.0:+,.1f}"
            table.add_row(
                one.field.name if not row else "",
                _value(one.field.value) if not row else "",
                _value(other.value),
                f"{round(100 * (other.step_time_s / one.step_time_s - 1), 1) + 0.0:+.1f}",
                memory if other.fits or not found.report.fits else "does not fit",
            )
    return [table, *_without_effect(rest)]


def _extremes(found: AssumedFieldEffect) -> list[Alternative]:
    """The alternatives of the shortest and the longest step if they change it, else that with the most other memory."""
    least = LEAST_FIELD * found.step_time_s
    ends = dict.fromkeys((found.alternatives[0], found.alternatives[-1]))
    shown = [one for one in ends if abs(one.step_time_s - found.step_time_s) >= least]
    if shown or found.memory_effect_gib < LEAST_FIELD_GIB:
        return shown
    return [max(found.alternatives, key=lambda one: abs(one.peak_device_gib - found.peak_device_gib))]


def _without_effect(names: list[str]) -> list[RenderableType]:
    return [Text(f"Without effect, or nearly so: {', '.join(names)}.", "dim")] if names else []


def _interval_sentence(found: Sensitivities) -> str:
    """The interval, and what contributes most to its variance."""
    low, high = found.report.interval_90
    widest = [f"{name_contribution(key)} {share:.0%}" for key, share in list(found.variance.items())[:NAMED]]
    widened = f" Largest shares of the variance: {', '.join(widest)}." if widest else ""
    return f"Nine of ten measured steps should lie between {format_seconds(low)} and {format_seconds(high)}.{widened}"


def format_value(figure: HardwareFigure) -> str:
    """The value of a figure of the hardware with its unit."""
    if figure.unit == "s":
        return format_seconds(figure.value)
    if not figure.unit:
        return format_number(figure.value)
    scale, prefix = next(((scale, prefix) for scale, prefix in PREFIXES if figure.value >= scale), (1.0, ""))
    return f"{format_number(figure.value / scale)} {prefix}{figure.unit}"


def format_signed(value: float) -> str:
    """A difference with its sign."""
    return f"{'-' if value < 0 else '+'}{format_number(abs(value))}"


def _percent(one: float, other: float) -> str:
    return f"{other / one - 1:+.1%}"[:-1] if one else ""


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value in (None, "") else value if isinstance(value, str) else json.dumps(value)


def _table(first: str, *numbers: str, footer: bool = False) -> Table:
    columns = Column(first, no_wrap=True), *number_columns(*numbers, no_wrap=True)
    return ruled_table(*columns, show_edge=False, show_footer=footer)
