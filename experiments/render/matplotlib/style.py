"""Style of all plots: widths, type sizes, and colours that are told apart on white paper, in grey and by the
colour-blind.

Most hues are those of Okabe and Ito (2008), "Color Universal Design"; each has a contrast of at least 2 to white (WCAG
2.2, relative luminance). Within one legend no two kinds share a hue, and kinds whose greys are alike have different
hatches (`HATCHES`). No information is in the hue alone: position, number or label has it too.

A plot is laid out in inches of the width that it is made for (`WIDTHS`). A slide is laid out smaller than it is and
enlarged as a whole when it is written (`SheetSize.zoom`), so its type and lines grow with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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

INK, FAINT, LINE = "#222222", "#6f6f6f", "#a6a6a6"

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"
SKY, YELLOW, GREY, BROWN = "#56b4e9", "#b79f00", "#555555", "#8c5a3c"
VIOLET, TEAL, OLIVE, PINK, WINE, AMBER, STONE, ROSE, OCHRE = (
    "#5d3a9b", "#44aac4", "#808000", "#cc79a7", "#6b1244", "#c79500", "#7d7d7d", "#dc93be", "#bc8d00",
)  # fmt: skip

AXES = {"tp": VIOLET, "cp": TEAL, "ep": OLIVE, "dp": GREEN, "pp": INK, "copy": BROWN}
"""Colours of communication by mesh axis; their greys are a ladder."""

HATCHES = ("", "////", "\\\\\\\\", "....", "xxxx", "||||", "----", "++++", "oo")
"""Hatches that tell kinds apart whose greys are alike; the first is none."""

PALEST = 0.38
"""Largest share of white in a shade of a hue: paler ones vanish on white."""

RC: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: plots look the same everywhere
    "font.size": TEXT,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.6,
    "axes.labelsize": TEXT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # names may hold any letters, such as $ and \\
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
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
    """Settings of matplotlib for a plot of this width."""
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
    """Width of the layout of the plot that is being made [in]."""
    from matplotlib import rcParams

    return float(rcParams["figure.figsize"][0])


def layout_height() -> float:
    """Height that a plot of rows should keep to [in]."""
    from matplotlib import rcParams

    return float(rcParams["figure.figsize"][1])


def is_narrow() -> bool:
    """Whether the plot is made for a column: what else stands beside the axes goes below them."""
    return layout_width() < 5.0


RGB = tuple[float, float, float]


def rgb(colour: str) -> RGB:
    """Red, green and blue of ``#rrggbb``, from 0 to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def lighten(colour: str, by: float) -> RGB:
    """Mixes a colour with white. by: share of white."""
    red, green, blue = (part + (1 - part) * by for part in rgb(colour))
    return red, green, blue


def shades(colour: str, count: int) -> list[RGB]:
    """`count` shades of one hue, darkest first; the palest is still seen on white, of a pale hue all are darker."""
    if count == 1:
        return [rgb(colour)]
    palest = PALEST
    while palest > 0 and contrast(lighten(colour, palest)) < 2.0:
        palest -= 0.02
    darkest = palest - PALEST
    return [_mix(colour, darkest + PALEST * i / (count - 1)) for i in range(count)]


def _mix(colour: str, by: float) -> RGB:
    """A colour with a share of white, or of black if negative."""
    if by >= 0:
        return lighten(colour, by)
    red, green, blue = (part * (1 + by) for part in rgb(colour))
    return red, green, blue


def luminance(colour: RGB) -> float:
    """Relative luminance from 0, black, to 1, white (WCAG 2.2)."""
    red, green, blue = ((p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4) for p in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: RGB, other: RGB = (1.0, 1.0, 1.0)) -> float:
    """Contrast of two colours from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: RGB) -> str:
    """Black or white, whichever is readable on `colour`."""
    return "white" if luminance(colour) < 0.25 else "black"


def metadata(path: str) -> dict[str, Any]:
    """Metadata of an image file without date and version, so that equal plots have equal bytes."""
    if path.endswith("pdf"):
        return {"CreationDate": None}
    return {"Date": None} if path.endswith("svg") else {"Software": None}
