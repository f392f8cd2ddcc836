"""``meshcast search``: the best plan of a job, with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.console import INTERRUPTED, AsJson, answering, emit


def search(
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="A job file; fields that are `auto` or lists of values are searched.")
    ],
    within: Annotated[
        str, typer.Option("--within", metavar="GAP", help="End once the best plan is proven within this gap, e.g. 1%.")
    ] = "0%",
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="Number of plans to show.")] = 10,
    jobs_to: Annotated[
        Path | None, typer.Option("--jobs-to", metavar="FOLDER", help="Write the best plans as job files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the plan with the shortest step that fits in memory, and prove that no other one is faster in the model."""
    with answering(as_json):
        gap = _read_gap(within)
        from experiments.search.find import open_search
        from experiments.search.page import SearchProgress, page
        from experiments.search.result import SearchResult, rank

        wanted, watch = open_search(job, gap, top), SearchProgress()
        try:
            certificate = wanted.run(watch)
        finally:
            watch.bar.stop()
        result = SearchResult(rank(wanted), certificate)
        if jobs_to is not None:
            _write_jobs(jobs_to, [one.job for one in result.best], job.stem)
        if as_json:
            emit(result.to_dict())
        else:
            from experiments.pages.forecast import show

            show(page(result))
        if not certificate.complete:
            typer.echo("meshcast: interrupted; the certificate says what is proven so far", err=True)
            raise typer.Exit(INTERRUPTED)


def _read_gap(text: str) -> float:
    """A gap as a share of the step, from a percentage or a number."""
    from hardware.errors import PlanError

    try:
        gap = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        gap = -1.0
    if not 0 <= gap < 1:
        raise PlanError("--within", "a gap is a share of the step from 0 to below 1", "Write 1% or 0.01", text)
    return gap


def _write_jobs(folder: Path, jobs: list[dict[str, object]], name: str) -> None:
    """Writes jobs as NAME-1.yaml, NAME-2.yaml and so on."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(jobs, 1):
        (folder / f"{name}-{number}.yaml").write_text(yaml.safe_dump(one, sort_keys=False))
