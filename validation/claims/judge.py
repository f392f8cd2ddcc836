"""Judges claims: runs their jobs, and holds the relation against what the paper says.

`holds` and `misses` compare one number. What the paper leaves open is tried at all its values: if the verdicts differ,
it `depends`, and the answer says on which field. A claim that no job can represent `cannot be judged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hardware.errors import Defect, MeshcastError, OutOfMemory, shorten
from simulator import Report, SharedWork, load_job, simulate
from validation.claims.claim_file import Claim, ClaimFile
from validation.claims.measures import better_of, read_case, read_measure
from validation.claims.relation import Quantity
from validation.pipelines.cases import answer as play_case
from validation.published.answer import map_chunks

HOLDS, MISSES, DEPENDS, OPEN = VERDICTS = ("holds", "misses", "depends", "cannot be judged")

NEAR = 0.25
"""Largest deviation of a claim that is near: of the alternative that misses least, or of all where it depends."""

Judgement = dict[str, Any]
"""The answer to one claim, plain data of ``--json``."""

WHOLE_LIST = ("fits", "memory_gib", "states_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_device_gib")
"""Measures that a job has that does not fit; of others, the points of an `over` that do not fit are left out."""


class ClaimTask(NamedTuple):
    """One claim to judge, and the file that it is of."""

    file: ClaimFile
    claim: Claim


def judge_claims(tasks: Sequence[ClaimTask], workers: int | None = None) -> Iterator[Judgement]:
    """Judgements of all claims in their order. workers: number of processes; None: one per core."""
    yield from map_chunks(_judge_chunk, tasks, workers, size=4)


def _judge_chunk(tasks: Sequence[ClaimTask]) -> list[Judgement]:
    shared = SharedWork()
    found = []
    for file, claim in tasks:
        found.append(judge(file, claim, shared))
        if found[-1]["defect"]:  # the failure may have left it half made
            shared = SharedWork()
    return found


Forecaster = Callable[[dict[str, Any]], Report]
"""Makes the report of a job file, by simulation or from a cache."""


def judge(
    file: ClaimFile, claim: Claim, shared_work: SharedWork | None = None, forecast: Forecaster | None = None
) -> Judgement:
    """The judgement of one claim. forecast: makes the reports of its jobs; None: they are simulated."""
    known = {
        **{"id": claim.id, "system": file.system, "family": file.family, "paper": file.paper, "says": claim.says},
        **{"source": claim.source, "provenance": claim.provenance, "measure": claim.measure, "note": claim.note},
        **{"relation": claim.relation, "theirs": describe_target(claim), "target": _target(claim)},
        "scored": claim.provenance == "checked",
    }
    found: Judgement = {
        "verdict": OPEN,
        "reason": claim.cannot_judge,
        "defect": False,
        "ours": None,
        "miss": None,
        "near": False,
    }
    found |= {"alternatives": [], "depends_on": []}
    if claim.cannot_judge:
        return known | found
    shared, alternatives = shared_work or SharedWork(), list[dict[str, Any]]()
    forecast = forecast or (lambda job: simulate(load_job(job), shared_work=shared))
    unfit: MeshcastError | None = None
    try:
        for assumed in file.alternatives(claim):
            try:
                alternatives.append(_judge_alternative(file, claim, assumed, forecast))
            except OutOfMemory as error:
                unfit = error
        if unfit and not alternatives:
            raise unfit
    except MeshcastError as error:
        given = f" with {_describe_assumed(assumed)}" if assumed else ""
        return known | found | {"reason": f"{error}{given}"}
    except Exception as error:  # a defect of meshcast costs one claim
        return known | found | {"reason": Defect.of(error).rule, "defect": True}
    return (
        known | found | {"alternatives": alternatives} | _summarize_alternatives(claim, drop_unfit(claim, alternatives))
    )


def _judge_alternative(
    file: ClaimFile, claim: Claim, assumed: Mapping[str, Any], forecast: Forecaster
) -> dict[str, Any]:
    """The numbers of a claim with one value for everything that it assumes."""
    is_case, unfit = file.uses_cases(claim), []
    reads = claim.parsed_relation.reads
    values: dict[tuple[str, str], Quantity] = {}
    for name, jobs in file.expand(claim, assumed).items():
        measures = [measure for job, measure in reads if job == name]
        if is_case:
            found = play_case(jobs[0], f"cases.{name}")
            values |= {(name, one): read_case(found, one or claim.measure) for one in measures}
            continue
        reports = list(_forecast_jobs(name, jobs, forecast))
        for one in measures:
            values[name, one] = _read_points(one or claim.measure, reports)
        unfit += [name] if len(reports) == 1 and not reports[0].fits else []
    ours = claim.parsed_relation.compute(values, better_of(claim.measure, is_case), "relation")
    miss = _miss(claim, ours)
    return {
        "assumed": dict(assumed),
        "values": {".".join(filter(None, read)): value for read, value in values.items()},
        "does_not_fit": unfit,
        "ours": ours,
        "miss": miss,
        "verdict": MISSES if _is_missed(claim, miss) else HOLDS,
    }


def _forecast_jobs(name: str, jobs: Sequence[dict[str, Any]], forecast: Forecaster) -> Iterator[Report]:
    """Forecasts of a job, or of all points of an `over` that are plans."""
    for job in jobs:
        try:
            yield forecast(job)
        except MeshcastError as error:
            if len(jobs) == 1:
                raise error.at(f"jobs.{name}") from None


def _read_points(measure: str, reports: Sequence[Report]) -> Quantity:
    """The measure of a job; of the points of an `over` those of all that fit, in one list."""
    if len(reports) == 1:
        return read_measure(reports[0], measure)
    whole = measure.partition(".")[0] in WHOLE_LIST
    points = [read_measure(report, measure) for report in reports if whole or report.fits]
    return [one for point in points for one in (point if isinstance(point, list) else [point])]


def drop_unfit(claim: Claim, alternatives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The alternatives that count: what does not fit in memory was not run, if anything else does."""
    fitting = [one for one in alternatives if not one["does_not_fit"]]
    return fitting if fitting and claim.measure != "fits" else alternatives


