"""Plot of a traced step against its simulation: a pair of bars for every class of kernels, both timelines by stream.

Both timelines have the same scale. Colours (`LOOKS`): blue for GEMMs and attention, orange for memory-bound
kernels, grey for the optimizer and the rest; communication has the colour of its mesh axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, format_time_axis, save, time_unit, truncate_words
from simulator.ir.ops import COMPUTE
from simulator.ir.scheme import SHORT
from simulator.report.words import format_seconds
from validation.traces.comparison import Comparison
from validation.traces.timeline import STREAMS, UNATTRIBUTED, Slice, Timeline

MATRIX, BOUND, REST = style.BLUE, style.ORANGE, style.GREY
LOOKS: dict[str, style.RGB] = {
    "gemm": style.rgb(MATRIX),
    "attention": style.lighten(MATRIX, 0.35),
    "scan": style.lighten(MATRIX, 0.6),
    "experts": style.lighten(BOUND, 0.1),
    "norm": style.rgb(BOUND),
    "activation": style.lighten(BOUND, 0.2),
    "rope": style.lighten(BOUND, 0.35),
    "addition": style.lighten(BOUND, 0.5),
    "embedding": style.lighten(BOUND, 0.62),
    "loss": style.lighten(BOUND, 0.72),
    "optimizer": style.rgb(REST),
    "copy": style.lighten(REST, 0.4),
    "other": style.lighten(REST, 0.65),
}
"""Colours of the classes of computation."""

SIDES = ("real", "simulated")
BRIEF = {UNATTRIBUTED: "comm."}
"""Short names of streams."""

PALE = 0.45
"""Share of white in the bars of the simulated side."""

ROW = 0.2
"""Height of a pair of bars [in]."""

LABEL, BARS, REAL, FORECAST, RATIO = 0.95, 1.9, 5.05, 5.95, 6.5
"""Left ends of classes and bars, right ends of the columns of numbers [in]."""

LANE = 0.15
"""Height of a stream in the timelines [in]."""

BINS = 1600
"""Columns of a lane: kernels are much shorter than print resolves."""


def draw(comparison: Comparison, path: str | Path) -> None:
    """Draws the comparison to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: traces(comparison), path)


def class_colour(stream: str, kind: str) -> style.RGB:
    """Returns the colour of a class of kernels on a stream."""
    if stream == COMPUTE:
        return LOOKS.get(kind, LOOKS["other"])
    return style.rgb(style.AXES[SHORT[stream]]) if stream in SHORT else style.lighten(style.INK, 0.25)


def traces(comparison: Comparison) -> Figure:
    """Returns the plot."""
    lines, sides = comparison.lines, (comparison.real, comparison.simulated)
    lanes = [stream for stream in STREAMS if any(line.stream == stream for line in lines)]
    spans = [side.span for side in sides]
    notes = [f"{comparison.on}. Simulated over real: {spans[1] / spans[0]:.2f}.", *_describe_sides(comparison)]
    notes += [f"{note[0].upper()}{note[1:]}." for note in comparison.notes]
    top = 0.36 + LINE * len(notes) + 0.22
    rows = _rows(comparison)
    middle = top + ROW * len(rows) + 0.3
    tall = LANE * len(lanes)
    talks = lanes != [COMPUTE]
    sheet = Sheet(middle + 2 * (tall + 0.24) + (0.26 if talks else 0.06))
    given = " and ".join(f"{format_seconds(span)} {side}" for side, span in zip(SIDES, spans, strict=True))
    sheet.head(
        f"{comparison.title}: a step of {given}", [truncate_words(note, style.PAGE - 2 * EDGE) for note in notes]
    )

    _draw_bars(sheet, rows, top)
    scale, unit = time_unit(max(spans))
    for number, (name, side) in enumerate(zip(SIDES, sides, strict=True)):
        at = middle + (tall + 0.24) * number
        sheet.text(EDGE, at - 0.05, name, fontweight="bold", fontsize=style.SMALL)
        axes = sheet.axes(LABEL, at, style.PAGE - LABEL - EDGE, tall)
        _draw_lanes(axes, side, lanes, max(spans), scale)
        format_time_axis(axes, max(spans), scale, unit)
        if not number:
            axes.set_xticks([])
    if talks:
        note = "A traced communication kernel lasts from its launch and includes waiting for other ranks."
        sheet.text(EDGE, sheet.height - 0.08, note, fontsize=style.SMALL, color=style.FAINT)
    return sheet.figure


def _describe_sides(comparison: Comparison) -> list[str]:
    """Writes a line for each side: number of kernels, exposed communication and idle time."""
    parts = []
    for name, side in zip(SIDES, (comparison.real, comparison.simulated), strict=True):
        account = side.account
        exposed = f", {account['exposed'] / side.span:.0%} exposed communication" if account["exposed"] else ""
        parts.append(f"{name.capitalize()}: {side.calls:,} kernels{exposed}, {account['idle'] / side.span:.0%} idle.")
    return parts


