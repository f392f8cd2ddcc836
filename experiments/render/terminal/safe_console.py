"""The console that prints pages: text of files is data, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import IO, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from meshcast.hardware.errors import escape_controls, to_line


class Lines(Text):
    """A text whose line ends are its author's; those of any other text are a name's, and are escaped."""

    def __init__(self, *lines: str) -> None:
        """lines: each without a line end."""
        super().__init__("\n".join(map(to_line, lines)))


class SafeConsole(Console):
    """Prints text as it is: no markup, and escapes in place of control characters and line ends, so that no name in a
    file can send commands to the terminal or begin a line."""

    def __init__(self, file: IO[str], width: int, **options: Any) -> None:
        """options: those of `Console`."""
        super().__init__(file=file, width=width, highlight=False, markup=False, emoji=False, **options)

    def print_page(self, *parts: RenderableType) -> None:
        """Prints renderables below each other; `print` would join texts."""
        self.print(Group(*parts))

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text of a cell."""
        return super().render_str(to_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Returns the segments of a renderable, those of a text in a single line."""
        if isinstance(renderable, Text) and not isinstance(renderable, Lines):
            renderable = _escape(renderable)
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escape_controls(text), style, control)


def _escape(text: Text) -> Text:
    """Returns a styled text in a single line."""
    letters = [to_line(letter) for letter in text.plain]
    if letters == [*text.plain]:
        return text
    at = [0, *accumulate(map(len, letters))]
    escaped = text.blank_copy("".join(letters))
    escaped.spans = [Span(at[span.start], at[span.end], span.style) for span in text.spans]
    return escaped
