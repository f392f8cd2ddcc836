"""The best plans of a job in one call: `meshcast.search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.search.result import SearchResult, rank
from experiments.search.search import Certificate, Search
from experiments.search.space import Space
from hardware.errors import PlanError
from simulator.costs.calibration.calibration import Calibration
from simulator.forecast.shared_work import SharedWork
from simulator.job.load import read_job
from simulator.job.locate import locate_errors

MOST_PLANS = 1000
"""Maximum number of plans that a search keeps as the best ones."""


def search(
    job: str | Path | Mapping[str, Any],
    *,
    within: float = 0.0,
    top: int = 10,
    base: str | Path | None = None,
    calibration: Calibration | None = None,
    watch: Callable[[Certificate], None] = lambda _: None,
) -> SearchResult:
    """The plans with the shortest step that fit in memory, and the proof that no other plan of the space is faster.

    job: path of a job file, or its mapping; fields that are ``auto`` or lists of values are searched (docs/search.md).
    within: gap, a share of the step from 0 to below 1, at which the search may end.
    top: number of plans to keep, 1 to 1,000.
    base: folder of relative paths in the job; default: the folder of the file, for a mapping the current folder.
    calibration: the coefficients of all costs; by default those that ship with meshcast.
    watch: called with the certificate after every step of the search.

    Raises PlanError, ModelError or CatalogError for a wrong job, a job without open fields, or a wrong option. Ctrl-C
    ends a search with what is proven by then: the certificate is then not `complete`.
    """
    check_options(within, top)
    made = open_search(job, within, top, base=base, calibration=calibration)
    certificate = made.run(watch)
    return SearchResult(rank(made), certificate)


def check_options(within: float, top: int) -> None:
    """Refuses a gap or a number of plans outside of its range."""
    if not _is_number(within) or not 0 <= within < 1:
        raise PlanError("within", "a gap is a share of the step from 0 to below 1", "Write 0.01 for 1 %", within)
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= MOST_PLANS:
        raise PlanError("top", f"it is a whole number from 1 to {MOST_PLANS:,}", "Write for example 10", top)


def open_search(
    job: str | Path | Mapping[str, Any],
    within: float = 0.0,
    top: int = 10,
    *,
    changes: tuple[str, ...] = (),
    base: str | Path | None = None,
    calibration: Calibration | None = None,
) -> Search:
    """The search of a job, before it runs. changes: to make first, such as ``plan.tp=auto``."""
    read = read_job(job, changes)
    folder = read.folder if base is None else Path(base)
    with locate_errors(read.where, "" if changes else read.text):
        space = Space(read.data, folder)
    return Search(space, within, top, SharedWork(calibration))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