KernelPair = tuple[str, str, tuple[float, float], tuple[int, int]]
"""Stream, class, seconds and calls of both sides."""


def _rows(comparison: Comparison) -> list[KernelPair]:
    """Lists a pair for every class of every stream, for exposed communication and for idle time."""
    rows: list[KernelPair] = [
        (line.stream, line.kind, (line.real, line.simulated), (line.real_calls, line.simulated_calls))
        for line in comparison.lines
    ]
    real, simulated = comparison.real.account, comparison.simulated.account
    for name, words in (("exposed", "exposed comm."), ("idle", "idle")):
        if real[name] or simulated[name]:
            rows.append(("step", words, (real[name], simulated[name]), (0, 0)))
    return rows


def _draw_bars(sheet: Sheet, rows: Sequence[KernelPair], top: float) -> None:
    """Draws a line for every pair, with its bars and numbers."""
    longest = max((max(times) for _, _, times, _ in rows), default=0.0) or 1.0
    heads = {REAL: "real ms", FORECAST: "simulated ms", RATIO: "ratio", style.PAGE - EDGE: "kernels"}
    for x, words in heads.items():
        sheet.text(x, top - 0.07, words, ha="right", fontsize=style.SMALL, color=style.FAINT)
    sheet.text(BARS, top - 0.07, "upper bar: real, paler: simulated", fontsize=style.SMALL, color=style.FAINT)
    axes = sheet.axes(BARS, top, REAL - 0.6 - BARS, ROW * len(rows))
    axes.set_axis_off()
    axes.set_xlim(0, longest)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    before = ""
    for y, (stream, kind, times, calls) in enumerate(rows):
        tone = style.rgb(style.LINE) if stream == "step" else class_colour(stream, kind)
        pale = tuple(part + (1 - part) * PALE for part in tone)
        for offset, took, face in ((-0.2, times[0], tone), (0.2, times[1], pale)):
            axes.barh(y + offset, max(took, longest / 500) if took else 0.0, 0.38, color=face, linewidth=0)
        base = top + ROW * (y + 0.5)
        looks: dict[str, Any] = {"va": "center_baseline", "fontsize": style.SMALL}
        if stream != before:
            sheet.text(EDGE, base, BRIEF.get(stream, stream), fontweight="bold", **looks)
            sheet.patch(EDGE, top + ROW * y, style.PAGE - 2 * EDGE, 0, edgecolor=style.LINE, linewidth=0.4)
            before = stream
        sheet.text(LABEL, base, kind.replace("_", "-"), **looks)
        for x, took in zip((REAL, FORECAST), times, strict=True):
            sheet.text(x, base, f"{took * 1e3:,.3f}" if took else "", ha="right", **looks)
        ratio = f"{times[1] / times[0]:.2f}" if all(times) else ""
        sheet.text(RATIO, base, ratio, ha="right", fontweight="bold", **looks)
        count = f"{calls[0]:,} / {calls[1]:,}" if any(calls) else ""
        sheet.text(style.PAGE - EDGE, base, count, ha="right", color=style.FAINT, **looks)


def _draw_lanes(axes: Any, side: Timeline, lanes: Sequence[str], span: float, scale: float) -> None:
    """Draws a lane for every stream, each column in the colours of the kernels that ran in it."""
    edges = np.linspace(0, span, BINS + 1)
    for y, lane in enumerate(lanes):
        own = [one for one in side.slices if one.stream == lane]
        image = mix_colours(own, edges)[None]
        axes.imshow(
            image, extent=(0, span * scale, y + 0.86, y), aspect="auto", interpolation="nearest", resample=False
        )
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([y + 0.43 for y in range(len(lanes))], [BRIEF.get(lane, lane) for lane in lanes])
    # After the end of the shorter step white is not idle time.
    axes.axvline(side.span * scale, color=style.INK, linewidth=0.6)


def mix_colours(slices: Sequence[Slice], edges: np.ndarray) -> np.ndarray:
    """Computes the mean colour of every column of time, white if idle [columns, 3]. edges: of the columns [s]."""
    total, mixed = np.zeros(len(edges) - 1), np.zeros((len(edges) - 1, 3))
    for stream, kind in sorted({(one.stream, one.kind) for one in slices}):
        own = [(one.begin, one.begin + one.seconds) for one in slices if (one.stream, one.kind) == (stream, kind)]
        share = np.diff(_busy_before(np.array(own), edges)) / np.diff(edges)
        total += share
        mixed += share[:, None] * np.array(class_colour(stream, kind))
    full = np.maximum(total, 1.0)[:, None]
    return np.clip(mixed / full + np.maximum(0.0, 1.0 - total)[:, None], 0.0, 1.0)


def _busy_before(spans: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Computes the total length of the intervals before every moment [s]; intervals may overlap."""
    found = np.zeros(len(moments))
    for column, sign in ((0, 1.0), (1, -1.0)):
        ordered = np.sort(spans[:, column])
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        passed = np.searchsorted(ordered, moments)
        found += sign * (passed * moments - sums[passed])
    return found
