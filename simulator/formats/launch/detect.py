"""Which files are launch files, and of which program: so that every command that takes a job takes them, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from meshcast.hardware.documents.input_file import DESCRIPTION
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml
from meshcast.simulator.formats.files import text as read_file
from meshcast.simulator.formats.launch import LAUNCH_SUFFIXES
from meshcast.simulator.formats.launch.convert import DEGREES, FORMATS, import_text
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.job.job import LongPlan
from meshcast.simulator.job.plan_keys import PLAN_KEYS, ShortPlan, keys_alike

DERIVED_FROM = (*DEGREES, "batch.micro", "batch.global")
"""Keys of a job that training programs derive others from: the global batch from the number of replicas, say."""

REMEDY = "Name a launch script, a TOML, YAML or JSON file of a training program, or a job"


def is_launch_data(data: Mapping[str, Any]) -> bool:
    """Whether what a YAML or JSON file holds is of a training program."""
    return _find_form(data, "") is not None


def import_path(path: Path, changes: Iterable[str] = ()) -> ImportedJob:
    """The job of a launch file whose program is found by its content.

    changes: changes to the job, such as ``cluster=dgx-h100:64``; those of the whole model or cluster count here, for
        the file need not say them, and those of degrees and batch sizes, for others follow from them.
    Raises PlanError for a file of no program that is known.
    """
    text, form = read_launch_file(path)
    given, changed = dict[str, Any](), dict[str, Any]()
    for change in changes:
        field, _, value = (word.strip() for word in change.partition("="))
        if field in ("model", "cluster"):
            given[field] = read_yaml(value, f"--set {field}", PlanError).data
        elif field in DERIVED_FROM and value.isdecimal() and int(value):
            changed[field] = int(value)
    return import_text(text, str(path), form, folder=path.parent, changed=changed, **given)


def apply_changes(imported: ImportedJob, changes: Iterable[str], apply: Callable[[dict[str, Any], str], None]) -> Any:
    """The job of a launch file with changes made. apply: makes one.

    Raises PlanError for keys of a short plan, where the file needs a long one.
    """
    data = copy.deepcopy(imported.job)
    plan = data.get("plan", {})
    for change in changes:
        field, _, value = (word.strip() for word in change.partition("="))
        section, _, key = field.partition(".")
        if section == "plan" and "mesh" in plan and key not in LongPlan.model_fields and key in ShortPlan.model_fields:
            if field in DEGREES and value.isdecimal() and int(value):
                continue  # the import has it
            refuse_short_key(plan, key, value)
        for name in keys_alike(key) if section == "plan" and key in PLAN_KEYS else ():
            plan.pop(name, None)  # a change of one replaces what the import wrote
        apply(data, change)
    return data


def refuse_short_key(plan: Mapping[str, Any], key: str, value: str) -> NoReturn:
    """Raises the error for a key of a short plan that cannot be set in a long one, with what can."""
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


def read_launch_file(path: Path) -> tuple[str, str]:
    """The content of a launch file, and the name of its format, found by its content.

    Raises PlanError for a file of no program that is known.
    """
    text = read_file(path, REMEDY, DESCRIPTION)
    data = None if path.suffix.lower() in LAUNCH_SUFFIXES else read_yaml(text + "\n", str(path), PlanError).data
    form = _find_form(data, text, path.suffix.lower() == ".toml")
    if form is None:
        known = ", ".join(one.program for one in FORMATS.values())
        raise PlanError(str(path), f"it is no launch file of a program that meshcast reads: {known}", REMEDY)
    return text, form


def _find_form(data: Any, text: str, is_toml: bool = False) -> str | None:
    if is_toml:
        return "torchtitan"
    for name in ("torchtitan", "megatron", "deepspeed", "accelerate", "nemo"):
        if FORMATS[name].recognise(data, text):
            return name
    return None
