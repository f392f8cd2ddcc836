"""Texts of data files in pages of Markdown: what would be markup in them is escaped."""

from __future__ import annotations

import re

from meshcast.hardware.errors import escape_controls

MARKUP = re.compile(r"[\\`*\[\]{|]|(?<![^\W_])_|_(?![^\W_])|<|&(?=#?\w+;)")
"""What begins markup inside a line: escapes, code, emphasis, links, lists of attributes, cells, elements, entities."""

ENTITIES = {"<": "&lt;", "&": "&amp;"}


def escape_text(text: object) -> str:
    """Returns a text as Markdown that shows it in one line, such as in a cell of a table."""
    line = " ".join(escape_controls(str(text)).split())
    return MARKUP.sub(lambda found: ENTITIES.get(found[0], f"\\{found[0]}"), line)
