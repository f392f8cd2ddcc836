"""Tables and lines of the terminal's pages."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from meshcast.experiments.render.terminal.safe_console import Lines
from meshcast.experiments.views.table import Column, Table, TableCell, Words, numbers
from meshcast.hardware.errors import to_line

if TYPE_CHECKING:
    from meshcast.simulator.report.report import Report


def make_grid(table: Table) -> RichTable:
    """Returns a table without its notes."""
    grid = RichTable(
        *map(_make_column, table.columns, table.foot or [TableCell("")] * len(table.columns)),
        box=box.SIMPLE_HEAD if table.ruled else None,
        pad_edge=False,
        show_header=table.ruled,
        show_footer=bool(table.foot),
        show_edge=table.edges,
        collapse_padding=table.dense,
    )
    for row in table.rows:
        grid.add_row(*map(_make_text, row.cells), style=row.style, end_section=row.ends)
    return grid


def show_table(table: Table) -> RenderableType:
    """Returns a table, and its notes dimmed below it."""
    notes = [Text(note, "dim") for note in table.notes]
    return Group(make_grid(table), *notes) if notes else make_grid(table)


def list_labels(labels: Sequence[str]) -> RenderableType:
    """Returns the letter of every job, with its label."""
    rows = zip(ascii_uppercase, labels, strict=False)
    return make_grid(Table("job", "what tells it apart", rows=rows, ruled=False, edges=False))


def _make_column(column: Column, foot: TableCell) -> RichColumn:
    return RichColumn(
        _make_text(TableCell(column.head)),
        _make_text(foot),
        justify=column.align,
        vertical="bottom" if column.low else "top",
        no_wrap=column.wrap == "never",
        overflow="fold" if column.wrap == "letters" else "ellipsis",
        style=column.style,
        min_width=column.width,
    )


def _make_text(cell: TableCell) -> Text | str:
    if isinstance(cell.text, tuple):
        return Lines(*cell.text)
    return Text(to_line(cell.text), cell.style) if cell.style else cell.text


def reasons_table(
    head: str, because: str, reasons: Sequence[tuple[Words, int]], most: int | None = None, rest: str = ""
) -> RenderableType:
    """Makes a table of reasons with their counts; of those after the first `most` a sum.

    rest: words of that sum, with `{}` for the number of reasons.
    """
    table = Table(*numbers(head, format=","), because, rows=[(count, reason) for reason, count in reasons[:most]])
    if most is not None and (others := reasons[most:]):
        table.add(sum(count for _, count in others), rest.format(f"{len(others):,}"))
    return show_table(table)


def labelled_line(name: str, *texts: Words | TableCell, style: str = "bold") -> RenderableType:
    """Makes lines of a page: a name in a narrow column, and texts that continue beside it."""
    named = [("" if number else TableCell(name, style), text) for number, text in enumerate(texts)]
    return show_table(Table(Column(width=9, wrap="never"), "", rows=named, ruled=False))


def list_broken_rules(report: Report, name: str = "") -> list[RenderableType]:
    """Makes the lines on what the program of a job would refuse, or does not have. name: of the job, of several."""
    before = f"{name}: " if name else ""
    return [labelled_line("warning", f"{before}{rule}", style="bold yellow") for rule in report.broken_rules]
