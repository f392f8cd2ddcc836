"""Expands the short form of a plan to the long form: every axis gets its documented default scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from meshcast.hardware.documents.other_words import list_meanings
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import validate_data
from meshcast.simulator.ir.capabilities import ChangesKernels
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.registry import find_scheme, is_scheme, scheme_names
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import Batch, LongPlan, SchemeEntry, StageMesh
from meshcast.simulator.job.plan_keys import (
    PLAN_KEYS,
    SCHEME_KEYS,
    ShortPlan,
    ShortStage,
    ShortStageEntry,
    choosing_keys,
    chosen_scheme,
    keys_alike,
    option_keys,
    state_scheme_name,
)
from meshcast.simulator.job.remedies import refuse_degrees, refuse_expert_degrees
from meshcast.simulator.models.model import Model

SCHEDULES_ELSEWHERE = list_meanings(
    {
        "zb-h1": "zero-bubble zerobubble zb zbh1 zero-bubble-h1 zb-1p",
        "zb-h2": "zbh2 zero-bubble-h2 zb-2p",
        "zb-v": "zbv zbvzerobubble zerobubble-v zero-bubble-v",
        "interleaved-1f1b": "interleaved interleaved1f1b virtual-pipeline",
        "interleaved-zb": "interleavedzerobubble interleaved-zero-bubble zb1p",
        "dualpipe-v": "dualpipev",
        "breadth-first": "loopedbfs looped-bfs bfs",
    }
)
"""Schedules by what other programs and papers call them."""

LONG_FORM = "The long form of a plan, of mesh and schemes, states axes (docs/job.md)"

SchemeAndAxes = tuple[Fields, dict[str, int]]
"""An entry of `schemes`, and the axes of the mesh that it is over, outermost first."""

CARRIED = tuple(name for name in PLAN_KEYS if name in LongPlan.model_fields and name not in ("stages", "replicas"))
"""Keys that both forms of a plan have."""

Schemes = tuple[SchemeEntry, ...]

STOPPING = ("memory/recompute-full", "memory/recompute-operators")
"""Schemes whose recomputation of a layer may stop early."""


def add_tensor_overlap(stage: StageMesh, use: str, domain: int) -> Schemes:
    """Returns the schemes of a mesh with `use`, if they hold tensor parallelism over several ranks that all reach each
    other, and none that overlaps it.

    domain: GPUs of a scale-up domain.
    """
    schemes = stage.schemes
    uses = [entry.use for entry in schemes]
    tensor = [i for i, use in enumerate(uses) if use.startswith("tensor/") and is_scheme(use)]
    overlaps = any(find_scheme(uses[i]).most_axes == 0 for i in tensor)
    if overlaps or not _tensor_spans(stage) or leaves_domain(stage, domain):
        return schemes
    return (*schemes[: tensor[0]], SchemeEntry(use=use), *schemes[tensor[0] :])


def leaves_domain(stage: StageMesh, domain: int) -> bool:
    """Returns whether ranks of tensor parallelism are in several scale-up domains, of so many GPUs each."""
    spans = _tensor_spans(stage)
    return math.prod(stage.mesh.values()) > domain and any(domain % span for span in spans)


def _tensor_spans(stage: StageMesh) -> list[int]:
    """Returns the ranks from the first to behind the last of a group, for every axis of tensor parallelism with several
    ranks."""
    sizes, spans, within = stage.mesh, dict[str, int](), 1
    for axis in reversed(sizes):
        within = spans[axis] = within * sizes[axis]
    entries = [entry for entry in stage.schemes if entry.use.startswith("tensor/") and is_scheme(entry.use)]
    axes = {axis for entry in entries for axis in find_scheme(entry.use).all_axes(entry.over, entry.model_extra or {})}
    return [spans[axis] for axis in axes if sizes.get(axis, 1) > 1]


def add_early_stop(schemes: Schemes) -> Schemes:
    """Returns the schemes, of which recomputation of whole layers stops early where it does not say whether it does."""
    return tuple(
        entry.model_copy(update={"early_stop": True})
        if entry.use in STOPPING and "early_stop" not in (entry.model_extra or {})
        else entry
        for entry in schemes
    )


def family_degree(plan: LongPlan, family: str) -> int:
    """Returns the product of the sizes of the axes of a family of schemes."""
    scheme_axes = (
        find_scheme(entry.use).all_axes(entry.over, entry.model_extra or {})
        for entry in plan.schemes
        if entry.use.startswith(f"{family}/") and is_scheme(entry.use)
    )
    return math.prod(plan.mesh.get(axis, 1) for axes in scheme_axes for axis in axes)


def is_interleaved(plan: LongPlan) -> bool:
    """Says whether the devices of a pipeline hold several chunks."""
    return any((entry.model_extra or {}).get("chunks", 1) > 1 for entry in plan.schemes)


def expand_plan(plan: SomeFields, gpus: int, model: Model, node: int = 1, batch: Batch | None = None) -> LongPlan:
    """Returns the long form of a plan.

    gpus: number of GPUs of the cluster.
    node: GPUs of a node, which schemes over several axes may ask for.
    batch: which what would work instead of a mistake divides, too.
    Raises PlanError for a mistake in the plan.
    """
    if "mesh" in plan or "schemes" in plan:
        return validate_data(LongPlan, dict(plan), "plan", PlanError)
    short = validate_data(ShortPlan, dict(plan), "plan", PlanError)
    if short.stages or any(replica.stages for replica in short.replicas):
        return _expand_stages(plan, short, model, node)
    model_ranks = short.tp * short.pp * short.cp
    if short.dp is None and gpus % model_ranks:
        degrees = {"tp": short.tp, "pp": short.pp, **({"cp": short.cp} if short.cp > 1 else {})}
        raise refuse_degrees(degrees, gpus, model, node, batch, short.ep * (short.etp or 1))
    dp = short.dp or gpus // model_ranks
    ranks, experts = dp * short.tp * short.cp, short.ep * (short.etp or 1)
    if ranks % experts and not short.replicas:
        whole = node if short.dp is None else 0
        count = _count_experts(model)
        key, rule, remedy, degree = refuse_expert_degrees(
            short.ep, short.etp or 1, ranks, count, whole, short.pp, model_ranks, batch
        )
        raise PlanError(f"plan.{key}", rule, remedy, degree)
    stage = _expand_stage(short, dp, model, "plan", node, short.pp if short.order.startswith("dp") else 1)
    stage["mesh"] = _order_axes({"pp": short.pp, **stage["mesh"]}, short.order)
    stage["schemes"].insert(0, _pipeline_scheme(short))
    long = stage | {name: getattr(short, name) for name in CARRIED}
    long["replicas"] = tuple(replica.model_dump() for replica in short.replicas)
    return validate_data(LongPlan, long, "plan", PlanError)


def _order_axes(mesh: Mapping[str, int], order: str) -> dict[str, int]:
    """Returns the axes of a mesh in an order of degrees, outermost first; each may be several axes."""
    places, copies = order.split("-"), {"replicate": "dp", "shard": "dp"}
    axes = sorted(mesh, key=lambda axis: places.index(copies.get(axis, axis.partition("-")[0])))
    return {axis: mesh[axis] for axis in axes}


def _expand_stages(plan: SomeFields, short: ShortPlan, model: Model, node: int) -> LongPlan:
    """Returns the long form of a plan whose stages have separate degrees; what a stage leaves out is as in the
    plan."""
    for key in ("pp", "dp"):
        if key in plan:
            raise PlanError(f"plan.{key}", "every stage has degrees of its own", "Leave it out", plan[key])
    if short.order != ShortPlan.model_fields["order"].default:
        rule = "the ranks of a stage with degrees of its own follow those of the stage before"
        raise PlanError("plan.order", rule, "Leave it out", short.order)
    common = {key: plan[key] for key in ShortStage.model_fields if key in plan}

    def expand(stages: Sequence[SomeFields], where: str) -> list[Fields]:
        return [_expand_entry(common, stage, model, f"{where}[{i}]", node) for i, stage in enumerate(stages)]

    counts = {len(stages) for stages in (short.stages, *(replica.stages for replica in short.replicas)) if stages}
    long: Fields = {"mesh": {"pp": max(counts)}, "schemes": [_pipeline_scheme(short)]}
    long |= {name: getattr(short, name) for name in CARRIED}
    long["stages"] = expand(short.stages, "plan.stages")
    long["replicas"] = [
        replica.model_dump() | {"stages": expand(replica.stages, f"plan.replicas[{i}].stages")}
        for i, replica in enumerate(short.replicas)
    ]
    return validate_data(LongPlan, long, "plan", PlanError)


def _expand_entry(common: SomeFields, entry: SomeFields, model: Model, where: str, node: int) -> Fields:
    """Returns the long form of an entry of `stages`, which may be in that form already."""
    if "mesh" in entry or "schemes" in entry:
        return dict(entry)
    stage = validate_data(ShortStageEntry, {**common, **entry}, where, PlanError)
    return _expand_stage(stage, stage.dp or 1, model, where, node) | {"layers": stage.layers}


def _expand_stage(short: ShortStage, dp: int, model: Model, where: str, node: int, stages_inside: int = 1) -> Fields:
    """Returns the axes inside a stage, and the schemes over them.

    stages_inside: stages between replicas along dp.
    """
    inside = short.tp * short.cp
    data, mesh = _data_schemes(short, dp, _near_ranks(dp, inside * stages_inside, node), where)
    sequence, sequence_axes = _sequence_schemes(short, node, where)
    tensor, tensor_axes = _tensor_schemes(short, where)
    schemes = [data, *sequence, *tensor]
    mesh |= {**sequence_axes, **tensor_axes}
    views = _views(short, dp * inside, _count_experts(model), where)
    expert_axes = (["ep", "etp"] if views["experts"]["etp"] > 1 else ["ep"]) if views else []
    schemes += _expert_schemes(short, expert_axes, model.moe is not None, where)
    if short.recompute_layers is not None and short.recompute != "full":
        rule = f"a number of layers needs recompute: full, and the plan has recompute: {short.recompute}"
        remedy = "Write recompute: full, or leave it out"
        raise PlanError(f"{where}.recompute_layers", rule, remedy, short.recompute_layers)
    if short.recompute == "full":
        layers = {} if short.recompute_layers is None else {"layers": short.recompute_layers}
        schemes.append({"use": "memory/recompute-full", **layers})
    elif short.recompute == "operators":
        schemes.append({"use": "memory/recompute-operators"})
    elif short.recompute != "none":
        schemes.append(_selective_scheme(short.recompute, f"{where}.recompute"))
    if short.offload:
        schemes.append({"use": "memory/offload", "what": list(short.offload)})
    if short.mlp_tiles is not None:
        schemes.append({"use": "memory/tiled-mlp", "tiles": short.mlp_tiles})
    return {"mesh": mesh, "views": views, "schemes": schemes}


def _selective_scheme(recompute: str | tuple[str, ...], where: str) -> Fields:
    use, modules = "memory/recompute-selective", ["core_attn"] if isinstance(recompute, str) else [*recompute]
    if not modules:
        raise PlanError(where, "the list names no module", "Write none, or leave it out", modules)
    field = find_scheme(use).Options.model_fields["modules"]
    known = get_args(get_args(field.annotation)[0])
    if wrong := next((module for module in modules if module not in known), None):
        rule = "selective recomputation has no such module"
        remedy = f"{nearest(wrong, known)}. none, selective, operators and full stand alone"
        raise PlanError(f"{where}[{modules.index(wrong)}]", rule, remedy, wrong)
    return {"use": use, "modules": modules}


def _shard_ranks(short: ShortStage, dp: int, data: type[Scheme], where: str) -> int:
    """Returns how many data-parallel ranks share a copy of the states."""
    shard = short.shard or dp
    if dp % shard:
        near = min(list_divisors(dp), key=lambda n: abs(n - shard))
        raise PlanError(f"{where}.shard", f"it must divide dp = {dp}", f"shard = {near} would work", shard)
    if shard < dp and "replicate" not in data.Options.model_fields:
        rule = f"data/{data.name} keeps no copies of what it shards; data/zero-1 and data/fsdp may"
        raise PlanError(f"{where}.shard", rule, "Write zero: 1 or fsdp: true, or leave it out", shard)
    return shard


def _pipeline_scheme(short: ShortPlan) -> Fields:
    # A single stage computes its chunks in the order of their layers, as a single chunk.
    single_stage = short.pp == 1 and not short.stages and not short.replicas
    stated = None if single_stage and short.schedule is None else short.chunks
    default = usual_schedule(stated or 1)
    options = dict(short.schedule) if isinstance(short.schedule, dict) else {"use": short.schedule or default}
    schedule = options.pop("use", default)
    if str(schedule).endswith(".csv"):
        schedule, options = "from-file", {"path": schedule, **options}
    use = f"pipeline/{str(schedule).removeprefix('pipeline/')}"
    if not is_scheme(use):
        remedy = nearest(str(schedule).rpartition("/")[2], _names_of("pipeline"), SCHEDULES_ELSEWHERE)
        raise PlanError("plan.schedule", "no such schedule", remedy, schedule)
    kind = find_scheme(use)
    chunks = stated or kind.Options.model_fields["chunks"].default
    return {"use": f"pipeline/{kind.name}", "over": "pp", "chunks": chunks, **options}


def usual_schedule(chunks: int) -> str:
    """Returns the schedule of a plan that names none."""
    return "interleaved-1f1b" if chunks > 1 else str(PLAN_KEYS[SCHEME_KEYS["pipeline"]].usual)


def _count_experts(model: Model) -> int:
    """Returns the greatest common divisor of the numbers of experts of the layers."""
    return math.gcd(*model.moe.expert_counts) if model.moe else 1


def _views(short: ShortStage, ranks: int, experts: int, where: str) -> dict[str, dict[str, int]]:
    """Returns the axes of the experts over the ranks of a pipeline stage; empty if they are those of everything
    else."""
    if short.ep == 1 and short.etp is None:
        return {}
    etp = short.etp or 1
    if ranks % (short.ep * etp):
        name, rule, remedy, degree = refuse_expert_degrees(short.ep, etp, ranks, experts, 0, 1, ranks, None)
        raise PlanError(f"{where}.{name}", rule, remedy, degree)
    return {"experts": {"edp": ranks // (short.ep * etp), "ep": short.ep, "etp": etp}}


# ------------------------------------------------------------------------------------- schemes of families


class StatedScheme(NamedTuple):
    """The scheme of a family in a plan in short form.

    kind: the scheme.
    named: whether a key names it.
    place: of that key, and its value.
    beside: options beside the name.
    """

    kind: type[Scheme]
    named: bool
    place: tuple[str, Any]
    beside: Fields

    def entry(self, short: ShortStage, **axes: Any) -> Fields:
        """Returns the entry of `schemes`, with the options that the plan states by separate keys, too."""
        where = self.place[0].rpartition(".")[0]
        options = _key_options(short, self.kind, self.beside, where) | self.beside
        return {"use": f"{self.kind.family}/{self.kind.name}", **axes, **options}


def _read_scheme(short: ShortStage, family: str, where: str) -> StatedScheme:
    """Returns the scheme of a family that a plan names, chooses in other words, or has by default.

    A name alone has the default options; ``{use: NAME, option: value}`` states others. Raises PlanError for a scheme
    that does not exist, and for options that it does not have, or that would state axes, which follow from degrees.
    """
    key = SCHEME_KEYS[family]
    stated, place = getattr(short, key), f"{where}.{key}"
    if stated is None:
        name = chosen_scheme(short, family) if choosing_keys(family) else PLAN_KEYS[key].usual
        kind = find_scheme(f"{family}/{name}")
        return StatedScheme(kind, False, (place, None), {})
    options = dict(stated) if isinstance(stated, dict) else {"use": stated}
    name, name_place = options.pop("use", None), f"{place}.use" if isinstance(stated, dict) else place
    if not isinstance(name, str):
        rule = f"it is the name of a scheme of the family {family}, and the other keys are its options"
        raise PlanError(name_place, rule, f"Write for example {key}: {{use: {_names_of(family)[0]}}}", name)
    plain = name.removeprefix(f"{family}/")
    if not is_scheme(f"{family}/{plain}"):
        raise PlanError(name_place, f"no such {family} scheme", nearest(plain, _names_of(family)), name)
    kind = find_scheme(f"{family}/{plain}")
    for option in ("over", *kind.names_axes):
        if option in options:
            rule = "the axes of a plan in short form follow from its degrees"
            remedy = "State shard, the ranks that share one copy" if option == "replicate" else LONG_FORM
            raise PlanError(f"{place}.{option}", rule, f"Leave it out. {remedy}", options[option])
    validate_data(kind.Options, options, place, PlanError)
    return StatedScheme(kind, True, (place, stated), options)


def _names_of(family: str) -> list[str]:
    return [use.partition("/")[2] for use in scheme_names() if use.startswith(f"{family}/")]


def _key_options(short: ShortStage, kind: type[Scheme], beside: SomeFields, where: str) -> Fields:
    """Returns the options of a scheme that a plan states by separate keys.

    beside: options beside the name of the scheme.
    Raises PlanError for a key whose option the scheme does not have, or that is stated in both ways.
    """
    options, naming = {}, SCHEME_KEYS[kind.family]
    for key in option_keys(kind.family):
        if (value := getattr(short, key.name)) is None:
            continue
        if key.option not in kind.Options.model_fields:
            owner = key.owner.partition("/")[2]
            remedy = f"{owner}: true" if owner in keys_alike(naming) else f"{naming}: {owner}"
            rule = f"{kind.family}/{kind.name} has no such option; {key.owner} has"
            raise PlanError(f"{where}.{key.name}", rule, f"Write {remedy}, or leave it out", value)
        if key.option in beside:
            rule = f"the plan states this option as an option of {naming} as well"
            raise PlanError(f"{where}.{key.name}", rule, "Leave one of them out", value)
        options[key.option] = value
    return options


def _spread_scheme(short: ShortStage, stated: StatedScheme, ranks: int, near: int, axis: str) -> SchemeAndAxes:
    """Returns a scheme over so many ranks, which get a single axis, or several with numbers behind its name.

    near: how many neighbours of the ranks share a node.
    Raises PlanError if the sizes of its axes do not follow from
    their product.
    """
    kind = stated.kind
    if kind.least_axes < 2:
        return stated.entry(short, over=axis), {axis: ranks}
    sizes = kind.axis_sizes(ranks, near) if ranks > 1 else [(1,) * kind.least_axes]
    if len(sizes) != 1:
        where, value = stated.place
        grids = " or ".join(" x ".join(map(str, grid)) for grid in sizes)
        over = f"{kind.family}/{kind.name} is over {kind.least_axes} axes"
        rule = f"{over}, and {axis} = {ranks} does not say how large they are"
        fits = [n for n in range(2, 2 * ranks + 8) if len(kind.axis_sizes(n, min(n, near))) == 1]
        best = sorted(fits, key=lambda n: abs(n - ranks))[:2]
        works = f"{axis} = {' or '.join(map(str, sorted(best)))} would work"
        if grids:
            raise PlanError(where, f"{rule}: {grids}", f"{works}; or state them in long form", value)
        raise PlanError(where, rule, f"{works}; or leave {where.rpartition('.')[2]} out", value)
    names = [f"{axis}-{number}" for number in range(1, len(sizes[0]) + 1)]
    return stated.entry(short, over=names), dict(zip(names, sizes[0], strict=True))


def _tensor_schemes(short: ShortStage, where: str) -> tuple[list[Fields], dict[str, int]]:
    """Returns the entries of tensor parallelism, and its axes."""
    stated = _read_scheme(short, "tensor", where)
    chosen, naming = keys_alike(SCHEME_KEYS["tensor"])
    usual = {"use": f"tensor/{chosen_scheme(short, 'tensor')}", "over": "tp"}
    overlaps = stated.kind.most_axes == 0
    if stated.named and not overlaps and chosen in short.model_fields_set:
        rule = f"tensor/{stated.kind.name} says itself how activations are sharded, and the plan states {chosen}"
        remedy = f"Leave {chosen} out, or {naming}"
        if (value := state_scheme_name("tensor", stated.kind.name).get(chosen)) is not None:
            remedy = f"Set {where}.{chosen}: {str(value).lower()} instead"
        raise PlanError(stated.place[0], rule, remedy, stated.place[1])
    if not stated.named or short.tp == 1:
        return [usual], {"tp": short.tp}
    if overlaps:
        return [stated.entry(short), usual], {"tp": short.tp}
    entry, axes = _spread_scheme(short, stated, short.tp, short.tp, "tp")
    return [entry], axes


def _sequence_schemes(short: ShortStage, node: int, where: str) -> tuple[list[Fields], dict[str, int]]:
    """Returns the entry of sequence parallelism, and its axes; none without."""
    stated = _read_scheme(short, "sequence", where)
    if short.cp == 1:
        return [], {}
    entry, axes = _spread_scheme(short, stated, short.cp, _near_ranks(short.cp, short.tp, node), "cp")
    return [entry], axes


def _expert_schemes(short: ShortStage, axes: list[str], has_experts: bool, where: str) -> list[Fields]:
    """Returns the entry of expert parallelism over the axes of the experts; without axes that of a scheme with other
    kernels alone."""
    if not axes and getattr(short, SCHEME_KEYS["expert"]) is None:
        return []
    stated = _read_scheme(short, "expert", where)
    if stated.named and not has_experts:
        raise PlanError(stated.place[0], "the model has no experts", "Leave it out", stated.place[1])
    if not axes:
        return [stated.entry(short)] if issubclass(stated.kind, ChangesKernels) else []
    if stated.kind.most_axes is not None and stated.kind.most_axes < len(axes):
        rule = f"expert/{stated.kind.name} keeps experts whole, and the plan has etp = {short.etp}"
        raise PlanError(stated.place[0], rule, "Leave etp out", stated.place[1])
    return [stated.entry(short, over=axes)]


def _data_schemes(short: ShortStage, dp: int, near: int, where: str) -> SchemeAndAxes:
    """Returns the entry of data parallelism, and its axes.

    near: how many neighbours among its ranks share a node.
    Raises PlanError if the plan both names and chooses the scheme.
    """
    stated = _read_scheme(short, "data", where)
    choosing = sorted(key.name for key in choosing_keys("data") if key.name in short.model_fields_set)
    if stated.named and choosing:
        keys = " and ".join(choosing)
        remedy = f"Leave {keys} out, or {SCHEME_KEYS['data']}"
        raise PlanError(stated.place[0], f"it names the data scheme, and so does {keys}", remedy, stated.place[1])
    shard = _shard_ranks(short, dp, stated.kind, where)
    if shard < dp:
        return stated.entry(short, over="shard", replicate="replicate"), {"replicate": dp // shard, "shard": shard}
    return _spread_scheme(short, stated, dp, near, "dp")


def _near_ranks(ranks: int, inside: int, node: int) -> int:
    """Returns how many neighbours of some ranks share a node.

    inside: GPUs from a rank to the next.
    node: GPUs of a node.
    """
    return math.gcd(ranks, node // inside) if node % inside == 0 else 1
