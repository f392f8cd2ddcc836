"""``meshcast sweep`` and ``merge``: their progress bar, and the page of their summary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from meshcast.experiments.render.terminal.say import say
from meshcast.experiments.render.terminal.tables import labelled_line, reasons_table, show_table
from meshcast.experiments.sweeps.merge import merge
from meshcast.experiments.sweeps.options import SweepOptions
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.selection import STATUSES
from meshcast.experiments.sweeps.simulated_runs import COLUMNS, RANKED_BY_RUN
from meshcast.experiments.sweeps.store import RANKED_BY, WHOLE, parse_shard
from meshcast.experiments.views.table import Table, Words, formatted_numbers, numbers
from meshcast.simulator.report.figures import shown_in
from meshcast.simulator.report.formatting import describe_order, describe_value

REASONS = 10
"""Maximum number of reasons on the page."""


def run_sweep(
    path: Path, out: Path, options: SweepOptions, shard: str | None = None
) -> tuple[Sequence[str], dict[str, Any]]:
    """Runs the sweep of a file; returns the fields that vary and the summary. An interruption says how to resume it."""
    part = parse_shard(shard) if shard is not None else WHOLE
    read = load_sweep(path)
    watch = ProgressBar()
    try:
        with ExitStack() as after:
            after.callback(watch.bar.stop)
            summary = run(
                read,
                out,
                workers=options.workers,
                on=options.on,
                part=part,
                restart=options.restart,
                watch=watch,
                tell=_tell,
            )
            return read.fields, summary
    except KeyboardInterrupt:
        kept = f"{watch.done:,} of {watch.points or read.points:,} points are stored in {parts_folder(out)}"
        say(f"meshcast: interrupted, {kept}; the same command resumes it", err=True)
        raise


def _tell(sentence: str) -> None:
    say(f"meshcast: {sentence}", err=True)


def run_merge(paths: Sequence[Path], out: Path) -> tuple[Sequence[str], dict[str, Any]]:
    """Joins the results of shards; returns the fields that vary and the summary."""
    watch = ProgressBar()
    with ExitStack() as after:
        after.callback(watch.bar.stop)
        return merge(paths, out, watch)


class Rate(ProgressColumn):
    """Points per second over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.3g} {task.description}/s" if task.speed else "")


class ProgressBar:
    """A bar on a terminal: finished points, their rate and the remaining time, from the first chunk on."""

    def __init__(self, word: str = "points") -> None:
        """word: what is counted."""
        self.done, self.points, self._word = 0, 0, word
        columns = TextColumn(word), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn()
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())

    def __call__(self, done: int, points: int) -> None:
        self.done, self.points = done, points
        if not self.bar.task_ids:
            self.bar.add_task(self._word, total=points, completed=done)
            return
        self.show(0.0)

    def show(self, more: float) -> None:
        """Shows points beside the finished ones, parts of them included."""
        self.bar.start()  # after the workers have started: a process with threads must not be forked
        self.bar.update(self.bar.task_ids[0], completed=self.done + more)


def page(fields: Sequence[str], summary: dict[str, Any]) -> RenderableType:
    """Returns counts by status, the best plans, and the reasons of invalid points. fields: those that vary."""
    shown = {status: words for status, words in STATUSES.items() if summary["status"][status] or status != "tight"}
    counts = [f"{summary['status'][status]:,} {words}" for status, words in shown.items()]
    head = f"{summary['points']:,} points: {', '.join(counts)}, {summary['excluded']:,} left out by `where`"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if summary["best"]:
        parts.append(best_table(fields, summary["best"]))
        if words := describe_order(summary["equal"]):
            parts += [labelled_line("order", words, style=""), Text()]
    if summary["invalid"]:
        reasons = [(reason["reason"], reason["count"]) for reason in summary["invalid"]]
        rest = "{} more reasons, see the column `reason`"
        parts.append(reasons_table("invalid", "reason (of similar ones the first)", reasons, REASONS, rest))
    return Group(*parts, Text(f"rows       {summary['out']}"))


def best_table(fields: Sequence[str], rows: list[dict[str, Any]]) -> RenderableType:
    """Returns the plans that fit with the highest `RANKED_BY`, or of simulated runs with the most tokens per second."""
    parts = [name.rpartition(".") for name in fields]
    heads: list[Words] = [(f"{inside}.", last) if inside else last for inside, _, last in parts]
    figures = sorted(shown_in("best"), key=lambda figure: figure.name != RANKED_BY)
    if RANKED_BY_RUN in rows[0]:  # the columns of simulated runs take the room of all but the step
        figures = [figure for figure in figures if figure.name == "step_time_s"]
    simulated = [column for column in COLUMNS if column.name in rows[0]]
    values = [
        *((figure.head, figure.cell) for figure in figures),
        *((column.head, column.cell) for column in simulated),
    ]
    names = [*(figure.name for figure in figures), *(column.name for column in simulated)]
    table = Table(
        *numbers("best", style="bold"),
        *numbers(*heads, wrap="letters", low=True),
        *formatted_numbers(*values, wrap="never", low=True),
        dense=True,
    )
    for place, row in enumerate(rows, 1):
        changed = [None if row[name] is None else describe_value(row[name]) for name in fields]
        table.add(place, *changed, *(row[name] for name in names))
    return show_table(table)
