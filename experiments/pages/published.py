"""``meshcast validate``: forecasts held against what is known, as tables for people and JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from validation.measurements.jsonl import read_lines

FEW = 40
"""Runs that are shown one by one."""

FIGURES = ("step-time", "memory")
"""What ``validate published`` draws; the first alone where a file is named."""


# ----------------------------------------------------------------------------------------- pipelines


def pipeline(paths: Sequence[Path]) -> tuple[dict[str, Any], RenderableType]:
    """Schedules played with given times: the answer and its table."""
    from validation.pipelines.cases import EXAMPLES, answers

    cases = [found for path in paths for _, found in read_lines(path)] if paths else list(EXAMPLES)
    good = iter(answers([case for case in cases if isinstance(case, dict)]))
    rows = [next(good) if isinstance(case, dict) else {"status": "refused", "reason": case} for case in cases]
    return {"rows": rows}, cases_table(cases, rows)


def cases_table(cases: Sequence[Any], rows: Sequence[dict[str, Any]]) -> Table:
    """The answers of ``validate pipeline`` as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule", style="bold")
    for head in ("p", "m", "v", "makespan", "bubble %", "chunks in flight"):
        table.add_column(head, justify="left" if head == "chunks in flight" else "right")
    for case, row in zip(cases, rows, strict=True):
        stated = case if isinstance(case, dict) else {}
        words = [str(stated.get(key, 1 if key == "v" else "")) for key in ("p", "m", "v")]
        if row["status"] == "refused":
            table.add_row(str(stated.get("schedule", "?")), *words, "refused", "", str(row["reason"]))
            continue
        held = " ".join(map(str, row["in_flight_b"]))
        table.add_row(
            str(stated["schedule"]), *words, f"{row['makespan']:,.6g}", f"{row['bubble_rate']:.2%}"[:-1], held
        )
    return table


# ------------------------------------------------------------------------------------ published runs


def validate_published(paths: Sequence[Path], workers: int | None = None) -> tuple[dict[str, Any], int]:
    """Forecasts of published runs: the answer, and how many runs have none because somebody interrupted."""
    from validation.published.answer import answers
    from validation.published.baseline import add_baselines
    from validation.published.rows import read, read_shipped
    from validation.published.summary import summarize_answers

    runs = [run for path in paths for run in read(path)] if paths else list(read_shipped())
    rows: list[dict[str, Any]] = []
    try:
        for row in progress(answers(runs, workers), len(runs), "runs"):
            rows.append(row)
    except KeyboardInterrupt:
        pass
    add_baselines(rows)
    return {"rows": rows, "summary": summarize_answers(rows)}, len(runs) - len(rows)


def progress(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """The same steps, with a bar on a terminal while they are asked for."""
    if not sys.stderr.isatty():
        yield from steps
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(steps, total=total)


def published_page(answer: dict[str, Any]) -> RenderableType:
    """Errors of all runs and of every group, the naive forecasts beside them, then what was refused and why."""
    stated = answer["summary"]
    runs = "run" if stated["rows"] == 1 else "runs"
    head = f"{stated['rows']:,} published {runs}: {stated['predicted']:,} forecast, {stated['refused']:,} refused"
    parts: list[RenderableType] = [Text(head, style="bold"), Text()]
    if stated["rows"] <= FEW:
        parts += [runs_table(answer["rows"]), Text()]
    parts.append(errors_table(stated))
    parts.append(
        Text("time: forecast over measured step - 1; timed: both are known; inside: in the 90% interval", "dim")
    )
    parts.append(Text("naive: one efficiency for a GPU and a number format, told from these very runs", "dim"))
    parts.append(Text("blind: the same, told from the runs of all other sources", "dim"))
    if stated["memory"]["compared"]:
        parts += [Text(), memory_table(stated)]
    if stated["refusals"]:
        parts += [Text(), refusals_table(stated["refusals"])]
    for name in stated["faster_than_peak"]:
        parts.append(Text(f"DEFECT: {name} is forecast faster than its matrix products at peak", "bold red"))
    return Group(*parts)


def runs_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Every run, measured and forecast."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", style="bold", no_wrap=True)
    table.add_column("GPU")
    for head in ("measured s", "forecast s", "90% interval", "error %"):
        table.add_column(head, justify="right")
    for row in rows:
        measured = row["measured"].get("step_time_s")
        if row["error"] is not None:  # of a run that tells its tokens/s only, too
            measured = row["predicted"]["step_time_s"] / (1 + row["error"])
        cells = [row["id"] or "?", row["gpu"] or "", f"{measured:,.2f}" if measured else ""]
        if row["status"] == "refused":
            table.add_row(*cells, "refused", "", "")
            continue
        low, high = row["predicted"]["interval_90_s"]
        error = "" if row["error"] is None else f"{100 * row['error']:+.1f}"
        table.add_row(*cells, f"{row['predicted']['step_time_s']:,.2f}", f"{low:,.2f} to {high:,.2f}", error)
    return table


