"""Style of all plots: widths, type sizes, fills.

A plot is laid out in inches of the width that it is made for (`WIDTHS`). A slide is laid out smaller than it is and
enlarged as a whole when it is written (`SheetSize.zoom`), so its type and lines grow with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshcast.experiments.views import palette
from meshcast.hardware.errors import escape_controls

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Width = Literal["column", "page", "slide"]
"""What a plot is made for: a column of a paper, the full width of its page, a slide."""


class SheetSize(NamedTuple):
    """The sheet that a plot is made for.

    width: of the finished plot [in].
    tallest: height that plots whose rows can shrink keep to [in].
    zoom: how much larger the finished plot is than its layout.
    """

    width: float
    tallest: float
    zoom: float = 1.0


PAGE = 7.0
"""Width of a plot for a page [in]: the text of an ACM paper; IEEE has 7.16."""

WIDTHS: dict[Width, SheetSize] = {
    "column": SheetSize(3.33, 8.5),
    "page": SheetSize(PAGE, 9.0),
    "slide": SheetSize(13.33, 7.5, 1.75),
}
"""Papers: a column of ACM and USENIX papers (IEEE 3.5 in), a page, a slide of 16 to 9."""

DPI = 200

SMALL, TEXT, TITLE = 7.0, 7.5, 9.0
"""Type sizes of the layout [pt]: none is smaller than 7."""

RC: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: plots look the same everywhere
    "font.size": TEXT,
    "axes.edgecolor": palette.LINE,
    "axes.linewidth": 0.6,
    "axes.labelsize": TEXT,
    "axes.labelcolor": palette.INK,
    "text.color": palette.INK,
    "text.parse_math": False,  # names may hold any letters, such as $ and \\
    "xtick.color": palette.LINE,
    "ytick.color": palette.LINE,
    "xtick.labelcolor": palette.INK,
    "ytick.labelcolor": palette.INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "meshcast",
    "pdf.fonttype": 42,  # text stays text: publishers refuse bitmap fonts and those of type 3
    "figure.figsize": (PAGE, WIDTHS["page"].tallest),
}
"""Settings of matplotlib for a page. Its figure size is the width of the layout, and the height it should keep to."""


def settings(width: Width = "page") -> Any:
    """Returns settings of matplotlib for a plot of this width."""
    paper = WIDTHS[width]
    return RC | {"figure.figsize": (paper.width / paper.zoom, paper.tallest / paper.zoom)}


@contextmanager
def drawing(width: Width = "page") -> Iterator[None]:
    """Sets the style of a plot of this width while it is made or written, whatever a file matplotlibrc in this folder
    says: it may hand names to LaTeX. A letter that the font lacks is drawn as a box, without a warning."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings(width))
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def escape_texts(figure: Figure) -> Figure:
    """Puts escapes in place of the control characters of all texts of a figure: names in files may hold any, and an SVG
    file may not. Returns the figure."""
    from matplotlib.text import Text

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):  # which ask for their labels whenever they are drawn
            for formatter in (axis.get_major_formatter(), axis.get_minor_formatter()):
                vars(formatter)["format_ticks"] = partial(_escape_labels, formatter.format_ticks)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if (escaped := escape_controls(text.get_text())) != text.get_text():
            text.set_text(escaped)
    return figure


def _escape_labels(write: Callable[[list[float]], list[str]], ticks: list[float]) -> list[str]:
    return [escape_controls(label) for label in write(ticks)]


def layout_width() -> float:
    """Returns the width of the layout of the plot that is being made [in]."""
    from matplotlib import rcParams

    return float(rcParams["figure.figsize"][0])


def layout_height() -> float:
    """Returns the height that a plot of rows should keep to [in]."""
    from matplotlib import rcParams

    return float(rcParams["figure.figsize"][1])


def is_narrow() -> bool:
    """Says whether the plot is made for a column: what else stands beside the axes goes below them."""
    return layout_width() < 5.0


def fill(looks: palette.Looks) -> dict[str, Any]:
    """Returns face, hatch and edge of an area of a kind, in the words of matplotlib."""
    return {"facecolor": palette.rgb(looks.colour), "hatch": looks.hatch, "edgecolor": looks.edge}


def metadata(path: str) -> dict[str, Any]:
    """Returns metadata of an image file without date and version, so that equal plots have equal bytes."""
    if path.endswith("pdf"):
        return {"CreationDate": None}
    return {"Date": None} if path.endswith("svg") else {"Software": None}
