"""The page of ``meshcast advise``: the plan as it is, its changes alone and together, and the edits of the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.advice.advice import LEAST_GAIN, TERMS, Advice, AdvisedPlan, measure
from meshcast.experiments.advice.neighbours import PlanChange
from meshcast.experiments.explain.fitting_changes import write_change
from meshcast.experiments.render.terminal.tables import labelled_line, list_broken_rules, show_table
from meshcast.experiments.views.table import Column, Format, Table, Words, formatted_numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.report.formatting import describe_field, format_probability, format_seconds

NUMBERS = ("one", "two", "three")

SMALL = 0.005
"""Largest change of a part of the step, over the step, that has no column."""

MOST = 6
"""Settings of a change that are listed; ``--json`` has all."""

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
        labelled_line("measured", _describe_distance(advice)),
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


def _describe_distance(advice: Advice) -> str:
    """Returns whether somebody has measured a plan like that of the job as it is."""
    distance = measure(advice.now)
    if distance.nearest is None or not distance.outside:
        return str(distance)
    return f"no published run is like it; {distance}"


def _list_fitting(advice: Advice) -> list[RenderableType]:
    """Returns the cheapest changes that make a plan fit."""
    if advice.now.fit.verdict == "fits":
        return []
    lines = [
        labelled_line(
            "to fit" if number == 0 else "",
            f"{_join(settings) or change}: step {format_seconds(change.forecast.step_time)}, "
            f"{change.forecast.peak_allocated / GIB:.1f} GiB allocated",
        )
        for number, (change, settings) in enumerate(advice.fitting)
    ]
    return lines or [labelled_line("to fit", "no change of one or two fields that was tried makes the plan fit surely")]


def _list_changes(advice: Advice) -> list[RenderableType]:
    """Returns the table of changes, alone and together, then what each is to the program, or to the job file."""
    plans = [*advice.changes, *advice.together]
    if not plans:
        edited = ", and can be told by edits of this file" if advice.best is not None else ""
        return [Text(f"No change saves {LEAST_GAIN:.1%} of the step and fits{edited}.")]
    terms = [name for name in TERMS if any(abs(plan.terms[name]) > SMALL * advice.now.step_time for plan in plans)]
    measured = any(plan.measured_runs for plan in plans)
    columns: tuple[tuple[Words, Format], ...] = (
        ("step", format_seconds),
        (("saved", "%"), ".1p"),
        *(((name, "ms"), "+,.0f") for name in terms),
        ("GiB", ",.1f"),
        (("fits", "%"), format_chance),
        *([("runs", ",")] if measured else []),
    )
    table = Table(
        Column("", align="right"),
        Column("change", width=14),
        *formatted_numbers(*columns, wrap="never", low=True),
        edges=False,
        dense=True,
    )
    settings = []
    for number, plan in enumerate(plans, 1):
        if number == len(advice.changes) + 1:
            table.end_section()
        figures = plan.trial.seconds, plan.gain, *(round(1e3 * plan.terms[name]) for name in terms)
        need = plan.report.peak_allocated / GIB, plan.trial.probability, *([plan.measured_runs] if measured else [])
        table.add(str(number), _name_changes(plan), *figures, *need)
        settings.append(labelled_line(f"{number:>2}", _join(_list_words(plan))))
    table.notes = list(_list_notes(advice))
    return [show_table(table), Text(), Text(_name_settings(advice), "bold"), *settings]


def _name_changes(plan: AdvisedPlan) -> str | tuple[str, ...]:
    """Returns changes by the fields that they are about."""
    names = [_name_change(change) for change in plan.changes]
    if len(names) > 1:
        return (f"{NUMBERS[len(names) - 1]} together:", *names)
    return f"{names[0]} {MARK}" if plan.trial.numerics else names[0]


def _name_change(change: PlanChange) -> str:
    name, after = change.key.removeprefix("plan.").removeprefix("framework.set."), describe_field(change.after)
    before = "" if change.before is None else f"{describe_field(change.before)} -> "
    return f"{name} {before}{after}"


def _list_notes(advice: Advice) -> Iterator[str]:
    measured = any(plan.measured_runs for plan in (*advice.changes, *advice.together))
    runs = "runs: published ones of such a plan" if measured else "nobody has published a run of any of these plans"
    yield f"ms: change of the parts of the step, a minus is saved. {runs}."
    if any(plan.trial.numerics for plan in advice.changes):
        yield f"{MARK} changes what is computed; figures are for as many tokens. It is not among those together."


def _name_settings(advice: Advice) -> str:
    """Returns the head of the list of settings."""
    if not advice.program:
        return "as changes of the job (--set)"
    return f"in the words of {advice.program}"


def format_chance(probability: float) -> str:
    """Formats a probability in whole percents without the sign."""
    words = format_probability(probability).removesuffix("%").strip()
    return words.replace("over ", ">").replace("under ", "<")


def _join(settings: Sequence[str]) -> str:
    """Returns settings in a line, of many the first ones and the number of the others."""
    more = [f"and {len(settings) - MOST} more"] if len(settings) > MOST + 1 else []
    return "; ".join([*settings[: MOST if more else None], *more])


def _list_words(plan: AdvisedPlan) -> list[str]:
    """Returns settings in the words of the program, or as fields of a job file."""
    return [*plan.settings] or [
        f"{field}={write_change(value)}" for change in plan.changes for field, value in change.fields.items()
    ]


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
        lines.append(labelled_line("", f"{advice.patch.words}. The edits follow; --write FILE writes them"))
    elif advice.unpatched:
        lines.append(labelled_line("by hand", advice.unpatched, style="bold yellow"))
    return lines


def _count_trials(advice: Advice) -> str:
    tried, refused, untold = advice.trials
    words = f"{tried:,} plans forecast; {refused:,} break a rule"
    return f"{words}; {untold:,} cannot be told to {advice.program}" if advice.program else words
