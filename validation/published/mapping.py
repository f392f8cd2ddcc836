"""From a published run to a job: the same facts in the words of a job file.

What a run leaves open is taken from the habits of its program (``stacks``) and listed, or the run is refused where
nobody could guess it. Whatever the simulator itself does not describe yet, it refuses by itself.
"""

from __future__ import annotations

import math
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from hardware.errors import PlanError
from simulator.ir.registry import find_scheme, scheme_names
from simulator.job.framework import CommunicationOverlap, Framework, load_framework
from simulator.scheduling.schedule import PipelineShape, Schedule
from validation.published.rows import Adapters, Row, Spec
from validation.published.stacks import HOST_BOUND, LAST, RELATIVES, SPREAD, Stack, framework, stack

T = TypeVar("T")

SCHEDULES = {
    **{"interleaved": "interleaved-1f1b", "zb-v-half": "v-half", "zb-v-min": "v-min"},
    **{"zb-1p": "zb-auto", "zb-2p": "zb-auto"},
}
"""Names of schedules that differ from a plan's."""

ROUNDS_IN_FLIGHT = {"zb-1p": 1, "zb-2p": 2}
"""The memory limit that their names hold: activations of so many rounds of one micro-batch a stage."""

SHARDING = {
    "none": "data/ddp",
    "zero1": "data/zero-1",
    "zero2": "data/zero-2",
    "zero3": "data/zero-3",
    "fsdp-full": "data/fsdp",
    "fsdp-hybrid": "data/fsdp",
    "fsdp-grad-op": "data/zero-2",
}

SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "vocab", "tied", "norm", "qk_layernorm")
"""What a model cannot be forecast without."""


TARGETS = {"qkv": "attn_qkv", "proj": "attn_proj"}
"""The linears that have adapters."""

USUAL_RANK = 16
"""Of adapters, where a run does not say it: that of the MLPerf benchmark, and of NVIDIA NeMo's recipes."""

USUAL_TARGETS = ("qkv",)
"""What has adapters in NVIDIA NeMo's performance recipes (``recipe.peft.target_modules`` of llama3_8b.py and others),
where a run does not say it."""


class Open:
    """What a run leaves open and its forecast takes for granted: fields, each with the spread that it adds."""

    def __init__(self, experts: bool) -> None:
        self.spreads = SPREAD | (HOST_BOUND if experts else {})
        self.fields: dict[str, float] = {}

    def note(self, field: str, why: str = "") -> None:
        """Lists a field. why: which of its spreads, where it has several."""
        self.fields[field] = self.spreads[why or field]

    def given(self, field: str, value: T | None, usual: T) -> T:
        """The value of a field, or the usual one."""
        if value is None:
            self.note(field)
            return usual
        return value

    def widened(self, spread: float) -> float:
        """`spread` and what all assumptions add; they are independent of each other."""
        return math.hypot(spread, *self.fields.values())


@dataclass(frozen=True)
class Mapped:
    """A job, and the fields of the run that were assumed for it."""

    job: dict[str, Any]
    assumed: tuple[str, ...]


def mapped(row: Row) -> Mapped:
    """The job of a run.

    Raises PlanError for a run that leaves open what nobody could guess, or is of a kind that no job describes.
    """
    spec = row.spec
    refuse_undescribed(spec)
    refuse_unknown(spec)
    defaults, left = stack(spec.stack), Open(spec.model.moe is not None)
    if spec.kind == "sft-packed":  # forecast as one long causal sequence
        left.note("class")
    if left.given("optimizer", spec.optimizer, "adam") not in ("adam", "adamw"):
        left.note("optimizer")
    left.given("offload.kind", spec.offload.kind, "none")
    model = _model(spec, defaults, left)
    job = {
        "id": row.id,
        "model": model,
        "cluster": _cluster(spec, left),
        "batch": {"global": spec.batch.total, "micro": _micro(spec, left), "sequence": spec.batch.seq},
        "precision": {
            "compute": spec.precision,
            "gradients": left.given("grad_dtype", spec.grad_dtype, None),
            "main_weights": left.given("main_weights", spec.main_weights, None),
        },
        "optimizer": "adam",
        "train": _train(spec, left),
        "plan": _plan(spec, defaults, left),
    }
    job["framework"] = _framework(spec, defaults, left)  # the last, for its spread is that of all that was assumed
    if row.measured.peak_memory_gib is not None and spec.memory_kind in (None, "unknown"):
        left.note("memory_kind")
    return Mapped(job, tuple(sorted(left.fields)))


