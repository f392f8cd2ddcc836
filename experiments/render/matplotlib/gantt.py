"""Gantt charts: the bars of a device through a step, windows of time in which they are drawn, and their legend.

A bar reaches from the first kernel of a pass to the end of its last, and has the number of its micro-batch where
there is room for it. A wait inside it that is long enough to be seen is white and dotted, so that only work has the
colour of work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, Sheet, text_width
from meshcast.experiments.views import palette
from meshcast.experiments.views.timeline import UPDATE, DeviceTimeline, busy_shares, time_unit
from meshcast.hardware.records import dataclass

# ---------------------------------------------------------------------------------------------- bars


DIGIT = 0.636 * style.SMALL / 72
"""Width of a digit in a bar [in]."""

NUMBER = 0.085
"""Least height of a bar, or of half a bar, with a number [in]."""

ASCENT, DESCENT, PAD = 0.928 * style.SMALL / 72, 0.236 * style.SMALL / 72, 0.2 / 72
"""Height of type above and below its baseline, and the rim of a patch below a number [in]."""

WHITE = (1.0, 1.0, 1.0)

SEEN = 0.015
"""Least width of a wait that is drawn [in]."""

LANE, GAP = 0.032, 0.05
"""Height of a lane of communication, and distance of rows [in]."""

LEFT, RIGHT = 0.62, 0.12
"""Margins left and right of the rows [in]."""

BINS = 1600
"""Columns of a lane of communication: ops are much shorter than print resolves."""

FAINTEST = 0.3
"""Opacity of a column in which communication is hardly busy; less would not be seen in print."""


@dataclass
class Panel:
    """A window of time [s], with the rows that are drawn in it.

    bar: height of a bar [in].
    numbers: whether bars have numbers.
    letter: marks the window in the whole step.
    """

    start: float
    stop: float
    rows: Sequence[DeviceTimeline]
    bar: float
    numbers: bool
    lanes: Sequence[str] = ()
    letter: str = ""
    words: str = ""

    @property
    def row(self) -> float:
        """Distance of rows [in]."""
        return self.bar + LANE * len(self.lanes) + (GAP if self.bar > 0.08 else 0.3 * self.bar)

    @property
    def height(self) -> float:
        """Height of all rows [in]."""
        return self.row * len(self.rows)


def left_margin(rows: Sequence[DeviceTimeline]) -> float:
    """Returns the room for the names of devices [in]."""
    return max(LEFT, max(text_width(row.name, style.TEXT) for row in rows) + 0.12)


def bar_height(rows: Sequence[DeviceTimeline]) -> float:
    """Returns the least height of bars with numbers [in]: two passes of a pair have them above each other."""
    return NUMBER * (2 if any(row.is_paired for row in rows) else 1) + 0.02


def number_width(number: int) -> float:
    """Returns the least width of a bar with the number of a micro-batch [in]."""
    return (len(str(number)) + 0.3) * DIGIT


Box = tuple[float, float, float, float]
"""Left, right, low and high end of a bar."""

Number = tuple[str, float, float, float, palette.RGB]
"""The number of a bar, its middle, low and high end of the bar, and the colour below it."""

ByLooks = dict[str, dict[palette.RGB, list[Box]]]
"""Bars by the kind of their actions and by their colour."""


OUTLINE = np.array([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], Path.code_type)
"""Strokes of the outline of a bar."""


def computing_pieces(begin: float, end: float, waits: np.ndarray, least: float) -> list[tuple[float, float]]:
    """Splits a bar at its waits of at least some length. waits: of its device, in their order (n, 2) [s]."""
    inside = waits[np.searchsorted(waits[:, 0], begin) : np.searchsorted(waits[:, 0], end)]
    pieces, at = [], begin
    for first, last in inside[inside[:, 1] - inside[:, 0] >= least]:
        pieces.append((at, float(first)))
        at = float(last)
    return [*pieces, (at, end)]


def draw_panel(axes: Any, panel: Panel, chunks: int, unit: tuple[float, str] | None = None) -> None:
    """Draws a panel. unit: units of the axis per second, and their name; those of the time if None."""
    scale = (unit or time_unit(panel.stop))[0]
    start, stop, rows = panel.start * scale, panel.stop * scale, panel.rows
    inches = axes.get_position().width * axes.figure.get_size_inches()[0]
    tall = panel.bar / panel.row
    second = (panel.stop - panel.start) / inches  # seconds an inch
    faces = {kind: palette.shades(looks.colour, chunks) for kind, looks in palette.ACTIONS.items()}
    bars: ByLooks = {kind: {} for kind in palette.ACTIONS}
    waiting, stripes, numbers = list[Box](), list[Box](), list[Number]()
    for y, row in enumerate(rows):
        for i in np.flatnonzero((row.end > panel.start) & (row.begin < panel.stop)):
            a, b = max(row.begin[i], panel.start), min(row.end[i], panel.stop)
            low, high = y + tall * row.part[i]
            kind = row.kind[i]
            face = faces[kind][0 if kind == UPDATE else row.chunk[i]]
            bars[kind].setdefault(face, []).append((a * scale, b * scale, low, high))
            if panel.numbers and panel.row * (high - low) >= NUMBER and kind != UPDATE:
                label, pieces = str(row.microbatch[i]), computing_pieces(a, b, row.waits, SEEN * second)
                least = number_width(row.microbatch[i]) * second
                c, d = max(pieces, key=lambda piece: piece[1] - piece[0])
                if d - c > least:
                    numbers.append((label, (c + d) / 2 * scale, low, high, face))
                elif b - a > least:  # between its waits no piece has room
                    numbers.append((label, (a + b) / 2 * scale, low, high, WHITE))
        for begin, end in row.waits[row.waits[:, 1] - row.waits[:, 0] >= SEEN * second]:
            if end > panel.start and begin < panel.stop:
                a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                waiting.append((a, b, y + 0.08 * tall, y + 0.92 * tall))
        if panel.numbers:
            for begin, end in row.again:
                if end > panel.start and begin < panel.stop:
                    a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                    stripes.append((a, b, y + tall * 0.84, y + tall))
        _draw_lanes(axes, panel, row, y + tall, (start, stop))
    _add_bars(axes, bars, panel.numbers)
    _add_marks(axes, waiting, stripes, panel.numbers)
    _write_numbers(axes, numbers, (stop - start) / inches, panel.row)
    axes.set_xlim(start, stop)
    axes.set_ylim(len(rows), -0.06)
    every = max(1, math.ceil(0.115 / panel.row))
    shown = list(range(0, len(rows), every))
    axes.set_yticks([y + tall / 2 for y in shown], [rows[y].name for y in shown])
    axes.tick_params(axis="y", length=0, pad=3)


def _add_bars(axes: Axes, bars: ByLooks, numbers: bool) -> None:
    """Adds the bars of actions. numbers: whether bars are large."""
    for kind, by_face in bars.items():
        if by_face:
            hatch = palette.ACTIONS[kind].hatch if numbers else None
            areas = _make_areas(
                by_face.values(), facecolors=[*by_face], edgecolors="white", linewidths=0.35 if numbers else 0.0,
                hatch=hatch, label=kind, zorder=2,
            )  # fmt: skip
            axes.add_collection(areas)


def _add_marks(axes: Axes, waiting: Sequence[Box], stripes: Sequence[Box], numbers: bool) -> None:
    """Adds what is marked on the bars: waits inside of actions, and stripes of recomputation."""
    if waiting:
        hatch, edge = palette.WAIT.hatch if numbers else "", palette.WAIT.edge
        areas = _make_areas(
            [waiting], facecolors="white", edgecolors=edge, linewidths=0.0, hatch=hatch, label="wait", zorder=3
        )
        axes.add_collection(areas)
    if stripes:
        colour = palette.RECOMPUTE.colour
        axes.add_collection(_make_areas([stripes], facecolors=colour, edgecolors="none", label="again", zorder=4))


def _write_numbers(axes: Axes, numbers: Sequence[Number], wide: float, high: float) -> None:
    """Writes the numbers of bars, on patches of the colours below them, which keep the hatch away.

    A patch of its own for each text, as `write_on` has it, would take as long to draw as the text.
    wide, high: units of both axes an inch.
    """
    font = FontProperties(family="DejaVu Sans", size=style.SMALL)
    patches: dict[palette.RGB, list[Box]] = {}
    for label, x, low, top, face in numbers:
        middle, half = (low + top) / 2, (text_width(label) / 2 + PAD) * wide
        above, below = (ASCENT / 2 + PAD) / high, (ASCENT / 2 + DESCENT + PAD) / high
        box = x - half, x + half, max(low, middle - above), min(top, middle + below)
        patches.setdefault(face, []).append(box)
        ink = palette.ink_on(face)
        axes.text(x, middle, label, fontproperties=font, ha="center", va="center_baseline", color=ink, zorder=5)
    if patches:
        areas = _make_areas(patches.values(), facecolors=[*patches], edgecolors="none", label="number", zorder=4.5)
        axes.add_collection(areas)


def _make_areas(groups: Iterable[Sequence[Box]], **looks: Any) -> PathCollection:
    """Makes areas of many boxes each: matplotlib draws an area, and a tile of its hatch, as fast as a single box."""
    paths = []
    for boxes in groups:
        left, right, low, high = np.array(boxes).T
        corners = np.stack([left, low, right, low, right, high, left, high, left, low], axis=1)
        paths.append(Path(corners.reshape(-1, 2), np.tile(OUTLINE, len(boxes))))
    areas = PathCollection(paths, **looks)
    areas.set_snap(True)  # to dots, as matplotlib does by itself with a single box
    return areas


def _draw_lanes(axes: Any, panel: Panel, row: DeviceTimeline, top: float, ends: tuple[float, float]) -> None:
    edges = np.linspace(panel.start, panel.stop, BINS + 1)
    thin = LANE / panel.row
    for k, lane in enumerate(panel.lanes):
        if lane in row.lanes:
            pixels = np.empty((1, BINS, 4))
            pixels[..., :3] = palette.rgb(palette.AXES[lane].colour)
            share = busy_shares(row.lanes[lane], edges)
            pixels[0, :, 3] = np.where(share > 0, FAINTEST + (1 - FAINTEST) * share, 0.0)
            low = top + thin * k
            # `imshow` would also fit the axes to every lane.
            image = AxesImage(
                axes, extent=(*ends, low + 0.8 * thin, low + 0.1 * thin), interpolation="nearest", zorder=1
            )
            image.set_data(pixels)
            image.set_clip_path(axes.patch)
            axes.add_image(image)


# -------------------------------------------------------------------------------------------- legend

LEGEND_LINE = 0.15
"""Height of a line of the legend [in]."""
PADDING = 0.4 * style.SMALL / 72
"""Room that matplotlib leaves around the entries [in]."""
SHOWN_SHADES = 5
"""Most shades of chunks in an entry."""


class LegendEntry(NamedTuple):
    """Words beside swatches of a hue.

    edge: colour of their hatch.
    strip: whether it is a strip, not a bar.
    """

    words: str
    tones: list[palette.RGB]
    hatch: str = ""
    edge: Any = "white"
    strip: bool = False


def legend_entry(looks: palette.Looks) -> LegendEntry:
    """Returns the entry of a kind with a single shade."""
    return LegendEntry(looks.words, [palette.rgb(looks.colour)], looks.hatch, looks.edge)


def legend_entries(
    rows: Sequence[DeviceTimeline], lanes: Sequence[str], chunks: int, waits: bool = False
) -> list[LegendEntry]:
    """Returns the kinds of actions and communication in the rows. waits: whether waits inside passes are drawn."""
    present = {kind for row in rows for kind in row.kind}
    entries = []
    for kind, looks in palette.ACTIONS.items():
        if kind in present:
            tones = palette.shades(looks.colour, 1 if kind == UPDATE else chunks)
            shown = [tones[round(i * (len(tones) - 1) / max(1, SHOWN_SHADES - 1))] for i in range(SHOWN_SHADES)]
            entries.append(LegendEntry(looks.words, tones if len(tones) <= SHOWN_SHADES else shown, looks.hatch))
    if any(len(row.again) for row in rows):
        entries.append(legend_entry(palette.RECOMPUTE))
    if waits:
        entries.append(legend_entry(palette.WAIT))
    entries += [legend_entry(palette.AXES[lane])._replace(strip=True) for lane in lanes]
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
    """Returns the height of the legend [in]."""
    return LEGEND_LINE * math.ceil(len(entries) / legend_columns(entries)) + 0.06


def swatch_length(entries: Sequence[LegendEntry]) -> float:
    """Returns the length of a swatch in type sizes: all shades of a hue have room."""
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
