"""Hypothesis strategies: models, settings and whole jobs, small enough to be lowered and played in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.capabilities import PredictsWeights, RequiresRoles
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.model import Model
from meshcast.simulator.scheduling.schedule import OverlappedPasses, PipelineShape, Schedule
from meshcast.simulator.scheduling.vocabulary import ShardsVocabulary
from meshcast.validation.contract.composed import chain_options, complete
from meshcast.validation.contract.played import Ideal

EVERY_EXAMPLE = settings.get_current_profile_name() == "all"
"""Whether all examples are drawn, as in `make test-all` (--hypothesis-profile=all)."""

SHARE = 1 if EVERY_EXAMPLE else 16
"""One example of so many is drawn in `make test`."""


def examples(number: int, daily: int | None = None) -> settings:
    """Settings of a property whose examples take long: `number` of them in `make test-all`, in `make test` `daily`, or
    a sixteenth, but not fewer than three.
    """
    few = max(number // SHARE, min(number, 3)) if daily is None else daily
    return settings(max_examples=number if EVERY_EXAMPLE else few)


def some(values: Sequence[Any], of: int) -> list[Any]:
    """Parameters of a test, of which all but one in so many are slow tests."""
    return [pytest.param(*value, marks=[pytest.mark.slow] * (number % of > 0)) for number, value in enumerate(values)]


ONE = st.just(1)
TENSOR_RANKS = st.sampled_from([1, 2, 4])

SECONDS = st.integers(1, 64).map(lambda n: n / 8)
"""Durations that add up without rounding."""

PRICES = st.builds(
    Ideal,
    flops=st.sampled_from([1e9, 1e11]),
    memory=st.sampled_from([1e8, 1e11]),
    links=st.sampled_from([1e5, 1e7, 1e9, math.inf]),
    latency=st.sampled_from([0.0, 1e-5, 1e-2]),
)
"""Machines on which products, memory or links take longest."""


@st.composite
def models(draw: st.DrawFn, tensor: int = 1, layers: int | None = None) -> Model:
    """A small decoder whose heads, widths, vocabulary and sequence divide by `tensor`, with features that all GPTs
    share.
    """
    return Model(**draw(shapes_of_models(tensor, layers)))


@st.composite
def shapes_of_models(
    draw: st.DrawFn, tensor: int = 1, layers: int | None = None, cut: int = 1, padded: bool = False
) -> dict[str, Any]:
    """The fields of such a model; its sequence divides by `tensor` x `cut`. padded: the plan pads heads."""
    kv_heads = draw(st.integers(1, 5)) if padded else tensor * draw(st.integers(1, 2))
    return {
        "layers": layers or draw(st.integers(1, 4)),
        "hidden": 4 * draw(st.integers(1, 16)),
        "heads": kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
        "kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 8)),
        "ffn": tensor * draw(st.integers(1, 64)),
        "vocab": tensor * draw(st.integers(1, 128)),
        "seq": tensor * cut * draw(st.integers(1, 16)),
        "gated": draw(st.booleans()),
        "positions": draw(st.sampled_from(["learned", "rope", "none"])),
        "tied": draw(st.booleans()),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "layernorm1p"])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
    }


@st.composite
def modern_models(
    draw: st.DrawFn, tensor: int, layers: int, cut: int, experts: int | None, each: int, padded: bool = False
) -> Model:
    """The same with any features of newer models. experts: ranks that they are spread over; None: the model has none.
    each: a number of ranks by which every expert divides.
    """
    fields = draw(shapes_of_models(tensor, layers, cut, padded))
    if draw(st.booleans()):
        fields |= {"parallel_residual": draw(st.booleans()), "embedding_norm": draw(st.booleans())}
        fields |= {"qk_layernorm": draw(st.booleans()), "mtp": draw(st.integers(0, 2))}
        limit = draw(st.sampled_from(["window", "attention_chunk"]))
        fields |= {limit: draw(st.integers(1, fields["seq"])), "full_every": draw(st.integers(0, 2))}
        fields["full_rope"] = fields["full_every"] == 0 or fields["positions"] != "rope" or draw(st.booleans())
    fields |= draw(variants(fields, tensor, experts is not None))
    if draw(st.booleans()):
        for word in ("sinks", "attention_gate", "linear_attention", "qk_layernorm"):
            fields.pop(word, None)
        mla = {name: 2 * draw(st.integers(1, 6)) for name in ("kv_lora_rank", "qk_nope", "qk_rope", "v")}
        mla["q_lora_rank"] = draw(st.sampled_from([None, 6]))
        fields |= {"mla": mla, "positions": "rope", "kv_heads": fields["heads"]}
        fields.pop("full_rope", None)
        del fields["head_dim"]
    if experts is not None:
        count = experts * draw(st.integers(1, 3))
        fields["moe"] = {
            "experts": count,
            "top_k": draw(st.integers(1, min(3, count))),
            "expert_ffn": math.lcm(tensor, each) * draw(st.integers(1, 8)),
            "shared_experts": (shared := draw(st.integers(0, 1))),
            "shared_ffn": shared * tensor * draw(st.integers(1, 8)),
            "first_dense": draw(st.integers(0, layers)),
            "every": draw(st.integers(1, 2)),
            "capacity": draw(st.sampled_from([None, 1.0, 1.25])),
            "router_bias": draw(st.booleans()),
            "clamped": bool(fields.get("gated")) and draw(st.booleans()),
            "residual": bool(shared) and (residual := draw(st.booleans())),
            "shared_gate": bool(shared) and not residual and draw(st.booleans()),
        }
        if shared and fields.get("norm_place", "before") != "before":
            fields["norm_place"] = "before"
    return Model(**fields)


@st.composite
def variants(draw: st.DrawFn, fields: dict[str, Any], tensor: int, experts: bool) -> dict[str, Any]:
    """Features of decoders that are no GPT or Llama, which go with the fields drawn so far."""
    if not draw(st.booleans()):
        return {}
    found: dict[str, Any] = {name: draw(st.booleans()) for name in ("sinks", "attention_gate")}
    found["softcaps"] = draw(st.sampled_from([(), ("logits",), ("attention", "logits")]))
    found["qk_layernorm"] = draw(st.sampled_from([False, True, "all"]))
    if fields.get("parallel_residual"):
        return found | {"shared_norm": draw(st.booleans())}
    if fields["norm"] == "rmsnorm":
        found["norm_place"] = draw(st.sampled_from(["before", "after", "both"]))
    if found.get("norm_place", "before") == "before":
        found["norm_residual"] = draw(st.booleans())
    return found


@st.composite
def shapes(draw: st.DrawFn, v: st.SearchStrategy[int] = ONE, most_p: int = 8, most_m: int = 24) -> PipelineShape:
    """Devices, micro-batches and chunks of a pipeline; half of them with m a multiple of p."""
    p = draw(st.integers(1, most_p))
    m = draw(st.integers(1, most_m)) if draw(st.booleans()) else p * draw(st.integers(1, max(1, most_m // p)))
    return PipelineShape(p, m, draw(v))


PIPELINES = ("pipeline/1f1b", "pipeline/gpipe", "pipeline/interleaved-1f1b")
TENSORS = ("tensor/megatron", "tensor/megatron-sp")


EVERY = tuple(
    use
    for use in scheme_names()
    if use.startswith("pipeline/") and complete(use) and not issubclass(find_scheme(use), ShardsVocabulary)
)
"""All schedules without required options, but those whose ends are shards on all devices: these refuse most models, and
have tests of their own (tests/simulator/scheduling/test_vocabulary.py)."""
FREE = tuple(use for use in EVERY if not issubclass(find_scheme(use), RequiresRoles))
"""Those that need no other scheme."""
WHOLE = tuple(use for use in FREE if "slices" not in find_scheme(use).Options.model_fields)
"""And of these, those that do not cut sequences."""
SLICED = tuple(use for use in EVERY if "slices" in find_scheme(use).Options.model_fields)
"""Those that cut sequences."""
DATAS = ("data/ddp", "data/zero-1", "data/fsdp")
MODULES = ("core_attn", "attention", "mlp", "moe")
FORMATS = ("bf16", "bf16", "fp8-delayed", "fp8-blockwise")


@st.composite
def partitions(draw: st.DrawFn, layers: int, stages: int) -> str | list[int]:
    """Layers of every stage: the same number, or one or two moved to another stage; the ends may have none."""
    each = [layers // stages] * stages
    for _ in range(draw(st.integers(0, 2))):
        giver, taker = draw(st.integers(0, stages - 1)), draw(st.integers(0, stages - 1))
        if each[giver] > (0 if giver in (0, stages - 1) else 1):
            each[giver] -= 1
            each[taker] += 1
    return "even" if len(set(each)) == 1 else each


def views_of(sizes: Sequence[int]) -> list[dict[str, int]]:
    """All ways to read ranks that lie in axes of these `sizes`, outermost first, again as edp x ep x etp."""
    borders = {math.prod(sizes[i:]) for i in range(len(sizes) + 1)}
    ranks = max(borders)

    def nests(etp: int, ep: int) -> bool:
        cuts = sorted({*borders, etp, etp * ep})
        return all(outer % inner == 0 for inner, outer in pairwise(cuts))

    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        {"edp": ranks // (etp * ep), "ep": ep, "etp": etp}
        for etp in divisors
        for ep in divisors
        if ranks % (etp * ep) == 0 and nests(etp, ep)
    ]


def accepted(pipeline: str, pp: int, chunks: int, most: int) -> list[int]:
    """The numbers of micro-batches, up to `most`, for which a schedule exists."""
    kind = find_scheme(pipeline)
    assert issubclass(kind, Schedule)
    schedule, found = kind(("pp",), kind.Options(chunks=chunks, **chain_options(pipeline))), []
    for m in range(1, most + 1):
        with suppress(PlanError):
            schedule.check(PipelineShape(pp, m, schedule.chunks_per_device(), len(schedule.slices)))
            found.append(m)
    return found


def overlaps_passes(pipeline: str) -> bool:
    """Whether devices play a forward and a backward pass at once; asked of the smallest pipelines."""
    kind = find_scheme(pipeline)
    assert issubclass(kind, Schedule)
    for pp, chunks in product((2, 4), (1, 2)):
        for m in () if kind.needs_durations else accepted(pipeline, pp, chunks, 8)[-1:]:
            schedule = kind(("pp",), kind.Options(chunks=chunks, **chain_options(pipeline)))
            shape = PipelineShape(pp, m, schedule.chunks_per_device(), len(schedule.slices))
            return any(isinstance(item, OverlappedPasses) for order in schedule.orders(shape) for item in order)
    return False


BIDIRECTIONAL = tuple(use for use in EVERY if getattr(find_scheme(use), "directions", 1) > 1)
"""Schedules with two ways through the devices."""
NO_FLUSH = tuple(use for use in EVERY if not getattr(find_scheme(use), "flush", True))
"""Schedules that never empty the pipeline."""
PAIRED = tuple(use for use in EVERY if overlaps_passes(use))
"""Schedules with pairs of passes."""
TWO_WAYS = tuple(use for use in EVERY if use in (*BIDIRECTIONAL, *PAIRED))


@st.composite
def jobs(
    draw: st.DrawFn,
    pipelines: tuple[str, ...] = PIPELINES,
    tensors: tuple[str, ...] = TENSORS,
    datas: tuple[str, ...] = DATAS,
    recompute: bool = True,
    tensor: st.SearchStrategy[int] = TENSOR_RANKS,
    launch: tuple[float, ...] = (0.0,),
    passes: int = 0,
    formats: tuple[str, ...] = FORMATS,
) -> dict[str, Any]:
    """A whole job in long form that no rule refuses.

    launch: seconds of the host an op. passes: of micro-batches through layers, up to which there may be more of them.
    formats: of the products of linear layers.
    """
    t, dp = draw(tensor), draw(st.integers(1, 4))
    cp = draw(st.sampled_from([1, 1, 2, 3]))
    pipeline = draw(st.sampled_from([use for use in pipelines if "data/ddp" in datas or not predicts_weights(use)]))
    chunks = draw(st.sampled_from([n for n in (1, 2, 3) if accepted(pipeline, 2, n, 12)]))
    pp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if accepted(pipeline, n, chunks, 12)]))
    stages = pp * chunks
    options = chain_options(pipeline)
    if "slices" in find_scheme(pipeline).Options.model_fields:
        options["slices"] = draw(st.integers(1, 3))
    if sync := find_scheme(pipeline).Options.model_fields.get("gradient_sync"):
        options["gradient_sync"] = draw(st.sampled_from(get_args(sync.annotation)))
    # Without a view experts are copies, of which tensor ranks hold parts.
    view = draw(st.none() | st.sampled_from(views_of((dp, cp, t))))
    ep, etp = (view["ep"], view["etp"]) if view else (draw(st.sampled_from([None, 1])), 1)
    pads = draw(st.sampled_from([False, False, True]))
    model = draw(modern_models(t, stages * draw(st.integers(1, 2)), cp * options.get("slices", 1), ep, etp, pads))
    most = min(40, passes // model.layers)
    m = draw(st.sampled_from(accepted(pipeline, pp, chunks, max(6 if chunks == 1 else 3 * pp, 2 * pp, most))))
    micro = draw(st.integers(1, 2))
    schemes: list[dict[str, Any]] = [
        {"use": pipeline, "over": "pp", "chunks": chunks, **options},
        {"use": draw(st.sampled_from(datas if not predicts_weights(pipeline) else ("data/ddp",))), "over": "dp"},
        {"use": "sequence/all-gather", "over": "cp"},
        {"use": draw(st.sampled_from(tensors)), "over": "tp"},
    ]
    if view:
        over = ["ep", "etp"] if etp > 1 else "ep"
        schemes.insert(draw(st.integers(1, 4)), {"use": "expert/all-to-all", "over": over})
    if recompute and draw(st.booleans()):
        modules = draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=3, unique=True))
        schemes.append({"use": "memory/recompute-selective", "modules": modules})
    elif issubclass(find_scheme(pipeline), RequiresRoles) or (recompute and draw(st.booleans())):
        schemes.insert(draw(st.integers(1, 3)), {"use": "memory/recompute-full", "layers": draw(st.integers(0, 2))})
    settings = {
        "overlap": {"dp": draw(st.booleans()), "pp": draw(st.booleans())},
        "bucket": {"elements": float(draw(st.sampled_from([1, 500, 40_000_000]))), "elements_per_rank": 0.0},
        "regather": draw(st.booleans()),
        # SlimPipe adds up outputs of attention, which flash kernels allow.
        "attention": draw(st.sampled_from(["flash"] if pipeline == "pipeline/slimpipe" else ["flash", "unfused"])),
        "launch_s": draw(st.sampled_from(launch)),
        "dummy_gradients": False,
    }
    job = {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": math.prod((pp, dp, cp, t))},
        "framework": {"name": "megatron-core", "set": settings},
        "precision": draw(st.sampled_from(formats)),
        "batch": {"global": m * micro * dp, "micro": micro},
        "plan": {
            "mesh": {"pp": pp, "dp": dp, "cp": cp, "tp": t},
            "views": {"experts": view} if view else {},
            "schemes": schemes,
            "partition": draw(partitions(model.layers, stages)),
            "pad_heads": pads,
        },
    }
    settings["scatter_gather_tensors_in_pipeline"] = draw(st.booleans())
    return job


def predicts_weights(use: str) -> bool:
    """Whether a schedule predicts weights, for which it needs whole optimizer states."""
    return issubclass(find_scheme(use), PredictsWeights)


AXIS = {"data": "dp", "sequence": "cp", "tensor": "tp"}
"""The axis of a family in the jobs that are drawn."""


@st.composite
def jobs_of_all(draw: st.DrawFn, *args: Any, recompute: bool = True, **more: Any) -> dict[str, Any]:
    """The same with any scheme of any family in place of the drawn one, as long as it does not refuse the job."""
    job = draw(jobs(*args, recompute=recompute, **more))
    for family in ("tensor", "sequence", "expert", "data", *(["memory"] if recompute else [])):
        known = [use for use in scheme_names() if use.startswith(f"{family}/")]
        other = with_scheme(job, draw(st.sampled_from([use for use in known if complete(use)])))
        with suppress(PlanError):
            resolve_plan(load_job(other))
            job = other
    return job


def with_scheme(job: dict[str, Any], use: str) -> dict[str, Any]:
    """The job with `use` in place of the scheme of its family; a scheme without axes is added to it instead. Where it
    needs several axes, the axis of the family is split.
    """
    family, kind, plan = use.partition("/")[0], find_scheme(use), job["plan"]
    schemes, mesh = [dict(entry) for entry in plan["schemes"]], dict(plan["mesh"])
    mine = [entry for entry in schemes if entry["use"].startswith(f"{family}/")]
    if not mine and family == "expert":
        return job
    if not mine or (kind.most_axes == 0 and family != "memory"):
        return {**job, "plan": {**plan, "schemes": [*schemes, {"use": use}]}}
    at = schemes.index(mine[0])
    over = mine[0].get("over")
    if kind.least_axes > 1:
        axis = AXIS[family]
        over, parts = [f"{axis}{i}" for i in range(kind.least_axes)], grid(mesh[axis], kind.least_axes)
        mesh = {
            name: size
            for old, whole in mesh.items()
            for name, size in (zip(over, parts, strict=True) if old == axis else [(old, whole)])
        }
    schemes[at] = {"use": use, **({"over": over} if over else {})}
    return {**job, "plan": {**plan, "mesh": mesh, "schemes": schemes}}


def grid(ranks: int, axes: int) -> list[int]:
    """Ranks as a grid of like axes, or, where that is not possible, of like axes but for the first."""
    side = round(ranks ** (1 / axes))
    if side**axes == ranks:
        return [side] * axes
    side = round(ranks ** (1 / (axes - 1)))
    return [ranks // side ** (axes - 1), *[side] * (axes - 1)]


def changed(job: dict[str, Any], **set_: Any) -> dict[str, Any]:
    """The same job with further settings of the framework."""
    framework = job["framework"]
    return {**job, "framework": {**framework, "set": {**framework["set"], **set_}}}
