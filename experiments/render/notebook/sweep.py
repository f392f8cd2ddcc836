"""`meshcast.sweep`: a job at every point of a grid, as a table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.experiments.sweeps.options import SweepOptions
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.hardware.records import dataclass

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class SweepResult:
    """The forecasts of a sweep.

    Attributes:
        fields: the fields that vary.
        summary: what ``meshcast sweep --json`` prints: counts by status, the best plans, reasons of invalid points.
        rows: a row for each point, with its fields, status and figures.
    """

    fields: Sequence[str]
    summary: dict[str, Any]
    rows: pandas.DataFrame

    def __repr__(self) -> str:
        counts = self.summary["status"]
        return f"<SweepResult: {self.summary['points']:,} points, {counts['fits']:,} fit>"

    def _repr_html_(self) -> str:
        """Returns the page of ``meshcast sweep``."""
        from meshcast.experiments.render.terminal.forecast import to_html
        from meshcast.experiments.render.terminal.sweep import page

        return to_html(page(self.fields, self.summary))

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each point, in the order of the grid; a copy."""
        return self.rows.copy()


def sweep(
    source: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    base: str | Path | None = None,
    workers: int | None = None,
    on: str | None = None,
    restart: bool = False,
    watch: Callable[[int, int], None] = lambda done, points: None,
) -> SweepResult:
    """Forecasts a job at every point of a grid.

    source: path of a sweep file, or its mapping: ``{"job": ..., "vary": {"plan.tp": [1, 2, 4]}}`` (docs/sweeps.md).
    out: Parquet file for the rows; the same call resumes an interrupted sweep. None: the rows are kept in memory only.
    base: folder of relative paths; default: the folder of the file, for a mapping the current folder.
    workers: number of processes; one for each core that this process may use if None. With more than one, a script
        needs ``if __name__ == "__main__":`` around the call, as always with processes in Python.
    on: address of a Dask scheduler, ``dask://host:8786``, whose workers are used instead.
    restart: discards results of another sweep at `out`.
    watch: called with the number of finished points and of all points.

    Raises PlanError, ModelError or CatalogError for a wrong sweep. Points that are invalid are rows with a reason.
    """
    options = SweepOptions.read({"workers": workers, "on": on, "restart": restart})
    read = load_sweep(source, base)
    if out is not None:
        return _result(read.fields, run(read, out, **options.model_dump(), watch=watch), out)
    with tempfile.TemporaryDirectory(prefix="meshcast-") as folder:
        place = Path(folder) / "rows.parquet"
        result = _result(read.fields, run(read, place, workers=workers, on=on, watch=watch), place)
    result.summary["out"] = "in memory"
    return result


def _result(fields: Sequence[str], summary: dict[str, Any], out: str | Path) -> SweepResult:
    import pandas

    return SweepResult(tuple(fields), summary, pandas.read_parquet(out))
