"""Maps a published run to a job.

Fields that a run does not state are taken from the defaults of its training program (``stacks``) and listed as assumed.
A run is refused if it does not state a necessary field, such as the number of GPUs, or if no job can describe it. Jobs
that the simulator does not support are refused by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import load
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.registry import find_scheme, is_scheme
from meshcast.simulator.job.framework import CommunicationOverlap, load_framework
from meshcast.simulator.job.open_settings import HOST_BOUND_SIGMA, WRONG
from meshcast.simulator.job.plan_keys import PLAN_KEYS, ShortPlan, chosen_scheme
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule
from meshcast.validation.published.clusters import blocks_launches, known_cluster
from meshcast.validation.published.recipes import (
    EAGER_LOSS,
    EVENED_BY_BIAS,
    LAUNCHED_DROPOUT,
    LaunchedSettings,
    correct_misprints,
    fill_launched,
    has_eager_loss,
    launched_attention,
    launched_dropout,
    launched_kernels,
    launched_overlap,
    launched_settings,
    main_weights,
    misprinted_fields,
    packed_samples,
    uneven_layers,
)
from meshcast.validation.published.releases import month_of
from meshcast.validation.published.rows import PublishedRun, RunAdapters, Spec
from meshcast.validation.published.stacks import (
    KEPT,
    SIGMA,
    Stack,
    framework,
    regime_of,
    stack,
)

MAX_STAGES = 10_000
"""Most stages of a pipeline, chunks counted singly, over which layers are divided."""

T = TypeVar("T")

SCHEDULES = {
    **{"interleaved": "interleaved-1f1b", "zb-v-half": "v-half", "zb-v-min": "v-min"},
    **{"zb-1p": "zb-auto", "zb-2p": "zb-auto"},
}
"""Schedules whose names in published runs differ from those of plans."""

DISPATCHERS: dict[str, dict[str, Any]] = {
    "": {"use": "expert/all-to-all"},
    "deepep": {"use": "expert/deepep", "dispatch": "bf16", "sms": 20, "most": 1_000},
    "deepseek": {"use": "expert/deepep", "sms": 20},
    **{key: {"use": "expert/hybrid-ep"} for key in ("hybridep", "hybrid-ep")},
}
"""Expert schemes by the backend of Megatron-Core's flex token dispatcher, with its defaults: tokens in bf16, experts on
any number of nodes, 20 multiprocessors for DeepEP (``moe_deepep_num_sms``), 16 for HybridEP (``moe_hybridep_num_sms``).
``deepseek``: as in its own program, with the defaults of the scheme.
"""

ROUNDS_IN_FLIGHT = {"zb-1p": 1, "zb-2p": 2}
"""Memory limits in the names of zb-1p and zb-2p: activations of a round or two of micro-batches."""

SHARDING = {
    "none": "data/ddp",
    "zero1": "data/zero-1",
    "zero2": "data/zero-2",
    "zero3": "data/zero-3",
    "fsdp-full": "data/fsdp",
    "fsdp-hybrid": "data/fsdp",
    "fsdp-grad-op": "data/zero-2",
}

SHARDING_WORDS = {use.partition("/")[2]: word for word, use in reversed(SHARDING.items())}
"""The words by the names of data schemes; of several the first."""

USUAL_RECOMPUTE = {
    **{"none": ("none", ("core_attn",)), "full": ("full", ("core_attn",))},
    "operators": ("selective", ("save_alternate",)),
}
"""Kind of recomputation, and modules of selective recomputation, by what a plan in short form recomputes."""

SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "vocab", "tied", "norm", "qk_layernorm")
"""Fields without which a model cannot be forecast."""

TARGETS = {"qkv": "attn_qkv", "proj": "attn_proj"}
"""LoRA targets by their names in published runs."""

USUAL_RANK = 16
"""Rank of adapters, if a run does not state it: that of the MLPerf benchmark and of NVIDIA NeMo's recipes."""

USUAL_TARGETS = ("qkv",)
"""Targets of adapters, if a run does not state them: those of NVIDIA NeMo's performance recipes
(``recipe.peft.target_modules`` of llama3_8b.py and others)."""


