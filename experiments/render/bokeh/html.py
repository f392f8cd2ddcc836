"""Pieces of HTML: tables, bars, legends and key figures. Whatever is not `Html` is text, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from meshcast.experiments.views.table import Column, Table, Words, join_lines
from meshcast.hardware.errors import escape_controls


class Html(Markup):
    """HTML. Text that is joined to it, or that fills its places, is escaped; control characters become visible escapes.

    ``Html("<b>{}</b>").format("a < b")`` is ``<b>a &lt; b</b>``. Only literals of the program become `Html` by name.
    """

    @classmethod
    def escape(cls, text: object) -> Html:
        return cls(super().escape(text if hasattr(text, "__html__") else escape_controls(str(text))))


class KeyFigure(NamedTuple):
    """A large number with its name and a remark. bad: drawn as a warning."""

    name: str
    value: str
    remark: str = ""
    bad: bool = False


class BarPiece(NamedTuple):
    """A piece of a bar from `begin` to `end`, in shares of its width. words: shown where the pointer is."""

    begin: float
    end: float
    colour: str
    words: str = ""
    striped: bool = False


def concat(pieces: Iterable[str]) -> Html:
    """Returns pieces of HTML, and escaped texts, behind each other."""
    return Html("").join(pieces)


def paragraph(text: str, kind: str = "") -> Html:
    return Html("<p{}>{}</p>").format(_class(kind), text)


def heading(text: str) -> Html:
    """Returns the heading of a part of a section."""
    return Html("<h3>{}</h3>").format(text)


def listing(items: Iterable[str]) -> Html:
    """Returns a list with a point for every text."""
    return Html("<ul>{}</ul>").format(concat(Html("<li>{}</li>").format(item) for item in items))


def key_figures(figures: Iterable[KeyFigure]) -> Html:
    tile = Html(
        '<div class="tile{}"><span class="name">{}</span><span class="value">{}</span>'
        '<span class="remark">{}</span></div>'
    )
    tiles = (tile.format(" bad" if figure.bad else "", figure.name, figure.value, figure.remark) for figure in figures)
    return Html('<div class="tiles">{}</div>').format(concat(tiles))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "", foot: Sequence[str] = ()) -> Html:
    """Returns a table of texts or pieces of HTML; columns of numbers are right-aligned."""
    body = list(rows)
    numbers = [
        all(_is_number(row[i]) for row in body if row[i]) and any(row[i] for row in body) for i in range(len(heads))
    ]
    columns = (Column(head, align="right" if number else "left") for head, number in zip(heads, numbers, strict=True))
    whole = Table(*columns, rows=body)
    if foot:
        whole.close(*foot)
    return render_table(whole, kind)


def render_table(table: Table, kind: str = "") -> Html:
    """Returns a table, and its notes below it; texts that are not `Html` are escaped."""

    def line(cells: Iterable[Words], cell: Html) -> Html:
        kinds = (_class("number" if column.align == "right" else "") for column in table.columns)
        return Html("<tr>{}</tr>").format(concat(map(cell.format, kinds, map(join_lines, cells))))

    data = Html("<td{}>{}</td>")
    return Html('<div class="scroll"><table{}><thead>{}</thead><tbody>{}</tbody>{}</table></div>{}').format(
        _class(kind),
        line((column.head for column in table.columns), Html("<th{}>{}</th>")),
        concat(line((cell.text for cell in row.cells), data) for row in table.rows),
        Html("<tfoot>{}</tfoot>").format(line((cell.text for cell in table.foot), data)) if table.foot else "",
        concat(map(paragraph, table.notes)),
    )


def bar(pieces: Iterable[BarPiece], kind: str = "", mark: float | None = None) -> Html:
    """Returns a bar of pieces. mark: place of a vertical line, as a share of the width."""
    shape = Html('<i{} style="left:{:.3f}%;width:{:.3f}%;background-color:{}" title="{}"></i>')
    shapes = [
        shape.format(
            _class("striped" if piece.striped else ""),
            100 * piece.begin,
            100 * (piece.end - piece.begin),
            piece.colour,
            piece.words,
        )
        for piece in pieces
        if piece.end > piece.begin
    ]
    if mark is not None:
        shapes.append(Html('<b style="left:{:.3f}%"></b>').format(100 * mark))
    return Html('<div class="bar {}">{}</div>').format(kind, concat(shapes))


def swatch(colour: str, name: str = "") -> Html:
    """Returns a small square of a colour, and the name of what has it."""
    return Html('<span class="swatch" style="background-color:{}"></span>{}').format(colour, name)


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Returns names with their colours."""
    squares = concat(Html("<span>{}</span>").format(swatch(colour, name)) for name, colour in entries)
    return Html('<div class="legend">{}</div>').format(squares)


def line_legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Returns names of lines with their dashes, in the words of Bokeh."""
    styles = {"dotdash": "groove"}
    stroke = Html('<span><span class="stroke" style="border-top-style:{}"></span>{}</span>')
    strokes = concat(stroke.format(styles.get(dash, dash), name) for name, dash in entries)
    return Html('<div class="legend">{}</div>').format(strokes)


def details(summary: str, body: Html) -> Html:
    """Returns a part that is folded until a reader opens it."""
    return Html("<details><summary>{}</summary>{}</details>").format(summary, body)


def _is_number(cell: str) -> bool:
    """Says whether a cell begins with a digit, or with a sign and a digit."""
    return cell.lstrip("+-")[:1].isdigit()


def _class(kind: str) -> Html:
    return Html(' class="{}"').format(kind) if kind else Html("")
