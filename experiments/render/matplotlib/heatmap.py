"""Heatmap of a sweep over two of its fields: each cell shows the best plan with that pair of values.

The best plan is chosen among those that fit in memory, by the figure that is drawn; fields in which the plans of a cell
differ are written below its value. A cell without a value says why: no plan fits (with the least memory that one
needs), all plans break a rule, or the sweep has none; `explain_cell` gives the reasons in full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Sheet,
    make_heading,
    note_height,
    text_width,
    wrap_text,
    write_on,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.heatmap import (
    Cell,
    choose_form,
    format_value,
    other_fields,
    shorten_field,
    sort_values,
)
from meshcast.simulator.report import figures

NAME = 1.6
"""Maximum width of a value beside the cells [in]."""

SCALE, BAR = 0.62, 0.13
"""Room for the scale of colours right of the cells, and its width [in]."""

BLANK: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": palette.LINE, "linewidth": 0}
HATCHES = {"too large": "////", "invalid": "xxxx", "not in the sweep": ""}
"""Hatches of cells without a value, by the reason."""
MEANING = {
    "too large": "no plan fits with 95 %; below: the least memory that one needs",
    "invalid": "every plan breaks a rule",
    "not in the sweep": "its lists or its `where` have no such plan",
}


def heatmap(
    cells: Mapping[tuple[Any, Any], Cell], x: str, y: str, value: str, title: str, lines: Sequence[str]
) -> Figure:
    """Returns the plot. lines: phrases below the title, on what all plans have in common."""
    across, down = (sort_values({key[i] for key in cells}) for i in (0, 1))
    shown, others = figures.FIGURES[value], other_fields(cells, x, y)
    names = [_wrap(label, NAME) for label in down]
    left = max(text_width(line) for name in names for line in name.split("\n")) + 0.42
    size = (style.layout_width() - left - EDGE - SCALE) / len(across)
    grid = {key: cells.get(key) for key in ((here, there) for here in across for there in down)}
    reasons = [note for note in HATCHES if any(_reason(cell) == note for cell in grid.values())]
    extras = [_describe_others(cell, others) for cell in cells.values() if cell.best is not None]
    has_extras = any(extras) and max(map(text_width, extras)) < size - 0.06
    fields = [name for name in next(iter(cells.values())).rows[0] if "." in name]
    below = f" (below it: {' / '.join(shorten_field(name, fields) for name in others)})" if has_extras else ""
    lines = [f"{shown.title}, of the best plan that fits{below}" if others else shown.title, *lines]
    heading = make_heading(title, lines)
    key = "; ".join(f"{note}: {MEANING[note]}" for note in reasons)
    key = f"Blank cells: {key}." if key else ""
    blank = [2 if reason == "too large" else 1 for reason in reasons]
    blank += [len(wrap_text(reason, size - 0.04)) for reason in reasons]
    lowest = LINE * max(*(name.count("\n") + 1 for name in names), 2 if has_extras else 1, *blank)
    room = style.layout_height() - heading.bottom - 0.7 - note_height(key)
    height = max(lowest + 0.06, min(0.42, size * 0.55, room / len(down)))
    height = max(height, (text_width(shorten_field(y, fields), style.TEXT) + 0.1) / len(down))
    top = heading.bottom
    below_cells = [_wrap(label, size - 0.04) for label in across]
    more = max(name.count("\n") for name in below_cells)
    foot = top + height * len(down) + 0.46 + LINE * more
    sheet = Sheet(foot + note_height(key))
    sheet.head(heading)
    axes = sheet.axes(left, top, size * len(across), height * len(down))
    axes.set_xlim(0, len(across))
    axes.set_ylim(len(down), 0)
    good = [cell.best[value] for cell in cells.values() if cell.best is not None]
    form = choose_form(shown.short or shown.form, good)
    colours = LinearSegmentedColormap.from_list("cells", ["#d9ecf9", palette.SKY, palette.BLUE, "#00395c"])
    for i, here in enumerate(across):
        for j, there in enumerate(down):
            cell = grid[here, there]
            if cell is None or cell.best is None:
                _draw_blank(axes, (i, j), _reason(cell), cell, size)
            else:
                extra = _describe_others(cell, others) if has_extras else ""
                _draw_cell(axes, (i, j), cell.best[value], extra, (shown, form), good, colours)
    axes.set_xticks([i + 0.5 for i in range(len(across))], below_cells)
    axes.set_yticks([j + 0.5 for j in range(len(down))], names)
    axes.tick_params(axis="both", length=0)
    axes.set_xlabel(_name_axis(x, fields, size * len(across)))
    axes.set_ylabel(_name_axis(y, fields, height * len(down)))
    axes.spines[:].set_visible(False)
    if good:
        _draw_scale(sheet, top, height * len(down), (shown, form), good, colours)
    if key:
        sheet.note(foot + 0.05, key)
    return sheet.figure


def _reason(cell: Cell | None) -> str:
    """Says why a cell has no value; empty if it has any."""
    return "not in the sweep" if cell is None else cell.note


def _describe_others(cell: Cell, others: Sequence[str]) -> str:
    """Describes the other fields of the best plan of a cell."""
    assert cell.best is not None
    return " / ".join(format_value(cell.best[name]) for name in others)


def _draw_blank(axes: Any, at: tuple[int, int], reason: str, cell: Cell | None, size: float) -> None:
    axes.add_patch(Rectangle(at, 1, 1, hatch=HATCHES[reason], **BLANK))
    axes.add_patch(Rectangle(at, 1, 1, facecolor="none", edgecolor="white", linewidth=1.2))
    words = wrap_text(reason, size - 0.04)
    if cell is not None and reason == "too large" and len(words) == 1 and text_width(cell.least_memory) < size - 0.04:
        words.append(cell.least_memory)
    looks = {"va": "center", "color": "#5c5c5c", "linespacing": 1.05}
    write_on(axes, "\n".join(words), (at[0] + 0.5, at[1] + 0.5), palette.rgb(BLANK["facecolor"]), 0.6, **looks)


def _draw_cell(
    axes: Any,
    at: tuple[int, int],
    value: float,
    extra: str,
    figure: tuple[figures.Figure, str],
    good: Sequence[float],
    colours: Any,
) -> None:
    """Draws a cell with the figure of its best plan.

    extra: its other fields.
    figure: with the format of its numbers.
    good: the figures of all cells.
    """
    (shown, form), low, high = figure, min(good), max(good)
    share = (value - low) / (high - low) if high > low else 0.5
    colour = colours(1 - share if shown.better == "lower" else share)[:3]
    axes.add_patch(Rectangle(at, 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
    looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": style.SMALL, "color": palette.ink_on(colour)}
    winner = "bold" if value == shown.best(good) else "normal"
    middle = at[1] + (0.3 if extra else 0.5)
    axes.text(at[0] + 0.5, middle, form.format(value), fontweight=winner, **looks)
    if extra:
        axes.text(at[0] + 0.5, at[1] + 0.72, extra, **looks)


def _draw_scale(
    sheet: Sheet, top: float, height: float, figure: tuple[figures.Figure, str], good: Sequence[float], colours: Any
) -> None:
    """Draws the scale of colours right of the cells, with the value at each of its ends and in the middle."""
    shown, form = figure
    tall = min(height, 1.6)
    axes = sheet.axes(sheet.width - SCALE + 0.12, top, BAR, tall)
    low, high = min(good), max(good)
    ramp = np.linspace(1, 0, 128)[:, None]
    axes.imshow(1 - ramp if shown.better == "lower" else ramp, cmap=colours, aspect="auto", extent=(0, 1, 0, 1))
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    marks = (0.0, 0.5, 1.0) if high > low and tall > 0.5 else (0.0, 1.0) if high > low else (0.5,)
    words = [form.format(low + (high - low) * mark) for mark in marks]
    axes.set_yticks(marks, words)
    axes.yaxis.tick_right()
    axes.tick_params(axis="y", length=0, pad=2)


def _name_axis(name: str, fields: Sequence[str], room: float) -> str:
    """Returns the names a field at an axis, in short if its name is longer than the axis. room: length of the axis
    [in]."""
    return name if text_width(name, style.TEXT) <= room else shorten_field(name, fields)


def _wrap(value: Any, room: float) -> str:
    """Breaks a value into lines of a width [in]."""
    together = re.sub(r"(\w) (\w)", "\\1\u00a0\\2", format_value(value))
    words = re.split(r"(?<=,) ", together)
    return "\n".join(line for word in words for line in wrap_text(word.replace("\u00a0", " "), room))
