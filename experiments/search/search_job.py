"""The best plans of a job in one call: `meshcast.search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshcast.experiments.search.certificate.comparison import Source, compare_plans, load_plans
from meshcast.experiments.search.certificate.result import SearchResult, rank
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import simulates_runs
from meshcast.experiments.search.frontier.plan_search import CountInterrupted, PlanSearch
from meshcast.experiments.search.frontier.workers import run_search as run_processes
from meshcast.experiments.search.heterogeneous.block_search import HeterogeneousSearch
from meshcast.experiments.search.heterogeneous.open_fields import HeterogeneousFields
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.space.fields import (
    CLUSTER,
    check_open_job,
    has_open_fields,
    opens_field,
    split_clusters,
    split_run_fields,
)
from meshcast.experiments.search.space.limits import LimitedSpace, Limits
from meshcast.experiments.search.space.run_choices import refuse_open_run
from meshcast.experiments.search.space.space import Space
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job, read_job
from meshcast.simulator.report.formatting import describe_value
from meshcast.simulator.report.peak_errors import RISK


class ShownSearchResult(SearchResult):
    """A `SearchResult` that shows itself in notebooks as the page of ``meshcast search``."""

    def _repr_html_(self) -> str:
        from meshcast.experiments.render.terminal.forecast import to_html
        from meshcast.experiments.search.output.page import page

        return to_html(page(self))


def search(
    job: str | Path | Mapping[str, Any],
    *,
    within: float = 0.0,
    top: int = 10,
    objective: str | Sequence[str] = "time",
    where: Sequence[str] = (),
    memory_margin: float = 0.0,
    memory_risk: float = RISK,
    near_measured: bool = False,
    any_program: bool = False,
    robust: bool = False,
    workers: int | None = None,
    compare: Sequence[Source] = (),
    heterogeneous: bool = False,
    runs: int | None = None,
    base: str | Path | None = None,
    calibration: Calibration | None = None,
    watch: Callable[[Certificate], None] = lambda _: None,
) -> SearchResult:
    """Returns the best plans that fit in memory, and the proof that no other plan of the space is better in the model.

    job: path of a job file, or its mapping; fields that are ``auto`` or lists of values are searched (docs/search.md).
    within: gap, a share of the objective from 0 to below 1, at which the search may end.
    top: number of plans to keep, 1 to 1,000; of two objectives the whole Pareto front is kept.
    objective: ``time``, ``tokens`` (per second and GPU), ``cost``, ``energy`` or ``memory`` of the step, ``days`` or
        ``run-cost`` of simulated runs; two of them, as a list or as ``time,memory``, for the Pareto front.
    where: constraints such as ``plan.tp * plan.pp <= 8``; a point that violates one is excluded.
    memory_margin: share of the memory of a GPU, from 0 to below 1, that must stay free.
    memory_risk: most probability of lacking memory that a plan may have, above 0 and up to 0.5.
    near_measured: whether only combinations of schemes and degrees are kept that somebody has run.
    any_program: whether plans are kept, too, that the program refuses or does not have which the job names, or whose
        launch file it is. A job that names no framework is not restricted.
    robust: whether the plans that were forecast are ranked by the upper ends of their 90 % intervals, widened by the
        distance from plans that somebody has run; the proof stays that of the shortest step.
    workers: number of processes; one for each core that this process may use if None. A small space takes one.
    compare: jobs of the same model, cluster and batch whose plans are held against the best one: `compared` of the
        result.
    heterogeneous: whether plans are searched whose stages, or whose replicas, have different degrees; also on clusters
        of several kinds of nodes. runs: most runs of equal stages of their pipelines; as many as there are kinds of
        nodes, two at least, if None.
    base: folder of relative paths in the job; default: the folder of the file, for a mapping the current folder.
    calibration: the coefficients of all costs; by default those that ship with meshcast.
    watch: called with the certificate after every step of the search.

    Raises PlanError, ModelError or CatalogError for a wrong job, a job without open fields, or a wrong option. Ctrl-C
    ends a search with what is proven by then: the certificate is then not `complete`. While the plans are counted, at
    the beginning (`counting` of the certificate), nothing is proven yet, and Ctrl-C raises KeyboardInterrupt.
    """
    values = locals()
    options = SearchOptions.read({name: values[name] for name in SearchOptions.model_fields})

    def run(search: PlanSearch, robust: bool, workers: int | None) -> SearchResult:
        certificate = run_processes(search, workers, watch)
        return ShownSearchResult(rank(search, robust), certificate, tuple(search.forecasts), top=search.top)

    return run_search(job, options, run, base=base, calibration=calibration)[1]


def run_search(
    job: str | Path | Mapping[str, Any],
    options: SearchOptions,
    run: Callable[[PlanSearch, bool, int | None], SearchResult],
    changes: Sequence[str] = (),
    base: str | Path | None = None,
    calibration: Calibration | None = None,
) -> tuple[PlanSearch, SearchResult]:
    """Opens the search of a job, runs it, and holds the plans of `compare` against the best one. Returns both.

    run: runs a search; its other arguments are the options `robust` and `workers`.
    changes: to make to the job first.
    """
    gap, top, objectives, limits = options.within, options.top, options.objective, options.limits
    if options.heterogeneous:
        if changes:
            rule = "a search of heterogeneous plans changes no fields"
            raise PlanError("--set", rule, "Write them into the file")
        mixed = open_heterogeneous(job, gap, top, objectives, limits, options.runs, base=base, calibration=calibration)
        return mixed, run(mixed, False, None)
    search = open_search(
        job, gap, top, objectives=objectives, limits=limits, changes=tuple(changes), base=base, calibration=calibration
    )
    plans = load_plans(search, options.compare, search.space.base)
    result = run(search, options.robust, options.workers)
    return search, replace(result, compared=tuple(compare_plans(search, plans)))


def open_search(
    job: str | Path | Mapping[str, Any],
    within: float = 0.0,
    top: int = 10,
    *,
    objectives: tuple[str, ...] = ("time",),
    limits: Limits | None = None,
    changes: tuple[str, ...] = (),
    base: str | Path | None = None,
    calibration: Calibration | None = None,
    shared: SharedWork | None = None,
) -> Search:
    """Returns the search of a job, before its plans are counted.

    changes: to make first, such as ``plan.tp=auto``. limits: by default what the program of the job runs. shared: work
    of forecasts on other clusters, in place of `calibration`.
    """
    read, limits = read_job(job, changes), limits or Limits(program=True)
    folder = read.folder if base is None else Path(base)
    origin = read.origin._replace(text="" if changes else read.text)
    with locate_errors(*origin):
        check_open_job(read.data)
        if read.launch is not None and not has_open_fields(read.data):
            rule = "a launch file states its whole plan, so there is nothing to search"
            remedy = "Open fields: --set plan=auto, or --set plan.tp=auto --set plan.zero=auto"
            other = f"Or import it, and edit the job: meshcast import {read.launch.form} {read.where}"
            raise PlanError(read.where, rule, f"{remedy}. {other}")
        rest, run_fields = split_run_fields(read.data)
        if not simulates_runs(objectives):
            by = " and ".join(objectives)
            refuse_open_run(run_fields, f"the step does not depend on it, and a search by {by} compares steps")
        several = isinstance(read.data.get(CLUSTER), list)
        spaces = [
            LimitedSpace(cluster_job, folder, limits, several, bool(run_fields)) for cluster_job in split_clusters(rest)
        ]
        check_clusters(spaces)
        start = _read_start(job, changes, base)
        return Search(spaces, within, top, objectives, shared or SharedWork(calibration), origin, run_fields, start)


def _read_start(job: str | Path | Mapping[str, object], changes: Sequence[str], base: str | Path | None) -> Job | None:
    """Returns a job without the changes that open its fields; None if it opens some itself, or is no valid one."""
    closed = [change for change in changes if not opens_field(change)]
    if len(closed) == len(changes):
        return None
    try:
        return load_job(job, closed, base)
    except MeshcastError:
        return None


def check_clusters(spaces: Sequence[Space]) -> None:
    """Refuses clusters that are written in different ways and are the same."""
    known: list[tuple[Cluster, Any]] = []
    for space in spaces:
        cluster, stated = space.loaded.cluster, space.job[CLUSTER]
        words = {"name": "", "title": "", "source": "", "assumed": (), "used": cluster.gpus}
        content = cluster.model_copy(update=words)
        for other, name in known:
            if content == other:
                rule = f"the list has this cluster twice: {describe_value(name)} is the same"
                raise PlanError(CLUSTER, rule, "Leave one out", stated)
        known.append((content, stated))


def open_heterogeneous(
    job: str | Path | Mapping[str, Any],
    within: float,
    top: int,
    objectives: tuple[str, ...],
    limits: Limits,
    runs: int | None = None,
    *,
    base: str | Path | None = None,
    calibration: Calibration | None = None,
) -> HeterogeneousSearch:
    """Returns the search of the heterogeneous plans of a job, before it runs. Raises CountInterrupted if it is
    interrupted."""
    read = read_job(job)
    folder, origin = read.folder if base is None else Path(base), read.origin
    with locate_errors(*origin):
        check_open_job(read.data)
        if isinstance(read.data.get(CLUSTER), list):
            rule = "a search of heterogeneous plans has one cluster"
            raise PlanError(CLUSTER, rule, "Write one of them", read.data[CLUSTER])
        try:
            fields = HeterogeneousFields(read.data, folder, limits.memory_margin, limits.memory_risk)
            return HeterogeneousSearch(fields, within, top, objectives, SharedWork(calibration), origin, runs)
        except KeyboardInterrupt:
            raise CountInterrupted from None
