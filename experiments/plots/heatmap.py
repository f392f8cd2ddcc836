"""Heatmap of a sweep over two of its fields: each cell shows the best plan with that pair of values.

The best plan is chosen among those that fit in memory, by the figure that is drawn; fields in which the plans of a cell
differ are written below its value. A cell without a value says why: no plan fits (with the least memory that one
needs), all plans break a rule, or the sweep has none; `explain_cell` gives the reasons in full.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meshcast.experiments.plots import style
from meshcast.experiments.plots.sheet import (
    EDGE,
    LINE,
    Sheet,
    make_heading,
    note_height,
    save,
    text_width,
    wrap_text,
)
from meshcast.experiments.sweeps.selection import LARGE
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.report import figures
from meshcast.simulator.report.formatting import describe_value

Row = Mapping[str, Any]

NAME = 1.6
"""Maximum width of a value beside the cells [in]."""

SCALE, BAR = 0.62, 0.13
"""Room for the scale of colours right of the cells, and its width [in]."""

BLANK: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": style.LINE, "linewidth": 0}
HATCHES = {"too large": "////", "invalid": "xxxx", "not in the sweep": ""}
"""Hatches of cells without a value, by the reason."""
MEANING = {
    "too large": "no plan fits with 95 %; below: the least memory that one needs",
    "invalid": "every plan breaks a rule",
    "not in the sweep": "its lists or its `where` have no such plan",
}


@dataclass(frozen=True)
class Cell:
    """Plans with one pair of values of the two fields. best: the best that fits, or None. note: why it is None."""

    rows: tuple[Row, ...]
    best: Row | None
    note: str

    @property
    def least_memory(self) -> str:
        """The least memory that a plan which is too large needs; empty if none is."""
        needs = [row["peak_device_gib"] for row in self.rows if row["status"] in LARGE]
        return f"{min(needs):,.0f} GiB" if needs else ""


def group_cells(rows: Iterable[Row], x: str, y: str, value: str) -> dict[tuple[Any, Any], Cell]:
    """Groups rows into cells by their values of `x` and `y`.

    Raises PlanError for a field or figure that the sweep does not have, or a figure that ranks no plans.
    """
    given = list(rows)
    known = list(given[0]) if given else []
    for option, name in (("--x", x), ("--y", y)):
        if name not in known:
            raise PlanError(option, "no such field in this sweep", nearest(name, known), name)
    shown = [name for name, one in figures.FIGURES.items() if one.better != "neither" and name in known]
    if value not in shown:
        raise PlanError("--value", "no such value in this sweep", nearest(value, shown), value)
    for option, name in (("--x", x), ("--y", y)):
        if any(isinstance(row[name], dict | list) for row in given):
            raise PlanError(
                option, "its values are lists or mappings, which have no place on an axis", "Name another", name
            )
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for row in given:
        groups.setdefault((row[x], row[y]), []).append(row)
    found = {}
    for key, own in groups.items():
        fit = [row for row in own if row["status"] == "fits" and row[value] is not None]
        best = figures.FIGURES[value].best(fit, key=lambda row: row[value]) if fit else None
        large = any(row["status"] in LARGE for row in own)
        found[key] = Cell(tuple(own), best, "" if best is not None else "too large" if large else "invalid")
    return found


def explain_cell(found: Mapping[tuple[Any, Any], Cell], x: Any, y: Any) -> list[str]:
    """Lists the reasons why plans of a cell do not fit or are invalid, most frequent first."""
    cell = found.get((x, y))
    if cell is None:
        return ["The sweep has no plan of these two values: its lists or its `where` leave them out."]
    said = Counter(
        f"needs {row['peak_device_gib']:.1f} GiB of {row['capacity_gib']:.1f}"
        if row["status"] in LARGE
        else str(row["reason"])
        for row in cell.rows
        if row["status"] != "fits"
    )
    return [f"{count} x {words}" if count > 1 else words for words, count in said.most_common()]


def draw(
    rows: Iterable[Row], x: str, y: str, value: str, title: str, lines: Sequence[str], path: str | Path,
    width: style.Width = "page",
) -> None:  # fmt: skip
    """Draws a heatmap to a .png, .svg or .pdf file. Raises OSError if it cannot be written."""
    found = group_cells(rows, x, y, value)
    save(lambda: heatmap(found, x, y, value, title, lines), path, width)


def heatmap(
    found: Mapping[tuple[Any, Any], Cell], x: str, y: str, value: str, title: str, lines: Sequence[str]
) -> Figure:
    """Returns the plot. lines: phrases below the title, on what all plans have in common."""
    across, down = (_sort_values({key[i] for key in found}) for i in (0, 1))
    shown, others = figures.FIGURES[value], _other_fields(found, x, y)
    names = [_wrap(one, NAME) for one in down]
    left = max(text_width(line) for name in names for line in name.split("\n")) + 0.42
    size = (style.layout_width() - left - EDGE - SCALE) / len(across)
    grid = {key: found.get(key) for key in ((here, there) for here in across for there in down)}
    reasons = [note for note in HATCHES if any(_reason(cell) == note for cell in grid.values())]
    extras = [_describe_others(cell, others) for cell in found.values() if cell.best is not None]
    has_extras = any(extras) and max(map(text_width, extras)) < size - 0.06
    fields = [name for name in next(iter(found.values())).rows[0] if "." in name]
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
    below_cells = [_wrap(one, size - 0.04) for one in across]
    more = max(name.count("\n") for name in below_cells)
    foot = top + height * len(down) + 0.46 + LINE * more
    sheet = Sheet(foot + note_height(key))
    sheet.head(heading)
    axes = sheet.axes(left, top, size * len(across), height * len(down))
    axes.set_xlim(0, len(across))
    axes.set_ylim(len(down), 0)
    good = [cell.best[value] for cell in found.values() if cell.best is not None]
    form = choose_form(shown.short or shown.form, good)
    colours = LinearSegmentedColormap.from_list("cells", ["#d9ecf9", style.SKY, style.BLUE, "#00395c"])
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
    """Why a cell has no value; empty if it has one."""
    return "not in the sweep" if cell is None else cell.note


def _describe_others(cell: Cell, others: Sequence[str]) -> str:
    """The other fields of the best plan of a cell."""
    assert cell.best is not None
    return " / ".join(_format_value(cell.best[name]) for name in others)


def _draw_blank(axes: Any, at: tuple[int, int], reason: str, cell: Cell | None, size: float) -> None:
    axes.add_patch(Rectangle(at, 1, 1, hatch=HATCHES[reason], **BLANK))
    axes.add_patch(Rectangle(at, 1, 1, facecolor="none", edgecolor="white", linewidth=1.2))
    words = wrap_text(reason, size - 0.04)
    if cell is not None and reason == "too large" and len(words) == 1 and text_width(cell.least_memory) < size - 0.04:
        words.append(cell.least_memory)
    patch = {"facecolor": BLANK["facecolor"], "edgecolor": "none", "pad": 0.6}
    looks = {"ha": "center", "va": "center", "fontsize": style.SMALL, "color": "#5c5c5c", "bbox": patch}
    axes.text(at[0] + 0.5, at[1] + 0.5, "\n".join(words), linespacing=1.05, **looks)


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

    extra: its other fields. figure: with the format of its numbers. good: the figures of all cells.
    """
    (shown, form), low, high = figure, min(good), max(good)
    share = (value - low) / (high - low) if high > low else 0.5
    colour = colours(1 - share if shown.better == "lower" else share)[:3]
    axes.add_patch(Rectangle(at, 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
    looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": style.SMALL, "color": style.ink_on(colour)}
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


def _other_fields(found: Mapping[tuple[Any, Any], Cell], x: str, y: str) -> list[str]:
    """Fields other than `x` and `y` in which plans of a cell differ."""
    row = next(iter(found.values())).rows[0]
    fields = [name for name in row if ("." in name or name in ("model", "cluster")) and name not in (x, y)]
    return [name for name in fields if any(len({repr(one[name]) for one in cell.rows}) > 1 for cell in found.values())]


def choose_form(form: str, values: Sequence[float]) -> str:
    """A format that gives all numbers of a plot the same decimals, as many as any needs; `form` if they differ widely.

    form: a format of significant digits, or of decimals.
    """
    words = [form.format(value) for value in values]
    if not form.endswith("g}") or any("e" in one for one in words) or max(values) > 100 * min(values):
        return form
    return f"{{:,.{max(len(one.partition('.')[2]) for one in words)}f}}"


def shorten_field(name: str, fields: Sequence[str]) -> str:
    """The last key of a field, with the one before it where the last alone would be read as another field."""
    short = name.rpartition(".")[2]
    same = [one for one in fields if one.rpartition(".")[2] == short and one != name]
    if same or (short in style.AXES and not name.startswith("plan.")):
        return ".".join(name.split(".")[-2:])
    return short


def _name_axis(name: str, fields: Sequence[str], room: float) -> str:
    """A field at an axis, in short if its name is longer than the axis. room: length of the axis [in]."""
    return name if text_width(name, style.TEXT) <= room else shorten_field(name, fields)


def _sort_values(values: Iterable[Any]) -> list[Any]:
    """Values of a field in their order: none before numbers, numbers before names."""
    return sorted(values, key=lambda one: (one is not None, isinstance(one, str), 0 if one is None else one))


def _wrap(value: Any, room: float) -> str:
    """A value in lines of a width [in]."""
    together = re.sub(r"(\w) (\w)", "\\1\u00a0\\2", _format_value(value))
    words = re.split(r"(?<=,) ", together)
    return "\n".join(line for word in words for line in wrap_text(word.replace("\u00a0", " "), room))


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()  # as jobs write it
    return f"{value:g}" if isinstance(value, float) else describe_value(value) if isinstance(value, str) else str(value)
