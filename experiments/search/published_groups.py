"""Searches whose spaces are the plans of a group of published runs: they must choose what the forecasts choose.

The fields in which the plans differ are open, with the values that the plans have, and a constraint excludes all other
combinations. A group is no search if a plan has something that no search varies, or if its plans differ in settings
beside the plan, such as compilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshcast.experiments.search.certificate.settings import differing_settings
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.plan_search import ROUNDING, BoundViolation
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.fields import AUTO, FIELDS, PARTITIONS, has_open_fields
from meshcast.experiments.search.space.limits import Limits
from meshcast.experiments.search.space.membership import find_point, list_outside, state_value
from meshcast.experiments.search.space.short_form import ShortForm, read_short_form
from meshcast.experiments.search.space.space import Space
from meshcast.experiments.sweeps.expressions import Expression, Look
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.job.plan_keys import state_scheme_name
from meshcast.simulator.loading.load import load_job, set_field
from meshcast.simulator.report.peak_errors import EVEN
from meshcast.validation.published.choice import PlanGroup

OF_INTERVALS = ("framework.set.sigmas", "framework.set.regime")
"""Settings that change the interval of a forecast alone."""


class NoSearchError(Exception):
    """A group of plans is no search.

    kind: why, in words that groups share.
    detail: what exactly.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


def search_group(group: PlanGroup) -> dict[str, Any]:
    """Returns what a search of the plans of a group alone chooses.

    chosen: the run of the best plan; None if none fits in memory.
    agrees: whether its step is the shortest forecast of those that fit.
    defect: the bound above its forecast; None if there is none.
    fits: whether the shortest forecast of all fits; otherwise a search cannot choose it.
    reason: why the group is no search, and its `kind`; None if it is a search.
    """
    fits = min(group.surveyed, key=lambda run: run.step_time).fits
    try:
        forms, search = _open(group)
        if not search.run().complete:
            raise KeyboardInterrupt
    except NoSearchError as error:
        return _answer(fits, kind=error.kind, reason=error.detail)
    except BoundViolation as error:
        return _answer(fits, defect=str(error))
    except MeshcastError as error:
        return _answer(fits, kind="break a rule of searches", reason=str(error))
    fitting = [run.step_time for run in group.surveyed if run.fits]
    shortest, incumbent = min(fitting, default=math.inf), search.certificate.incumbent
    chosen = None
    if search.best:
        best = find_point(search.space, read_short_form(load_job(search.best[0].job)).values)
        points = [find_point(search.space, form.values) for form in forms]
        chosen = group.names[points.index(best)]
    agrees = incumbent == shortest or math.isclose(incumbent, shortest, rel_tol=ROUNDING)
    return _answer(fits, chosen=chosen, agrees=agrees)


def _answer(fits: bool, **known: Any) -> dict[str, Any]:
    empty = {"chosen": None, "agrees": False, "fits": fits, "defect": None, "kind": None, "reason": None}
    return {**empty, **known}


def _open(group: PlanGroup) -> tuple[list[ShortForm], Search]:
    """Returns the plans of a group, and the search of them alone. Raises NoSearchError."""
    jobs = [load_job(run.job) for run in group.surveyed]
    forms = [read_short_form(job) for job in jobs]
    for form, name in zip(forms, group.names, strict=True):
        for field, (value, _) in form.others.items():
            raise NoSearchError("have what no search varies", f"{field} of {name} is {state_value(value)}")
    for job in jobs[1:]:
        for field in differing_settings(jobs[0], job):
            if not field.startswith(OF_INTERVALS):
                raise NoSearchError("differ in settings beside the plan", f"the plans differ in {field}")
    written = _write_space(group.surveyed[0].job, [form.values for form in forms])
    try:
        space = Space(written, Path("."))
    except MeshcastError as error:
        kind = "do not differ in what a search varies" if not has_open_fields(written) else "break a rule of searches"
        raise NoSearchError(kind, str(error)) from None
    for form, name in zip(forms, group.names, strict=True):
        if outside := list_outside(space, form):
            first = outside[0]
            detail = f"{first.field} of {name} is {state_value(first.value)}; {first.why}"
            raise NoSearchError("have what no search varies", detail)
    search = open_search(written, top=len(forms), limits=Limits((_only(space, forms),), memory_risk=EVEN))
    search.count()
    left = search.certificate.plans - sum(search.certificate.excluded.values())
    assert left == len({find_point(space, form.values) for form in forms}), "the space has other plans as well"
    return forms, search


def _write_space(job: dict[str, Any], plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the job of a search over the values that some plans have in each field.

    A field of the plan is a list even with a single value: what the job states elsewhere stays as it is.
    """
    written = {key: value for key, value in job.items() if key not in ("id", "plan")}
    written |= {"plan": {}, "batch": dict(written["batch"])}
    written["framework"] = {**written["framework"], "set": dict(written["framework"]["set"])}
    written["framework"]["set"]["overlap"] = dict(written["framework"]["set"].get("overlap", {}))
    for field, name in FIELDS.items():
        values = list(dict.fromkeys(plan[name] for plan in plans if plan[name] is not None or name == "recomputed"))
        if name == "data":
            # Fully sharded schemes are no value of a list.
            zero = AUTO if "fsdp" in values else [state_scheme_name("data", value)["zero"] for value in values]
            written["plan"] |= {"zero": zero} if values else {}
        elif values and values not in ([None], [()]):
            known = name != "partition" or {*values} <= {*PARTITIONS}
            listed = [list(value) if isinstance(value, tuple) else value for value in values]
            stated = listed[0] if len(listed) == 1 and field.startswith("framework.") else listed
            set_field(written, field, stated if known else AUTO, field)
    return written


def _only(space: Space, forms: Sequence[ShortForm]) -> Expression:
    """Returns the constraint that a point is among some plans."""
    points = [space.changes(*find_point(space, form.values)) for form in forms]
    names = tuple(dict.fromkeys(name for point in points for name in point))
    listed = {tuple(map(_freeze, (point.get(name) for name in names))) for point in points}

    def holds(look: Look) -> bool:
        return tuple(_freeze(look(name)) for name in names) in listed

    return Expression("one of the published plans", "where", names, holds)


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
