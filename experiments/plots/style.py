"""Style of all plots: type sizes, and colours that colour-blind readers can distinguish.

Most hues are those of Okabe and Ito (2008), "Color Universal Design". A hue means the same in every plot; its shades
rank items of one kind. No information is in the hue alone: position, number or label has it too.
"""

from __future__ import annotations

from typing import Any

PAGE = 7.2
"""Width of a plot [in], that of the text on a page of a paper."""

DPI = 200

SMALL, TEXT, TITLE = 7.0, 7.5, 9.0
"""Type sizes [pt]."""

INK, FAINT, LINE = "#222222", "#6f6f6f", "#c8c8c8"

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"
SKY, YELLOW, GREY, BROWN = "#56b4e9", "#f0e442", "#555555", "#8c5a3c"

AXES = {"tp": PURPLE, "cp": SKY, "ep": YELLOW, "dp": GREEN, "pp": INK, "copy": BROWN}
"""Colours of communication by mesh axis."""

RC: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: plots look the same everywhere
    "font.size": TEXT,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.6,
    "axes.labelsize": TEXT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "svg.hashsalt": "meshcast",
}

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
    """`count` shades of one hue, darkest first."""
    return [lighten(colour, 0.62 * i / max(1, count - 1) if count > 1 else 0.12) for i in range(count)]


def ink_on(colour: RGB) -> str:
    """Black or white, whichever is readable on `colour`."""
    red, green, blue = ((p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4) for p in colour)
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.30 else "black"


def metadata(path: str) -> dict[str, Any]:
    """Metadata of an image file without date and version, so that equal plots have equal bytes."""
    return {"Date": None} if path.endswith("svg") else {"Software": None}
