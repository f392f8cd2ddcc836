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

from meshcast.experiments.render.terminal.published import progress
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
    lines = [
        "| regime | class | runs | sources | median / p90 % | inside % | of left-out sources % | half width % |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for one in residuals:
        if one["rows"]:
            errors = f"{100 * one['median']:.1f} / {100 * one['p90']:.1f}"
            shares = (f"{100 * one[key]:.{digits}f}" for key, digits in SHARES.items())
            cells = (one["regime"], one["class"] or "all", one["rows"], one["sources"], errors, *shares)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


SHARES = {"inside": 0, "inside_left_out": 0, "half_width": 1}
"""Shares of a row, with their digits as percentages."""


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
