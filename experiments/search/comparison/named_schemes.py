"""Reads the keys that name schemes of families, and units of FSDP, from a plan in long form."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.search.keys.scheme_keys import DEFAULTS, UNITS, NamedScheme, accompanies_others, name_scheme
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.framework import Framework
from meshcast.simulator.job.job import LongPlan, SchemeEntry
from meshcast.simulator.job.shorthand import family_degree

BY_SEQUENCE_PARALLEL = ("tensor/megatron-sp", "tensor/megatron")
"""Tensor schemes that a plan in short form states by `sequence_parallel`."""


def read_named_schemes(plan: LongPlan, framework: Framework, named: frozenset[str]) -> dict[str, Any]:
    """Values of fields in `NAMED_ALONE`, by their names in a point; None where a field is not read, makes no
    difference, or is that of a plan without it. named: the fields to read."""
    found: dict[str, Any] = dict.fromkeys((*DEFAULTS, *UNITS))
    if "plan.tp_scheme" in named and family_degree(plan, "tensor") > 1:
        usual = (*BY_SEQUENCE_PARALLEL, framework.tensor_overlap if framework.overlap.tp else "")
        others = [entry for entry in _family(plan, "tensor") if entry.use not in usual]
        if len(others) == 1:
            found["tp_scheme"] = _name_entry(others[0])
            if not accompanies_others(found["tp_scheme"]):
                found["sequence_parallel"] = None
    for field, family in (("plan.cp_scheme", "sequence"), ("plan.ep_scheme", "expert")):
        views = plan.views.get("experts", {}) if family == "expert" else {}
        ranks = max(family_degree(plan, family), views.get("ep", 1) * views.get("etp", 1))
        if field in named and ranks > 1 and len(own := _family(plan, family)) == 1:
            found[field.partition(".")[2]] = _name_entry(own[0])
    for entry in _family(plan, "data"):
        if "plan.dp_scheme" in named:
            found["data"] = entry.use.partition("/")[2]
        options = find_scheme(entry.use).Options
        for key in UNITS:
            if f"plan.{key}" in named and key in options.model_fields:
                found[key] = getattr(options.model_validate(entry.model_extra or {}), key)
        if "plan.prefetch" in named and "prefetch" in options.model_fields and found["prefetch"] is None:
            found["prefetch"] = int(framework.overlap.gathers_ahead)
    return found


def _name_entry(entry: SchemeEntry) -> NamedScheme:
    """The scheme of an entry, with the options that its plan states but for axes, which follow from degrees."""
    axes = find_scheme(entry.use).names_axes
    return name_scheme(entry.use, {k: v for k, v in (entry.model_extra or {}).items() if k not in axes})


def _family(plan: LongPlan, family: str) -> list[SchemeEntry]:
    return [entry for entry in plan.schemes if entry.use.startswith(f"{family}/")]
