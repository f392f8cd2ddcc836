"""``meshcast search``: the best plan of a job, with a certificate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from meshcast.experiments.cli.best_plan import end_search, ending_count
from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    check_folder,
    check_place,
    emit_or_show,
    plan_figures,
    unwritable_folder,
    writing,
    writing_figure,
)
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.experiments.search.options import SearchOptions
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.output_file import write_file


class SearchCommandOptions(SearchOptions, LaunchFileOptions):
    """Options of ``meshcast search``: those of a search, and what is read and written."""

    job: Annotated[Path, argument("JOB", "A job file; fields that are `auto` or lists of values are searched.")]
    change: Annotated[
        tuple[str, ...], option("--set", "Change or open a field of the job, e.g. plan.tp=auto.", "FIELD=VALUE")
    ] = ()
    jobs_to: Annotated[Path | None, option("--jobs-to", "Write the best plans as job files.", "FOLDER")] = None
    out: Annotated[Path | None, option("--out", "Write the plans that were forecast as .parquet rows.", "FILE")] = None
    plot: Annotated[
        str | None, option("--plot", "Draw their time and memory into a .png, .svg or .pdf file.", "FILE")
    ] = None
    width: WidthOption = None
    as_json: AsJson = False


def search(options: SearchCommandOptions) -> None:
    """Searches the best plan, and shows it with the proof that no other one is better in the model."""
    from meshcast.experiments.search.certificate.comparison_page import comparison_page
    from meshcast.experiments.search.output.page import page, run_with_progress
    from meshcast.experiments.search.output.rows import check_rows_place, write_rows
    from meshcast.experiments.search.search_job import run_search

    files, paper = plan_figures(options.plot, options.width, ("search",))
    if options.jobs_to is not None:
        check_folder(options.jobs_to, "--jobs-to")
    if options.out is not None:
        check_place(options.out, "--out")
        check_rows_place(options.out)
    tell_launch(options.job, options.change)
    with ending_count():
        searched, result = run_search(options.job, options, run_with_progress, options.change)
    if options.out is not None:
        with writing(options.out, "--out"):
            write_rows(searched, result.best, options.out)
    for path in files.values():
        from meshcast.experiments.search.output.plot import draw

        with writing_figure(path):
            draw(searched, result, path, paper)
    if options.jobs_to is not None:
        _write_jobs(options.jobs_to, [plan.job for plan in result.best], options.job.stem)
    pages = [lambda: page(result), *([lambda: comparison_page(result.compared)] if result.compared else [])]
    emit_or_show(options.as_json, result.to_dict, *pages)
    end_search(result)


def _write_jobs(folder: Path, jobs: Sequence[dict[str, Any]], name: str) -> None:
    """Writes jobs as NAME-1.yaml, NAME-2.yaml and so on, and says so."""
    paths = [folder / f"{name}-{number}.yaml" for number in range(1, len(jobs) + 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, job in zip(paths, jobs, strict=True):
            write_file(path, to_yaml(job))
    except OSError as error:
        raise unwritable_folder(folder, error.strerror or str(error), "--jobs-to") from None
    say(f"wrote {', '.join(map(str, paths)) or 'no job'}", err=True)
