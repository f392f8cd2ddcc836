"""``meshcast check``: an installation held against itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from meshcast.experiments.cli.console import AsJson, answering, emit

VIOLATED = 1
"""Exit code where a check found something wrong."""


def check(
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, max=100_000, help="Jobs to draw.")] = 50,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Equal seeds draw equal jobs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Check this installation: relations that hold for any job, on drawn ones, and the completeness of its data."""
    with answering(as_json):
        from rich.console import Console
        from rich.progress import track

        from meshcast.validation.selfcheck.run import has_violations, run_checks

        console = Console(stderr=True)

        def show_progress(drawn: Iterable[Any]) -> Iterable[Any]:
            quiet = not console.is_terminal
            return track(list(drawn), "checking jobs", console=console, transient=True, disable=quiet)

        rows = run_checks(jobs, seed, show_progress)
        if as_json:
            emit({"checks": rows, "violations": sum(len(row["violations"]) for row in rows)})
        else:
            from meshcast.experiments.pages.forecast import show
            from meshcast.experiments.pages.selfcheck import checks_page

            show(checks_page(rows))
    if has_violations(rows):
        raise typer.Exit(VIOLATED)