# ------------------------------------------------------------------------------------------ refusals


def refuse_undescribed(spec: Spec) -> None:
    """Kinds of runs that no job can say."""
    lacking = {
        "hybrid-ssm": "state-space layers are not described yet",
        "other": "its attention is of a kind that no block describes",
    }
    if spec.kind in lacking or spec.model.ssm:
        raise _refusal("class", lacking.get(spec.kind, lacking["hybrid-ssm"]), spec.kind)


def refuse_unknown(spec: Spec) -> None:
    """Facts that decide the step and that nobody could guess."""
    needed: dict[str, Any] = {
        "gpu": spec.gpu,
        "gpus": spec.gpus,
        "precision": spec.precision,
        "batch.global": spec.batch.total,
        "batch.seq": spec.batch.seq,
    }
    needed |= {f"model.{key}": getattr(spec.model, key) for key in SHAPE}
    degrees = ("dp", "tp", "pp", "cp", *(("ep", "etp") if spec.model.moe else ()))
    needed |= {f"mesh.{axis}": getattr(spec.mesh, axis) for axis in degrees}
    for field, value in needed.items():
        if value is None:
            raise _refusal(field, "it is not published, and no other fact tells it")


def _refusal(field: str, rule: str, value: Any = None) -> PlanError:
    return PlanError(f"spec.{field}", rule, "This run is left out", value)


# --------------------------------------------------------------------------------------------- parts


def _model(spec: Spec, defaults: Stack, left: Open) -> dict[str, Any]:
    """The keys of a model, as the run has them."""
    told = spec.model
    model = told.model_dump(exclude={"attention", "ssm", "seq"}, exclude_none=True)
    model["seq"] = spec.batch.seq
    model["positions"] = left.given("model.positions", told.positions, "rope" if told.norm == "rmsnorm" else "learned")
    if defaults.dropout is not None:
        left.note("model.dropout")
        model["dropout"] = defaults.dropout
    if told.vocab and told.vocab % spec.width("tp"):  # padded by the framework
        left.note("model.vocab")
    if told.window:  # the only architecture with a window in the vocabulary is gpt-oss: every second layer slides
        model["full_every"] = 2
    return model


def _cluster(spec: Spec, left: Open) -> dict[str, Any]:
    """The cluster; what is null is filled in by the catalog."""
    left.given("gpus_per_node", spec.gpus_per_node, None)
    inter = spec.inter
    if spec.gpus and spec.gpus > (spec.domain or 1) and inter.kind != "none":  # otherwise no network takes part
        left.given("inter.kind", inter.kind, None)
        left.given("inter.gbps_per_gpu", inter.gbps_per_gpu, None)
    return {
        "gpu": spec.gpu,
        "gpus": spec.gpus,
        "gpus_per_node": spec.gpus_per_node,
        "scale_up_domain": left.given("scale_up_domain", spec.scale_up_domain, None),
        "inter": inter.model_dump(exclude={"stated"}),
    }


