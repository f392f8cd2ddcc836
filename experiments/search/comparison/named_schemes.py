"""Reads the keys that name schemes of families, and options of data schemes, from a plan in long form."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.search.keys.data_schemes import left_to_framework
from meshcast.experiments.search.keys.scheme_keys import (
    DATA_OPTIONS,
    DEFAULTS,
    NamedScheme,
    accompanies_others,
    name_scheme,
)
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.framework import Framework
from meshcast.simulator.job.job import LongPlan, SchemeEntry
from meshcast.simulator.job.plan_keys import PLAN_KEYS, SCHEME_KEYS, choosing_keys
from meshcast.simulator.job.shorthand import family_degree


def read_named_schemes(plan: LongPlan, framework: Framework, named: frozenset[str]) -> dict[str, Any]:
    """Returns values of fields in `NAMED_ALONE`, by their names in a point; None where a field is not read, makes no
    difference, or is that of a plan without it. named: the fields to read."""
    families = {family for family, key in SCHEME_KEYS.items() if f"plan.{key}" in named}
    found: dict[str, Any] = dict.fromkeys((*DEFAULTS, *DATA_OPTIONS))
    if "tensor" in families and family_degree(plan, "tensor") > 1:
        chosen = [f"tensor/{name}" for key in choosing_keys("tensor") for name in key.chooses.values()]
        usual = (*chosen, framework.tensor_overlap if framework.overlap.tp else "")
        others = [entry for entry in _family(plan, "tensor") if entry.use not in usual]
        if len(others) == 1:
            found["tensor"] = _name_entry(others[0])
            if not accompanies_others(found["tensor"]):
                found |= {key.point: None for key in choosing_keys("tensor")}
    for family in families & {"sequence", "expert"}:
        views = plan.views.get("experts", {}) if family == "expert" else {}
        ranks = max(family_degree(plan, family), views.get("ep", 1) * views.get("etp", 1))
        if ranks > 1 and len(entries := _family(plan, family)) == 1:
            found[family] = _name_entry(entries[0])
    for entry in _family(plan, "data"):
        if "data" in families:
            found["data"] = entry.use.partition("/")[2]
        options, left = find_scheme(entry.use).Options, left_to_framework(framework)
        for key in DATA_OPTIONS:
            if f"plan.{key}" in named and (option := PLAN_KEYS[key].option) in options.model_fields:
                value = getattr(options.model_validate(entry.model_extra or {}), option)
                found[key] = left.get(key) if value is None else value
    return found


def _name_entry(entry: SchemeEntry) -> NamedScheme:
    """The scheme of an entry, with the options that its plan states but for axes, which follow from degrees."""
    axes = find_scheme(entry.use).names_axes
    return name_scheme(entry.use, {k: v for k, v in (entry.model_extra or {}).items() if k not in axes})


def _family(plan: LongPlan, family: str) -> list[SchemeEntry]:
    return [entry for entry in plan.schemes if entry.use.startswith(f"{family}/")]