GPT_OSS = {"full_every": 2, "qkv_bias": True, "proj_bias": True, "mlp_bias": True, "sinks": True}
"""Fields of the model gpt-oss that published runs do not have."""


class Assumptions:
    """The fields that a forecast assumes because its run does not state them, each with the sigma that it adds."""

    def __init__(self, experts: bool) -> None:
        self.sigmas = SIGMA | ({"cuda_graphs": HOST_BOUND_SIGMA["framework.set.cuda_graphs"]} if experts else {})
        self.fields: dict[str, float] = {}

    def add(self, field: str, why: str = "") -> None:
        """Lists a field as assumed. why: key of its sigma, if it has several."""
        self.fields[field] = self.sigmas[why or field]

    def value_or_usual(self, field: str, value: T | None, usual: T) -> T:
        """Returns the value of a field; if it is not stated, the usual value, and lists the field as assumed.

        Without a usual value the job leaves the field open, and its forecast says what that is worth.
        """
        if value is None and usual is None:
            self.fields[field] = 0.0
        elif value is None:
            self.add(field)
        return usual if value is None else value

    @property
    def widening(self) -> dict[str, float]:
        """Sigmas of the assumptions that may be wrong, each with probability `WRONG`."""
        return {field: math.sqrt(WRONG) * sigma for field, sigma in self.fields.items() if sigma}


@dataclass(frozen=True)
class MappedJob:
    """A job.

    assumed: fields that its run does not state.
    replaced: fields of these whose usual value the run contradicts, and the value that stands for it.
    """

    job: dict[str, Any]
    assumed: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...] = ()


OPTIMIZERS = {"adam": "adam", "adamw": "adam", "muon": "muon"}
"""Optimizers of jobs by those of runs; others are forecast as Adam."""


def map_run(row: PublishedRun, chosen: Sequence[str] = (), profile: str | None = None) -> MappedJob:
    """Maps a run to its job.

    chosen: fields that were chosen among several possible values.
    profile: framework profile to take instead of that of the run's program.
    Raises PlanError for a run that does not state a necessary field, or of a kind that no job can describe.
    """
    row = fill_launched(correct_misprints(row))
    spec = row.spec
    refuse_unknown(spec)
    defaults, assumptions = stack(spec.stack), Assumptions(spec.model.moe is not None)
    for field in misprinted_fields(row):
        assumptions.add(field)
    name = profile or framework(spec.stack)
    launched = launched_settings(row, name)
    if launched.dispatcher != row.token_dispatcher and spec.width("ep") > 1:
        assumptions.add("token dispatcher")
    for field in chosen:
        assumptions.add(field, f"{field}, chosen" if f"{field}, chosen" in assumptions.sigmas else field)
    documents = packed_samples(row)
    if documents is not None or spec.kind == "sft-packed":
        assumptions.add("batch.documents" if documents is not None else "class")
    optimizer = OPTIMIZERS.get(str(assumptions.value_or_usual("optimizer", spec.optimizer, "adam")))
    if optimizer is None:
        assumptions.add("optimizer")
    assumptions.value_or_usual("offload.kind", spec.offload.kind, "none")
    model = _model(row, defaults, assumptions)
    job = {
        "id": row.id,
        "model": model,
        "cluster": _cluster(row, assumptions),
        "batch": {
            "global": spec.batch.total,
            "micro": _micro(spec, assumptions),
            "sequence": spec.batch.seq,
            **({"documents": documents} if documents is not None else {}),
        },
        "precision": {
            "compute": spec.precision,
            "gradients": assumptions.value_or_usual("grad_dtype", spec.grad_dtype, None),
            "main_weights": assumptions.value_or_usual("main_weights", main_weights(row), None),
        },
        "optimizer": optimizer or "adam",
        "train": _train(row, defaults, assumptions),
        "plan": _plan(spec, launched, assumptions),
    }
    # Last, because the framework has the sigmas of all assumptions.
    job["framework"] = _framework(row, launched, defaults, assumptions, name)
    if row.measured.peak_memory_gib is not None and spec.memory_kind in (None, "unknown"):
        assumptions.add("memory_kind")
    return MappedJob(job, tuple(sorted(assumptions.fields)))


