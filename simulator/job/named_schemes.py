"""Schemes that a plan in short form names by the keys in `SCHEME_KEYS`, with the options that further keys state.

A name alone has the default options; ``{use: NAME, option: value}`` states others. A scheme over several axes gets them
from the degree of its family.
"""

from __future__ import annotations

import math
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import validate_data
from meshcast.simulator.ir.registry import find_scheme, is_scheme, scheme_names
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.plan_keys import (
    PLAN_KEYS,
    SCHEME_KEYS,
    ShortStage,
    chosen_scheme,
    keys_alike,
    option_keys,
    state_scheme_name,
)

LONG_FORM = "The long form of a plan, of mesh and schemes, states axes (docs/job.md)"

StatedScheme = tuple[dict[str, Any], dict[str, int]]
"""An entry of `schemes`, and the axes of the mesh that it is over, outermost first."""


def named_scheme(short: ShortStage, family: str, where: str) -> type[Scheme] | None:
    """Returns the scheme of a family that a plan names; None if it names none. Raises PlanError for one that does not
    exist, and for options that it does not have, or that would state axes, which follow from degrees."""
    key = SCHEME_KEYS[family]
    if (given := getattr(short, key)) is None:
        return None
    name, place = given, f"{where}.{key}"
    if isinstance(given, dict):
        name, place = given.get("use"), f"{where}.{key}.use"
        if not isinstance(name, str):
            rule = f"it is the name of a scheme of the family {family}, and the other keys are its options"
            raise PlanError(place, rule, f"Write for example {key}: {{use: {find_example(family)}}}", name)
    use = f"{family}/{name.removeprefix(f'{family}/')}"
    if not is_scheme(use):
        known = [one.partition("/")[2] for one in scheme_names() if one.startswith(f"{family}/")]
        raise PlanError(place, f"no such {family} scheme", nearest(use.partition("/")[2], known), name)
    kind, options = find_scheme(use), _options_beside_name(short, family)
    for option in ("over", *kind.names_axes):
        if option in options:
            rule = "the axes of a plan in short form follow from its degrees"
            remedy = "State shard, the ranks that share one copy" if option == "replicate" else LONG_FORM
            raise PlanError(f"{where}.{key}.{option}", rule, f"Leave it out. {remedy}", options[option])
    validate_data(kind.Options, options, f"{where}.{key}", PlanError)
    return kind


def _options_beside_name(short: ShortStage, family: str) -> dict[str, Any]:
    """Returns the options of a scheme that a plan states beside its name."""
    given = getattr(short, SCHEME_KEYS[family])
    return {option: value for option, value in given.items() if option != "use"} if isinstance(given, dict) else {}


def stated_options(short: ShortStage, kind: type[Scheme], where: str) -> dict[str, Any]:
    """Returns the options of a scheme that a plan states, by keys of their own and beside the scheme's name. Raises
    PlanError for a key whose option the scheme does not have, or that is stated in both ways."""
    beside, options = _options_beside_name(short, kind.family), {}
    for key in option_keys(kind.family):
        if (value := getattr(short, key.name)) is None:
            continue
        if key.option not in kind.Options.model_fields:
            owner, naming = key.owner.partition("/")[2], SCHEME_KEYS[kind.family]
            remedy = f"{owner}: true" if owner in keys_alike(naming) else f"{naming}: {owner}"
            rule = f"{kind.family}/{kind.name} has no such option; {key.owner} has"
            raise PlanError(f"{where}.{key.name}", rule, f"Write {remedy}, or leave it out", value)
        if key.option in beside:
            rule = f"the plan states this option as an option of {SCHEME_KEYS[kind.family]} as well"
            raise PlanError(f"{where}.{key.name}", rule, "Leave one of them out", value)
        options[key.option] = value
    return options | beside


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
    """Returns the entries of tensor parallelism, and its axes."""
    usual = {"use": f"tensor/{chosen_scheme(short, 'tensor')}", "over": "tp"}
    (chosen, naming) = keys_alike(SCHEME_KEYS["tensor"])
    kind, given = named_scheme(short, "tensor", where), getattr(short, naming)
    if kind is not None and not accompanies_others(kind) and chosen in short.model_fields_set:
        rule = f"tensor/{kind.name} says itself how activations are sharded, and the plan states {chosen}"
        remedy = f"Leave {chosen} out, or {naming}"
        if (value := state_scheme_name("tensor", kind.name).get(chosen)) is not None:
            remedy = f"Set {where}.{chosen}: {str(value).lower()} instead"
        raise PlanError(f"{where}.{naming}", rule, remedy, given)
    if kind is None or short.tp == 1:
        return [usual], {"tp": short.tp}
    options = stated_options(short, kind, where)
    if accompanies_others(kind):
        return [{"use": f"tensor/{kind.name}", **options}, usual], {"tp": short.tp}
    entry, axes = state_scheme(kind, short.tp, short.tp, "tp", (f"{where}.{naming}", given))
    return [entry | options], axes


