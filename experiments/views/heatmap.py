"""Heatmap of a sweep over two of its fields: a cell is the best plan with a pair of values, or says why it is blank.

The best plan is chosen among those that fit in memory, by the figure that is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshcast.experiments.sweeps.selection import LARGE
from meshcast.experiments.views import palette
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.simulator.report import figures
from meshcast.simulator.report.formatting import describe_value

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """Plans with a pair of values of the two fields.

    best: the best that fits, or None.
    note: why it is None.
    """

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
    plans = list(rows)
    known = list(plans[0]) if plans else []
    for option, name in (("--x", x), ("--y", y)):
        if name not in known:
            raise PlanError(option, "no such field in this sweep", nearest(name, known), name)
    shown = [name for name, figure in figures.FIGURES.items() if figure.better != "neither" and name in known]
    if value not in shown:
        raise PlanError("--value", "no such value in this sweep", nearest(value, shown), value)
    for option, name in (("--x", x), ("--y", y)):
        if any(isinstance(row[name], dict | list) for row in plans):
            raise PlanError(
                option, "its values are lists or mappings, which have no place on an axis", "Name another", name
            )
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for row in plans:
        groups.setdefault((row[x], row[y]), []).append(row)
    cells = {}
    for key, group in groups.items():
        fit = [row for row in group if row["status"] == "fits" and row[value] is not None]
        best = figures.FIGURES[value].best(fit, key=lambda row: row[value]) if fit else None
        large = any(row["status"] in LARGE for row in group)
        cells[key] = Cell(tuple(group), best, "" if best is not None else "too large" if large else "invalid")
    return cells


def explain_cell(cells: Mapping[tuple[Any, Any], Cell], x: Any, y: Any) -> list[str]:
    """Lists the reasons why plans of a cell do not fit or are invalid, most frequent first."""
    cell = cells.get((x, y))
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


def other_fields(cells: Mapping[tuple[Any, Any], Cell], x: str, y: str) -> list[str]:
    """Lists fields other than `x` and `y` in which plans of a cell differ."""
    first = next(iter(cells.values())).rows[0]
    fields = [name for name in first if ("." in name or name in ("model", "cluster")) and name not in (x, y)]
    return [name for name in fields if any(len({repr(row[name]) for row in cell.rows}) > 1 for cell in cells.values())]


def sort_values(values: Iterable[Any]) -> list[Any]:
    """Sorts values of a field: none before numbers, numbers before names."""
    return sorted(values, key=lambda value: (value is not None, isinstance(value, str), 0 if value is None else value))


def choose_form(form: str, values: Sequence[float]) -> str:
    """Chooses a format that gives all numbers of a plot the same decimals, as many as any needs.

    form: a format of significant digits, or of decimals, which is returned where the numbers differ widely.
    """
    words = [form.format(value) for value in values]
    if not form.endswith("g}") or any("e" in word for word in words) or max(values) > 100 * min(values):
        return form
    return f"{{:,.{max(len(word.partition('.')[2]) for word in words)}f}}"


def shorten_field(name: str, fields: Sequence[str]) -> str:
    """Shortens a field to its last key, with the key before it where the last alone would be read as another field."""
    short = name.rpartition(".")[2]
    same = [field for field in fields if field.rpartition(".")[2] == short and field != name]
    if same or (short in palette.AXES and not name.startswith("plan.")):
        return ".".join(name.split(".")[-2:])
    return short


def format_value(value: Any) -> str:
    """Formats a value of a field as jobs write it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else describe_value(value) if isinstance(value, str) else str(value)
