"""Whether a plan lies in the space of a search, and which of its fields are outside."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.search.space.divisions import UNEVEN_ENDS
from meshcast.experiments.search.space.fields import FIELD_OF, FIELDS, PARTITIONS, write_value
from meshcast.experiments.search.space.limits import LimitedSpace
from meshcast.experiments.search.space.scheme_keys import DATA_OPTIONS, DEFAULTS, takes_option
from meshcast.experiments.search.space.short_form import ShortForm
from meshcast.experiments.search.space.space import LayerGroup, Pipeline, Space, StepChoice
from meshcast.hardware.records import dataclass

MAX_NAMED = 12
"""Values of a field that a sentence names."""


@dataclass(frozen=True)
class OutsideField:
    """A field of a plan that lies outside of a space.

    value: of the plan.
    searched: the values of the space; None if no search varies the field.
    why: in words.
    """

    field: str
    value: Any
    searched: list[Any] | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        return {"field": self.field, "value": self.value, "searched": self.searched, "why": self.why}


def list_outside(space: Space, form: ShortForm) -> list[OutsideField]:
    """Returns the fields of a plan that are outside of a space; empty if the space holds it.

    A plan whose fields all have values of the space is still outside where the space has no such pipeline, or where a
    limit of the search excludes it.
    """
    others = []
    for field, (stated, restated) in form.others.items():
        instead = f"; in short form it would be {state_value(restated)}" if restated is not None else ""
        others.append(OutsideField(field, stated, None, f"a search does not vary it{instead}"))
    if not form.values:
        return others
    fields = [_wrong_value(space, field, form.values[name]) for field, name in space.fields.items()]
    outside = [field for field in fields if field is not None]
    return [*(outside or _explain_point(space, form.values)), *others]


def _wrong_value(space: Space, field: str, value: Any) -> OutsideField | None:
    """Returns a field whose value the space does not have; None if it has it, or if the field makes no difference."""
    name = FIELDS[field]
    known = space.values[name]
    if name == "etp" and value is None and not {None, 1} & {*known}:
        value = 1
    if name in ("recomputed", "shard") or value is None or value in known:  # they depend on other fields
        return None
    if name == "partition" and isinstance(value, tuple) and UNEVEN_ENDS in known:
        return None
    searched, value = [write_value(known_value) for known_value in known], write_value(value)
    if field not in space.open and len(searched) == 1:
        return OutsideField(field, value, searched, f"the job of the search states {state_value(searched[0])}")
    named = ", ".join(map(state_value, searched[:MAX_NAMED]))
    more = f" and {len(searched) - MAX_NAMED:,} more" if len(searched) > MAX_NAMED else ""
    return OutsideField(field, value, searched, f"the search took {named}{more}")


def _explain_point(space: Space, values: dict[str, Any]) -> list[OutsideField]:
    """Returns why a space that has all values of a plan does not have it, or admits it not; empty if it does."""
    group, pipeline, step = find_point(space, values)
    if space.named and group not in space.groups():
        why = "the search took no such combination of degrees and schemes"
        return [OutsideField("plan", "this combination", None, why)]
    if pipeline not in space.pipelines(group):
        if any(other.order == pipeline.order for other in space.pipelines(group)):
            why = "the search took no such number of layers for stages of this size"
            return [OutsideField(FIELD_OF["recomputed"], values["recomputed"], None, why)]
        stated = ", ".join(f"{name} {state_value(values[name])}" for name in ("schedule", "chunks", "partition"))
        why = "the search took no such combination of schedule, chunks and partition"
        return [OutsideField("plan.schedule", stated, None, why)]
    if step.shard is not None and step not in space.steps(group, *pipeline.place):
        why = "the search took no such number of ranks that share one copy of the states"
        return [OutsideField("plan.shard", step.shard, None, why)]
    why = space.explain_exclusion(group, pipeline, step) if isinstance(space, LimitedSpace) else ""
    return [OutsideField("plan", "this combination", None, why)] if why else []


def find_point(space: Space, values: dict[str, Any]) -> tuple[LayerGroup, Pipeline, StepChoice]:
    """Returns the point of a space that a plan would be; fields without effect have the first value of the space."""
    point = {name: space.values[name][0] if values[name] is None else values[name] for name in FIELDS.values()}
    point |= {name: values[name] for name in ("etp", "shard", "tensor")}
    point["sequence"] = point["sequence"] if point["cp"] > 1 else DEFAULTS["sequence"]
    if point["ep"] == 1 and (point["etp"] or 1) == 1 and values["expert"] is None:
        point["expert"] = DEFAULTS["expert"]
    point["options"] = tuple(
        point[key] if takes_option(point["data"], key) else usual for key, usual in DATA_OPTIONS.items()
    )
    layers, recomputed = space.loaded.model.layers, values["recomputed"]
    if point["pp"] > 1:
        layers = -(-(layers + 2 * (point["partition"] == PARTITIONS[1])) // (point["pp"] * point["chunks"]))
    point["recomputed"] = recomputed if recomputed is not None and recomputed < layers else None
    return (
        LayerGroup(**{name: point[name] for name in LayerGroup._fields}),
        Pipeline(**{name: point[name] for name in Pipeline._fields}),
        StepChoice(**{name: point[name] for name in StepChoice._fields}),
    )


def state_value(value: Any) -> str:
    """Returns a value of a field in words."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {state_value(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(state_value, value))}]" if value else "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
