"""Schemes that a plan in short form names: `tp_scheme`, `cp_scheme`, `ep_scheme` and `dp_scheme`.

A name alone has the default options; ``{use: NAME, option: value}`` states others. A scheme over several axes gets them
from the degree of its family.
"""

from __future__ import annotations

import math
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import validate_data
from meshcast.simulator.ir.capabilities import ChangesKernels
from meshcast.simulator.ir.registry import find_scheme, is_scheme, scheme_names
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import ShortStage

FAMILIES = {"tp_scheme": "tensor", "cp_scheme": "sequence", "ep_scheme": "expert", "dp_scheme": "data"}
"""Keys of a plan in short form, and the families whose schemes they name."""

LONG_FORM = "The long form of a plan, of mesh and schemes, states axes (docs/job.md)"

UNITS = ("reshard", "unit", "prefetch")
"""Keys of a plan in short form that are options of units of FSDP."""

StatedScheme = tuple[dict[str, Any], dict[str, int]]
"""An entry of `schemes`, and the axes of the mesh that it is over, outermost first."""


def stated_options(short: ShortStage, key: str) -> dict[str, Any]:
    """The options of a scheme that a plan states beside its name."""
    given = getattr(short, key)
    return {option: value for option, value in given.items() if option != "use"} if isinstance(given, dict) else {}


def named_scheme(short: ShortStage, key: str, where: str) -> type[Scheme] | None:
    """The scheme that a key names; None if the plan leaves it out. Raises PlanError for one that does not exist, and
    for options that it does not have, or that would state axes, which follow from degrees."""
    if (given := getattr(short, key)) is None:
        return None
    family, name, place = FAMILIES[key], given, f"{where}.{key}"
    if isinstance(given, dict):
        name, place = given.get("use"), f"{where}.{key}.use"
        if not isinstance(name, str):
            rule = f"it is the name of a scheme of the family {family}, and the other keys are its options"
            raise PlanError(place, rule, f"Write for example {key}: {{use: {find_example(family)}}}", name)
    use = f"{family}/{name.removeprefix(f'{family}/')}"
    if not is_scheme(use):
        known = [one.partition("/")[2] for one in scheme_names() if one.startswith(f"{family}/")]
        raise PlanError(place, f"no such {family} scheme", nearest(use.partition("/")[2], known), name)
    kind, options = find_scheme(use), stated_options(short, key)
    for option in ("over", *kind.names_axes):
        if option in options:
            rule = "the axes of a plan in short form follow from its degrees"
            remedy = "State shard, the ranks that share one copy" if option == "replicate" else LONG_FORM
            raise PlanError(f"{where}.{key}.{option}", rule, f"Leave it out. {remedy}", options[option])
    validate_data(kind.Options, options, f"{where}.{key}", PlanError)
    return kind


def find_example(family: str) -> str:
    """The name of a scheme of a family, for messages."""
    return next(one.partition("/")[2] for one in scheme_names() if one.startswith(f"{family}/"))


def accompanies_others(kind: type[Scheme]) -> bool:
    """Whether a tensor scheme has no axes, and overlaps the communication of another one."""
    return kind.most_axes == 0


def state_scheme(kind: type[Scheme], ranks: int, near: int, axis: str, place: tuple[str, Any]) -> StatedScheme:
    """A scheme over so many ranks, which get one axis, or several with numbers behind its name.

    near: how many neighbours of the ranks share a node. place: of the scheme in the plan, and what is given there.
    Raises PlanError if the sizes of its axes do not follow from their product.
    """
    use = f"{kind.family}/{kind.name}"
    if kind.least_axes < 2:
        return {"use": use, "over": axis}, {axis: ranks}
    sizes = kind.axis_sizes(ranks, near) if ranks > 1 else [(1,) * kind.least_axes]
    if len(sizes) != 1:
        where, given = place
        grids = " or ".join(" x ".join(map(str, one)) for one in sizes)
        rule = f"{use} is over {kind.least_axes} axes, and {axis} = {ranks} does not say how large they are"
        fits = [n for n in range(2, 2 * ranks + 8) if len(kind.axis_sizes(n, min(n, near))) == 1]
        best = sorted(fits, key=lambda n: abs(n - ranks))[:2]
        works = f"{axis} = {' or '.join(map(str, sorted(best)))} would work"
        if grids:
            raise PlanError(where, f"{rule}: {grids}", f"{works}; or state them in long form", given)
        raise PlanError(where, rule, f"{works}; or leave {where.rpartition('.')[2]} out", given)
    names = [f"{axis}-{number}" for number in range(1, len(sizes[0]) + 1)]
    return {"use": use, "over": names}, dict(zip(names, sizes[0], strict=True))


