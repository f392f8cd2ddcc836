"""Pages of the terminal as HTML."""

from __future__ import annotations

import io

from rich.console import RenderableType

from experiments.pages.forecast import WIDTH, SafeConsole

FORMAT = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\"><code>{code}</code></pre>"
)


def to_html(what: RenderableType) -> str:
    """A page as one HTML element with inline styles, the same in any notebook; names in it are escaped."""
    console = SafeConsole(file=io.StringIO(), width=WIDTH, record=True, highlight=False, markup=False, emoji=False)
    console.print(what)
    return console.export_html(inline_styles=True, code_format=FORMAT)
