"""Tables of answers, which `experiments/render` prints on a terminal, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from meshcast.hardware.records import dataclass

Words = str | tuple[str, ...]
"""A text; a tuple holds its lines."""


Format = str | Callable[[Any], str]
"""A format of Python, such as ``,.1f``, with ``.1p`` for percent without its sign; or a function of a value."""

Wrap = Literal["words", "letters", "never"]
"""Where a terminal breaks a long text."""


class TableCell(NamedTuple):
    """What a cell shows.

    text: its words.
    style: colours and weight on a terminal, such as ``bold green``.
    """

    text: Words
    style: str = ""


class TableRow(NamedTuple):
    """A row of a table.

    cells: of each column.
    style: of all cells on a terminal.
    ends: whether a section ends here.
    """

    cells: tuple[TableCell, ...]
    style: str = ""
    ends: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table.

    name: what stands above it.
    unit: of its values, behind the name.
    format: of values that are no texts; None is an empty cell.
    align: numbers stand to the right.
    wrap: between words, anywhere, or not at all.
    style: of its cells on a terminal.
    width: minimum on a terminal [characters].
    low: whether texts stand at the lower end of their row on a terminal.
    """

    name: Words = ""
    unit: str = ""
    format: Format = ""
    align: Literal["left", "right"] = "left"
    wrap: Wrap = "words"
    style: str = ""
    width: int | None = None
    low: bool = False

    @property
    def head(self) -> Words:
        """Name and unit."""
        return f"{join_lines(self.name)} {self.unit}".strip() if self.unit else self.name

    def make_cell(self, value: object) -> TableCell:
        """Returns the cell of a value."""
        if isinstance(value, TableCell):
            return value
        if value is None or isinstance(value, str | tuple):
            return TableCell(value or "")
        if callable(self.format):
            return TableCell(self.format(value))
        text = format_percent(value, self.format) if self.format.endswith("p") else format(value, self.format)
        return TableCell(text)


class Table:
    """Columns and rows.

    Attributes:
        columns: as they were stated.
        rows: in their order.
        foot: cells below a further rule; none without it.
        notes: sentences below the table.
        ruled: whether heads stand above a rule; without, there are no heads.
        edges: whether empty lines stand around it on a terminal.
        dense: whether columns of a terminal stand close together.
    """

    def __init__(
        self,
        *columns: Column | str,
        rows: Iterable[Iterable[object]] = (),
        notes: Sequence[str] = (),
        ruled: bool = True,
        edges: bool = True,
        dense: bool = False,
    ) -> None:
        """columns: or their names. rows: their values, as `add` takes them."""
        self.columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self.rows: list[TableRow] = []
        self.foot: tuple[TableCell, ...] = ()
        self.notes, self.ruled, self.edges, self.dense = notes, ruled, edges, dense
        for values in rows:
            self.add(*values)

    def add(self, *values: object, style: str = "") -> None:
        """Adds a row; columns without a value stay empty."""
        self.rows.append(TableRow(self._make_cells(values), style))

    def close(self, *values: object) -> None:
        """Adds the foot."""
        self.foot = self._make_cells(values)

    def _make_cells(self, values: Sequence[object]) -> tuple[TableCell, ...]:
        padded = (*values, *[""] * (len(self.columns) - len(values)))
        return tuple(column.make_cell(value) for column, value in zip(self.columns, padded, strict=True))

    def end_section(self) -> None:
        """Ends a section behind the last row, if there is any."""
        if self.rows:
            self.rows[-1] = self.rows[-1]._replace(ends=True)


def numbers(*names: Words, format: Format = "", **options: Any) -> list[Column]:
    """Makes columns of numbers, to the right. options: further ones of `Column`."""
    return [Column(name, format=format, align="right", **options) for name in names]


def formatted_numbers(*columns: tuple[Words, Format], **options: Any) -> list[Column]:
    """Makes columns of numbers from names and formats. options: further ones of `Column`."""
    return [column for name, format in columns for column in numbers(name, format=format, **options)]


def join_lines(words: Words) -> str:
    """Returns a text in a single line."""
    return words if isinstance(words, str) else " ".join(line for line in words if line)


def format_percent(value: object, form: str = ".1p") -> str:
    """Formats a share as percent without its sign, and None as nothing. form: see `Format`."""
    return "" if value is None else format(value, form.replace("p", "%"))[:-1]
