"""Runs the checks of an installation against itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.report import Report
from meshcast.validation.selfcheck.completeness import COMPLETE
from meshcast.validation.selfcheck.drawn_jobs import draw_jobs
from meshcast.validation.selfcheck.relations import ENGINES, EXACT, RELATIONS, Relation
from meshcast.validation.selfcheck.replay import Replay, Track, describe_disagreement, replay, track_silently

JOBS = 50
"""Jobs that are drawn unless another number is given."""


def run_checks(jobs: int = JOBS, seed: int = 0, track: Track = track_silently) -> list[dict[str, Any]]:
    """Results of all checks, a row each: its name, what it was held against, violations, seconds.

    A violation has the `job` that shows it, where it is of a job. A crash inside a relation is a violation, too.
    track: shows the progress over the drawn jobs.
    """
    rows = []
    for name, check in COMPLETE.items():
        begin = time.perf_counter()
        violations = [{"what": text, "job": None} for text in check()]
        rows.append({"check": name, "jobs": None, "violations": violations, "seconds": time.perf_counter() - begin})
    drawn: dict[str, dict[str, Any]] = {
        name: {"check": name, "jobs": jobs, "violations": [], "seconds": 0.0} for name in RELATIONS
    }
    shared = SharedWork()
    for described, _ in track(list(islice(draw_jobs(seed), jobs)), "checking jobs"):
        for name, what, seconds in check_job(described, shared):
            drawn[name]["seconds"] += seconds
            if what:
                drawn[name]["violations"].append({"what": what, "job": described})
    return [*rows, *drawn.values()]


def check_job(described: dict[str, Any], shared: SharedWork) -> Iterator[tuple[str, str, float]]:
    """Holds a job against all relations: the name of each, what is wrong or an empty string, seconds."""
    return _hold(RELATIONS, described, simulate(described, shared_work=shared), shared)


def check_report(report: Report, track: Track = track_silently) -> tuple[list[dict[str, Any]], Sequence[Replay]]:
    """Holds the forecast of any job against its replays and the relations of `EXACT`; returns a row each as
    `run_checks`, and the replays.

    Raises PlanError for a step of too many ops.
    """
    begin = time.perf_counter()
    _, replays = replay(report, track)
    held = [(ENGINES, describe_disagreement(replays), time.perf_counter() - begin)]
    held += _hold({name: RELATIONS[name] for name in EXACT}, {}, report, SharedWork())
    rows = [
        {"check": name, "jobs": 1, "violations": [{"what": what, "job": None}] if what else [], "seconds": seconds}
        for name, what, seconds in held
    ]
    return rows, replays


def _hold(
    relations: Mapping[str, Relation], described: dict[str, Any], report: Report, shared: SharedWork
) -> Iterator[tuple[str, str, float]]:
    """Holds a forecast against relations: the name of each, what is wrong or an empty string, seconds."""
    for name, relation in relations.items():
        begin = time.perf_counter()
        try:
            what = relation(described, report, shared)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
        yield name, what, time.perf_counter() - begin


def has_violations(rows: Iterable[dict[str, Any]]) -> bool:
    """Returns whether any check found something wrong."""
    return any(row["violations"] for row in rows)
