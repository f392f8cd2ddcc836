"""Pages of the terminal as HTML."""

from __future__ import annotations

import io

from rich.console import RenderableType
from rich.terminal_theme import TerminalTheme

from meshcast.experiments.pages.forecast import WIDTH, SafeConsole

FORMAT = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\"><code>{code}</code></pre>"
)

THEME = TerminalTheme(
    (255, 255, 255),
    (34, 34, 34),
    [(128, 128, 128), (205, 60, 50), (0, 135, 70), (150, 118, 0), (50, 120, 210), (175, 75, 175), (0, 135, 140),
     (128, 128, 128)],
)  # fmt: skip
"""Colours with a contrast of at least 3 to the white of a notebook and to the black of its dark theme."""


def to_html(what: RenderableType) -> str:
    """A page as one HTML element with inline styles, the same in any notebook; names in it are escaped."""
    console = SafeConsole(file=io.StringIO(), width=WIDTH, record=True, highlight=False, markup=False, emoji=False)
    console.print(what)
    return console.export_html(inline_styles=True, theme=THEME, code_format=FORMAT)
