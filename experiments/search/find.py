"""The best plans of a job in one call: `meshcast.search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshcast.experiments.search.certificate import Certificate
from meshcast.experiments.search.comparison.compare import Source, compare_plans, load_plans
from meshcast.experiments.search.fields import (
    CLUSTER,
    check_open_job,
    has_open_fields,
    opens_field,
    split_clusters,
    split_run_fields,
)
from meshcast.experiments.search.found import CountInterrupted
from meshcast.experiments.search.limits import LimitedSpace, Limits
from meshcast.experiments.search.objectives import OF_RUNS, check_objectives, simulates_runs
from meshcast.experiments.search.result import SearchResult, rank
from meshcast.experiments.search.runs.choices import refuse_open_run
from meshcast.experiments.search.search import Search
from meshcast.experiments.search.space import Space
from meshcast.experiments.search.unlike.unlike_search import UnlikeSearch
from meshcast.experiments.search.unlike.values import UnlikeFields
from meshcast.experiments.search.workers import run_on_workers
from meshcast.experiments.sweeps.expressions import parse_constraint
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.workers import count_cores
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job, read_job
from meshcast.simulator.report.peak_errors import EVEN, RISK
from meshcast.simulator.report.words import describe_value


class ShownSearchResult(SearchResult):
    """A `SearchResult` that shows itself in notebooks as the page of ``meshcast search``."""

    def _repr_html_(self) -> str:
        from meshcast.experiments.render.terminal.forecast import to_html
        from meshcast.experiments.search.output.page import page

        return to_html(page(self))


MOST_PLANS = 1000
"""Maximum number of plans that a search keeps as the best ones."""


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
    unlike: bool = False,
    runs: int | None = None,
    base: str | Path | None = None,
    calibration: Calibration | None = None,
    watch: Callable[[Certificate], None] = lambda _: None,
) -> SearchResult:
    """The best plans that fit in memory, and the proof that no other plan of the space is better in the model.

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
    unlike: whether plans are searched whose stages, or whose replicas, have unlike degrees; also on clusters of several
        kinds of nodes. runs: most runs of equal stages of their pipelines; as many as there are kinds of nodes, two at
        least, if None.
    base: folder of relative paths in the job; default: the folder of the file, for a mapping the current folder.
    calibration: the coefficients of all costs; by default those that ship with meshcast.
    watch: called with the certificate after every step of the search.

    Raises PlanError, ModelError or CatalogError for a wrong job, a job without open fields, or a wrong option. Ctrl-C
    ends a search with what is proven by then: the certificate is then not `complete`. While the plans are counted, at
    the beginning (`counting` of the certificate), nothing is proven yet, and Ctrl-C raises KeyboardInterrupt.
    """
    check_options(within, top, workers)
    limits = make_limits(where, memory_margin, near_measured, any_program, memory_risk)
    objectives = read_objectives(objective, robust)
    if unlike:
        check_options_of_unlike(limits, robust, compare, runs, objectives)
        found = open_unlike(job, within, top, objectives, limits, runs, base=base, calibration=calibration)
        proven = found.run(watch)
        return ShownSearchResult(rank(found), proven, tuple(found.forecasts), top=top)
    if runs is not None:
        raise PlanError("runs", "only pipelines of unlike stages have runs", "Leave it out, or add unlike=True", runs)
    made = open_search(job, within, top, objectives=objectives, limits=limits, base=base, calibration=calibration)
    given = load_plans(made, compare, made.space.base)
    certificate = run_on_workers(made, workers or count_cores(), watch)
    compared = tuple(compare_plans(made, given))
    return ShownSearchResult(rank(made, robust), certificate, tuple(made.forecasts), compared, top)


def check_options(within: float, top: int, workers: int | None = None, dashes: str = "") -> None:
    """Refuses a gap, a number of plans or a number of processes outside of its range. dashes: before their names in
    error messages."""
    if not _is_number(within) or not 0 <= within < 1:
        rule = "a gap is a share of the step from 0 to below 1"
        raise PlanError(f"{dashes}within", rule, "Write 0.01 for 1 %", within)
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= MOST_PLANS:
        raise PlanError(f"{dashes}top", f"it is a whole number from 1 to {MOST_PLANS:,}", "Write for example 10", top)
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        rule, remedy = "it is a number of processes, 1 or more", "Leave it out for one a core"
        raise PlanError(f"{dashes}workers", rule, remedy, workers)


def read_objectives(given: str | Sequence[str], robust: bool = False, place: str = "objective") -> tuple[str, ...]:
    """The objectives by their names. place: of them in error messages. robust: whether intervals rank the plans.
    Raises PlanError for wrong ones."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple):
        raise PlanError(place, "it is a word, or a list of two", "Write for example time,memory", given)
    found = check_objectives([one.strip() if isinstance(one, str) else one for one in names], place)
    if robust and (len(found) > 1 or found[0] in ("memory", "energy", *OF_RUNS)):
        rule = "with --robust intervals of the step rank the plans, so it takes one objective: time, tokens or cost"
        raise PlanError(place, rule, "Leave out --robust, or write one of these", ",".join(found))
    return found


