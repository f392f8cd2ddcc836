"""Runs the checks of an installation against itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.validation.selfcheck.completeness import COMPLETE
from meshcast.validation.selfcheck.drawn_jobs import draw_jobs
from meshcast.validation.selfcheck.relations import RELATIONS

JOBS = 50
"""Jobs that are drawn unless another number is given."""

Track = Callable[[Iterable[Any]], Iterable[Any]]


def run_checks(jobs: int = JOBS, seed: int = 0, track: Track = iter) -> list[dict[str, Any]]:
    """Results of all checks, one row each: its name, what it was held against, violations, seconds.

    A violation has the `job` that shows it, where it is of a job. A crash inside a relation is a violation, too.
    track: shows the progress over the drawn jobs.
    """
    rows = []
    for name, check in COMPLETE.items():
        begin = time.perf_counter()
        found = [{"what": text, "job": None} for text in check()]
        rows.append({"check": name, "jobs": None, "violations": found, "seconds": time.perf_counter() - begin})
    drawn: dict[str, dict[str, Any]] = {
        name: {"check": name, "jobs": jobs, "violations": [], "seconds": 0.0} for name in RELATIONS
    }
    shared = SharedWork()
    for described, _ in track(list(islice(draw_jobs(seed), jobs))):
        for name, what, seconds in check_job(described, shared):
            drawn[name]["seconds"] += seconds
            if what:
                drawn[name]["violations"].append({"what": what, "job": described})
    return [*rows, *drawn.values()]


def check_job(described: dict[str, Any], shared: SharedWork) -> Iterator[tuple[str, str, float]]:
    """Holds one job against all relations: the name of each, what is wrong or an empty string, seconds."""
    report = simulate(described, shared_work=shared)
    for name, relation in RELATIONS.items():
        begin = time.perf_counter()
        try:
            what = relation(described, report, shared)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
        yield name, what, time.perf_counter() - begin


def has_violations(rows: Iterable[dict[str, Any]]) -> bool:
    """Whether any check found something wrong."""
    return any(row["violations"] for row in rows)


def reproduce(described: dict[str, Any]) -> str:
    """A job in one line, for a file and `meshcast predict`."""
    return json.dumps(described)
