"""Judges claims: runs their jobs, and holds the relation against what the paper says.

`holds` and `misses` compare a number. What the paper leaves open is tried at all its values: if the statuses differ,
it `depends`, and the answer says on which field. A claim that no job can represent `cannot-be-judged`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from meshcast.hardware.errors import Defect, MeshcastError, OutOfMemory, PlanError, shorten
from meshcast.hardware.load import validate_data
from meshcast.simulator import Report, SharedWork, load_job, simulate
from meshcast.validation.claims.claim_file import Claim, ClaimFile
from meshcast.validation.claims.measures import better_of, read_case, read_measure
from meshcast.validation.claims.planner_run import OF_PLAN, PlanFinder, PlannerRun, read_plan
from meshcast.validation.claims.relation import Quantity, flatten
from meshcast.validation.pipelines.cases import answer as play_case
from meshcast.validation.published.answer import map_chunks

HOLDS, MISSES, DEPENDS, OPEN = STATUSES = ("holds", "misses", "depends", "cannot-be-judged")

NEAR = 0.25
"""Largest deviation of a claim that is near: of the alternative that misses least, or of all where it depends."""

TARGET = ("value", "tolerance", "at_least", "at_most", "between")
"""Fields of a claim that say what its number is held against."""

KEPT = 24
"""Reports that a process keeps."""

ROUNDING = 1e-9
"""Deviation beyond its tolerance at which a claim still holds."""

Judgement = dict[str, Any]
"""The answer to a claim, plain data of ``--json``."""

PEAKS = ("peak_allocated_gib", "peak_reserved_gib", "peak_device_gib")
WHOLE_LIST = ("fits", "memory_gib", "most_gib", "states_gib", *PEAKS)
"""Measures that a job has that does not fit; of others, the points of an `over` that do not fit are left out."""


class ClaimTask(NamedTuple):
    """One claim to judge, and the file that it is of."""

    file: ClaimFile
    claim: Claim


def judge_claims(
    tasks: Sequence[ClaimTask], workers: int | None = None, find_plan: PlanFinder | None = None
) -> Iterator[Judgement]:
    """Yields the judgements of all claims in their order.

    workers: number of processes; None: as many as cores. find_plan: runs a planner, and can be pickled.
    """
    yield from map_chunks(partial(_judge_chunk, find_plan=find_plan), tasks, workers, size=4)


def _judge_chunk(tasks: Sequence[ClaimTask], find_plan: PlanFinder | None) -> list[Judgement]:
    cache = ReportCache()
    judgements = []
    for file, claim in tasks:
        judgements.append(judge(file, claim, find_plan, cache))
        if judgements[-1]["defect"]:  # the failure may have left it half built
            cache = ReportCache()
    return judgements


class ReportCache:
    """Reports of jobs; those that were needed last are kept: claims of a file compare with the same jobs.

    Attributes:
        simulated: number of jobs that were simulated.
    """

    def __init__(self, size: int = KEPT) -> None:
        self.size, self.simulated = size, 0
        self._shared = SharedWork()
        self._reports = OrderedDict[str, Report]()

    def forecast(self, job: dict[str, Any]) -> Report:
        """Returns the report of a job. Raises MeshcastError if it cannot be forecast."""
        key = json.dumps(job, sort_keys=True, default=str)
        if key not in self._reports:
            self.simulated += 1
            self._reports[key] = simulate(load_job(job), shared_work=self._shared)
            if len(self._reports) > self.size:
                self._reports.popitem(last=False)
        self._reports.move_to_end(key)
        return self._reports[key]


def judge(
    file: ClaimFile, claim: Claim, find_plan: PlanFinder | None = None, cache: ReportCache | None = None
) -> Judgement:
    """Returns the judgement of a claim.

    find_plan: runs a planner; claims of planners are not judged without it.
    cache: forecasts its jobs.
    """
    known = {
        **{"id": claim.id, "system": file.system, "family": file.family, "reference": file.paper, "says": claim.says},
        **{"source": claim.source, "provenance": claim.provenance, "measure": claim.measure, "note": claim.note},
        **{"relation": claim.relation, "theirs": describe_target(claim)},
        "target": {key: value for key in TARGET if (value := getattr(claim, key)) is not None},
        **{"scored": claim.provenance == "checked", "tolerance": claim.tolerance, "paper": _paper_number(claim)},
    }
    judgement: Judgement = {
        **{"status": OPEN, "reason": claim.cannot_judge, "defect": False},
        **{"ours": None, "ratio": None, "miss": None, "near": False, "alternatives": [], "depends_on": []},
    }
    if claim.cannot_judge:
        return known | judgement
    cache, alternatives = cache or ReportCache(), list[dict[str, Any]]()
    unfit: MeshcastError | None = None
    try:
        for assumed in file.alternatives(claim):
            try:
                alternatives.append(_judge_alternative(file, claim, assumed, cache, find_plan))
            except OutOfMemory as error:
                unfit = error
        if unfit and not alternatives:
            raise unfit
    except MeshcastError as error:
        where = f" with {_describe_assumed(assumed)}" if assumed else ""
        return known | judgement | {"reason": f"{error}{where}"}
    except Exception as error:  # a defect of meshcast costs a single claim
        return known | judgement | {"reason": Defect.of(error).rule, "defect": True}
    summary = _summarize_alternatives(claim, drop_unfit(claim, alternatives))
    return known | judgement | {"alternatives": alternatives} | summary


def _judge_alternative(
    file: ClaimFile, claim: Claim, assumed: Mapping[str, Any], cache: ReportCache, find_plan: PlanFinder | None
) -> dict[str, Any]:
    """Returns the numbers of a claim with a value for everything that it assumes."""
    unfit: list[str] = []
    reads = claim.parsed_relation.reads
    values: dict[tuple[str, str], Quantity] = {}
    for name, jobs in file.expand(claim, assumed).items():
        measures, kind = [measure for job, measure in reads if job == name], file.kind_of(claim, name)
        if kind == "cases":
            played = play_case(jobs[0], f"cases.{name}")
            values |= {(name, measure): read_case(played, measure or claim.measure) for measure in measures}
            continue
        if kind == "plans":
            values |= {
                (name, measure): _read_plans(name, measure or claim.measure, jobs, find_plan) for measure in measures
            }
            continue
        reports = list(_forecast_jobs(name, jobs, cache))
        for measure in measures:
            values[name, measure] = _read_points(measure or claim.measure, reports)
        unfit += [name] if len(reports) == 1 and not reports[0].fits else []
    of_plan = claim.measure in OF_PLAN or claim.measure.startswith("plan.")
    better = better_of(claim.measure, file.uses_cases(claim) or of_plan)
    ours = claim.parsed_relation.compute(values, better, "relation")
    miss = _miss(claim, ours)
    return {
        "assumed": dict(assumed),
        "values": {".".join(filter(None, read)): value for read, value in values.items()},
        "does_not_fit": unfit,
        "ours": ours,
        "miss": miss,
        "status": MISSES if abs(miss) > (claim.tolerance or 0.0) + ROUNDING else HOLDS,
    }


def _read_plans(name: str, measure: str, runs: Sequence[dict[str, Any]], find_plan: PlanFinder | None) -> Quantity:
    """Returns the number of a plan that a planner finds; of all points of an `over` that have a plan, in a list."""
    if find_plan is None:
        remedy = "Run meshcast validate claims, or hand find_plan in"
        raise PlanError(f"plans.{name}", "there are no planners to run it", remedy)
    values: list[Quantity] = []
    for run in runs:
        try:
            plan = find_plan(validate_data(PlannerRun, run, f"plans.{name}", PlanError))
            value = read_plan(plan, measure)
            values.append(read_measure(plan.forecast(), measure) if value is None else value)
        except MeshcastError as error:
            if len(runs) == 1:
                raise error.at(f"plans.{name}") from None
    return values[0] if len(values) == 1 else flatten(values)


def _forecast_jobs(name: str, jobs: Sequence[dict[str, Any]], cache: ReportCache) -> Iterator[Report]:
    """Yields the reports of a job, or of all points of an `over` that are plans."""
    for job in jobs:
        try:
            yield cache.forecast(job)
        except MeshcastError as error:
            if len(jobs) == 1:
                raise error.at(f"jobs.{name}") from None


def _read_points(measure: str, reports: Sequence[Report]) -> Quantity:
    """Returns the measure of a job; of the points of an `over` those of all that fit, in a list."""
    if len(reports) == 1:
        return read_measure(reports[0], measure)
    whole = measure.partition(".")[0] in WHOLE_LIST
    return flatten(read_measure(report, measure) for report in reports if whole or report.fits)


def drop_unfit(claim: Claim, alternatives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the alternatives that count: what does not fit in memory was not run, if anything else does."""
    fitting = [alternative for alternative in alternatives if not alternative["does_not_fit"]]
    return fitting if fitting and claim.measure != "fits" else alternatives