def tensor_schemes(short: ShortStage, where: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The entries of tensor parallelism, and its axes."""
    default = {"use": "tensor/megatron-sp" if short.sequence_parallel else "tensor/megatron", "over": "tp"}
    kind = named_scheme(short, "tp_scheme", where)
    if kind is not None and not accompanies_others(kind) and "sequence_parallel" in short.model_fields_set:
        rule = f"tensor/{kind.name} says itself how activations are sharded, and the plan states sequence_parallel"
        remedy = "Leave sequence_parallel out, or tp_scheme"
        if kind.name in ("megatron", "megatron-sp"):
            remedy = f"Set {where}.sequence_parallel: {str(kind.name == 'megatron-sp').lower()} instead"
        raise PlanError(f"{where}.tp_scheme", rule, remedy, short.tp_scheme)
    if kind is None or short.tp == 1:
        return [default], {"tp": short.tp}
    options = stated_options(short, "tp_scheme")
    if accompanies_others(kind):
        return [{"use": f"tensor/{kind.name}", **options}, default], {"tp": short.tp}
    entry, axes = state_scheme(kind, short.tp, short.tp, "tp", (f"{where}.tp_scheme", short.tp_scheme))
    return [entry | options], axes


def sequence_schemes(short: ShortStage, near: int, where: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The entry of sequence parallelism, and its axes; none without. near: how many of its ranks share a node."""
    kind = named_scheme(short, "cp_scheme", where) or find_scheme("sequence/all-gather")
    if short.cp == 1:
        return [], {}
    entry, axes = state_scheme(kind, short.cp, near, "cp", (f"{where}.cp_scheme", short.cp_scheme))
    return [entry | stated_options(short, "cp_scheme")], axes


def expert_schemes(short: ShortStage, axes: list[str], has_experts: bool, where: str) -> list[dict[str, Any]]:
    """The entry of expert parallelism over the axes of the experts; none without, but for kernels of its own."""
    kind = named_scheme(short, "ep_scheme", where)
    if kind is not None and not has_experts:
        raise PlanError(f"{where}.ep_scheme", "the model has no experts", "Leave it out", short.ep_scheme)
    options = stated_options(short, "ep_scheme")
    if not axes:
        if kind is None or not issubclass(kind, ChangesKernels):
            return []
        return [{"use": f"expert/{kind.name}", **options}]
    if kind is not None and kind.most_axes is not None and kind.most_axes < len(axes):
        rule = f"expert/{kind.name} keeps experts whole, and the plan has etp = {short.etp}"
        raise PlanError(f"{where}.ep_scheme", rule, "Leave etp out", short.ep_scheme)
    return [{"use": f"expert/{kind.name}" if kind is not None else "expert/all-to-all", "over": axes, **options}]


def data_scheme(short: ShortStage, where: str) -> type[Scheme]:
    """The data scheme of a plan, named or of `zero` and `fsdp`. Raises PlanError if it states both."""
    kind = named_scheme(short, "dp_scheme", where)
    if kind is not None:
        if stated := sorted({"zero", "fsdp"} & short.model_fields_set):
            rule = f"it names the data scheme, and so does {' and '.join(stated)}"
            remedy = f"Leave {' and '.join(stated)} out, or dp_scheme"
            raise PlanError(f"{where}.dp_scheme", rule, remedy, short.dp_scheme)
        return kind
    return find_scheme("data/fsdp" if short.fsdp else f"data/zero-{short.zero}" if short.zero else "data/ddp")


def data_schemes(
    short: ShortStage, dp: int, shard: int, near: int, where: str
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The entry of data parallelism, and its axes. shard: ranks that share one copy of the states. near: how many
    neighbours among the data-parallel ranks share a node."""
    kind = data_scheme(short, where)
    options = {key: value for key in UNITS if (value := getattr(short, key)) is not None}
    if unknown := [key for key in options if key not in kind.Options.model_fields]:
        rule = f"data/{kind.name} has no such option; data/fsdp has"
        remedy = "Write fsdp: true, or leave it out"
        raise PlanError(f"{where}.{unknown[0]}", rule, remedy, options[unknown[0]])
    stated = stated_options(short, "dp_scheme")
    if twice := [key for key in options if key in stated]:
        rule = "the plan states this option as an option of dp_scheme as well"
        raise PlanError(f"{where}.{twice[0]}", rule, "Leave one of them out", options[twice[0]])
    options |= stated
    if shard < dp:
        entry = {"use": f"data/{kind.name}", "over": "shard", "replicate": "replicate"}
        return [entry | options], {"replicate": dp // shard, "shard": shard}
    place = f"{where}.dp_scheme", short.dp_scheme
    entry, axes = state_scheme(kind, dp, near, "dp", place)
    return [entry | options], axes


def near_ranks(ranks: int, inside: int, node: int) -> int:
    """How many neighbours of some ranks share a node. inside: GPUs from one to the next. node: GPUs of a node."""
    return math.gcd(ranks, node // inside) if node % inside == 0 else 1
