"""Legend of Gantt charts: the kinds of work and of communication that are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from meshcast.experiments.plots import style
from meshcast.experiments.plots.gantt.bars import AGAIN, KINDS, LANES, WAIT
from meshcast.experiments.plots.gantt.rows import Row
from meshcast.experiments.plots.sheet import EDGE, Sheet, text_width

LEGEND_LINE = 0.15
"""Height of a line of the legend [in]."""
PADDING = 0.4 * style.SMALL / 72
"""Room that matplotlib leaves around the entries [in]."""
SHOWN_SHADES = 5
"""Most shades of chunks in an entry."""


class LegendEntry(NamedTuple):
    """Words beside swatches of one hue. edge: colour of their hatch. strip: whether it is a strip, not a bar."""

    words: str
    tones: list[style.RGB]
    hatch: str = ""
    edge: Any = "white"
    strip: bool = False


def legend_entries(rows: Sequence[Row], lanes: Sequence[str], chunks: int, waits: bool = False) -> list[LegendEntry]:
    """Returns the kinds of actions and communication in the rows. waits: whether waits inside passes are drawn."""
    present = {kind for row in rows for kind in row.kind}
    entries = []
    for kind, looks in KINDS.items():
        if kind in present:
            tones = style.shades(looks.colour, 1 if kind == "O" else chunks)
            shown = [tones[round(i * (len(tones) - 1) / max(1, SHOWN_SHADES - 1))] for i in range(SHOWN_SHADES)]
            entries.append(LegendEntry(looks.words, tones if len(tones) <= SHOWN_SHADES else shown, looks.hatch))
    if any(len(row.again) for row in rows):
        entries.append(LegendEntry(AGAIN.words, [style.rgb(AGAIN.colour)], AGAIN.hatch))
    if waits:
        entries.append(LegendEntry("wait inside a pass", [(1.0, 1.0, 1.0)], WAIT["hatch"], WAIT["edgecolor"]))
    for lane in lanes:
        words = LANES[lane] if lane == "copy" else f"{LANES[lane]} comm."
        entries.append(LegendEntry(words, [style.rgb(style.AXES[lane])], strip=True))
    return entries


def legend_columns(entries: Sequence[LegendEntry]) -> int:
    """Returns how many entries of the legend fit a line of the layout."""
    beside = (swatch_length(entries) + 0.5 + 1.1) * style.SMALL / 72

    def wide(columns: int) -> float:
        """Computes the width of a legend with so many columns [in]; entries fill them from top to bottom."""
        lines = math.ceil(len(entries) / columns)
        full = len(entries) - (lines - 1) * columns  # as matplotlib fills them: the first columns are longer
        at, width = 0, 0.0
        for column in range(columns):
            count = lines if column < full else lines - 1
            width += max((text_width(entry.words) for entry in entries[at : at + count]), default=0.0) + beside
            at += count
        return width

    room = style.layout_width() - 2 * EDGE + PADDING
    return next((n for n in range(len(entries), 1, -1) if wide(n) <= room), 1)


def legend_height(entries: Sequence[LegendEntry]) -> float:
    """Height of the legend [in]."""
    return LEGEND_LINE * math.ceil(len(entries) / legend_columns(entries)) + 0.06


def swatch_length(entries: Sequence[LegendEntry]) -> float:
    """Length of a swatch in type sizes: all shades of a hue have room."""
    return max(1.8, 0.7 * max(len(entry.tones) for entry in entries))


def draw_legend(sheet: Sheet, entries: Sequence[LegendEntry], top: float) -> Any:
    """Draws the legend with its upper end at `top` [in]."""
    handles: Any = [
        Line2D([], [], color=entry.tones[0], linewidth=2.4, solid_capstyle="butt")
        if entry.strip
        else tuple(Patch(facecolor=tone, edgecolor=entry.edge, hatch=entry.hatch, linewidth=0) for tone in entry.tones)
        for entry in entries
    ]
    return sheet.figure.legend(
        handles,
        [entry.words for entry in entries],
        loc="upper left",
        bbox_to_anchor=((EDGE - PADDING) / sheet.width, 1 - top / sheet.height),
        ncols=legend_columns(entries),
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=swatch_length(entries),
        handleheight=0.9,
        columnspacing=1.1,
        handletextpad=0.5,
        borderpad=0.2,
        borderaxespad=0.2,
    )
