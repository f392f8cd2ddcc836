"""Scaling curve: tokens/s of a GPU against GPUs with ideal scaling as a line, and below it the parts of the step.

The axis of tokens/s is linear and for a single GPU, so that a loss at the end of the curve is as long as it is large.
The band is the 90 % interval; a vertical line marks where the bottleneck changes.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Sheet,
    format_large,
    make_heading,
    note_height,
    text_width,
    truncate_words,
)
from meshcast.experiments.sweeps.scaling import Curve
from meshcast.experiments.views import palette
from meshcast.experiments.views.breakdown import STEP_GROUPS
from meshcast.experiments.views.devices import choose_devices
from meshcast.experiments.views.scaling import ScalingCurve, make_scaling_curve

LEFT, TABLE, BETWEEN = 0.62, 2.15, 0.25
"""Left end of the axes, width of the table beside them, and distance of both [in]."""
UPPER, LOWER = 2.2, 1.3
"""Heights of the two axes [in]."""
KEY = 0.4
"""Height of the legend of lines, marks and band [in]."""


MAX_ROWS = 12
"""Maximum number of points in the table beside the curve: as many as fit beside it, with the bottlenecks below."""


def scaling(curve: Curve) -> Figure:
    """Returns the plot."""
    picture = make_scaling_curve(curve)
    heading = make_heading(picture.title, picture.phrases)
    top = heading.bottom + KEY
    if not picture.steps:
        sheet = Sheet(top + 0.4)
        sheet.head(heading)
        sheet.text(EDGE, top, "The job runs on none of these numbers of GPUs.")
        return sheet.figure
    narrow = style.is_narrow()
    refused = ", ".join(f"{gpus:,}" for gpus in picture.refused)
    note = f"Not possible with this plan: {refused} GPUs." if refused else ""
    room = style.layout_height() - top - 0.75 - note_height(note)
    upper_height = min(UPPER, 0.62 * room)
    lower_height = min(LOWER, room - upper_height)
    rows = _table_rows(picture)
    table = LINE * (len(rows) + 1) + 0.1 + 0.17 * len(STEP_GROUPS) + 0.1
    below = top + upper_height + lower_height + 0.6
    side = style.layout_width() - LEFT - (EDGE if narrow else TABLE + BETWEEN + EDGE)
    height = below + (table + 0.1 if narrow else 0.0)
    sheet = Sheet(max(height, 0.0 if narrow else top + table) + note_height(note))
    sheet.head(heading)
    upper = sheet.axes(LEFT, top, side, upper_height)
    lower = sheet.axes(LEFT, top + upper_height + 0.15, side, lower_height)
    gpus = picture.gpus
    for axes in (upper, lower):
        set_gpu_axis(axes, gpus, side)
    _draw_rates(upper, picture)
    _draw_shares(lower, picture)
    upper.tick_params(axis="x", labelbottom=False)
    lower.set_xlabel("GPUs")
    _draw_legend(sheet, picture, heading.bottom - 0.12)
    _draw_table(sheet, rows, EDGE if narrow else LEFT + side + BETWEEN, below if narrow else top)
    if note:
        sheet.note(sheet.height - note_height(note) + 0.04, note)
    return sheet.figure


def set_gpu_axis(axes: Axes, gpus: list[int], length: float) -> None:
    """Makes the horizontal axis one of numbers of GPUs, each doubling of the same length. length: of the axis [in]."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(gpus[0] / 1.3, gpus[-1] * 1.3)
    axes.xaxis.set_major_locator(FixedLocator(choose_ticks(gpus, length)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.spines["left"].set_visible(True)


def choose_ticks(gpus: list[int], room: float) -> list[int]:
    """As many of the numbers as have room, including the last. room: length of the axis [in]."""
    count = max(2, int(room / (text_width(f"{gpus[-1]:,}") + 0.12)))
    step = -(-len(gpus) // count)
    return gpus[::-1][::step][::-1]


def _draw_rates(axes: Any, picture: ScalingCurve) -> None:
    """Draws tokens/s of a GPU, their interval, ideal scaling, and where the bottleneck changes."""
    steps = picture.steps
    x, rates = [step.gpus for step in steps], [step.rate for step in steps]
    lows, highs = [step.low for step in steps], [step.high for step in steps]
    axes.axhline(rates[0], color=palette.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.fill_between(x, lows, highs, color=palette.lighten(palette.BLUE, 0.75), linewidth=0, zorder=0)
    axes.plot(x, rates, color=palette.BLUE, linewidth=1.2, zorder=2)
    for fits, face in ((True, palette.BLUE), (False, "white")):
        points = [step for step in steps if step.report.fits == fits]
        axes.scatter(
            [step.gpus for step in points],
            [step.rate for step in points],
            s=16,
            color=face,
            edgecolors=palette.BLUE,
            linewidths=0.8,
            zorder=3,
        )
    for smaller, larger in picture.changes:
        middle = (smaller.gpus * larger.gpus) ** 0.5
        axes.axvline(middle, color=palette.ORANGE, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
    axes.set_ylabel("tokens/s of a GPU")
    axes.set_ylim(0, 1.08 * max(*highs, *rates))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(format_rate))


def format_rate(value: float, _: Any) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):g} {unit}"
    return f"{value:,g}"


def _draw_shares(axes: Any, picture: ScalingCurve) -> None:
    """Draws the parts of the step as areas above each other."""
    x, rows = [float(step.gpus) for step in picture.steps], [step.shares for step in picture.steps]
    if len(x) == 1:  # an area needs two points
        x, rows = [x[0] / 1.2, x[0] * 1.2], rows * 2
    low = [0.0] * len(x)
    for part, shares in zip(STEP_GROUPS.values(), zip(*rows, strict=True), strict=True):
        high = [below + share for below, share in zip(low, shares, strict=True)]
        axes.fill_between(x, low, high, linewidth=0.4, **style.fill(part))
        low = high
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50", "100"])
    axes.set_ylabel("% of the step")


def _draw_legend(sheet: Sheet, picture: ScalingCurve, top: float) -> None:
    band = Patch(facecolor=palette.lighten(palette.BLUE, 0.75), linewidth=0)
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=palette.BLUE, marker="o", markersize=3.6, linewidth=1.2), "forecast"),
        (band, "90% interval"),
        (Line2D([], [], color=palette.INK, linewidth=0.8, linestyle=(0, (4, 3))), "ideal scaling"),
    ]
    if picture.changes:
        dots = Line2D([], [], color=palette.ORANGE, linewidth=1.0, linestyle=(0, (1, 2)))
        entries.append((dots, "largest cost changes"))
    if not all(step.report.fits for step in picture.steps):
        looks: dict[str, Any] = {"markerfacecolor": "white", "markersize": 3.6, "linewidth": 0}
        entries.append((Line2D([], [], color=palette.BLUE, marker="o", **looks), "does not fit"))
    columns = 2 if style.is_narrow() else len(entries)
    sheet.figure.legend(
        *zip(*entries, strict=True),
        loc="upper left",
        bbox_to_anchor=((EDGE - 0.4 * style.SMALL / 72) / sheet.width, 1 - top / sheet.height),
        ncols=columns,
        frameon=False,
        handlelength=2.2,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=0.1,
        labelspacing=0.25,
    )


