"""``meshcast sweep``, ``merge`` and ``scale``: a job at many points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    emit_or_show,
    plan_figures,
    writing_figure,
)
from meshcast.experiments.cli.launch import LaunchFileOptions
from meshcast.experiments.options import Options, argument, option
from meshcast.experiments.sweeps.options import SweepOptions
from meshcast.hardware.errors import PlanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcast.experiments.sweeps.scaling import Curve


class SweepCommandOptions(SweepOptions):
    """Options of ``meshcast sweep``: those of a sweep, and what is read and written."""

    path: Annotated[Path | None, argument("SWEEP", "A sweep file, YAML or JSON.")] = None
    out: Annotated[Path | None, option("--out", "Parquet file, one row per point.", "FILE")] = None
    shard: Annotated[
        str | None, option("--shard", "Forecast part K of N, counted from 0; `merge` joins the parts.", "K/N")
    ] = None
    as_json: AsJson = False


def sweep(options: SweepCommandOptions) -> None:
    """Forecasts a job at every point of a grid. The same command resumes an interrupted sweep."""
    if options.path is None or options.out is None:
        missing, name = ("SWEEP", "sweep.yaml") if options.path is None else ("--out", str(options.path))
        raise PlanError("sweep", f"{missing} is missing", f"Write meshcast sweep {name} --out rows.parquet")
    from meshcast.experiments.render.terminal import sweep as pages

    fields, answer = pages.run_sweep(options.path, options.out, options, options.shard)
    emit_or_show(options.as_json, answer, lambda: pages.page(fields, answer))


class MergeOptions(Options):
    """Options of ``meshcast merge``."""

    parts: Annotated[tuple[Path, ...], argument("PARTS", "The Parquet files of all shards of a sweep.")]
    out: Annotated[Path, option("--out", "Parquet file, one row per point.", "FILE")]
    as_json: AsJson = False


def merge(options: MergeOptions) -> None:
    """Joins the shards of a sweep into the file of the whole sweep."""
    from meshcast.experiments.render.terminal import sweep as pages

    fields, answer = pages.run_merge(options.parts, options.out)
    emit_or_show(options.as_json, answer, lambda: pages.page(fields, answer))


class ScaleOptions(LaunchFileOptions):
    """Options of ``meshcast scale``."""

    jobs: Annotated[tuple[Path, ...], argument("JOB", "Job files (YAML or JSON), or launch files.")]
    gpus: Annotated[str, option("--gpus", "8,16,24, or 8..4096 for all doublings from 8.", "COUNTS")]
    strong: Annotated[
        bool, option("--strong/--weak", "Keep the global batch (strong), or the batch of each GPU (weak).")
    ] = False
    over: Annotated[
        str | None, option("--over", "Mesh axis that grows; that of the data scheme if not given.", "AXIS")
    ] = None
    as_json: AsJson = False
    plot: Annotated[str | None, option("--plot", "Draw the scaling curve (.png, .svg or .pdf).", "PATH")] = None
    width: WidthOption = None


def scale(options: ScaleOptions) -> None:
    """Forecasts jobs on growing numbers of GPUs: the scaling curve of each."""
    from meshcast.experiments.sweeps.scaling import Kind, check_curves, curve_rows, forecast_curve, parse_counts
    from meshcast.simulator.job.differences import label_jobs

    files, paper = plan_figures(options.plot, options.width, ("scaling",))
    counts = parse_counts(options.gpus)
    check_curves(options.jobs, counts)
    kind: Kind = "strong" if options.strong else "weak"
    jobs = [load_with_plan(job) for job in options.jobs]
    curves = [forecast_curve(job, counts, kind, options.over) for job in jobs]
    labelled = [*zip(label_jobs(jobs), curves, strict=True)]
    for file in files.values():
        from meshcast.experiments.render.matplotlib.scaling import scaling
        from meshcast.experiments.render.matplotlib.scalings import scalings
        from meshcast.experiments.render.matplotlib.sheet import save

        with writing_figure(file):
            save(partial(scaling, *curves) if len(curves) == 1 else partial(scalings, labelled), file, paper)
    answers = [{"kind": curve.kind, "axis": curve.axis, "points": curve_rows(curve)} for curve in curves]
    answer = answers[0]
    if len(jobs) > 1:
        answer = {"jobs": [{"label": label} | each for (label, _), each in zip(labelled, answers, strict=True)]}
    emit_or_show(options.as_json, answer, lambda: _show_curves(labelled))


def _show_curves(labelled: Sequence[tuple[str, Curve]]) -> RenderableType:
    from meshcast.experiments.render.terminal import scaling

    return scaling.page(labelled[0][1]) if len(labelled) == 1 else scaling.page_of_several(labelled)
