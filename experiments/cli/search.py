"""``meshcast search``: the best plan of a job, with a certificate; and the search that ``predict`` begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshcast.experiments.cli.console import (
    INTERRUPTED,
    TOO_LARGE,
    AsJson,
    MemoryRisk,
    WidthOption,
    answering,
    check_folder,
    check_place,
    choose_width,
    emit,
    plot_files,
    read_number,
    unwritable_folder,
    writing,
)
from meshcast.experiments.cli.launch import takes_launch_files, tell_launch
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.output_file import write_file

if TYPE_CHECKING:
    from meshcast.experiments.search.certificate.result import SearchResult
    from meshcast.experiments.search.frontier.plan_search import PlanSearch
    from meshcast.simulator.costs.calibration.calibration import Calibration


@takes_launch_files
def search(
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="A job file; fields that are `auto` or lists of values are searched.")
    ],
    within: Annotated[
        str, typer.Option("--within", metavar="GAP", help="End once the best plan is proven within this gap, e.g. 1%.")
    ] = "0%",
    top: Annotated[
        int, typer.Option("--top", help="Number of plans to show, 1 to 1,000; none more than 5 % worse than the best.")
    ] = 10,
    jobs_to: Annotated[
        Path | None, typer.Option("--jobs-to", metavar="FOLDER", help="Write the best plans as job files.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="EXPR", help="Exclude plans that violate it, e.g. 'plan.tp * plan.pp <= 8'."),
    ] = None,
    memory_margin: Annotated[
        str, typer.Option("--memory-margin", metavar="SHARE", help="Share of GPU memory that stays free, e.g. 10%.")
    ] = "0%",
    memory_risk: MemoryRisk = "5%",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change or open a field of the job, e.g. plan.tp=auto."),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="time, tokens (per s, GPU), cost, energy, memory; of runs days, run-cost. Two: their Pareto front.",
        ),
    ] = "time",
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Number of processes; one per core if not given."),
    ] = None,
    near_measured: Annotated[
        bool, typer.Option("--near-measured", help="Keep only combinations that somebody has run.")
    ] = False,
    any_program: Annotated[
        bool,
        typer.Option("--any-program", help="Keep plans, too, that the program of the job refuses or does not have."),
    ] = False,
    robust: Annotated[
        bool, typer.Option("--robust", help="Rank by the upper end of the interval, wider for what nobody has run.")
    ] = False,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            "--compare", metavar="PLAN", help="A job file whose plan is held against the best one; repeatable."
        ),
    ] = None,
    heterogeneous: Annotated[
        bool,
        typer.Option(
            "--heterogeneous", help="Search stages and replicas of different degrees, also on several kinds of nodes."
        ),
    ] = False,
    runs: Annotated[
        int | None,
        typer.Option("--runs", metavar="N", help="With --heterogeneous: most runs of equal stages of a pipeline."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the plans that were forecast as .parquet rows.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw their time and memory into a .png, .svg or .pdf file."),
    ] = None,
    width: WidthOption = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan that fits in memory, by default that with the shortest step, and prove that no other one is
    better in the model."""
    with answering(as_json):
        gap = _read_share("--within", within, "a gap is a share of the step", "Write 1% or 0.01")
        margin = _read_share(
            "--memory-margin", memory_margin, "a margin is a share of the memory of a GPU", "Write 10% or 0.1"
        )
        from meshcast.experiments.search.certificate.comparison import compare_plans, load_plans
        from meshcast.experiments.search.options import (
            check_heterogeneous_options,
            check_options,
            check_risk,
            make_limits,
            read_objectives,
        )
        from meshcast.experiments.search.output.page import page, run_with_progress
        from meshcast.experiments.search.search_job import open_heterogeneous, open_search
        from meshcast.hardware.errors import PlanError

        check_options(gap, top, workers, "--")
        objectives = read_objectives(objective, robust, "--objective")
        tell_launch(job, change or ())
        risk = read_number(memory_risk)
        check_risk(risk, "--memory-risk", memory_risk)
        limits = make_limits(where or (), margin, near_measured, any_program, risk, "--where")
        files, paper = plot_files(plot, ("search",)) if plot is not None else {}, choose_width(width, plot)
        if jobs_to is not None:
            check_folder(jobs_to, "--jobs-to")
        if out is not None:
            from meshcast.experiments.search.output.rows import check_rows_place, write_rows

            check_place(out, "--out")
            check_rows_place(out)
        wanted: PlanSearch
        if heterogeneous:
            check_heterogeneous_options(limits, robust, compare or (), runs, objectives, "--")
            with ending_count():
                if change:
                    raise PlanError(
                        "--set", "a search of heterogeneous plans changes no fields", "Write them into the file"
                    )
                wanted = open_heterogeneous(job, gap, top, objectives, limits, runs)
            result = run_with_progress(wanted)
        else:
            if runs is not None:
                raise PlanError(
                    "--runs", "only pipelines of heterogeneous stages have runs", "Add --heterogeneous", runs
                )
            changes = tuple(change or ())
            wanted = ordinary = open_search(job, gap, top, objectives=objectives, limits=limits, changes=changes)
            given = load_plans(ordinary, compare or ())
            with ending_count():
                result = run_with_progress(ordinary, robust, workers)
            result = replace(result, compared=tuple(compare_plans(ordinary, given)))
        if out is not None:
            with writing(out, "--out"):
                write_rows(wanted, result.best, out)
        for path in files.values():
            from meshcast.experiments.search.output.plot import draw

            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                draw(wanted, result, path, paper)
        if jobs_to is not None:
            try:
                written = _write_jobs(jobs_to, [one.job for one in result.best], job.stem)
            except OSError as error:
                raise unwritable_folder(jobs_to, error.strerror or str(error), "--jobs-to") from None
            say(f"wrote {', '.join(map(str, written)) or 'no job'}", err=True)
        if as_json:
            emit(result.to_dict())
        else:
            from meshcast.experiments.render.terminal.forecast import show
            from meshcast.experiments.search.certificate.comparison_page import comparison_page

            show(page(result))
            if result.compared:
                show(comparison_page(result.compared))
        end_search(result)


