"""The data source that all figures of many plans share, so that plans selected in any are marked in all."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.experiments.render.bokeh.load import PlanRows
from meshcast.experiments.sweeps.selection import Row
from meshcast.hardware.errors import cut_middle, escape_controls
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.figures import Figure
from meshcast.simulator.report.formatting import describe_value

MAX_ROWS = 5000
"""Maximum number of plans that are drawn and listed; of more those of the highest throughput."""


@dataclass(frozen=True)
class PlanSource:
    """Plans that were forecast, the fitting ones first.

    rows: the plans.
    fitting: how many of them, from the first on, fit.
    data: Bokeh's source: the varied fields as ``f0``, ``f1`` ..., figures by their names, `status`, `plan` in words.
        Names of columns are ours, as Bokeh reads them as templates; texts show control characters as escapes.
    fields: names that are shown for the varied fields with several values; columns ``f0`` ... in this order.
    figures: those with a column.
    """

    rows: list[Row]
    fitting: int
    data: Any
    fields: list[str]
    figures: list[Figure]


def make_source(plans: PlanRows) -> PlanSource:
    from bokeh.models import ColumnDataSource

    rows = [*plans.fitting, *plans.others][:MAX_ROWS]
    fitting = min(len(plans.fitting), len(rows))
    fields = plans.several or plans.fields
    columns: dict[str, Any] = {
        "status": [row["status"] for row in rows],
        "plan": [escape_controls(cut_middle(plans.describe(row))) for row in rows],
    }
    for number, name in enumerate(fields):
        values = [row.get(name) for row in rows]
        plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        columns[f"f{number}"] = values if plain else [escape_controls(describe_value(value)) for value in values]
    figures = []
    for figure in plans.figures:
        numbers = np.array([np.nan if row.get(figure.name) is None else row[figure.name] for row in rows], float)
        if np.isfinite(numbers).any():
            columns[figure.name] = numbers.astype(np.float32)
            figures.append(figure)
    names = [escape_controls(name.removeprefix("plan.")) for name in fields]
    return PlanSource(rows, fitting, ColumnDataSource(columns), names, figures)