def sequence_schemes(short: ShortStage, near: int, where: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns the entry of sequence parallelism, and its axes; none without. near: how many of its ranks share a
    node."""
    kind = named_scheme(short, "sequence", where) or _usual_scheme("sequence")
    if short.cp == 1:
        return [], {}
    key = SCHEME_KEYS["sequence"]
    entry, axes = state_scheme(kind, short.cp, near, "cp", (f"{where}.{key}", getattr(short, key)))
    return [entry | stated_options(short, kind, where)], axes


def _usual_scheme(family: str) -> type[Scheme]:
    """Returns the scheme of a family that a plan has without naming one."""
    return find_scheme(f"{family}/{PLAN_KEYS[SCHEME_KEYS[family]].usual}")


def expert_schemes(short: ShortStage, axes: list[str], has_experts: bool, where: str) -> list[dict[str, Any]]:
    """Returns the entry of expert parallelism over the axes of the experts; none without, but for kernels of its
    own."""
    key = SCHEME_KEYS["expert"]
    named, given = named_scheme(short, "expert", where), getattr(short, key)
    if named is not None and not has_experts:
        raise PlanError(f"{where}.{key}", "the model has no experts", "Leave it out", given)
    if not axes and (named is None or not named.changes_kernels):
        return []
    kind = named or _usual_scheme("expert")
    if kind.most_axes is not None and kind.most_axes < len(axes):
        rule = f"expert/{kind.name} keeps experts whole, and the plan has etp = {short.etp}"
        raise PlanError(f"{where}.{key}", rule, "Leave etp out", given)
    over = {"over": axes} if axes else {}
    return [{"use": f"expert/{kind.name}", **over, **stated_options(short, kind, where)}]


def data_scheme(short: ShortStage, where: str) -> type[Scheme]:
    """Returns the data scheme of a plan, named or chosen in other words. Raises PlanError if it is both."""
    kind, naming = named_scheme(short, "data", where), SCHEME_KEYS["data"]
    if kind is not None:
        if stated := sorted({*keys_alike(naming)} & short.model_fields_set - {naming}):
            rule = f"it names the data scheme, and so does {' and '.join(stated)}"
            remedy = f"Leave {' and '.join(stated)} out, or {naming}"
            raise PlanError(f"{where}.{naming}", rule, remedy, getattr(short, naming))
        return kind
    return find_scheme(f"data/{chosen_scheme(short, 'data')}")


def data_schemes(
    short: ShortStage, dp: int, shard: int, near: int, where: str
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns the entry of data parallelism, and its axes. shard: ranks that share one copy of the states. near: how
    many neighbours among the data-parallel ranks share a node."""
    kind, key = data_scheme(short, where), SCHEME_KEYS["data"]
    options = stated_options(short, kind, where)
    if shard < dp:
        entry = {"use": f"data/{kind.name}", "over": "shard", "replicate": "replicate"}
        return [entry | options], {"replicate": dp // shard, "shard": shard}
    entry, axes = state_scheme(kind, dp, near, "dp", (f"{where}.{key}", getattr(short, key)))
    return [entry | options], axes


def near_ranks(ranks: int, inside: int, node: int) -> int:
    """How many neighbours of some ranks share a node. inside: GPUs from one to the next. node: GPUs of a node."""
    return math.gcd(ranks, node // inside) if node % inside == 0 else 1