TableRow = tuple[str, ...]
"""GPUs, efficiency, tokens/s and step; or when and what of the largest cost; or a single text, which is a head."""


def _table_rows(picture: ScalingCurve) -> list[TableRow]:
    """Formats the efficiency at some points, and the largest costs."""
    rows: list[TableRow] = [("GPUs", "efficiency", "tokens/s", "step")]
    for step in (picture.steps[number] for number in choose_devices(len(picture.steps), MAX_ROWS)):
        seconds = step.report.step_time
        duration = f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
        rows.append((f"{step.gpus:,}", f"{step.efficiency:.1%}", format_large(step.tokens_per_s, ".3g"), duration))
    rows.append(("largest cost besides matrix work",))
    rows += [(f"to {smaller.gpus:,}", smaller.bottleneck) for smaller, _ in picture.changes][-3:]
    return [*rows, ("then" if picture.changes else "all", picture.steps[-1].bottleneck)]


def _draw_table(sheet: Sheet, rows: list[TableRow], left: float, top: float) -> None:
    """Writes the efficiency at some points and the largest costs, and below them the colours of the parts."""
    right, y = sheet.right, top + 0.08
    ends = (left + 0.42, left + 0.98, left + 1.55, min(right, left + TABLE))
    for row in rows:
        looks: dict[str, Any] = {"fontsize": style.SMALL}
        head = row[0] in ("GPUs", "largest cost besides matrix work")
        looks["color"] = palette.FAINT if head else palette.INK
        if len(row) == 1:
            y += 0.06
            sheet.text(left, y, row[0], **looks)
        elif len(row) == 2:
            sheet.text(left + 0.42, y, row[0], ha="right", **looks)
            sheet.text(left + 0.5, y, truncate_words(row[1], right - left - 0.5), **looks)
        else:
            for x, cell in zip(ends, row, strict=True):
                sheet.text(x, y, cell, ha="right", **looks)
        y += LINE
    for part in reversed(STEP_GROUPS.values()):
        sheet.patch(left, y, 0.22, 0.1, linewidth=0, **style.fill(part))
        sheet.text(left + 0.3, y + 0.09, part.words, fontsize=style.SMALL)
        y += 0.17