def _micro(spec: Spec, left: Open) -> int:
    """Sequences of a micro-batch; derived where one number alone is possible."""
    if spec.batch.micro is not None:
        return spec.batch.micro
    own = (spec.batch.total or 1) // spec.width("dp")
    # Interleaved schedules run micro-batches in rounds, one a stage.
    round_ = spec.width("pp") if spec.schedule == "interleaved" else 1
    fits = [micro for micro in range(1, own + 1) if own % micro == 0 and own // micro % round_ == 0]
    if len(fits) != 1:
        raise _refusal("batch.micro", "it is not published, and several micro-batches are possible")
    left.note("batch.micro")
    return fits[0]


def _train(spec: Spec, left: Open) -> dict[str, Any]:
    """What is trained: adapters, or all."""
    if spec.kind != "lora" and spec.lora is None:
        return {"mode": "full"}
    told = spec.lora or Adapters()
    targets = told.targets if told.targets is not None else left.given("lora.targets", None, USUAL_TARGETS)
    for word in targets:
        if word not in TARGETS:
            raise _refusal("lora.targets", f"only {', '.join(TARGETS)} are described", word)
    rank = left.given("lora.rank", told.rank, USUAL_RANK)
    return {"mode": "lora", "rank": rank, "targets": [TARGETS[word] for word in targets]}


def _framework(spec: Spec, defaults: Stack, left: Open) -> dict[str, Any]:
    """The framework that stands for the run's program, with what the run says of it."""
    name = framework(spec.stack)
    changes: dict[str, Any] = {}
    if name != spec.stack:
        left.note("stack", "stack, built on megatron-core" if spec.stack in RELATIVES and name == LAST else "")
    left.given("stack_version", spec.stack_version, None)
    changes["attention"] = left.given("model.attention", spec.model.attention, defaults.attention)
    for field in ("compile", "cuda_graphs"):
        value = left.given(field, getattr(spec, field), False)
        if field in Framework.model_fields:
            changes[field] = value
        elif value:
            left.note(field)
    overlap = {}
    for axis, value in spec.overlap:
        if spec.width(axis) == 1:
            continue
        value = left.given(f"overlap.{axis}", value, defaults.overlap if name != spec.stack else None)
        # How tensor parallelism overlaps differs: torch's way stands in for no other.
        if value is not None and axis in CommunicationOverlap.model_fields and axis != "tp":
            overlap[axis] = value
    changes["overlap"] = overlap
    changes["spread"] = left.widened(load_framework(name).spread)
    return {"name": name, "release": spec.stack_version, "set": changes}


def _plan(spec: Spec, defaults: Stack, left: Open) -> dict[str, Any]:
    """Mesh and schemes, outermost first."""
    dp, tp, pp, cp = (spec.width(axis) for axis in ("dp", "tp", "pp", "cp"))
    mesh = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    schemes: list[dict[str, Any]] = []
    if pp > 1:
        schemes.append(_pipeline(spec, left))
    sharding = left.given("sharding", spec.sharding, defaults.sharding) if dp * cp > 1 else spec.sharding or "none"
    data = {"use": SHARDING[sharding], "over": "dp"}
    if sharding != "none" and dp * cp > 1:
        group = left.given("shard_group", spec.shard_group, _usual_group(spec, sharding))
        if group != dp * cp and sharding != "fsdp-grad-op":
            if sharding != "fsdp-hybrid" or dp % group:
                rule = f"{SHARDING[sharding]} over {group} of {dp * cp} data-parallel ranks is not described"
                raise _refusal("shard_group", rule, group)
            if "replicate" not in _options("data/fsdp"):
                rule = f"copies of groups of {group} ranks that share a model are not described yet"
                raise _refusal("sharding", rule, sharding)
            mesh = {"pp": pp, "replicate": dp // group, "shard": group, "cp": cp, "tp": tp}
            data = {"use": "data/fsdp", "over": "shard", "replicate": "replicate"}
    schemes.append(data)
    if cp > 1:
        left.note("mesh.cp")  # which way was taken is not in a row's words
        schemes.append({"use": defaults.context, "over": "cp"})
    if tp > 1:
        split = left.given("sequence_parallel", spec.sequence_parallel, defaults.sequence_parallel)
        schemes.append({"use": "tensor/megatron-sp" if split else "tensor/megatron", "over": "tp"})
    plan: dict[str, Any] = {"mesh": mesh, "schemes": schemes}
    if spec.model.moe:
        plan["views"] = {"experts": _experts(spec, schemes)}
    schemes += _memory(spec, defaults, left)
    if spec.pipeline_split == "ends-as-layers":
        plan["partition"] = "ends-as-layers"
    elif spec.pipeline_split == "uneven":
        left.note("pipeline_split")
        plan["partition"] = _as_even(spec, schemes[0]["chunks"] * pp)
    return plan


def _as_even(spec: Spec, stages: int) -> list[int]:
    """Layers of every stage where they do not divide: as even as can be, the embedding, the loss and every layer of
    multi-token prediction (the last ones in the last stage) counting as a layer each."""
    layers, further = spec.model.layers or 0, spec.model.mtp or 0
    each, more = divmod(layers + 2 + further, stages)
    found = [each + (stage < more) for stage in range(stages)]
    found[0] -= 1
    found[-1] -= 1 + further
    if found[-1] < 0:  # the ends fill more than a stage
        found[1:3] = [found[1] + found[-1], *found[2:3]]
        found[-1] = 0
    return found


def _options(use: str) -> Container[str]:
    """The options of a scheme; none where there is no such scheme."""
    return find_scheme(use).Options.model_fields if use in scheme_names() else ()


def _usual_group(spec: Spec, sharding: str) -> int:
    """Ranks that share a copy of the split state: a node's where copies exist beyond, otherwise all."""
    return (spec.gpus_per_node or 1) if sharding == "fsdp-hybrid" else spec.width("dp") * spec.width("cp")


def _chunks_of(use: str) -> int | None:
    """The chunks a device of a schedule that exists for one number alone."""
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    fits = []
    for chunks in range(1, 4):
        with suppress(PlanError):
            kind(("pp",), kind.Options(chunks=chunks)).check(PipelineShape(2, 8, chunks * kind.directions))
            fits.append(chunks)
    return fits[0] if len(fits) == 1 else None


def _pipeline(spec: Spec, left: Open) -> dict[str, Any]:
    chunks = spec.mesh.vpp
    use = f"pipeline/{SCHEDULES.get(spec.schedule or '', spec.schedule)}"
    fixed = _chunks_of(use) if use in scheme_names() else None
    if fixed is not None and chunks in (None, 1):
        # The schedule says it: 1 is what rows write where nothing is interleaved.
        chunks = fixed
    elif chunks is None:
        places = (spec.model.layers or 0) + 2 * (spec.pipeline_split == "ends-as-layers")
        least = 2 if spec.schedule == "interleaved" else 1
        each = places // spec.width("pp")
        fits = [n for n in range(least, each + 1) if each % n == 0 and places % spec.width("pp") == 0]
        if len(fits) != 1:
            raise _refusal("mesh.vpp", "it is not published, and several numbers of chunks are possible")
        chunks = fits[0]
        left.note("mesh.vpp")
    schedule = left.given("schedule", spec.schedule, "interleaved" if chunks > 1 else "1f1b")
    entry = {"use": f"pipeline/{SCHEDULES.get(schedule, schedule)}", "over": "pp", "chunks": chunks}
    if schedule in ROUNDS_IN_FLIGHT:
        entry["memory_limit"] = ROUNDS_IN_FLIGHT[schedule] * spec.width("pp")
    return entry


def _experts(spec: Spec, schemes: list[dict[str, Any]]) -> dict[str, int]:
    """The second reading of a stage's ranks, for its experts; adds the scheme of their axes."""
    ranks, ep, etp = math.prod(spec.width(axis) for axis in ("dp", "cp", "tp")), spec.width("ep"), spec.width("etp")
    if ranks % (ep * etp):
        raise _refusal("mesh.ep", f"ep x etp = {ep} x {etp} must divide dp x cp x tp = {ranks}", ep)
    if ep * etp > 1:
        schemes.append({"use": "expert/all-to-all", "over": ["ep", "etp"] if etp > 1 else "ep"})
    return {"edp": ranks // (ep * etp), "ep": ep, "etp": etp}


def _memory(spec: Spec, defaults: Stack, left: Open) -> list[dict[str, Any]]:
    """What is computed again, and what is kept in host memory."""
    found: list[dict[str, Any]] = []
    told = spec.recompute
    kind = left.given("recompute.kind", told.kind, defaults.recompute)
    if kind == "full":
        found.append({"use": "memory/recompute-full", "layers": told.layers})
    elif kind == "selective":
        modules = left.given("recompute.modules", told.modules, ["core_attn"])
        found.append({"use": "memory/recompute-selective", "modules": modules})
    if spec.offload.kind not in (None, "none"):
        layers = {} if spec.offload.layers is None else {"layers": spec.offload.layers}
        found.append({"use": "memory/offload", "what": [spec.offload.kind], "to": "cpu", **layers})
    return found