@contextmanager
def ending_count() -> Iterator[None]:
    """Ends the command with a message of its own if it is interrupted before the search begins."""
    from meshcast.experiments.search.frontier.plan_search import CountInterrupted

    try:
        yield
    except CountInterrupted:
        say(
            "meshcast: interrupted before the search began, while its plans were counted; nothing is proven yet",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def end_search(result: SearchResult) -> None:
    """Ends the command, after its answer, with a message and exit code of its own if the search was interrupted."""
    if not result.certificate.complete:
        say("meshcast: interrupted; the certificate says what is proven so far", err=True)
        raise typer.Exit(INTERRUPTED)


def find_plan(job: Path, changes: tuple[str, ...], calibration: Calibration, strict: bool) -> SearchResult | None:
    """The best plan of a job with open fields, by a search; None if no field is open.

    changes: to make first, such as ``plan.tp=auto``.
    Raises OutOfMemory if no plan of the space fits: with exit code 3 if `strict`.
    """
    from meshcast.experiments.search.space.fields import has_open_fields
    from meshcast.simulator.loading.load import read_job

    if not has_open_fields(read_job(job, changes).data):
        return None
    from meshcast.experiments.search.output.page import run_with_progress
    from meshcast.experiments.search.search_job import open_search
    from meshcast.hardware.errors import OutOfMemory

    with ending_count():
        result = run_with_progress(open_search(job, top=1, changes=changes, calibration=calibration))
    if result.best:
        return result
    found = result.certificate
    if not found.complete:
        raise KeyboardInterrupt
    words = f"no plan fits: of {found.plans:,} plans {found.invalid:,} break a rule, the others need too much memory"
    least = f"; the smallest need is {result.smallest}" if result.smallest else ""
    remedy = result.smallest.remedy if result.smallest else "Open more fields, or take more GPUs"
    misfit = OutOfMemory(str(job), words + least, remedy)
    if strict:
        say(f"meshcast: {misfit}", err=True)
        raise typer.Exit(TOO_LARGE)
    raise misfit


def describe_search(result: SearchResult) -> dict[str, Any]:
    """The search in the answer of ``predict --json``."""
    return {"search": {"plan": result.best[0].changes, "certificate": result.certificate.to_dict()}}


def show_search(result: SearchResult) -> None:
    """Prints the line above the page of ``predict``: by which search its plan was found."""
    from rich.text import Text

    from meshcast.experiments.render.terminal.forecast import show
    from meshcast.experiments.search.output.page import describe_proof

    show(Text(describe_proof(result)))


def _read_share(option: str, text: str, rule: str, remedy: str) -> float:
    """A share from 0 to below 1, from a percentage or a number."""
    from meshcast.hardware.errors import PlanError

    share = read_number(text)
    if not 0 <= share < 1:
        raise PlanError(option, f"{rule} from 0 to below 1", remedy, text)
    return share


def _write_jobs(folder: Path, jobs: list[dict[str, object]], name: str) -> list[Path]:
    """Writes jobs as NAME-1.yaml, NAME-2.yaml and so on; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{number}.yaml" for number in range(1, len(jobs) + 1)]
    for path, one in zip(paths, jobs, strict=True):
        write_file(path, to_yaml(one))
    return paths
