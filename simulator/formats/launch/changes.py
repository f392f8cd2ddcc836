"""Changes to the job of a launch file, as ``--set`` makes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.table import DEGREES, SomeKeys
from meshcast.simulator.job.job import LongPlan
from meshcast.simulator.job.plan_keys import PLAN_KEYS, ShortPlan, keys_alike


def apply_changes(job: SomeKeys, changes: Iterable[str], apply: Callable[[dict[str, Any], str], None]) -> Any:
    """Returns the job of a launch file with changes. apply: makes a change.

    Raises PlanError for a key of a short plan that is to be searched, where the file needs a plan in long form.
    """
    data = copy.deepcopy(dict(job))
    plan = data.get("plan", {})
    for change in changes:
        field, _, value = (word.strip() for word in change.partition("="))
        section, _, key = field.partition(".")
        if section == "plan" and "mesh" in plan and key not in LongPlan.model_fields and key in ShortPlan.model_fields:
            if read_digits(value) if field in DEGREES else "auto" not in value:
                continue  # the import has it
            refuse_short_key(plan, key, value)
        for name in keys_alike(key) if section == "plan" and key in PLAN_KEYS else ():
            plan.pop(name, None)  # a change of a key replaces what the import wrote
        apply(data, change)
    return data


def refuse_short_key(plan: SomeKeys, key: str, value: str) -> NoReturn:
    """Raises the error for a key of a short plan that cannot be set in a long plan, with what can."""
    family = PLAN_KEYS[key].flat.partition(".")[0]
    uses = [entry["use"] for entry in plan["schemes"]]
    near = next((i for i, use in enumerate(uses) if use.startswith((f"{family}/", f"memory/{family}"))), None)
    named = f"plan.schemes.{near} is {uses[near]}" if near is not None else f"plan.schemes has {', '.join(uses)}"
    rule = "the plan of this file is in long form, for a short one cannot say all of it"
    if f"plan.{key}" in DEGREES:
        rule, remedy = f"{rule}, and takes one number for it", "Set a number such as 8"
    else:
        more = f"set plan.schemes.{near}.use, or" if near is not None else "set"
        remedy = f"{named}: {more} one of {', '.join(DEGREES)}; or edit what meshcast import writes"
    raise PlanError(f"--set plan.{key}", rule, remedy, value)
