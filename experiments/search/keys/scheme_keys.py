"""Keys of a plan that name the scheme of a family, and keys of units of FSDP, in the plans of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from meshcast.simulator.ir.capabilities import ChangesKernels, HoldsStates, MeasuresMemory
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job import named_schemes

DEFAULTS: dict[str, Any] = {"tp_scheme": None, "cp_scheme": "all-gather", "ep_scheme": "all-to-all"}
"""What a plan has without the keys; of tensor parallelism one of two schemes, as `sequence_parallel` says."""

DEFAULT_DATA = "zero-1"
"""The data scheme of a plan that states none."""

UNITS: dict[str, Any] = {"reshard": True, "unit": 1, "prefetch": None}
"""Keys of units of FSDP, with what a plan has without them; of `prefetch` the framework says."""

FSDP_UNITS = (1, 2, 4)
"""Layers of a unit that are tried by default."""

PREFETCHED = (0, 1, 2)
"""Units gathered ahead that are tried by default."""

NAMED_ALONE = tuple(f"plan.{key}" for key in (*DEFAULTS, "dp_scheme", *UNITS))
"""Fields that ``plan: auto`` leaves alone: they are searched where a job names them."""


@dataclass(frozen=True)
class SchemeWithOptions:
    """A scheme that a plan names with options of its own.

    name: without its family. options: those that are not the scheme's defaults, sorted by name.
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{key} {value}' for key, value in self.options)})"

    def to_dict(self) -> dict[str, Any]:
        """The value of the key in a plan."""
        return {"use": self.name, **{key: list(v) if isinstance(v, tuple) else v for key, v in self.options}}


NamedScheme = str | SchemeWithOptions
"""A scheme as a point has it: its name without its family, or with options."""


def name_scheme(use: str, options: Mapping[str, Any]) -> NamedScheme:
    """A scheme as a point has it. use: with its family. options: as a plan states them."""
    defaults, name = find_scheme(use).Options.model_fields, use.rpartition("/")[2]
    changed = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v != defaults[k].default}
    return SchemeWithOptions(name, tuple(sorted(changed.items()))) if changed else name


def plain_name(scheme: NamedScheme) -> str:
    """The name of a scheme without its options."""
    return scheme.name if isinstance(scheme, SchemeWithOptions) else scheme


class Units(Protocol):
    """What a choice between the passes says of the data scheme."""

    @property
    def data(self) -> str: ...
    @property
    def reshard(self) -> bool: ...
    @property
    def unit(self) -> int: ...
    @property
    def prefetch(self) -> int | None: ...


def units_of(step: Units) -> tuple[Any, ...]:
    """What a choice says of units of FSDP, in the order of `UNITS`."""
    return tuple(getattr(step, key) for key in UNITS)


def find_named(given: Mapping[str, Any], plan: Mapping[str, Any]) -> frozenset[str]:
    """The fields in `NAMED_ALONE` that a job opens, or that its plan states. given: the open fields."""
    stated = {f"plan.{key}" for key, value in plan.items() if value is not None}
    return frozenset(field for field in NAMED_ALONE if field in given or field in stated)


def scheme_namer(key: str) -> Callable[[str | Mapping[str, Any] | None], NamedScheme | None]:
    """Gives a scheme as a point has it from what a job states under a key."""
    default = DEFAULTS.get(key, DEFAULT_DATA)

    def read(given: str | Mapping[str, Any] | None) -> NamedScheme | None:
        if given is None or isinstance(given, str):
            return default if given is None else given.rpartition("/")[2]
        name = str(given["use"]).rpartition("/")[2]
        return name_scheme(f"{named_schemes.FAMILIES[key]}/{name}", {k: v for k, v in given.items() if k != "use"})

    return read


@cache
def accompanies_others(tensor: NamedScheme | None) -> bool:
    """Whether a tensor scheme overlaps the communication of another one."""
    return tensor is not None and named_schemes.accompanies_others(find_scheme(f"tensor/{plain_name(tensor)}"))


@cache
def changes_kernels(family: str, scheme: NamedScheme) -> bool:
    """Whether a scheme has kernels of its own, which also a single rank runs."""
    return issubclass(find_scheme(f"{family}/{plain_name(scheme)}"), ChangesKernels)


@cache
def offloads_states(data: str) -> bool:
    """Whether a data scheme keeps states in other memory, also those of a single rank."""
    scheme = find_scheme(f"data/{data}")()
    offloads = isinstance(scheme, HoldsStates) and bool(scheme.offloaded_to("optimizer"))
    return offloads or (isinstance(scheme, MeasuresMemory) and scheme.measures_memory)


def write_scheme_keys(plan: dict[str, Any], tensor: NamedScheme | None, step: Units) -> None:
    """Writes the keys of a point to a plan, which has those of its open fields already: of keys that state the same
    one is left."""
    if plan.get("dp_scheme") is not None:
        plan.pop("zero", None)
        plan.pop("fsdp", None)
        plan["dp_scheme"] = step.data
    if tensor is not None and not accompanies_others(tensor):
        plan.pop("sequence_parallel", None)
    elif tensor is None:
        plan.pop("tp_scheme", None)
    for key, default in UNITS.items():
        plan.pop(key, None)
        if (value := getattr(step, key)) != default:
            plan[key] = value
