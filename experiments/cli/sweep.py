"""``meshcast sweep``, ``merge`` and ``scale``: a job at many points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    answering,
    choose_width,
    emit,
    emit_or_show,
    plot_files,
)
from meshcast.experiments.cli.launch import takes_launch_files
from meshcast.hardware.errors import PlanError


def sweep(
    path: Annotated[Path | None, typer.Argument(metavar="SWEEP", help="A sweep file, YAML or JSON.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Parquet file, one row per point.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Number of processes; one per core if not given."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="dask://HOST:PORT", help="Run on the workers of this Dask scheduler instead."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="K/N", help="Forecast part K of N, counted from 0; `merge` joins the parts."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the results of an earlier sweep at --out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forecast a job at every point of a grid. The same command resumes an interrupted sweep."""
    with answering(as_json):
        if path is None or out is None:
            missing, name = ("SWEEP", "sweep.yaml") if path is None else ("--out", str(path))
            raise PlanError("sweep", f"{missing} is missing", f"Write meshcast sweep {name} --out rows.parquet")
        from meshcast.experiments.render.terminal import sweep as pages

        fields, answer = pages.run_sweep(path, out, workers, on, shard, restart)
        emit_or_show(as_json, answer, lambda: pages.page(fields, answer))


def merge(
    parts: Annotated[list[Path], typer.Argument(metavar="PARTS", help="The Parquet files of all shards of a sweep.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Parquet file, one row per point.")],
    as_json: AsJson = False,
) -> None:
    """Join the shards of a sweep into the file of the whole sweep."""
    with answering(as_json):
        from meshcast.experiments.render.terminal import sweep as pages

        fields, answer = pages.run_merge(parts, out)
        emit_or_show(as_json, answer, lambda: pages.page(fields, answer))


@takes_launch_files
def scale(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")],
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="COUNTS", help="8,16,24, or 8..4096 for all doublings from 8.")
    ],
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch (strong), or the batch of each GPU (weak).")
    ] = False,
    over: Annotated[
        str | None,
        typer.Option("--over", metavar="AXIS", help="Mesh axis that grows; that of the data scheme if not given."),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw the scaling curve (.png, .svg or .pdf)."),
    ] = None,
    width: WidthOption = None,
) -> None:
    """Forecast a job on growing numbers of GPUs: the scaling curve."""
    with answering(as_json):
        from meshcast.experiments.sweeps.scaling import curve_rows, forecast_curve, parse_counts

        files, paper = plot_files(plot, ("scaling",)) if plot is not None else {}, choose_width(width, plot)
        found = forecast_curve(job, parse_counts(gpus), "strong" if strong else "weak", over)
        for place in files.values():
            from meshcast.experiments.render.matplotlib import scaling

            place.parent.mkdir(parents=True, exist_ok=True)
            scaling.draw(found, place, paper)
        if as_json:
            emit({"kind": found.kind, "axis": found.axis, "points": curve_rows(found)})
        else:
            from meshcast.experiments.render.terminal.forecast import show
            from meshcast.experiments.render.terminal.scaling import page

            show(page(found))
