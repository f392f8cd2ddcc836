"""One table on a terminal, as HTML and as Markdown: the same texts in the same order, whatever they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from html import unescape

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from meshcast.experiments.render import markdown
from meshcast.experiments.render.bokeh import html
from meshcast.experiments.render.terminal.forecast import render
from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Column, Table, TableCell, format_percent, numbers
from meshcast.hardware.errors import escape_controls

WORDS = st.text("ab<|&[`*_\\\x1b", min_size=1, max_size=6)


def make_table(rows: Sequence[tuple[str, str, float | None]], note: str, escape: Callable[[str], str] = str) -> Table:
    shares = numbers("share", unit="%", format=".1p")
    table = Table(Column("name", wrap="letters"), Column(("two", "lines")), *shares, notes=[escape(note)])
    for name, text, share in rows:
        table.add(escape(name), TableCell(escape(text), "bold"), share)
    table.close("all", None, 1.0)
    return table


def list_texts(page: str) -> list[str]:
    """The texts of cells and paragraphs of HTML that are not empty."""
    return [unescape(text) for text in re.findall(r"<(?:th|td|p)[^>]*>([^<]+)</(?:th|td|p)>", page)]


@given(rows=st.lists(st.tuples(WORDS, WORDS, st.none() | st.floats(0.0, 1.0)), min_size=1, max_size=4), note=WORDS)
def test_all_renderers_show_the_same_texts(rows: list[tuple[str, str, float | None]], note: str) -> None:
    cells = [text for name, words, share in rows for text in (name, words, format_percent(share)) if text]
    texts = [escape_controls(text) for text in ("name", "two lines", "share %", *cells, "all", "100.0", note)]
    table = make_table(rows, note)
    assert list_texts(html.render_table(table)) == texts
    escaped = markdown.render_table(make_table(rows, note, markdown.escape_text))
    assert list_texts(MarkdownIt("commonmark").enable("table").render(escaped)) == texts
    shown = render(show_table(table)).replace("─", "").split()
    assert Counter(shown) == Counter(" ".join(texts).split())
