"""The search that commands begin with where fields of a job are open, and how a search ends that is interrupted.

``predict`` tells of its search; other commands say in a line what it found, and remember it: a job of the same content
is not searched again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.experiments.cli.commands import INTERRUPTED, TOO_LARGE
from meshcast.experiments.render.terminal.say import say
from meshcast.experiments.search.remembered_plans import find_remembered, read_remembered, remember

if TYPE_CHECKING:
    from meshcast.experiments.search.certificate.result import SearchResult
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.simulator.job.job import Job


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


def load_with_plan(job: Path, changes: tuple[str, ...] = ()) -> Job:
    """Returns a job; where fields are open, with its best plan, which is searched for unless it is remembered.

    changes: to make first, such as ``plan.tp=auto``.
    Raises MeshcastError for a wrong job, and OutOfMemory if no plan of the space fits.
    """
    from meshcast.experiments.search.space.fields import has_open_fields
    from meshcast.simulator.loading.load import load_job, read_job

    read = read_job(job, changes)
    if not has_open_fields(read.data):
        return load_job(job, changes)
    words, found = read_remembered(find_remembered(read.data, read.folder))
    if found is None:
        from meshcast.experiments.search.output.page import describe_proof
        from meshcast.simulator.costs.calibration.calibration import Calibration

        result = find_plan(job, changes, Calibration.shipped(), strict=False)
        assert result is not None
        words, found = describe_proof(result), result.best[0].job
    say(f"meshcast: {words}", err=True)
    return load_job(found, base=job.parent)


def find_plan(job: Path, changes: tuple[str, ...], calibration: Calibration, strict: bool) -> SearchResult | None:
    """The best plan of a job with open fields, by a search; None if no field is open.

    changes: to make first, such as ``plan.tp=auto``.
    Raises OutOfMemory if no plan of the space fits: with exit code 3 if `strict`.
    """
    from meshcast.experiments.search.space.fields import has_open_fields
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.simulator.loading.load import read_job

    read = read_job(job, changes)
    if not has_open_fields(read.data):
        return None
    from meshcast.experiments.search.output.page import run_with_progress
    from meshcast.experiments.search.search_job import open_search
    from meshcast.hardware.errors import OutOfMemory

    with ending_count():
        result = run_with_progress(open_search(job, top=1, changes=changes, calibration=calibration))
    if result.best:
        if result.certificate.complete and calibration is Calibration.shipped():
            remember(find_remembered(read.data, read.folder), result)
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
