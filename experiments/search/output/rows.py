"""``search --out``: the plans that a search has forecast as rows like those of a sweep, in a Parquet file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshcast.experiments.search.certificate.result import RankedPlan
from meshcast.experiments.search.frontier.plan_search import ForecastPlan, PlanSearch
from meshcast.experiments.search.space.fields import CLUSTER
from meshcast.experiments.sweeps.columns import make_table
from meshcast.experiments.sweeps.simulated_runs import forecast_run, simulates_runs
from meshcast.experiments.sweeps.store import Row, arrow_types, column_type, row_schema
from meshcast.hardware.documents.output_file import replacing
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.figures import row_of
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.version import product_version

if TYPE_CHECKING:
    import pyarrow as pa

BOUND = "bound_s"
"""Column of the lower bound of the step time [s], after those of a sweep."""

EVERY = "checkpoint_every_s"
"""Column of the time between two checkpoints of a simulated run [s]."""


def check_rows_place(out: Path) -> None:
    """Raises PlanError, before any work, for a file that is not named as Parquet, or is no result of a search."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if out.suffix.lower() != ".parquet":
        raise PlanError("--out", "rows are written as .parquet", f"Write {out.stem or 'plans'}.parquet", str(out))
    if not out.exists():
        return
    try:
        about = json.loads((pq.read_schema(out).metadata or {})[b"meshcast"])
    except (pa.ArrowException, OSError, ValueError, LookupError):
        about = None
    if not isinstance(about, dict) or "certificate" not in about:
        rule = "the file exists and is not the result of a search, or is damaged"
        raise PlanError("--out", rule, "Name another file, or delete this one", str(out))


def write_rows(search: PlanSearch, best: Sequence[RankedPlan], out: Path) -> None:
    """Writes a row for every plan that was forecast: the best ones in their order, then the others, fastest first.

    best: as ranked. Its reports are reused; all others are forecast whole.
    Raises OSError if the file cannot be written.
    """
    import pyarrow.parquet as pq

    ranked = [plan.searched for plan in best]
    others = [plan for plan in search.forecasts if not any(plan is best_plan for best_plan in ranked)]
    others.sort(key=lambda plan: (plan.values if plan.runs else (math.inf,), plan.forecast.step_time))
    rows = [*_rows_of(search, best, others)]
    table = make_table(rows, _schema(search, rows))
    with replacing(out) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def _rows_of(search: PlanSearch, best: Sequence[RankedPlan], others: list[ForecastPlan]) -> Iterator[Row]:
    plans: list[tuple[ForecastPlan, Report | None]] = [(plan.searched, plan.report) for plan in best]
    for index, (plan, known) in enumerate([*plans, *((other, None) for other in others)]):
        report = known or simulate(load_job(plan.job, base=search.space.base), shared_work=search.shared)
        status, reason = str(report.fit.verdict), None
        if plan.fits:
            status = "fits"
        elif status == "fits":
            status, reason = "tight", "it leaves less of the memory of a GPU free than --memory-margin or --memory-risk"
        row = {"index": index, **plan.changes, "status": status, "reason": reason}
        if search.certificate.runs is not None:
            row |= {**(plan.runs.columns if plan.runs else {}), EVERY: plan.runs.interval_s if plan.runs else None}
        elif known is not None and simulates_runs(search.space.job, plan.changes):
            row |= forecast_run(report)
        yield {**row, **row_of(report), "limits": report.limits, BOUND: plan.bound}


def _schema(search: PlanSearch, rows: list[Row]) -> pa.Schema:
    import pyarrow as pa

    names = list(dict.fromkeys(name for plan in search.forecasts for name in plan.changes)) or list(search.space.open)
    kinds = arrow_types()
    fields = {name: kinds[column_type(row.get(name) for row in rows)] for name in names}
    clusters = [space.job[CLUSTER] for space in search.jobs]
    job = {**search.space.job, CLUSTER: clusters if len(clusters) > 1 else clusters[0]}
    about = {"version": product_version(), "certificate": search.certificate.to_dict(), "job": job}
    if search.certificate.runs is not None:  # the fields of the run alone may not say that it is simulated
        job["run"] = {"seeds": search.certificate.runs.seeds, **job["run"]}
    schema = row_schema(job, fields).append(pa.field(BOUND, pa.float64()))
    schema = schema if search.certificate.runs is None else schema.append(pa.field(EVERY, pa.float64()))
    return schema.with_metadata({"meshcast": json.dumps(about)})