# ------------------------------------------------------------------------------------------ refusals


def refuse_unknown(spec: Spec) -> None:
    """Raises PlanError for a run of a kind that no job can describe, or without a field that a forecast needs."""
    if spec.kind == "other":
        raise _refusal("class", "its kind of attention is not supported", spec.kind)
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
            raise _refusal(field, "it is not published and cannot be derived")


def _refusal(field: str, rule: str, value: Any = None) -> PlanError:
    return PlanError(f"spec.{field}", rule, "This run is left out", value)


# --------------------------------------------------------------------------------------------- parts


def _model(row: PublishedRun, defaults: Stack, assumptions: Assumptions) -> dict[str, Any]:
    """Maps the model of the run."""
    spec, shape = row.spec, row.spec.model
    model = shape.model_dump(exclude={"attention", "seq"}, exclude_none=True)
    model["seq"] = spec.batch.seq
    model["positions"] = assumptions.value_or_usual(
        "model.positions", shape.positions, "rope" if shape.norm == "rmsnorm" else "learned"
    )
    dropout, is_assumed = (defaults.dropout, True) if defaults.dropout is not None else launched_dropout(row)
    if dropout is not None:
        model["dropout"] = dropout
    if dropout is not None and is_assumed:
        assumptions.add("model.dropout")
    if shape.vocab and shape.vocab % spec.width("tp"):  # padded by the framework
        assumptions.add("model.vocab")
    if shape.moe and shape.moe.get("routing") == "natural" and row.model_name in EVENED_BY_BIAS:
        model["moe"] = {**shape.moe, "routing": "loss-free"}
    if shape.window:  # only gpt-oss states a window
        model |= GPT_OSS | ({"moe": model["moe"] | {"clamped": True}} if shape.moe else {})
    return model


def _cluster(row: PublishedRun, assumptions: Assumptions) -> dict[str, Any]:
    """Maps the cluster of the run, by its node if the catalog has it; nulls are filled in from the catalog."""
    spec, known = row.spec, known_cluster(row)
    if known is not None and spec.gpus:
        each = spec.gpus_per_node or int(load("nodes", known.node).gpus)
        return {"node": known.node, "nodes": math.ceil(spec.gpus / each), "gpus": spec.gpus}
    assumptions.value_or_usual("gpus_per_node", spec.gpus_per_node, None)
    inter = spec.inter
    if spec.gpus and spec.gpus > (spec.domain or 1) and inter.kind != "none":  # otherwise there is no network traffic
        assumptions.value_or_usual("inter.kind", inter.kind, None)
        assumptions.value_or_usual("inter.gbps_per_gpu", inter.gbps_per_gpu, None)
    return {
        "gpu": spec.gpu,
        "gpus": spec.gpus,
        "gpus_per_node": spec.gpus_per_node,
        "scale_up_domain": assumptions.value_or_usual("scale_up_domain", spec.scale_up_domain, None),
        "inter": inter.model_dump(exclude={"stated"}),
    }


