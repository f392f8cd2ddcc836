"""Bars of a window of time, with the number of the micro-batch in each that has room for it.

A bar reaches from the first kernel of a pass to the end of its last one. A wait inside it that is long enough to be
seen is white and dotted, so that only work has the colour of work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection

from meshcast.experiments.plots import style
from meshcast.experiments.plots.gantt.rows import Row, busy_share
from meshcast.experiments.plots.sheet import text_width, time_unit


class KindLooks(NamedTuple):
    """Name, hue and hatch of a kind of action."""

    words: str
    colour: str
    hatch: str


KINDS = {
    "N": KindLooks("forward, output alone", "#6a8caf", "oo"),
    "Y": KindLooks("loss of the batch", "#a50026", "++++"),
    "Z": KindLooks("gradients of outputs", style.STONE, "----"),
    "F": KindLooks("forward", style.BLUE, ""),
    "BW": KindLooks("backward", style.ORANGE, "////"),
    "B": KindLooks("backward, inputs", style.OCHRE, "\\\\\\\\"),
    "W": KindLooks("backward, weights", style.ROSE, "xxxx"),
    "R": KindLooks("recompute", style.WINE, "||||"),
    "O": KindLooks("optimizer", style.GREY, ""),
}
AGAIN = KindLooks("recompute, inside a pass", style.WINE, "||||")
WAIT: dict[str, Any] = {"facecolor": "white", "edgecolor": style.FAINT, "hatch": "......", "linewidth": 0.0}
LANES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline", "copy": "copies"}

DIGIT = 0.636 * style.SMALL / 72
"""Width of a digit in a bar [in]."""

NUMBER = 0.085
"""Least height of a bar, or of half a bar, with a number [in]."""

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

    bar: height of a bar [in]. numbers: whether bars have numbers. letter: marks the window in the whole step.
    """

    start: float
    stop: float
    rows: Sequence[Row]
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


def left_margin(rows: Sequence[Row]) -> float:
    """Room for the names of devices [in]."""
    return max(LEFT, max(text_width(row.name, style.TEXT) for row in rows) + 0.12)


def bar_height(rows: Sequence[Row]) -> float:
    """Least height of bars with numbers [in]: two passes of a pair have one above the other."""
    return NUMBER * (2 if any(row.is_paired for row in rows) else 1) + 0.02


def number_width(number: int) -> float:
    """Least width of a bar with the number of a micro-batch [in]."""
    return (len(str(number)) + 0.05) * DIGIT


def computing_pieces(begin: float, end: float, waits: np.ndarray, least: float) -> list[tuple[float, float]]:
    """Splits a bar at its waits of at least some length. waits: of its device, in their order (n, 2) [s]."""
    inside = waits[np.searchsorted(waits[:, 0], begin) : np.searchsorted(waits[:, 0], end)]
    pieces, at = [], begin
    for first, last in inside[inside[:, 1] - inside[:, 0] >= least]:
        pieces.append((at, float(first)))
        at = float(last)
    return [*pieces, (at, end)]