def errors_table(stated: dict[str, Any]) -> Table:
    """Errors of the step time [%], one row a group."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("time error %", style="bold", no_wrap=True)
    heads = "runs", "timed", "median", "mean", "p90", "bias", "inside"
    for head in (*heads, "naive\nmedian", "\np90", "blind\nmedian", "\np90"):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")

    def add(name: str, of: dict[str, Any], style: str = "") -> None:
        naive, blind = of["baseline"], of["baseline_from_other_sources"]
        ours = [percent(of[key]) for key in ("median", "mean", "p90")] + [percent(of["bias"], "+")]
        theirs = [percent(each[key]) for each in (naive, blind) for key in ("median", "p90")]
        inside = percent(of["inside_interval"], digits=0)
        table.add_row(name, f"{of['rows']:,}", f"{of['compared']:,}", *ours, inside, *theirs, style=style)

    _add_group_rows(table, stated, add)
    return table


def memory_table(stated: dict[str, Any]) -> Table:
    """Errors of the peak memory [%], one row a group that has any."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("memory error %", style="bold", no_wrap=True)
    for head in ("compared", "median", "mean", "p90", "bias"):
        table.add_column(head, justify="right")

    def add(name: str, of: dict[str, Any], style: str = "") -> None:
        held = of["memory"]
        if held["compared"]:
            sizes = [percent(held[key]) for key in ("median", "mean", "p90")]
            table.add_row(name, f"{held['compared']:,}", *sizes, percent(held["bias"], "+"), style=style)

    _add_group_rows(table, stated, add)
    return table


def _add_group_rows(table: Table, stated: dict[str, Any], add: Any) -> None:
    """A row for all, then one row a source, GPU, class and program."""
    add("all", stated, "bold")
    for group in ("source", "gpu", "class", "stack"):
        if not stated[f"by_{group}"]:
            continue
        table.add_row()
        table.add_row(Text(f"by {group}", style="dim"))
        for name, of in stated[f"by_{group}"].items():
            add(f"  {name}", of)


def refusals_table(refusals: dict[str, int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("refused", justify="right")
    table.add_column("because")
    for reason, count in refusals.items():
        table.add_row(f"{count:,}", reason)
    return table


def percent(value: float | None, sign: str = "", digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:{sign}.{digits}f}"


def draw(answer: dict[str, Any], files: dict[str, Path]) -> None:
    """Draws the figures of ``validate published`` into their files, of memory where any run has a reading.

    Raises OSError where one cannot be written.
    """
    if not files:
        return
    from experiments.plots import published as plots

    figures = {"step-time": plots.draw_times, "memory": plots.draw_memories}
    for name, path in files.items():
        if name == "memory" and not answer["summary"]["memory"]["compared"]:
            continue
        path.parent.mkdir(exist_ok=True)
        figures[name](answer["rows"], path)