def _summarize_alternatives(claim: Claim, alternatives: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict over everything that is assumed, with the numbers of the alternative that misses least.

    It depends, too, where some miss above and others below: the paper's number lies between them.
    """
    verdicts = {one["verdict"] for one in alternatives}
    misses = [one["miss"] for one in alternatives]
    if len(verdicts) > 1 or (min(misses) < 0 < max(misses) and verdicts == {MISSES}):
        keys = [key for key in claim.assumed if _decides(key, alternatives)] or list(claim.assumed)
        shown = min(alternatives, key=lambda one: abs(one["miss"]))
        reason = "; ".join(f"{_describe_assumed(one['assumed'])}: {one['ours']:.4g}" for one in alternatives)
        verdict = DEPENDS
    else:
        keys, reason, (verdict,) = [], "", verdicts
        shown = min(alternatives, key=lambda one: abs(one["miss"])) if verdict == MISSES else alternatives[0]
    return {
        "verdict": verdict,
        "reason": reason,
        "ours": shown["ours"],
        "miss": shown["miss"],
        "near": max(abs(one["miss"]) for one in ([shown] if verdict == MISSES else alternatives)) <= NEAR
        or verdict == HOLDS,
        "depends_on": keys,
    }


def _decides(key: str, alternatives: Sequence[dict[str, Any]]) -> bool:
    """Whether two alternatives that differ in one field alone have different verdicts."""
    groups: dict[str, set[tuple[str, bool]]] = {}
    for one in alternatives:
        rest = repr([(name, value) for name, value in one["assumed"].items() if name != key])
        groups.setdefault(rest, set()).add((one["verdict"], one["verdict"] == MISSES and one["miss"] > 0))
    return any(len(verdicts) > 1 for verdicts in groups.values())


def _describe_assumed(assumed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shorten(value)}" for key, value in assumed.items())


# ------------------------------------------------------------------------------------------ targets


def _bounds(claim: Claim) -> tuple[float | None, float | None]:
    """Lowest and highest value of a claim that is a bound or an order; None: unbounded."""
    if claim.parsed_relation.is_order:
        return 1.0, None
    return claim.between or (claim.at_least, claim.at_most)


def _miss(claim: Claim, ours: float) -> float:
    """Relative deviation from the value, or from the bound that is not met; 0 within bounds. Absolute where the paper
    says 0."""
    if claim.value is not None:
        return _deviation(ours, claim.value)
    low, high = _bounds(claim)
    if low is not None and ours < low:
        return _deviation(ours, low)
    return _deviation(ours, high) if high is not None and ours > high else 0.0


def _deviation(ours: float, theirs: float) -> float:
    return (ours - theirs) / abs(theirs) if theirs else ours


def _is_missed(claim: Claim, miss: float) -> bool:
    rounding = 1e-9
    return abs(miss) > (claim.tolerance or 0.0) + rounding


def _target(claim: Claim) -> dict[str, Any]:
    keys = ("value", "tolerance", "at_least", "at_most", "between")
    return {key: getattr(claim, key) for key in keys if getattr(claim, key) is not None}


def describe_target(claim: Claim) -> str:
    """What the paper says of the relation, in words."""
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
