"""Plot of the communication matrix: the bytes that ranks, nodes or stages send each other in a step.

All axes together, and every axis of communication by itself. Rows send to columns. The scale of colours is logarithmic
and common to all; white cells send nothing. Of a matrix with more cells than the paper resolves, a drawn cell is the
largest of several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, Sheet, make_heading, note_height
from meshcast.experiments.views import palette
from meshcast.experiments.views.communication import (
    CommunicationMatrix,
    pool_cells,
)
from meshcast.simulator.report.formatting import describe_plan, format_bytes
from meshcast.simulator.report.report import Report

LEFT, BELOW, BAR = 0.48, 0.4, 0.14
"""Room left of a matrix and below it, and height of the scale of colours [in]."""
MIN_SIDE = 0.4
"""Minimum side of the matrix of an axis [in]."""
CLEAR = 128
"""Maximum number of rows of a matrix that is drawn by default: cells of more are too small to be told apart."""
MAX_CELLS = 90.0
"""Maximum number of cells an inch."""
DECADES = 6.0
"""Maximum number of decades of the scale of colours; what is less has the palest colour."""


def communication(report: Report, matrix: CommunicationMatrix) -> Figure:
    """Returns the plot."""
    job, narrow = report.job, style.is_narrow()
    noun = matrix.names[0].partition(" ")[0] if matrix.names else matrix.grouping
    title = f"{job.model.name} on {job.cluster.name}: bytes between {len(matrix.names):,} {noun}s in a step"
    sums = ", ".join(f"{axis} {format_bytes(nbytes)}" for axis, nbytes in matrix.sums.items())
    heading = make_heading(title, describe_plan(report.play.plan), f"All {noun}s send {sums or 'nothing'}.")
    note = f"Rows send to columns; the diagonal is what ranks of one {noun} send each other." if noun != "rank" else ""
    note = note or "Rows send to columns."
    note += " White: nothing is sent. Palest blue: the least value of the scale, or less."
    host = matrix.host.sum(axis=0)
    if host.any():
        note += f" Not drawn: {format_bytes(host[0])} are copied to hosts, and {format_bytes(host[1])} back."
    if not matrix.by_axis:
        sheet = Sheet(heading.bottom + 0.1)
        sheet.head(heading)
        return sheet.figure
    axes_of = list(matrix.by_axis)
    has_axes = len(axes_of) > 1  # of a single axis the matrix of all is the same
    foot = 0.5 + note_height(note) + 0.1
    room = style.layout_height() - heading.bottom - foot
    width = style.layout_width()
    if narrow:
        side = width - LEFT - EDGE - 0.1
        columns = 2
        small = (width - EDGE - columns * (LEFT + 0.05)) / columns
        rows = -(-len(axes_of) // columns) if has_axes else 0
        height = side + BELOW + rows * (small + BELOW + 0.2)
    else:
        columns = 1 if not has_axes else 2 if len(axes_of) <= 4 else 3
        rows = -(-len(axes_of) // columns) if has_axes else 0
        side = min(0.46 * width if has_axes else 0.7 * width, room - BELOW - 0.18)
        left = LEFT + side + 0.12
        small = (width - left - EDGE - columns * LEFT) / columns if has_axes else 0.0
        small = max(MIN_SIDE, min(small, (side + BELOW + 0.18) / rows - BELOW - 0.2)) if has_axes else 0.0
        height = side + BELOW + 0.18
    sheet = Sheet(heading.bottom + height + foot)
    sheet.head(heading)
    colours, norm = _choose_colours(matrix)
    top = heading.bottom + (0.0 if narrow else 0.18)
    if not narrow and has_axes:
        sheet.text(LEFT, top - 0.06, "all axes", fontsize=style.SMALL, fontweight="bold")
    _draw_matrix(sheet.axes(LEFT, top, side, side), matrix.total, noun, colours, norm)
    for i, axis in enumerate(axes_of if has_axes else ()):
        row, column = divmod(i, columns)
        if narrow:
            x = LEFT + column * (small + LEFT + 0.05)
            y = heading.bottom + side + BELOW + 0.2 + row * (small + BELOW + 0.2)
        else:
            x = left + LEFT + column * (small + LEFT)
            y = top + row * (small + BELOW + 0.2)
        words = f"{palette.AXES[axis].words.removesuffix(' comm.')}, {format_bytes(matrix.sums[axis])}"
        sheet.text(x, y - 0.06, words, fontsize=style.SMALL, fontweight="bold")
        _draw_matrix(sheet.axes(x, y, small, small), matrix.by_axis[axis], "", colours, norm)
    at = heading.bottom + height + 0.06
    _draw_scale(sheet, at, colours, norm)
    sheet.note(at + 0.54, note)
    return sheet.figure


def _choose_colours(matrix: CommunicationMatrix) -> tuple[Any, Any]:
    """Chooses colours and their logarithmic scale, common to all matrices."""
    colours = LinearSegmentedColormap.from_list("bytes", [palette.SKY, palette.BLUE, "#00395c", "#00080f"])
    low, high = matrix.find_scale(DECADES)
    return colours, LogNorm(low if low < high else high / 10, high, clip=True)


def _draw_matrix(axes: Any, matrix: np.ndarray, noun: str, colours: Any, norm: Any) -> None:
    """Draws a matrix; cells without bytes stay white."""
    inches = axes.get_position().width * axes.figure.get_size_inches()[0]
    size = len(matrix)
    shown = np.ma.masked_less_equal(pool_cells(matrix, int(MAX_CELLS * inches)), 0.0)
    axes.imshow(shown, cmap=colours, norm=norm, interpolation="nearest", extent=(-0.5, size - 0.5, size - 0.5, -0.5))
    axes.spines[:].set_visible(True)
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 1 << 30) if size / n * 0.3 <= inches)
    ticks = list(range(0, size, step))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.tick_params(axis="y", length=2.5, pad=2)
    if noun:
        axes.set_xlabel(f"to {noun}", labelpad=1)
        axes.set_ylabel(f"from {noun}", labelpad=1)


def _draw_scale(sheet: Sheet, top: float, colours: Any, norm: Any) -> None:
    """Draws the scale of colours with at most five values."""
    wide = min(3.0, sheet.width - 2 * EDGE - 0.6)
    axes = sheet.axes(EDGE + 0.3, top, wide, BAR)
    low, high = np.log10(norm.vmin), np.log10(norm.vmax)
    axes.imshow(np.linspace(0, 1, 256)[None], cmap=colours, aspect="auto", extent=(low, high, 0, 1))
    every = max(1, int(np.ceil((high - low) / (wide / 0.62))))
    marks = [mark for mark in range(int(np.ceil(low)), int(np.floor(high)) + 1) if mark % every == 0]
    if len(marks) < 2:
        marks = [low, high]
    axes.set_xticks(marks, [format_bytes(10.0**mark) for mark in marks])
    axes.set_yticks([])
