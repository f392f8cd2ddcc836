"""Keys of a plan that name the scheme of a family, and keys of options of data schemes, in the plans of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.capabilities import ChangesKernels, HoldsStates, MeasuresMemory
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.plan_keys import PLAN_KEYS, SCHEME_KEYS, choosing_keys, option_keys

USUAL = {family: None if family == "tensor" else PLAN_KEYS[key].usual for family, key in SCHEME_KEYS.items()}
"""The scheme of a family that a plan has without naming any; of tensor parallelism another key chooses it."""

DEFAULTS: dict[str, Any] = {family: USUAL[family] for family in ("tensor", "sequence", "expert")}
"""Those of the families whose schemes change the ops of a layer."""

DATA_OPTIONS: dict[str, Any] = {key.name: key.usual for key in option_keys("data") if key.part}
"""Keys of options of data schemes, with what a plan has without them; of null the framework says."""

NAMED_ALONE = tuple(f"plan.{key.name}" for key in PLAN_KEYS.values() if key.part == "named")
"""Fields that ``plan: auto`` leaves alone: they are searched where a job names them."""


@dataclass(frozen=True)
class SchemeWithOptions:
    """A scheme that a plan names with options.

    name: without its family.
    options: those that are not the scheme's defaults, sorted by name.
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{key} {value}' for key, value in self.options)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of the key in a plan."""
        return {"use": self.name, **{key: list(v) if isinstance(v, tuple) else v for key, v in self.options}}


NamedScheme = str | SchemeWithOptions
"""A scheme as a point has it: its name without its family, or with options."""


def name_scheme(use: str, options: Mapping[str, Any]) -> NamedScheme:
    """Returns a scheme as a point has it. use: with its family. options: as a plan states them."""
    defaults, name = find_scheme(use).Options.model_fields, use.rpartition("/")[2]
    changed = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v != defaults[k].default}
    return SchemeWithOptions(name, tuple(sorted(changed.items()))) if changed else name


def plain_name(scheme: NamedScheme) -> str:
    return scheme.name if isinstance(scheme, SchemeWithOptions) else scheme


def takes_option(data: str, key: str) -> bool:
    """Returns whether a search varies the option of a data scheme that a key states."""
    return issubclass(find_scheme(f"data/{data}"), find_scheme(PLAN_KEYS[key].owner))


def find_named(opened: Mapping[str, Any], plan: Mapping[str, Any]) -> frozenset[str]:
    """Returns the fields in `NAMED_ALONE` that a job opens, or that its plan states. opened: the open fields."""
    stated = {f"plan.{key}" for key, value in plan.items() if value is not None}
    return frozenset(field for field in NAMED_ALONE if field in opened or field in stated)


def scheme_namer(family: str) -> Callable[[str | Mapping[str, Any] | None], NamedScheme | None]:
    """Returns what gives a scheme as a point has it from what a job states of a family."""

    def read(stated: str | Mapping[str, Any] | None) -> NamedScheme | None:
        if stated is None or isinstance(stated, str):
            return USUAL[family] if stated is None else stated.rpartition("/")[2]
        name = str(stated["use"]).rpartition("/")[2]
        return name_scheme(f"{family}/{name}", {k: v for k, v in stated.items() if k != "use"})

    return read


@cache
def accompanies_others(tensor: NamedScheme | None) -> bool:
    """Returns whether a tensor scheme overlaps the communication of another scheme."""
    return tensor is not None and find_scheme(f"tensor/{plain_name(tensor)}").most_axes == 0


@cache
def changes_kernels(family: str, scheme: NamedScheme) -> bool:
    """Returns whether a scheme has special kernels, which also a single rank runs."""
    return issubclass(find_scheme(f"{family}/{plain_name(scheme)}"), ChangesKernels)


@cache
def offloads_states(data: str) -> bool:
    """Returns whether a data scheme keeps states in other memory, also those of a single rank."""
    scheme = find_scheme(f"data/{data}")()
    offloads = isinstance(scheme, HoldsStates) and bool(scheme.offloaded_to("optimizer"))
    return offloads or (isinstance(scheme, MeasuresMemory) and scheme.measures_memory)


def write_scheme_keys(plan: dict[str, Any], tensor: NamedScheme | None, data: str, options: tuple[Any, ...]) -> None:
    """Writes the keys of a point to a plan, which has those of its open fields already; keys that state the same
    leave it. options: in the order of `DATA_OPTIONS`."""
    if plan.get(SCHEME_KEYS["data"]) is not None:
        _leave_out(plan, "data")
        plan[SCHEME_KEYS["data"]] = data
    if tensor is not None and not accompanies_others(tensor):
        _leave_out(plan, "tensor")
    elif tensor is None:
        plan.pop(SCHEME_KEYS["tensor"], None)
    for (key, default), value in zip(DATA_OPTIONS.items(), options, strict=True):
        plan.pop(key, None)
        if value != default:
            plan[key] = value


def _leave_out(plan: dict[str, Any], family: str) -> None:
    """Takes the keys from a plan that choose the scheme of a family which it names."""
    for key in choosing_keys(family):
        plan.pop(key.name, None)
