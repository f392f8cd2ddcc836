"""Writes how far steps lie from their forecast, by regime, from files of published runs.

python -m tools.data.regimes runs.jsonl more.jsonl

The table is simulator/costs/regimes.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.render.terminal.published import progress
from meshcast.experiments.views.table import Table, formatted_numbers
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.costs.regimes import FILE, ROOM
from meshcast.validation.published.fit.derivatives import forecast_derivatives
from meshcast.validation.published.fit.residuals import measure_residuals
from meshcast.validation.published.rows import PublishedRun, read_files

HEAD = """\
# Bias and standard deviation of log(measured / forecast) of steps by regime, without assumptions and kernels. Made by
# `make docs-regimes`; do not edit it. `rows` published runs; validation/published/fit/residuals.py says how.
"""


def write_table(residuals: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Writes the table."""
    table = {
        row["regime"]: {key: round(value, 3) for key, value in row["residual"].items()} | {"rows": row["rows"]}
        for row in residuals
        if not row["class"]
    }
    write_file(file, HEAD + yaml.safe_dump(table, default_flow_style=None, sort_keys=False, width=200))


def describe_residuals(residuals: Sequence[Mapping[str, Any]]) -> str:
    """Returns how the intervals of every regime hold, as a table in Markdown."""
    counts = ("runs", ""), ("sources", ""), ("median / p90 %", "")
    table = Table("regime", "class", *formatted_numbers(*counts, *SHARES.values()))
    for row in residuals:
        if row["rows"]:
            errors = f"{100 * row['median']:.1f} / {100 * row['p90']:.1f}"
            shares = (row[key] for key in SHARES)
            table.add(row["regime"], row["class"] or "all", row["rows"], row["sources"], errors, *shares)
    return render_table(table).rstrip()


SHARES = {
    "inside": ("inside %", ".0p"),
    "inside_left_out": ("of left-out sources %", ".0p"),
    "half_width": ("half width %", ".1p"),
}
"""Shares of a row, with their heads and formats."""


def main(paths: Sequence[str]) -> None:
    """Reads files of published runs, writes the table, and prints how intervals hold."""
    runs = [run for run in read_files([Path(path) for path in paths]) if isinstance(run, PublishedRun)]
    timed = [run for run in runs if run.step_time is not None]
    rows = [row for row in progress(forecast_derivatives(timed), len(timed), "runs") if row["shares"] is not None]
    residuals = measure_residuals(rows)
    write_table(residuals, Path(str(ROOM / FILE)))
    print(describe_residuals(residuals))


if __name__ == "__main__":
    main(sys.argv[1:])