def possible_micro_batches(spec: Spec) -> list[int]:
    """Returns sequences per micro-batch that divide the batch of a replica."""
    sequences = (spec.batch.total or 1) // spec.width("dp")
    # Interleaved schedules need micro-batches in multiples of the stages.
    round_ = spec.width("pp") if spec.schedule == "interleaved" else 1
    return [micro for micro in range(1, sequences + 1) if sequences % micro == 0 and sequences // micro % round_ == 0]


def _micro(spec: Spec, assumptions: Assumptions) -> int:
    """Returns the sequences per micro-batch; derived if only a single value is possible."""
    if spec.batch.micro is not None:
        return spec.batch.micro
    fits = possible_micro_batches(spec)
    if len(fits) != 1:
        raise _refusal("batch.micro", "it is not published, and several values are possible")
    assumptions.add("batch.micro")
    return fits[0]


def _train(row: PublishedRun, defaults: Stack, assumptions: Assumptions) -> dict[str, Any]:
    """Maps the training mode: adapters, or all weights."""
    spec = row.spec
    if spec.kind != "lora" and spec.lora is None:
        return {"mode": "full"}
    adapters = spec.lora or RunAdapters()
    targets = (
        adapters.targets
        if adapters.targets is not None
        else assumptions.value_or_usual("lora.targets", None, USUAL_TARGETS)
    )
    for word in targets:
        if word not in TARGETS:
            raise _refusal("lora.targets", f"only {', '.join(TARGETS)} are supported", word)
    rank = assumptions.value_or_usual("lora.rank", adapters.rank, USUAL_RANK)
    train = {"mode": "lora", "rank": rank, "targets": [TARGETS[word] for word in targets]}
    in_8_bits = defaults.fp8_adapters and spec.precision not in ("bf16", "fp16")
    stored = {"frozen_weights": "fp8"} if in_8_bits else {}
    return train | stored | ({"dropout": True} if row.kernel_plugin in LAUNCHED_DROPOUT else {})


def _framework(
    row: PublishedRun, launched: LaunchedSettings, defaults: Stack, assumptions: Assumptions, name: str
) -> dict[str, Any]:
    """Maps the training program to the framework profile `name`, with the settings that the run states."""
    spec, blocking = row.spec, blocks_launches(row)
    release = month_of(row, name)
    profile = load_framework(name, release=release)
    changes: dict[str, Any] = dict(launched.traits)
    if name != spec.stack:
        assumptions.add("stack")
    assumptions.value_or_usual("stack_version", spec.stack_version, None)
    changes["attention"] = assumptions.value_or_usual("model.attention", spec.model.attention, defaults.attention)
    compiles = False if spec.compile is None and defaults.never_compiles else spec.compile
    changes["compile"] = assumptions.value_or_usual("compile", compiles, None)
    changes["cuda_graphs"] = launched.graphs
    assumptions.value_or_usual("cuda_graphs", spec.cuda_graphs, launched.graphs)
    if library := launched_attention(row):
        changes["attention_library"] = library
    if defaults.step_overhead_s is not None:
        changes["step_overhead_s"] = defaults.step_overhead_s
    overlap, known = dict(launched.traits.get("overlap", {})), launched_overlap(row)
    for axis, value in spec.overlap:
        if spec.width(axis) * (spec.width("cp") if axis == "dp" else 1) == 1:  # gradients are reduced over both
            continue
        value = known.get(axis) if value is None else value
        value = assumptions.value_or_usual(f"overlap.{axis}", value, defaults.overlap if name != spec.stack else None)
        if value is not None and axis in CommunicationOverlap.model_fields:
            overlap[axis] = value
    changes["overlap"] = dict.fromkeys(CommunicationOverlap.model_fields, False) if blocking else overlap
    if kernels := launched_kernels(row):
        changes |= kernels
    elif has_eager_loss(row):
        changes["loss"] = profile.loss.model_dump() | EAGER_LOSS
    if row.is_of_torch_1:
        changes["recompute_early_stop"] = False
    if defaults.fp8_adapters and spec.kind == "lora" and spec.precision not in ("bf16", "fp16"):
        changes["fp8_activation_inputs"] = True
    if blocking:
        changes |= {"launch_blocking": True, "cuda_graphs": False}
    changes["sigmas"] = assumptions.widening
    changes["regime"] = regime_of(spec.stack, profile, row.source)
    stated = {key: value for key, value in changes.items() if value is not None}
    return {"name": name, "release": release, "recipe": False, "set": stated}


def _plan(spec: Spec, launched: LaunchedSettings, assumptions: Assumptions) -> dict[str, Any]:
    """Makes the plan of the run: mesh and schemes, outermost first."""
    dp, tp, pp, cp = (spec.width(axis) for axis in ("dp", "tp", "pp", "cp"))
    mesh = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    short = ShortPlan.model_validate({key: value for key, value in launched.plan.items() if key != "recompute"})
    schemes: list[dict[str, Any]] = []
    if pp > 1:
        schemes.append(_pipeline(spec, launched, assumptions))
    elif launched.overlaps:
        schemes.append({"use": "pipeline/1f1b", "over": "pp", **_overlap(launched)})
    sharding = (
        assumptions.value_or_usual("sharding", spec.sharding, SHARDING_WORDS[chosen_scheme(short, "data")])
        if dp * cp > 1
        else spec.sharding or "none"
    )
    data: dict[str, Any] = {"use": SHARDING[sharding], "over": "dp"}
    if pp > 1 and data["use"] == "data/zero-2" and dp * cp > 1:
        # Under a pipeline only PyTorch's FSDP shards gradients: DeepSpeed's engine refuses to (deepspeed/runtime/pipe/
        # engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism").
        data = {"use": "data/fsdp", "over": "dp", "reshard": False}
    if sharding != "none" and dp * cp > 1:
        usual = (spec.gpus_per_node or 1) if sharding == "fsdp-hybrid" else dp * cp
        group = assumptions.value_or_usual("shard_group", spec.shard_group, usual)
        if group != dp * cp and sharding != "fsdp-grad-op":
            if "replicate" not in _options(data["use"]) or dp * cp % group or group % cp:
                rule = f"{data['use']} over {group} of {dp * cp} data-parallel ranks is not supported"
                raise _refusal("shard_group", rule, group)
            mesh = {"pp": pp, "replicate": dp * cp // group, "shard": group // cp, "cp": cp, "tp": tp}
            data |= {"over": "shard", "replicate": "replicate"}
    schemes.append(data)
    if cp > 1:
        if not launched.context:
            assumptions.add("mesh.cp")  # a spec does not state the kind of context parallelism
        usual_context = short.cp_scheme or PLAN_KEYS["cp_scheme"].usual
        schemes.append({"use": launched.context or f"sequence/{usual_context}", "over": "cp"})
    if tp > 1:
        split = assumptions.value_or_usual("sequence_parallel", spec.sequence_parallel, short.sequence_parallel)
        schemes.append({"use": "tensor/megatron-sp" if split else "tensor/megatron", "over": "tp"})
    plan: dict[str, Any] = {"mesh": mesh, "schemes": schemes}
    if spec.model.moe:
        plan["views"] = {"experts": _experts(spec, launched.dispatcher, schemes)}
    schemes += _memory(spec, launched.plan.get("recompute", "none"), assumptions)
    chunks = pp * schemes[0]["chunks"] if pp > 1 else 1
    if _ends_as_layers(spec):
        if spec.pipeline_split is None:
            assumptions.add("pipeline_split")
        plan["partition"] = "ends-as-layers"
    elif spec.pipeline_split == "uneven" or (spec.pipeline_split is None and (spec.model.layers or 0) % chunks):
        assumptions.add("pipeline_split")
        layers = (spec.model.layers or 0) + (spec.model.mtp or 0)
        if chunks > min(layers + 2, MAX_STAGES):  # the embedding and the loss count as a layer each
            raise _refusal("mesh.pp", f"{layers:,} layers have not {chunks:,} stages, of at most {MAX_STAGES:,}", pp)
        plan["partition"] = uneven_layers(spec, chunks)
    return plan


def _options(use: str) -> Container[str]:
    """Returns the options of a scheme; empty if there is no such scheme."""
    return find_scheme(use).Options.model_fields if is_scheme(use) else ()


def _only_chunk_count(use: str) -> int | None:
    """Returns the chunks per device of a schedule that supports only a single number of them; otherwise None."""
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    fits = []
    for chunks in range(1, 4):
        with suppress(PlanError):
            kind(("pp",), kind.Options(chunks=chunks)).check(PipelineShape(2, 8, chunks * kind.directions))
            fits.append(chunks)
    return fits[0] if len(fits) == 1 else None


def _ends_as_layers(spec: Spec) -> bool:
    """Returns whether the embedding and the loss take the place of a layer each: so the run says, or only so they
    divide."""
    if spec.pipeline_split is not None:
        return spec.pipeline_split == "ends-as-layers"
    layers, stages = spec.model.layers or 0, spec.width("pp")
    return stages > 1 and layers % stages != 0 and (layers + 2) % stages == 0


def possible_chunks(spec: Spec) -> list[int]:
    """Chunks of a device into which the layers of a stage divide."""
    places = (spec.model.layers or 0) + 2 * _ends_as_layers(spec)
    least = 2 if spec.schedule == "interleaved" else 1
    each = places // spec.width("pp")
    return [n for n in range(least, each + 1) if each % n == 0 and places % spec.width("pp") == 0]


def _pipeline(spec: Spec, launched: LaunchedSettings, assumptions: Assumptions) -> dict[str, Any]:
    """Maps the pipeline schedule of the run, with its chunks."""
    chunks = spec.mesh.vpp
    use = f"pipeline/{SCHEDULES.get(spec.schedule or '', spec.schedule)}"
    fixed = _only_chunk_count(use) if is_scheme(use) else None
    if fixed is not None and chunks in (None, 1):
        # The schedule fixes it; runs write 1 where nothing is interleaved.
        chunks = fixed
    elif chunks is None:
        fits = possible_chunks(spec)
        if len(fits) != 1:
            several = "several numbers of chunks are possible" if fits else "no number of chunks divides the layers"
            raise _refusal("mesh.vpp", f"it is not published, and {several}")
        chunks = fits[0]
        assumptions.add("mesh.vpp")
    schedule = assumptions.value_or_usual("schedule", spec.schedule, "interleaved" if chunks > 1 else "1f1b")
    entry = {"use": f"pipeline/{SCHEDULES.get(schedule, schedule)}", "over": "pp", "chunks": chunks}
    if launched.overlaps and "overlap_passes" in _options(str(entry["use"])):
        entry |= _overlap(launched)
    if schedule in ROUNDS_IN_FLIGHT:
        entry["memory_limit"] = ROUNDS_IN_FLIGHT[schedule] * spec.width("pp")
    return entry


def _overlap(launched: LaunchedSettings) -> dict[str, bool]:
    """Returns the options of a schedule whose passes overlap: weight gradients are delayed as its recipe says."""
    schedule = launched.plan.get("schedule")
    delayed = isinstance(schedule, Mapping) and bool(schedule.get("delay_weight_gradients"))
    return {"overlap_passes": True, **({"delay_weight_gradients": True} if delayed else {})}


def _experts(spec: Spec, dispatcher: str, schemes: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the expert view of a stage's ranks (edp, ep, etp); appends the expert scheme to `schemes`."""
    ranks, ep, etp = math.prod(spec.width(axis) for axis in ("dp", "cp", "tp")), spec.width("ep"), spec.width("etp")
    if ranks % (ep * etp):
        raise _refusal("mesh.ep", f"ep x etp = {ep} x {etp} must divide dp x cp x tp = {ranks}", ep)
    if ep * etp > 1:
        schemes.append({**DISPATCHERS.get(dispatcher, DISPATCHERS[""]), "over": ["ep", "etp"] if etp > 1 else "ep"})
    return {"edp": ranks // (ep * etp), "ep": ep, "etp": etp}


def _memory(spec: Spec, usual: str | Sequence[str], assumptions: Assumptions) -> list[dict[str, Any]]:
    """Maps the memory schemes: recomputation and offloading. usual: what is recomputed where the run does not say."""
    schemes: list[dict[str, Any]] = []
    recompute = spec.recompute
    usual_kind, usual_modules = USUAL_RECOMPUTE.get(str(usual), ("selective", usual))
    kind = assumptions.value_or_usual("recompute.kind", recompute.kind, usual_kind)
    if kind == "full":
        schemes.append({"use": "memory/recompute-full", "layers": recompute.layers})
    elif kind == "selective":
        modules = assumptions.value_or_usual("recompute.modules", recompute.modules, [*usual_modules])
        save = [word for module in modules for word in KEPT.get(module, ())]
        if save:
            schemes.append({"use": "memory/recompute-operators", "layers": recompute.layers, "save": save})
        else:
            schemes.append({"use": "memory/recompute-selective", "modules": modules})
    if spec.offload.kind not in (None, "none"):
        layers = {} if spec.offload.layers is None else {"layers": spec.offload.layers}
        schemes.append({"use": "memory/offload", "what": [spec.offload.kind], "to": "cpu", **layers})
    return schemes
