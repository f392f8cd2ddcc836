"""The pages of ``meshcast learn`` and ``meshcast validate learning``: errors of what is held back, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.published import keep_until_interrupted, progress, read_runs
from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Column, Table, formatted_numbers
from meshcast.validation.learning.learn import LearnAnswer

MAX_MOVES = 40
"""Maximum number of coefficients on the page; ``--json`` has all of them."""


def page(answer: LearnAnswer, out: Path) -> RenderableType:
    """Returns what was learnt of each section and of steps, the coefficients, and how to use the files."""
    errors = formatted_numbers(("rows", ","), (("error", "before"), ".1p"), (("held", "back"), ".1p"), wrap="never")
    table = Table(Column(("hardware", "section"), wrap="letters"), *errors, Column("learnt"), dense=True)
    for section in answer["sections"]:
        held = section["held_back"]
        name = f"{section['hardware']} {section['section']}"
        table.add(name, section["rows"], held["before"], held["after"], _tell_verdict(section))
    if steps := answer["steps"]:
        held = steps["held_back"]
        table.add("steps", steps["rows"], held["before"], held["after"], _tell_steps(steps))
    moves = [(section, move) for section in answer["sections"] for move in section["coefficients"]]
    parts: list[RenderableType] = [show_table(table)]
    if moves:
        values = formatted_numbers(("before", ".4g"), ("after", ".4g"), wrap="never")
        moved = Table(Column("coefficient", wrap="letters"), *values, Column("meaning"), dense=True)
        for section, move in moves[:MAX_MOVES]:
            name = " ".join(filter(None, (section["hardware"], section["section"], move["library"], move["name"])))
            moved.add(name, move["before"], move["after"], move["meaning"])
        parts += [Text(), show_table(moved)]
        if len(moves) > MAX_MOVES:
            parts.append(Text(f"{len(moves) - MAX_MOVES:,} coefficients more with --json", "dim"))
    if steps:
        parts += [Text(), show_table(_list_steps(steps))]
    parts += [Text(), Text("error %: median of the calibration in use, and of fits that have not seen the row", "dim")]
    if answer["files"]:
        parts += [
            Text(f"written   {', '.join(answer['files'])}"),
            Text(f"use       meshcast predict JOB --calibration {out}"),
        ]
    else:
        parts.append(Text("nothing is written: forecasts stay as they are"))
    return Group(*parts)


def _tell_verdict(section: LearnAnswer) -> str:
    """Says what became of the rows of a section."""
    if section["coefficients"]:
        return f"{len(section['coefficients'])} coefficients"
    if section["held_back"]["after"] is None:
        return "too few rows to hold any back"
    return "nothing: unseen rows are forecast no better"


def _tell_steps(steps: LearnAnswer) -> str:
    """Says what became of measured steps."""
    changes = [step["change"] for step in steps["steps"]]
    if not any(changes):
        return "no correction is certain; intervals follow these steps"
    reach = f"{min(changes):+.1%} to {max(changes):+.1%}"
    held = "confirmed by steps held back" if steps["confirmed"] else "what is certain of few steps"
    return f"these steps {reach}: {held}"


def _list_steps(steps: LearnAnswer) -> Table:
    """Returns measured steps beside their forecasts, and what all of them together make of these."""
    columns = (("measured s", ".4g"), ("forecast s", ".4g"), ("corrected s", ".4g"))
    table = Table(Column("step", wrap="letters"), *formatted_numbers(*columns, wrap="never"), dense=True)
    for step in steps["steps"][:MAX_MOVES]:
        table.add(step["name"], step["measured_s"], step["forecast_s"], step["corrected_s"])
    return table


# --------------------------------------------------------------------------------------------- trials


def validate_learning(paths: Sequence[Path], workers: int | None = None) -> tuple[LearnAnswer, int]:
    """Learns from some published runs of every source and forecasts its others: the answer, and the number of runs that
    an interruption has left out."""
    from meshcast.validation.learning.step_sources import forecast_sources, group_sources
    from meshcast.validation.learning.step_trials import try_sources
    from meshcast.validation.published.rows import PublishedRun

    runs = [run for run in read_runs(paths) if isinstance(run, PublishedRun) and run.step_time is not None]
    steps = keep_until_interrupted(progress(forecast_sources(runs, workers), len(runs), "runs"))
    return try_sources(group_sources(steps), progress), len(runs) - len(steps)


def trials_page(answer: LearnAnswer) -> RenderableType:
    """Returns errors by source and number of steps learnt from, how intervals hold, and how often learning hurts."""
    parts: list[RenderableType] = [show_table(errors_table(answer)), Text()]
    return Group(*parts, show_table(intervals_table(answer)), Text(), Text(describe_draws(answer)))


def errors_table(answer: LearnAnswer) -> Table:
    """Returns the median error of the other steps of every source, by the number of steps that were learnt from."""
    counts = answer["counts"]
    columns = (("steps", ""), *((f"{count} %", ".1p") for count in counts), ("5 / 0", ".2f"), ("whole", ".2f"))
    table = Table(Column("source", wrap="letters"), *formatted_numbers(*columns, wrap="never"), dense=True)
    for row in answer["sources"]:
        errors = [row["errors"].get(str(count)) for count in counts]
        ratios = (row[kind]["5"] / row["errors"]["0"] for kind in ("errors", "not_shortened"))
        table.add(row["source"], row["steps"], *errors, *ratios)
    return table


def intervals_table(answer: LearnAnswer) -> Table:
    """Returns the shares of steps inside their 90 % interval, and half of its width, before and after learning."""
    columns = (
        ("learnt from", ""), ("sources", ""), ("inside before %", ".0p"), ("after %", ".0p"),
        ("half before %", ".0p"), ("after %", ".0p"),
    )  # fmt: skip
    table = Table(*formatted_numbers(*columns, wrap="never"), dense=True)
    for row in answer["intervals"]:
        keys = ("steps", "sources", "inside_before", "inside_after", "width_before", "width_after")
        table.add(*(row[key] for key in keys))
    return table


def describe_draws(answer: LearnAnswer) -> str:
    """Says how often learning hurts."""
    draws = answer["draws"]
    if not draws["draws"]:
        return "no source has enough steps to count how often learning hurts"
    share, point = (draws[key] / draws["draws"] for key in ("worse", "by_a_point"))
    return (
        f"of {draws['draws']:,} draws with {draws['held']} steps or more held back {share:.1%} are forecast worse than "
        f"without learning, {point:.2%} by more than a point of the median error; most: {draws['most']:.1%}"
    )