def _summarize_alternatives(claim: Claim, alternatives: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the status over everything that is assumed, with the numbers of the alternative that misses least.

    It depends, too, where some miss above and others below: the paper's number lies between them.
    """
    statuses = {alternative["status"] for alternative in alternatives}
    misses = [alternative["miss"] for alternative in alternatives]
    if len(statuses) > 1 or (min(misses) < 0 < max(misses) and statuses == {MISSES}):
        keys = [key for key in claim.assumed if _decides(key, alternatives)] or list(claim.assumed)
        shown = min(alternatives, key=lambda alternative: abs(alternative["miss"]))
        reason = "; ".join(
            f"{_describe_assumed(alternative['assumed'])}: {alternative['ours']:.4g}" for alternative in alternatives
        )
        status = DEPENDS
    else:
        keys, reason, (status,) = [], claim.note if MISSES in statuses else "", statuses
        shown = (
            min(alternatives, key=lambda alternative: abs(alternative["miss"])) if status == MISSES else alternatives[0]
        )
    return {
        "status": status,
        "reason": reason,
        "ours": shown["ours"],
        "ratio": _ratio(claim, shown["ours"]),
        "miss": shown["miss"],
        "near": max(abs(alternative["miss"]) for alternative in ([shown] if status == MISSES else alternatives)) <= NEAR
        or status == HOLDS,
        "depends_on": keys,
    }


def _decides(key: str, alternatives: Sequence[dict[str, Any]]) -> bool:
    """Returns whether two alternatives that differ in a field alone have different statuses."""
    groups: dict[str, set[tuple[str, bool]]] = {}
    for alternative in alternatives:
        rest = repr([(name, value) for name, value in alternative["assumed"].items() if name != key])
        groups.setdefault(rest, set()).add(
            (alternative["status"], alternative["status"] == MISSES and alternative["miss"] > 0)
        )
    return any(len(statuses) > 1 for statuses in groups.values())


def _describe_assumed(assumed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shorten(value)}" for key, value in assumed.items())


# ------------------------------------------------------------------------------------------ targets


def _bounds(claim: Claim) -> tuple[float | None, float | None]:
    """Returns the lowest and highest value of a claim that is a bound or an order; None: unbounded."""
    if claim.parsed_relation.is_order:
        return 1.0, None
    return claim.between or (claim.at_least, claim.at_most)


def _miss(claim: Claim, ours: float) -> float:
    """Returns the relative deviation from the value, or from the bound that is not met; 0 within bounds. Absolute where
    the paper says 0."""
    if claim.value is not None:
        return find_deviation(ours, claim.value)
    low, high = _bounds(claim)
    if low is not None and ours < low:
        return find_deviation(ours, low)
    return find_deviation(ours, high) if high is not None and ours > high else 0.0


def find_deviation(ours: float, theirs: float) -> float:
    """Returns the relative deviation from a published number; ours where that is 0."""
    return (ours - theirs) / abs(theirs) if theirs else ours


def _paper_number(claim: Claim) -> float | list[float] | None:
    """Returns what the paper says of the relation: its number, the bound, or both ends; 1 of an order."""
    if claim.cannot_judge or claim.value is not None:
        return claim.value
    low, high = _bounds(claim)
    return [low, high] if low is not None and high is not None else high if low is None else low


def _ratio(claim: Claim, ours: float) -> float | None:
    """Returns ours over the paper's number, or over the nearest bound; None where that is 0."""
    stated = claim.value
    if stated is None:
        low, high = _bounds(claim)
        stated = min((bound for bound in (low, high) if bound is not None), key=lambda bound: abs(ours - bound))
    return ours / stated if stated else None


def describe_target(claim: Claim) -> str:
    """Returns what the paper says of the relation, in words."""
    if claim.cannot_judge:
        return ""
    if claim.value is not None:
        tolerance = claim.tolerance or 0.0
        return f"0 within {tolerance:.3g}" if claim.value == 0 else f"{claim.value:.4g} within {100 * tolerance:.3g} %"
    low, high = _bounds(claim)
    if claim.parsed_relation.is_order:
        return "in this order"
    if low is not None and high is not None:
        return f"{low:.4g} to {high:.4g}"
    return f"at least {low:.4g}" if low is not None else f"at most {high:.4g}"


# ------------------------------------------------------------------------------------------ counts


def summarize_judgements(rows: Sequence[Judgement]) -> dict[str, Any]:
    """Counts statuses over all claims, by family and by system. Only claims whose source was read are scored."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    return {
        **count_statuses(rows),
        "by_family": {name: count_statuses(row for row in rows if row["family"] == name) for name in families},
        "by_system": {name: count_statuses(row for row in rows if row["system"] == name) for name in systems},
    }


def count_statuses(rows: Iterable[Judgement]) -> dict[str, Any]:
    """Counts statuses among scored claims.

    judged: scored claims that hold, miss or depend. near: those that hold or deviate by at most `NEAR`.
    share_holds, share_near: over the judged ones; None without any.
    """
    rows = list(rows)
    scored = [row for row in rows if row["scored"]]
    counts = {status: sum(row["status"] == status for row in scored) for status in STATUSES}
    judged = [row for row in scored if row["ours"] is not None]
    near = sum(row["near"] for row in judged)
    return {
        "claims": len(rows),
        "recalled": len(rows) - len(scored),
        "judged": len(judged),
        **{status.replace("-", "_"): count for status, count in counts.items()},
        "near": near,
        "share_holds": counts[HOLDS] / len(judged) if judged else None,
        "share_near": near / len(judged) if judged else None,
    }
