"""The search that ``meshcast predict`` begins with where fields are open, and how a search ends that is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.experiments.cli.commands import INTERRUPTED, TOO_LARGE
from meshcast.experiments.render.terminal.say import say

if TYPE_CHECKING:
    from meshcast.experiments.search.certificate.result import SearchResult
    from meshcast.simulator.costs.calibration.calibration import Calibration


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
        sys.exit(INTERRUPTED)


def end_search(result: SearchResult) -> None:
    """Ends the command, after its answer, with a message and exit code of its own if the search was interrupted."""
    if not result.certificate.complete:
        say("meshcast: interrupted; the certificate says what is proven so far", err=True)
        sys.exit(INTERRUPTED)


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
    certificate = result.certificate
    if not certificate.complete:
        raise KeyboardInterrupt
    words = f"no plan fits: of {certificate.plans:,} plans {certificate.invalid:,} break a rule, the others need too "
    words += "much memory"
    least = f"; the smallest need is {result.smallest}" if result.smallest else ""
    remedy = result.smallest.remedy if result.smallest else "Open more fields, or take more GPUs"
    misfit = OutOfMemory(str(job), words + least, remedy)
    if strict:
        say(f"meshcast: {misfit}", err=True)
        sys.exit(TOO_LARGE)
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