def draw_panel(axes: Any, panel: Panel, chunks: int, unit: tuple[float, str] | None = None) -> None:
    """Draws one panel. unit: units of the axis per second, and their name; those of the time if None."""
    scale = (unit or time_unit(panel.stop))[0]
    start, stop, rows = panel.start * scale, panel.stop * scale, panel.rows
    inches = axes.get_position().width * axes.figure.get_size_inches()[0]
    tall = panel.bar / panel.row
    second = (panel.stop - panel.start) / inches  # seconds an inch
    faces = {kind: style.shades(looks.colour, chunks) for kind, looks in KINDS.items()}
    polygons: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    tones: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    waiting, stripes = [], []
    for y, row in enumerate(rows):
        for i in np.flatnonzero((row.end > panel.start) & (row.begin < panel.stop)):
            a, b = max(row.begin[i], panel.start), min(row.end[i], panel.stop)
            low, high = y + tall * row.part[i]
            kind = row.kind[i]
            face = faces[kind][0 if kind == "O" else row.chunk[i]]
            polygons[kind].append(_box(a * scale, b * scale, low, high))
            tones[kind].append(face)
            if panel.numbers and panel.row * (high - low) >= NUMBER and kind != "O":
                label, pieces = str(row.microbatch[i]), computing_pieces(a, b, row.waits, SEEN * second)
                least = number_width(row.microbatch[i]) * second
                c, d = max(pieces, key=lambda piece: piece[1] - piece[0])
                if d - c > least:
                    _write_number(axes, (c + d) / 2 * scale, (low + high) / 2, label, face)
                elif b - a > least:  # between its waits no piece has room
                    _write_number(axes, (a + b) / 2 * scale, (low + high) / 2, label, (1.0, 1.0, 1.0))
        for begin, end in row.waits[row.waits[:, 1] - row.waits[:, 0] >= SEEN * second]:
            if end > panel.start and begin < panel.stop:
                a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                waiting.append(_box(a, b, y + 0.08 * tall, y + 0.92 * tall))
        if panel.numbers:
            for begin, end in row.again:
                if end > panel.start and begin < panel.stop:
                    a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                    stripes.append(_box(a, b, y + tall * 0.84, y + tall))
        _draw_lanes(axes, panel, row, y + tall, (start, stop))
    rim = 0.35 if panel.numbers else 0.0
    for kind, boxes in polygons.items():
        if boxes:
            looks: dict[str, Any] = {"facecolors": tones[kind], "edgecolors": "white", "linewidths": rim, "zorder": 2}
            if panel.numbers:
                looks["hatch"] = KINDS[kind].hatch
            axes.add_collection(PolyCollection(boxes, label=kind, **looks))
    if waiting:
        hatch = WAIT["hatch"] if panel.numbers else ""
        axes.add_collection(
            PolyCollection(
                waiting, facecolors="white", edgecolors=WAIT["edgecolor"], linewidths=0.0, hatch=hatch, zorder=3,
                label="wait",
            )
        )  # fmt: skip
    if stripes:
        axes.add_collection(
            PolyCollection(stripes, facecolors=AGAIN.colour, edgecolors="none", zorder=4, label="again")
        )
    axes.set_xlim(start, stop)
    axes.set_ylim(len(rows), -0.06)
    every = max(1, math.ceil(0.115 / panel.row))
    shown = list(range(0, len(rows), every))
    axes.set_yticks([y + tall / 2 for y in shown], [rows[y].name for y in shown])
    axes.tick_params(axis="y", length=0, pad=3)


def _box(left: float, right: float, low: float, high: float) -> tuple[tuple[float, float], ...]:
    return ((left, low), (right, low), (right, high), (left, high))


def _write_number(axes: Any, x: float, y: float, label: str, face: style.RGB) -> None:
    """Writes a number on a patch of its bar's colour, which keeps the hatch away from it."""
    axes.text(
        x, y, label, ha="center", va="center_baseline", fontsize=style.SMALL, color=style.ink_on(face), zorder=5,
        bbox={"facecolor": face, "edgecolor": "none", "pad": 0.2},
    )  # fmt: skip


def _draw_lanes(axes: Any, panel: Panel, row: Row, top: float, ends: tuple[float, float]) -> None:
    """Draws the lanes of communication below the bar of a device."""
    edges = np.linspace(panel.start, panel.stop, BINS + 1)
    thin = LANE / panel.row
    for k, lane in enumerate(panel.lanes):
        if lane in row.lanes:
            image = np.empty((1, BINS, 4))
            image[..., :3] = style.rgb(style.AXES[lane])
            share = busy_share(row.lanes[lane], edges)
            image[0, :, 3] = np.where(share > 0, FAINTEST + (1 - FAINTEST) * share, 0.0)
            low = top + thin * k
            axes.imshow(
                image, extent=(*ends, low + 0.8 * thin, low + 0.1 * thin), aspect="auto", interpolation="nearest",
                zorder=1,
            )  # fmt: skip
