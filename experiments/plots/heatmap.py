"""Heatmap of a sweep over two of its fields: each cell shows the best plan with that pair of values.

The best plan is chosen among those that fit in memory, by the figure that is drawn; fields in which the plans of a cell
differ are written below its value. A cell in which no plan fits says `too large` or `invalid`; `explain_cell` gives the
reasons.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, save, text_width, truncate_words, wrap_words
from hardware.errors import PlanError, nearest
from simulator.report import figures
from simulator.report.words import describe_value

Row = Mapping[str, Any]

LEFT, WIDEST = 0.95, 0.95
"""Left end of the cells, and maximum width of one [in]."""

NAME = 34
"""Maximum length of a line of a value beside the cells [characters]."""


@dataclass(frozen=True)
class Cell:
    """Plans with one pair of values of the two fields. best: the best that fits, or None. note: why it is None."""

    rows: tuple[Row, ...]
    best: Row | None
    note: str


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
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for row in given:
        groups.setdefault((row[x], row[y]), []).append(row)
    found = {}
    for key, own in groups.items():
        fit = [row for row in own if row["status"] == "fits" and row[value] is not None]
        best = figures.FIGURES[value].best(fit, key=lambda row: row[value]) if fit else None
        large = any(row["status"] == "does-not-fit" for row in own)
        found[key] = Cell(tuple(own), best, "" if best is not None else "too large" if large else "invalid")
    return found


def explain_cell(found: Mapping[tuple[Any, Any], Cell], x: Any, y: Any) -> list[str]:
    """Lists the reasons why plans of a cell do not fit or are invalid, most frequent first."""
    cell = found.get((x, y))
    if cell is None:
        return ["The sweep has no plan of these two values: its lists or its `where` leave them out."]
    said = Counter(
        f"needs {row['peak_device_gib']:.1f} GiB of {row['capacity_gib']:.1f}"
        if row["status"] == "does-not-fit"
        else str(row["reason"])
        for row in cell.rows
        if row["status"] != "fits"
    )
    return [f"{count} x {words}" if count > 1 else words for words, count in said.most_common()]


def draw(rows: Iterable[Row], x: str, y: str, value: str, title: str, lines: Sequence[str], path: str | Path) -> None:
    """Draws a heatmap to a .png or .svg file. Raises OSError if it cannot be written."""
    found = group_cells(rows, x, y, value)
    save(lambda: heatmap(found, x, y, value, title, lines), path)


def heatmap(
    found: Mapping[tuple[Any, Any], Cell], x: str, y: str, value: str, title: str, lines: Sequence[str]
) -> Figure:
    """Returns the plot. lines: phrases below the title, on what all plans have in common."""
    across, down = (_sort_values({key[i] for key in found}) for i in (0, 1))
    names = [_wrap(one, NAME) for one in down]
    left = max(LEFT, max(text_width(line) for name in names for line in name.split("\n")) + 0.4)
    size = min(WIDEST, (style.PAGE - left - EDGE) / len(across))
    height = max(min(0.42, max(0.24, size * 0.5)), LINE * max(name.count("\n") + 1 for name in names))
    shown = figures.FIGURES[value]
    others = _other_fields(found, x, y)
    below = " / ".join(map(_last_key, others))
    words = [f"{shown.title}, of the best plan that fits ({below} written below it)" if others else shown.title, *lines]
    head = wrap_words(words)
    top = 0.42 + LINE * len(head)
    below_cells = [_wrap(one, max(8, int(size * 16))) for one in across]
    more = max(name.count("\n") for name in below_cells)
    sheet = Sheet(top + height * len(down) + 0.62 + LINE * more)
    sheet.head(title, head)
    axes = sheet.axes(left, top, size * len(across), height * len(down))
    axes.set_xlim(0, len(across))
    axes.set_ylim(len(down), 0)
    good = [cell.best[value] for cell in found.values() if cell.best is not None]
    colours = LinearSegmentedColormap.from_list("cells", ["#f7fbff", style.SKY, style.BLUE, "#00395c"])
    for i, here in enumerate(across):
        for j, there in enumerate(down):
            _draw_cell(axes, i, j, found.get((here, there)), shown, good, colours, others, size)
    axes.set_xticks([i + 0.5 for i in range(len(across))], below_cells)
    axes.set_yticks([j + 0.5 for j in range(len(down))], names)
    axes.tick_params(axis="both", length=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[:].set_visible(False)
    return sheet.figure


def _draw_cell(
    axes: Any,
    i: int,
    j: int,
    cell: Cell | None,
    shown: figures.Figure,
    good: Sequence[float],
    colours: Any,
    others: Sequence[str],
    size: float,
) -> None:
    if cell is None:
        return
    if cell.best is None:
        axes.add_patch(Rectangle((i, j), 1, 1, facecolor="#f2f2f2", edgecolor="white", linewidth=1.2))
        axes.text(
            i + 0.5,
            j + 0.5,
            truncate_words(cell.note, size),
            ha="center",
            va="center",
            fontsize=style.SMALL - 1,
            color=style.FAINT,
        )
        return
    low, high, value = min(good), max(good), cell.best[shown.name]
    share = (value - low) / (high - low) if high > low else 0.5
    if shown.better == "lower":
        share = 1 - share
    colour = colours(0.1 + 0.9 * share)[:3]
    ink = style.ink_on(colour)
    axes.add_patch(Rectangle((i, j), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2))
    extra = " / ".join(_format_value(cell.best[name]) for name in others)
    place = 0.38 if extra else 0.5
    winner = "bold" if value == shown.best(good) else "normal"
    axes.text(
        i + 0.5,
        j + place,
        (shown.short or shown.form).format(value),
        ha="center",
        va="center",
        fontsize=style.SMALL,
        color=ink,
        fontweight=winner,
    )
    if extra:
        axes.text(
            i + 0.5, j + 0.74, truncate_words(extra, size * 1.2), ha="center", va="center", fontsize=5.2, color=ink
        )


def _other_fields(found: Mapping[tuple[Any, Any], Cell], x: str, y: str) -> list[str]:
    """Fields other than `x` and `y` in which plans of a cell differ."""
    row = next(iter(found.values())).rows[0]
    fields = [name for name in row if ("." in name or name in ("model", "cluster")) and name not in (x, y)]
    return [name for name in fields if any(len({repr(one[name]) for one in cell.rows}) > 1 for cell in found.values())]


def _sort_values(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _last_key(name: str) -> str:
    return name.rpartition(".")[2]


def _wrap(value: Any, most: int) -> str:
    """A value in lines of at most `most` characters."""
    together = re.sub(r"(\w) (\w)", "\\1\u00a0\\2", _format_value(value))
    return "\n".join(textwrap.wrap(together, most))


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else describe_value(value) if isinstance(value, str) else str(value)
