"""Pieces of HTML: escaped text, tables, bars, legends and key figures."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshcast.hardware.errors import escape_controls


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


def escape(text: Any) -> str:
    """Text as HTML; control characters become visible escapes."""
    return html.escape(escape_controls(str(text)))


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>"


def listing(items: Iterable[str]) -> str:
    """A list with a point for every text."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def key_figures(figures: Iterable[KeyFigure]) -> str:
    tiles = (
        f'<div class="tile{" bad" if one.bad else ""}"><span class="name">{escape(one.name)}</span>'
        f'<span class="value">{escape(one.value)}</span><span class="remark">{escape(one.remark)}</span></div>'
        for one in figures
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "", foot: Sequence[str] = ()) -> str:
    """A table whose cells are HTML; columns of numbers are right-aligned."""
    given = list(rows)
    numbers = [
        all(_is_number(row[i]) for row in given if row[i]) and any(row[i] for row in given) for i in range(len(heads))
    ]

    def line(cells: Sequence[str], tag: str = "td") -> str:
        made = (f"<{tag}{_class('number' if numbers[i] else '')}>{cell}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    top, body = line([escape(head) for head in heads], "th"), "".join(map(line, given))
    end = f"<tfoot>{line(foot)}</tfoot>" if foot else ""
    return f'<div class="scroll"><table{_class(kind)}><thead>{top}</thead><tbody>{body}</tbody>{end}</table></div>'


def bar(pieces: Iterable[BarPiece], kind: str = "", mark: float | None = None) -> str:
    """A bar of pieces. mark: place of a vertical line, as a share of the width."""
    made = [
        f'<i{_class("striped" if one.striped else "")} style="left:{100 * one.begin:.3f}%;'
        f'width:{100 * (one.end - one.begin):.3f}%;background-color:{one.colour}" title="{escape(one.words)}"></i>'
        for one in pieces
        if one.end > one.begin
    ]
    if mark is not None:
        made.append(f'<b style="left:{100 * mark:.3f}%"></b>')
    return f'<div class="bar {kind}">{"".join(made)}</div>'


def swatch(colour: str) -> str:
    return f'<span class="swatch" style="background-color:{colour}"></span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names with their colours."""
    found = "".join(f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in entries)
    return f'<div class="legend">{found}</div>'


def line_legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names of lines with their dashes, in the words of Bokeh."""
    styles = {"dotdash": "groove"}
    found = "".join(
        f'<span><span class="stroke" style="border-top-style:{styles.get(dash, dash)}"></span>{escape(name)}</span>'
        for name, dash in entries
    )
    return f'<div class="legend">{found}</div>'


def details(summary: str, body: str) -> str:
    """A part that is folded until a reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def _is_number(cell: str) -> bool:
    """Whether a cell begins with a digit, or with a sign and one."""
    return cell.lstrip("+-")[:1].isdigit()


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
