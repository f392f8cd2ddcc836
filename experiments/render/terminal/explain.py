"""The pages of ``meshcast compare`` and ``meshcast why``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.explain.assumed_fields import Alternative, AssumedFieldEffect
from meshcast.experiments.explain.comparison import ForecastComparison
from meshcast.experiments.explain.fitting_changes import MemoryChanges
from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities
from meshcast.experiments.render.terminal.forecast import list_memory_changes
from meshcast.experiments.render.terminal.scaling import FORMATS
from meshcast.experiments.render.terminal.tables import list_broken_rules, list_labels, show_table
from meshcast.experiments.views.table import Column, Format, Table, Wrap, formatted_numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.job.differences import write_value
from meshcast.simulator.job.hardware_figures import HardwareFigure
from meshcast.simulator.program.categories import EXPOSED
from meshcast.simulator.report.figures import FIGURES, name_contribution, parts_of_step
from meshcast.simulator.report.formatting import format_number, format_seconds
from meshcast.simulator.report.metrics import NAMED

MIN_SHARE = 1e-4
"""Share of the step below which a figure of the hardware has no row."""

MIN_GIB = 0.005
"""Memory below which a category has no row [GiB]."""

MIN_FIELD_SHARE, MIN_FIELD_GIB = 1e-3, 0.5
"""Share of the step and memory [GiB] below both of which an assumed field has no row."""

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


MAX_COLUMNS = 5
"""Jobs whose columns stand beside each other; further ones have a table of their own."""


def comparison_page(comparison: ForecastComparison) -> RenderableType:
    """Returns what differs in the jobs, then the headline figures, the parts of the step and the memory of all."""
    reports, letters = comparison.reports, comparison.letters
    groups = [range(len(reports))[first : first + MAX_COLUMNS] for first in range(0, len(reports), MAX_COLUMNS)]
    blocks: list[RenderableType] = []
    for columns in groups:
        changes = _table("field", *((letters[job], "") for job in columns))
        for change in comparison.changes:
            changes.add(change.field, *(write_value(change.values[job]) for job in columns))
        if not comparison.changes:
            changes.add("none")
        blocks.append(show_table(changes))
    blocks.append(_compare_figures(comparison) if len(reports) == 2 else _list_jobs(comparison))
    blocks += [_compare_parts(comparison, columns) for columns in groups]
    blocks += [_compare_memory(comparison, columns) for columns in groups]
    if len(reports) == 2:
        named = zip(letters, comparison.labels, reports, strict=True)
        blocks.append(Text(" ".join(f"{letter} ({label}) {report.fit_in_words}." for letter, label, report in named)))
    apart = [part for block in blocks for part in (Text(), block)]
    broken = [
        line for letter, report in zip(letters, reports, strict=True) for line in list_broken_rules(report, letter)
    ]
    return Group(Text(comparison.sentence(), "bold"), *apart, *broken)


def _compare_figures(comparison: ForecastComparison) -> RenderableType:
    """Returns the headline figures of two jobs, and their difference."""
    table = _table("", ("A", ""), ("B", ""), ("B - A", ""), ("%", ""))
    for name, pair in comparison.figures.items():
        figure = FIGURES[name]
        scale = 100 if figure.form.endswith("%}") else 1
        cells = [figure.cell(value) for value in pair]
        table.add(figure.title, *cells, format_signed(scale * (pair[1] - pair[0])), _percent(pair[0], pair[1]))
    return show_table(table)


def _list_jobs(comparison: ForecastComparison) -> RenderableType:
    """Returns the headline figures of more than two jobs, a row each."""
    figures = comparison.figures
    lengths = [(name, form) for name, form in FORMATS.items() if name in figures]
    formats = ("step s", ",.3f"), ("low", ",.3g"), ("high", ",.3g"), ("than A %", "+.1p"), ("MFU %", ".1p")
    forms: list[tuple[str, Format]] = [*formats, ("exposed s", ",.3f"), ("peak GiB", ",.1f"), *lengths]
    table = Table("job", *formatted_numbers(*forms, wrap="never"), Column("memory", wrap="never"), edges=False)
    steps = figures["step_time_s"]
    for job, report in enumerate(comparison.reports):
        low, high = report.interval_90
        table.add(
            *(comparison.letters[job], steps[job], low, high, steps[job] / steps[0] - 1),
            *(figures["mfu_palm"][job], sum(report.parts[key] for key in EXPOSED), report.peak_device / GIB),
            *(figures[name][job] for name, _ in lengths),
            report.fit.verdict.replace("-", " "),
        )
    table.notes = ["low, high: nine of ten measured steps should lie between; exposed: communication of all axes"]
    return Group(list_labels(comparison.labels), Text(), show_table(table))


def _compare_parts(comparison: ForecastComparison, jobs: Sequence[int]) -> RenderableType:
    """Returns the parts of the steps of some jobs; of two jobs their difference."""
    steps, letters = comparison.figures["step_time_s"], comparison.letters
    columns: list[tuple[str, Format]] = [(f"{letters[job]} ms", ",.1f") for job in jobs]
    is_pair = len(steps) == 2
    if is_pair:
        columns += [("B - A ms", "+,.1f"), ("% of A's step", "+.1p")]

    def compare(seconds: Sequence[float]) -> list[float]:
        change = seconds[1] - seconds[0]
        return [*(1e3 * seconds[job] for job in jobs), *([1e3 * change, change / steps[0]] if is_pair else [])]

    parts = _table("part of the step", *columns)
    parts.close("step", *compare(steps))
    for key, seconds in sorted(comparison.parts.items(), key=lambda item: min(item[1]) - max(item[1])):
        parts.add(parts_of_step()[key].label, *compare(seconds))
    return show_table(parts)


def _compare_memory(comparison: ForecastComparison, jobs: Sequence[int]) -> RenderableType:
    """Returns the memory of the fullest stages of some jobs; of two jobs their difference."""
    is_pair = len(comparison.reports) == 2
    columns: list[tuple[str, Format]] = [(f"{comparison.letters[job]} GiB", ",.2f") for job in jobs]
    table = _table("fullest stage", *columns, *([("B - A GiB", "+,.2f")] if is_pair else []))
    for category, gib in comparison.memory.items():
        if max(gib) >= MIN_GIB:
            table.add(category, *(gib[job] for job in jobs), *([round(gib[1] - gib[0], 2) + 0.0] if is_pair else []))
    return show_table(table)


def sensitivity_page(sensitivities: Sensitivities, changes: MemoryChanges | None = None) -> RenderableType:
    """Returns the limit, the critical path by kind, every figure of the hardware and every assumed field that matters.

    changes: that make a plan fit that is tight or does not.
    """
    report = sensitivities.report
    head = f"{report.job.model.name} on {report.job.cluster.name}: a step takes {format_seconds(report.step_time)}"
    blocks: list[RenderableType] = [
        Text(head, "bold"),
        Text(report.limits),
        *list_memory_changes(changes, report.capacity),
    ]
    blocks += [
        Text(),
        _list_path(sensitivities),
        Text(),
        *_hardware_blocks(sensitivities),
        Text(),
        *_assumed_blocks(sensitivities),
    ]
    blocks += [Text(), Text(_interval_sentence(sensitivities))]
    blocks += list_broken_rules(report)
    blocks += [Text(f"assumed: {sentence}", "dim") for sentence in report.assumed]
    return Group(*blocks)


def _list_path(sensitivities: Sensitivities) -> RenderableType:
    """Returns the parts of the step on the critical path, the longest first."""
    report = sensitivities.report
    table = _table("critical path", ("time", format_seconds), ("% of the step", ".1p"))
    times = {figure.label: figure.compute(report) or 0.0 for figure in parts_of_step().values()}
    for label, seconds in sorted(times.items(), key=lambda item: -item[1]):
        if seconds >= MIN_SHARE * report.step_time:
            table.add(label, seconds, seconds / report.step_time)
    return show_table(table)


def _hardware_blocks(sensitivities: Sensitivities) -> list[RenderableType]:
    """Returns a row for every figure of the hardware that changes the step, and the names of the others."""
    step = sensitivities.report.step_time
    times = [(head, format_seconds) for head in ("1 % saves", f"{RANGE:.0%} better", f"{RANGE:.0%} worse")]
    table = _table("hardware", ("now", format_value), *times, ("swing %", ".1p"))
    rest = []
    for effect in sensitivities.figures:
        if effect.swing_s < MIN_SHARE * step:
            rest.append(effect.figure.label)
            continue
        seconds = effect.saved_s, effect.better_s, effect.worse_s
        table.add(effect.figure.label, effect.figure, *seconds, effect.swing_s / step)
    return [show_table(table), *_without_effect(rest)]


def _assumed_blocks(sensitivities: Sensitivities) -> list[RenderableType]:
    """Returns the extremes of every assumed field that matters, and the names of the other fields."""
    if not sensitivities.assumed:
        return []
    forms = ("assumed", ""), ("if it is", ""), ("step %", "+.1f"), ("memory GiB", "+,.1f")
    table = _table("not stated", *forms, wrap="letters")
    rest = []
    for effect in sensitivities.assumed:
        shown = _extremes(effect)
        if not shown:
            rest.append(effect.field.name)
        for row, other in enumerate(shown):
            longer = round(100 * (other.step_time_s / effect.step_time_s - 1), 1) + 0.0
            memory = round(other.peak_device_gib - effect.peak_device_gib, 1) + 0.0
            table.add(
                *("", "") if row else (effect.field.name, write_value(effect.field.value)),
                *(write_value(other.value), longer),
                memory if other.fits or not sensitivities.report.fits else "does not fit",
            )
    return [show_table(table), *_without_effect(rest)]


def _extremes(effect: AssumedFieldEffect) -> list[Alternative]:
    """Returns the alternatives of the shortest and the longest step if they change it, else that with the most other
    memory."""
    least = MIN_FIELD_SHARE * effect.step_time_s
    ends = dict.fromkeys((effect.alternatives[0], effect.alternatives[-1]))
    shown = [alternative for alternative in ends if abs(alternative.step_time_s - effect.step_time_s) >= least]
    if shown or effect.memory_effect_gib < MIN_FIELD_GIB:
        return shown
    return [max(effect.alternatives, key=lambda alternative: abs(alternative.peak_device_gib - effect.peak_device_gib))]


def _without_effect(names: list[str]) -> list[RenderableType]:
    return [Text(f"Without effect, or nearly so: {', '.join(names)}.", "dim")] if names else []


def _interval_sentence(sensitivities: Sensitivities) -> str:
    """Returns the interval, and what contributes most to its variance."""
    low, high = sensitivities.report.interval_90
    widest = [f"{name_contribution(key)} {share:.0%}" for key, share in list(sensitivities.variance.items())[:NAMED]]
    widened = f" Largest shares of the variance: {', '.join(widest)}." if widest else ""
    return f"Nine of ten measured steps should lie between {format_seconds(low)} and {format_seconds(high)}.{widened}"


def format_value(figure: HardwareFigure) -> str:
    """Returns the value of a figure of the hardware with its unit."""
    if figure.unit == "s":
        return format_seconds(figure.value)
    if not figure.unit:
        return format_number(figure.value)
    scale, prefix = next(((scale, prefix) for scale, prefix in PREFIXES if figure.value >= scale), (1.0, ""))
    return f"{format_number(figure.value / scale)} {prefix}{figure.unit}"


def format_signed(value: float) -> str:
    """Returns a difference with its sign."""
    return f"{'-' if value < 0 else '+'}{format_number(abs(value))}"


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}"[:-1] if before else ""


def _table(first: str, *columns: tuple[str, Format], wrap: Wrap = "never") -> Table:
    """Makes a table without rows.

    first: head of its first column.
    columns: heads and formats of those of numbers.
    wrap: of the first.
    """
    return Table(Column(first, wrap=wrap), *formatted_numbers(*columns, wrap="never"), edges=False)