def make_limits(
    where: Sequence[str] = (),
    memory_margin: float = 0.0,
    near_measured: bool = False,
    any_program: bool = False,
    memory_risk: float = RISK,
    place: str = "where",
) -> Limits:
    """The limits of a search, as `search` takes them. place: of the constraints in error messages. Raises PlanError for
    wrong ones."""
    if isinstance(where, str) or not all(isinstance(one, str) for one in where):
        raise PlanError(place, "constraints are a list of texts", 'Write for example ["plan.tp <= 8"]', where)
    if not _is_number(memory_margin) or not 0 <= memory_margin < 1:
        rule = "it is a share of the memory of a GPU from 0 to below 1"
        raise PlanError("memory_margin", rule, "Write 0.1 for 10 %", memory_margin)
    check_risk(memory_risk)
    constraints = tuple(parse_constraint(one, place) for one in where)
    return Limits(constraints, float(memory_margin), float(memory_risk), bool(near_measured), not any_program)


def check_risk(risk: float, place: str = "memory_risk", written: object = None) -> None:
    """Refuses a risk of lacking memory outside of its range. place, written: of it in error messages."""
    if not _is_number(risk) or not 0 < risk <= EVEN:
        rule = f"it is the most probability of lacking memory that a plan may have, above 0 and up to {EVEN}"
        raise PlanError(place, rule, "Write 0.1 for plans that fit with 90 %", risk if written is None else written)


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
) -> Search:
    """The search of a job, before its plans are counted.

    changes: to make first, such as ``plan.tp=auto``. limits: by default what the program of the job runs.
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
        spaces = [LimitedSpace(one, folder, limits, several, bool(run_fields)) for one in split_clusters(rest)]
        check_clusters(spaces)
        start = _read_start(job, changes, base)
        return Search(spaces, within, top, objectives, SharedWork(calibration), origin, run_fields, start)


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
        cluster, given = space.loaded.cluster, space.job[CLUSTER]
        words = {"name": "", "title": "", "source": "", "assumed": (), "used": cluster.gpus}
        content = cluster.model_copy(update=words)
        for other, name in known:
            if content == other:
                rule = f"the list has this cluster twice: {describe_value(name)} is the same"
                raise PlanError(CLUSTER, rule, "Leave one out", given)
        known.append((content, given))


def check_options_of_unlike(
    limits: Limits,
    robust: bool,
    compare: Sequence[object],
    runs: int | None,
    objectives: tuple[str, ...],
    dashes: str = "",
) -> None:
    """Refuses options that a search of unlike plans does not have. dashes: before their names in error messages."""
    given = {"where": limits.where, "near_measured": limits.near_measured, "robust": robust, "compare": compare}
    for name, stated in given.items():
        if stated:
            place = dashes + (name.replace("_", "-") if dashes else name)
            raise PlanError(place, "a search of unlike plans does not have this option", "Leave it out")
    if simulates_runs(objectives):
        rule = "a search of unlike plans compares steps, and this is an objective of runs"
        raise PlanError(f"{dashes}objective", rule, "Write time, or search plans that are alike", ",".join(objectives))
    if runs is not None and (not isinstance(runs, int) or isinstance(runs, bool) or runs < 1):
        rule, remedy = "it is a number of runs of stages, 1 or more", "Leave it out for the default"
        raise PlanError(f"{dashes}runs", rule, remedy, runs)


def open_unlike(
    job: str | Path | Mapping[str, Any],
    within: float,
    top: int,
    objectives: tuple[str, ...],
    limits: Limits,
    runs: int | None = None,
    *,
    base: str | Path | None = None,
    calibration: Calibration | None = None,
) -> UnlikeSearch:
    """The search of the unlike plans of a job, before it runs. Raises CountInterrupted if it is interrupted."""
    read = read_job(job)
    folder, origin = read.folder if base is None else Path(base), read.origin
    with locate_errors(*origin):
        check_open_job(read.data)
        if isinstance(read.data.get(CLUSTER), list):
            rule = "a search of unlike plans has one cluster"
            raise PlanError(CLUSTER, rule, "Write one of them", read.data[CLUSTER])
        try:
            fields = UnlikeFields(read.data, folder, limits.memory_margin, limits.memory_risk)
            return UnlikeSearch(fields, within, top, objectives, SharedWork(calibration), origin, runs)
        except KeyboardInterrupt:
            raise CountInterrupted from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
