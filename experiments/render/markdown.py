"""Tables and texts in Markdown."""

from __future__ import annotations

import re

from meshcast.experiments.views.table import Table, join_lines
from meshcast.hardware.errors import escape_controls

MARKUP = re.compile(r"[\\`*\[\]{|]|(?<![^\W_])_|_(?![^\W_])|<|&(?=#?\w+;)")
"""What begins markup inside a line: escapes, code, emphasis, links, lists of attributes, cells, elements, entities."""

ENTITIES = {"<": "&lt;", "&": "&amp;"}

BAR = re.compile(r"(?<!\\)\|")
"""A bar that would end a cell."""


def escape_text(text: object) -> str:
    """Returns a text as Markdown that shows it in a single line, such as in a cell of a table."""
    line = " ".join(escape_controls(str(text)).split())
    return MARKUP.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), line)


def render_table(table: Table) -> str:
    """Returns a table as Markdown; its texts are Markdown, too, of which only bars are escaped."""
    lines = [[join_lines(column.head) for column in table.columns]]
    lines.append(["--:" if column.align == "right" else "---" for column in table.columns])
    every = [row.cells for row in table.rows] + ([table.foot] if table.foot else [])
    lines += [[join_lines(cell.text) for cell in cells] for cells in every]
    rows = [" | ".join(BAR.sub(r"\|", " ".join(cell.split())) for cell in line) for line in lines]
    return "".join(f"| {row} |\n" for row in rows) + "".join(f"\n{note}\n" for note in table.notes)
