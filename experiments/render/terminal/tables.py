"""Tables of the terminal's pages: a rule below the heads, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from meshcast.simulator.report.report import Report


def ruled_table(*columns: Column | str, **options: Any) -> Table:
    """Makes an empty table with a rule below its heads. options: those of `Table`."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, **options)


def number_columns(*heads: str | Text, **options: Any) -> list[Column]:
    """Makes right-aligned columns. options: those of `Column`."""
    return [Column(head, justify="right", **options) for head in heads]


def reasons_table(
    head: str, because: str, reasons: Sequence[tuple[str, int]], most: int | None = None, rest: str = ""
) -> Table:
    """Makes a table of reasons with their counts; of those after the first `most` a sum.

    rest: words of that sum, with `{}` for the number of reasons.
    """
    table = ruled_table(*number_columns(head), because)
    for reason, count in reasons[:most]:
        table.add_row(f"{count:,}", reason)
    if most is not None and (others := reasons[most:]):
        table.add_row(f"{sum(count for _, count in others):,}", rest.format(f"{len(others):,}"))
    return table


def labelled_line(name: str, text: str | Text, style: str = "bold") -> Table:
    """Makes a line of a page: a name in a narrow column, and a text that continues beside it."""
    grid = Table.grid(Column(width=9), Column(), padding=(0, 2))
    grid.add_row(Text(name, style=style), text)
    return grid


def list_broken_rules(report: Report, name: str = "") -> list[RenderableType]:
    """Makes the lines on what the program of a job would refuse, or does not have. name: of the job, of several."""
    before = f"{name}: " if name else ""
    return [labelled_line("warning", f"{before}{rule}", "bold yellow") for rule in report.broken_rules]
