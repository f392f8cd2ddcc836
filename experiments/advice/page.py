"""The page of ``meshcast advise``: the plan as it is, its changes alone and together, and the edits of the best."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.advice.advice import LEAST_GAIN, TERMS, AdvisedPlan, Advice, measure
from meshcast.experiments.advice.neighbours import PlanChange
from meshcast.experiments.explain.fitting_changes import write_change
from meshcast.experiments.render.terminal.tables import labelled_line, list_broken_rules, show_table
from meshcast.experiments.views.table import Column, Format, Table, formatted_numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.report.formatting import format_probability, format_seconds

NUMBERS = ("one", "two", "three")

MARK = "*"
"""Behind a change of the numerics."""

EXPOSED = "exposed communication"


def page(advice: Advice) -> RenderableType:
    """Returns the whole page."""
    report = advice.now
    program = f", {advice.program}" if advice.program else ""
    blocks: list[RenderableType] = [
        Text(f"{report.job.model.name} on {report.job.cluster.name}{program}: what to change", "bold"),
        Text(),
        labelled_line("now", _describe_now(advice)),
        labelled_line("", report.fit_in_words),
        labelled_line("measured", str(measure(report))),
        *list_broken_rules(report),
        *_list_fitting(advice),
        Text(),
        *_list_changes(advice),
        Text(),
        *_describe_best(advice),
        labelled_line("tried", _count_trials(advice), style="dim"),
    ]
    return Group(*blocks)


def _describe_now(advice: Advice) -> str:
    """Returns the step as it is, and the shares of its parts."""
    report = advice.now
    shares = {name: sum(report.parts[key] for key in keys) / report.step_time for name, keys in TERMS.items()}
    names = {"exposed": EXPOSED, "other": "host and idle"}
    words = ", ".join(f"{names.get(name, name)} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return f"{format_seconds(report.step_time)} a step: {words}"


def _list_fitting(advice: Advice) -> list[RenderableType]:
    """Returns the cheapest changes that make a plan fit."""
    if advice.now.fit.verdict == "fits":
        return []
    lines = [
        labelled_line(
            "to fit" if number == 0 else "",
            f"{'; '.join(settings) or change}: step {format_seconds(change.forecast.step_time)}, "
            f"{change.forecast.peak_allocated / GIB:.1f} GiB allocated",
        )
        for number, (change, settings) in enumerate(advice.fitting)
    ]
    return lines or [labelled_line("to fit", "no change of one or two fields that was tried makes the plan fit surely")]


def _list_changes(advice: Advice) -> list[RenderableType]:
    """Returns the table of single changes, and of those together."""
    if not (advice.changes or advice.together):
        return [Text(f"No single change saves {LEAST_GAIN:.1%} of the step and fits.")]
    columns: tuple[tuple[str, Format], ...] = (
        ("step", format_seconds),
        ("saved %", ".1p"),
        *((f"{name} ms", "+,.0f") for name in TERMS),
        ("GiB", ",.1f"),
        ("fits %", format_chance),
        ("runs", ","),
    )
    table = Table("change", *formatted_numbers(*columns, wrap="never"), dense=True)
    for plan in advice.changes:
        table.add(_describe_change(plan), *_list_figures(plan))
    table.end_section()
    for plan in advice.together:
        lines = (f"{NUMBERS[len(plan.changes) - 1]} together:", *_list_words(plan))
        table.add(lines, *_list_figures(plan))
    notes = ["Changes of parts of the step: negative is saved. runs: published ones of such a plan; 0: nobody's."]
    if any(plan.trial.numerics for plan in advice.changes):
        notes.append(
            f"{MARK} changes what is computed, for the same tokens: not among those together. Try it alone, with an eye "
            "on the loss."
        )
    table.notes = notes
    return [show_table(table)]


def _list_figures(plan: AdvisedPlan) -> Iterator[object]:
    yield plan.trial.seconds
    yield plan.gain
    yield from (1e3 * seconds or 0.0 for seconds in plan.terms.values())
    yield plan.report.peak_allocated / GIB
    yield plan.trial.probability
    yield plan.measured_runs


def format_chance(probability: float) -> str:
    """Formats a probability in whole percents without the sign."""
    return format_probability(probability).removesuffix("%").strip()


def _describe_change(plan: AdvisedPlan) -> tuple[str, ...]:
    """Returns the settings of a single change, each in a line."""
    first, *others = _list_words(plan)
    return (f"{first} {MARK}" if plan.trial.numerics else first, *others)


def _list_words(plan: AdvisedPlan) -> list[str]:
    """Returns settings in the words of the program, or of a job file."""
    return [*plan.settings] or [words for change in plan.changes for words in list_field_words(change)]


def list_field_words(change: PlanChange) -> Iterator[str]:
    """Yields the fields of a change with their values now and then."""
    for field, value in change.fields.items():
        after = write_change(value)
        if field != change.key or change.before is None:
            yield f"{field}={after}"
        else:
            before = list(change.before) if isinstance(change.before, tuple) else change.before
            yield f"{field} {write_change(before)} -> {after}"


def _describe_best(advice: Advice) -> list[RenderableType]:
    """Returns what the best changes give, and whether the edited file is read back so."""
    best = advice.best
    if best is None:
        return []
    number = len(best.changes)
    changes = f"{NUMBERS[number - 1]} change{'s together' if number > 1 else ''}"
    fits = format_probability(best.trial.probability)
    words = f"{changes}: {format_seconds(best.trial.seconds)} a step, {best.gain:.1%} less; it fits with {fits}"
    lines = [labelled_line("best", words)]
    if advice.patch is not None:
        lines.append(labelled_line("", f"read back: {advice.patch.words}"))
    elif advice.unpatched:
        lines.append(labelled_line("by hand", advice.unpatched, style="bold yellow"))
    return lines


def _count_trials(advice: Advice) -> str:
    tried, refused, untold = advice.trials
    words = f"{tried:,} plans forecast; {refused:,} break a rule"
    return f"{words}; {untold:,} cannot be told to {advice.program}" if advice.program else words
