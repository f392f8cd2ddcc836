"""Plot of a traced step against its simulation: a pair of bars for every class of kernels, both timelines by stream.

Both timelines have the same scale. Every class of kernels has its colour (`LOOKS`), communication that of its mesh
axis; the bars name them. Greys are alike: in print without colour the timelines show when kernels run, the bars which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    Sheet,
    format_time_axis,
    make_heading,
    note_height,
    text_width,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.timeline import count_busy, time_unit
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.ir.scheme import SHORT
from meshcast.simulator.report.formatting import format_seconds
from meshcast.validation.traces.comparison import Comparison
from meshcast.validation.traces.timeline import STREAMS, UNATTRIBUTED, Slice, Timeline

LOOKS: dict[str, palette.RGB] = {
    "gemm": palette.rgb(palette.BLUE),
    "attention": palette.rgb(palette.SKY),
    "scan": palette.rgb("#6a8caf"),
    "experts": palette.rgb("#a50026"),
    "norm": palette.rgb(palette.ORANGE),
    "activation": palette.rgb(palette.AMBER),
    "rope": palette.rgb("#e08a5b"),
    "addition": palette.rgb(palette.PINK),
    "embedding": palette.rgb("#b0722f"),
    "loss": palette.rgb(palette.WINE),
    "optimizer": palette.rgb(palette.GREY),
    "copy": palette.rgb(palette.STONE),
    "other": palette.rgb(palette.LINE),
}
"""Colours of the classes of computation."""

SIDES = ("real", "simulated")
BRIEF = {UNATTRIBUTED: "comm."}
"""Short names of streams."""

PALE = 0.45
"""Share of white in the bars of the simulated side."""

ROW = 0.2
"""Height of a pair of bars [in]."""

LABEL, BARS = 0.85, 1.75
"""Left ends of classes and bars [in]."""
REAL, FORECAST, RATIO = 1.95, 1.05, 0.6
"""Distances of the columns of numbers from the right end [in]; there is the number of kernels."""
NARROW = {"LABEL": 0.72, "REAL": 1.06, "FORECAST": 0.44, "RATIO": 0.0}
"""The same in a column, which has neither bars nor numbers of kernels."""

MIN_SECONDS = 1e-9
"""Least time with a ratio [s]; what is shorter is a rounding error."""
MAX_RATIO = 100.0
"""Ratios beyond this, or below its inverse, are not written out."""

LANE = 0.15
"""Height of a stream in the timelines [in]."""

BINS = 1600
"""Columns of a lane: kernels are much shorter than print resolves."""


def class_colour(stream: str, kind: str) -> palette.RGB:
    """Returns the colour of a class of kernels on a stream."""
    if stream == COMPUTE:
        return LOOKS.get(kind, LOOKS["other"])
    return palette.rgb(palette.AXES[SHORT[stream]].colour) if stream in SHORT else palette.lighten(palette.INK, 0.25)


def traces(comparison: Comparison) -> Figure:
    """Returns the plot."""
    lines, sides = comparison.lines, (comparison.real, comparison.simulated)
    lanes = [stream for stream in STREAMS if any(line.stream == stream for line in lines)]
    spans = [side.span for side in sides]
    notes = [f"{comparison.on}. Simulated over real: {spans[1] / spans[0]:.2f}.", *_describe_sides(comparison)]
    notes += [f"{note[0].upper()}{note[1:]}." for note in (*comparison.notes, *comparison.explain_framework())]
    steps = " and ".join(f"{format_seconds(span)} {side}" for side, span in zip(SIDES, spans, strict=True))
    heading = make_heading(f"{comparison.title}: a step of {steps}", *notes)
    top = heading.bottom + 0.14
    rows = _rows(comparison)
    middle = top + ROW * len(rows) + 0.3
    tall = LANE * len(lanes)
    talks = lanes != [COMPUTE]
    note = "A traced communication kernel lasts from its launch and includes waiting for other ranks." if talks else ""
    foot = middle + 2 * (tall + 0.24)
    sheet = Sheet(foot + note_height(note) + 0.1)
    sheet.head(heading)

    _draw_bars(sheet, rows, top)
    scale, unit = time_unit(max(spans))
    for number, (name, side) in enumerate(zip(SIDES, sides, strict=True)):
        at = middle + (tall + 0.24) * number
        sheet.text(EDGE, at - 0.05, name, fontweight="bold", fontsize=style.SMALL)
        axes = sheet.axes(LABEL, at, sheet.width - LABEL - EDGE, tall)
        _draw_lanes(axes, side, lanes, max(spans), scale)
        format_time_axis(axes, max(spans), scale, unit)
        if not number:
            axes.set_xticks([])
    if note:
        sheet.note(foot + 0.12, note)
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


def format_ratio(real: float, simulated: float) -> str:
    """Formats simulated over real time; empty if either is no time, and a bound if the ratio is beyond measure."""
    if min(real, simulated) < MIN_SECONDS:
        return ""
    ratio = simulated / real
    if ratio > MAX_RATIO:
        return f"> {MAX_RATIO:g}"
    return f"{ratio:.2f}" if ratio >= 1 / MAX_RATIO else f"< {1 / MAX_RATIO:g}"


def _draw_bars(sheet: Sheet, rows: Sequence[KernelPair], top: float) -> None:
    longest = max((max(times) for _, _, times, _ in rows), default=0.0) or 1.0
    narrow = style.is_narrow()
    places = NARROW if narrow else {"LABEL": LABEL, "REAL": REAL, "FORECAST": FORECAST, "RATIO": RATIO}
    counts = [f"{calls[0]:,} / {calls[1]:,}" if any(calls) else "" for _, _, _, calls in rows]
    if not narrow:  # long numbers of kernels move the other columns
        more = max(0.0, max(map(text_width, counts), default=0.0) + 0.14 - RATIO)
        places |= {key: places[key] + more for key in ("REAL", "FORECAST", "RATIO")}
    bars = max(BARS, places["LABEL"] + 0.25 + max((text_width(kind) for _, kind, _, _ in rows), default=0.0))
    ends = {key: sheet.right - places[key] for key in ("REAL", "FORECAST", "RATIO")}
    heads = {ends["REAL"]: "real ms", ends["FORECAST"]: "simul. ms", ends["RATIO"]: "ratio"}
    heads |= {} if narrow else {sheet.right: "kernels"}
    for x, words in heads.items():
        sheet.text(x, top - 0.07, words, ha="right", fontsize=style.SMALL, color=palette.FAINT)
    axes = None
    if not narrow:
        sheet.text(bars, top - 0.07, "upper bar: real, paler: simulated", fontsize=style.SMALL, color=palette.FAINT)
        axes = sheet.axes(bars, top, ends["REAL"] - 0.6 - bars, ROW * len(rows))
        axes.set_axis_off()
        axes.set_xlim(0, longest)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    before = ""
    for y, (stream, kind, times, _) in enumerate(rows):
        tone = palette.rgb(palette.LINE) if stream == "step" else class_colour(stream, kind)
        base = top + ROW * (y + 0.5)
        if axes is not None:
            pale = tuple(part + (1 - part) * PALE for part in tone)
            for offset, took, face in ((-0.2, times[0], tone), (0.2, times[1], pale)):
                axes.barh(y + offset, max(took, longest / 500) if took else 0.0, 0.38, color=face, linewidth=0)
        sheet.patch(places["LABEL"], base - 0.05, 0.1, 0.1, facecolor=tone, linewidth=0)
        looks: dict[str, Any] = {"va": "center_baseline", "fontsize": style.SMALL}
        if stream != before:
            sheet.text(EDGE, base, BRIEF.get(stream, stream), fontweight="bold", **looks)
            sheet.patch(EDGE, top + ROW * y, sheet.width - 2 * EDGE, 0, edgecolor=palette.LINE, linewidth=0.4)
            before = stream
        sheet.text(places["LABEL"] + 0.15, base, kind.replace("_", "-"), **looks)
        for key, took in zip(("REAL", "FORECAST"), times, strict=True):
            sheet.text(ends[key], base, f"{took * 1e3:,.3f}" if took >= MIN_SECONDS else "", ha="right", **looks)
        sheet.text(ends["RATIO"], base, format_ratio(*times), ha="right", fontweight="bold", **looks)
        if not narrow:
            sheet.text(sheet.right, base, counts[y], ha="right", color=palette.FAINT, **looks)


def _draw_lanes(axes: Any, side: Timeline, lanes: Sequence[str], span: float, scale: float) -> None:
    """Draws a lane for every stream, each column in the colours of the kernels that ran in it."""
    edges = np.linspace(0, span, BINS + 1)
    for y, lane in enumerate(lanes):
        image = mix_colours([part for part in side.slices if part.stream == lane], edges)[None]
        axes.imshow(
            image, extent=(0, span * scale, y + 0.86, y), aspect="auto", interpolation="nearest", resample=False
        )
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([y + 0.43 for y in range(len(lanes))], [BRIEF.get(lane, lane) for lane in lanes])
    # After the end of the shorter step white is not idle time.
    axes.axvline(side.span * scale, color=palette.INK, linewidth=0.6)


def mix_colours(slices: Sequence[Slice], edges: np.ndarray) -> np.ndarray:
    """Computes the mean colour of every column of time, white if idle [columns, 3]. edges: of the columns [s]."""
    total, mixed = np.zeros(len(edges) - 1), np.zeros((len(edges) - 1, 3))
    for stream, kind in sorted({(part.stream, part.kind) for part in slices}):
        begin, seconds = np.array([(s.begin, s.seconds) for s in slices if (s.stream, s.kind) == (stream, kind)]).T
        share = count_busy([(begin, begin + seconds)], edges)
        total += share
        mixed += share[:, None] * np.array(class_colour(stream, kind))
    full = np.maximum(total, 1.0)[:, None]
    return np.clip(mixed / full + np.maximum(0.0, 1.0 - total)[:, None], 0.0, 1.0)
