"""What the reference trainer supports; all other plans are refused before any work starts."""

from __future__ import annotations

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.routing import Routing
from meshcast.simulator.plan.checks import check_alike
from meshcast.simulator.plan.plan import Plan

SCHEMES = (
    "tensor/megatron",
    "tensor/megatron-sp",
    "data/ddp",
    "data/zero-1",
    "data/fsdp",
    "sequence/all-gather",
    "sequence/ulysses",
    "expert/all-to-all",
    "memory/recompute-full",
    "memory/recompute-selective",
)
"""Supported schemes, besides pipeline schedules (`check_schedule`)."""


def check(plan: Plan) -> None:
    """Raises PlanError for the first feature that a process that stands for all ranks of a stage does not support."""
    check_distributed(plan)
    for i, scheme in enumerate(plan.schemes):
        if scheme.family in ("sequence", "expert") and plan.mesh.size(scheme.over) > 1:
            rule = "one process has neither the keys nor the tokens of other ranks"
            raise PlanError(f"plan.schemes[{i}].use", rule, "Use meshcast measure distributed", scheme.use)


def check_distributed(plan: Plan) -> None:
    """Raises PlanError for the first feature of a plan that the reference trainer does not support."""
    check_alike(plan, "the reference trainer")
    for rule in (
        check_train,
        check_model,
        check_schemes,
        check_experts,
        check_framework,
        check_schedule,
        check_heads,
        check_positions,
    ):
        rule(plan)


def check_train(plan: Plan) -> None:
    """Checks that all weights are trained."""
    if (mode := plan.job.train.mode) != "full":
        raise PlanError("train.mode", "the reference trainer trains all weights", "Give full, or leave it out", mode)


def check_model(plan: Plan) -> None:
    """Checks for GPT and Llama shapes."""
    model = plan.job.model
    lacks = {
        "mla": (model.mla is not None, None),
        "ssm": (model.ssm is not None, None),
        "window": (model.window is not None, None),
        "attention_chunk": (model.attention_chunk is not None, None),
        "frames": (model.frames is not None, None),
        "dropout": (model.dropout > 0, 0),
        "positions": (model.positions == "alibi", "rope or learned"),
        "norm": (model.norm == "layernorm1p", "layernorm or rmsnorm"),
        "embedding_norm": (model.embedding_norm, False),
        "qk_layernorm": (model.qk_layernorm and model.mla is None, False),
        "parallel_residual": (model.parallel_residual, False),
        "norm_place": (model.norm_place != "before", "before"),
        "sinks": (model.sinks, False),
        "norm_residual": (model.norm_residual, False),
        "relative_buckets": (model.relative_buckets is not None, None),
        "linear_attention": (model.linear_attention is not None, None),
        "attention_gate": (model.attention_gate, False),
        "value_dim": (model.value_dim is not None, None),
        "keys_are_values": (model.keys_are_values, False),
        "value_norm": (model.value_norm, False),
        "shared_keys": (model.shared_keys > 0, 0),
        "layer_input": (model.layer_input is not None, None),
        "layer_scale": (model.layer_scale, False),
        "inner_norms": (model.inner_norms, False),
        "hyper_connections": (model.hyper_connections is not None, None),
        "altup": (model.altup is not None, None),
        "compressed": (model.compressed is not None, None),
        "head_experts": (model.head_experts is not None, None),
        "distance_profiles": (model.distance_profiles is not None, None),
        "result_scale": (model.result_scale, False),
        "qkv_bias": (model.qkv_bias == "queries-values", "true or false"),
        "output": (model.output is not None, None),
        "diffusion": (model.diffusion is not None, None),
        "activation": (model.activation == "xielu", "gelu"),
        "softcaps": (bool(model.softcaps), None),
        "mtp": (model.mtp > 0, 0),
        "branches": (bool(model.branches), None),
        "bidirectional": (model.bidirectional, False),
    }
    for field, (lacking, remedy) in lacks.items():
        if lacking:
            value = getattr(model, field)
            shown = value if isinstance(value, int | float | str) else None
            remedy = f"Give model.{field}: {remedy}" if remedy is not None else f"Leave model.{field} out"
            raise PlanError(f"model.{field}", "the reference model does not implement it", remedy, shown)
    if model.positions == "rope" and model.head_dim % 2:
        raise PlanError(
            "model.head_dim", "the reference model's RoPE needs an even head width", "Give an even one", model.head_dim
        )


def check_experts(plan: Plan) -> None:
    """Checks for gated experts, whole under expert parallelism, with balanced routing."""
    moe = plan.job.model.moe
    if moe is None:
        return
    for field, lacking in {
        "shared_experts": moe.shared_experts > 0,
        "capacity": moe.capacity is not None,
        "router_bias": moe.router_bias,
        "clamped": moe.clamped,
        "residual": moe.residual,
        "norm": bool(moe.norm),
        "zero_experts": moe.zero_experts > 0,
        "leading": moe.leading,
        "sum_bias": moe.sum_bias,
        "latent": moe.latent is not None,
        "experts_from": bool(moe.experts_from),
    }.items():
        if lacking:
            rule = "the reference model's experts do not implement it"
            raise PlanError(f"model.moe.{field}", rule, "Leave it out", getattr(moe, field))
    if not plan.job.model.gated or plan.job.model.mlp_bias:
        rule = "the reference model's experts are SwiGLU without biases"
        raise PlanError("model.moe", rule, "Give model.gated: true and model.mlp_bias: false")
    for i, scheme in enumerate(plan.schemes):
        if scheme.family != "expert":
            continue
        if scheme.options.routing != Routing():
            rule = "the reference model's routing is balanced"
            raise PlanError(f"plan.schemes[{i}].routing", rule, "Give balanced", str(scheme.options.routing))
        if _degree(plan, "tensor") > 1 or plan.mesh.size(scheme.axes[1:]) > 1:
            rule = (
                "the reference model shards experts over expert-parallel ranks or all tensor-parallel ranks, not both"
            )
            raise PlanError(f"plan.schemes[{i}].over", rule, "Leave tp, or ep and etp, out", list(scheme.axes))
    sequence = plan.job.batch.sequence
    assert sequence is not None
    parts = _position_parts(plan)
    places = sequence // parts * moe.top_k
    if places % moe.experts:
        rule = f"{sequence // parts} positions x top_k {moe.top_k} must be a multiple of the {moe.experts} experts"
        raise PlanError("batch.sequence", rule, f"Give a multiple of {moe.experts * parts}", sequence)


def check_framework(plan: Plan) -> None:
    """Checks for fused attention, formats of 16 or 32 bits, moments in the format of the main weights."""
    framework = plan.job.framework
    if framework.attention != "flash":
        rule = "the reference model has fused attention only"
        raise PlanError("framework.set.attention", rule, "Give flash", framework.attention)
    if framework.quantised:
        rule = "the reference model computes in the format of its weights"
        raise PlanError("precision.compute", rule, "Give bf16 or fp32", framework.quantised)
    for field in ("weights", "gradients", "main_weights"):
        if getattr(framework, field) == "fp16":
            rule = "the reference trainer has no loss scaling, and small gradients underflow in fp16"
            place = "compute" if field == "weights" else field
            raise PlanError(f"precision.{place}", rule, "Give bf16 or fp32", "fp16")
    if framework.moments != framework.main_weights:
        rule = f"fused Adam keeps them in the format of the main weights, {framework.main_weights}"
        raise PlanError("precision.moments", rule, f"Give {framework.main_weights}", framework.moments)


def check_schedule(plan: Plan) -> None:
    """Checks that there are a single chain of stages, unsliced micro-batches, a single update at the end of a step, an
    order fixed in advance.

    `action_orders` checks the kinds of actions.
    """
    schedule, shape = plan.schedule, plan.shape
    chain = all(schedule.predecessors(shape, stage) == (stage - 1,) * (stage > 0) for stage in range(shape.stages))
    if plan.job.batch.lengths:
        rule = "the reference trainer runs micro-batches of one length"
        raise PlanError("batch.lengths", rule, "Give batch.micro and batch.sequence")
    lacks = {
        "its stages do not form one chain": schedule.directions > 1 or not chain,
        "it slices the sequences of a micro-batch": shape.slices > 1,
        "it updates weights while micro-batches are in flight": not schedule.flush,
        "its devices choose their order at run time": schedule.reorders_at_run_time,
    }
    for what, lacking in lacks.items():
        if lacking:
            remedy = "Use one with a chain of stages and a fixed order, such as 1f1b, zb-h1 or zb-v"
            raise PlanError(
                "plan.schedule", f"the reference trainer does not support this schedule: {what}", remedy, schedule.use
            )


def check_schemes(plan: Plan) -> None:
    """Checks for supported schemes only, except along axes of size 1, where a scheme does nothing."""
    for i, scheme in enumerate(plan.schemes):
        idle = scheme.over and plan.mesh.size(scheme.over) == 1
        if scheme.use not in SCHEMES and scheme.family != "pipeline" and not idle:
            rule = "the reference trainer does not support this scheme"
            raise PlanError(f"plan.schemes[{i}].use", rule, f"Use one of {', '.join(SCHEMES)}", scheme.use)
        if scheme.use == "memory/recompute-selective" and tuple(scheme.options.modules) != ("core_attn",):
            rule = "the reference trainer recomputes the attention core, or whole layers"
            raise PlanError(f"plan.schemes[{i}].modules", rule, "Give core_attn", list(scheme.options.modules))


def check_heads(plan: Plan) -> None:
    """Checks that key heads divide over the tensor-parallel ranks, with Ulysses also over the context-parallel ranks:
    they are not replicated.
    """
    tensor, keys = _degree(plan, "tensor"), plan.job.model.kv_heads
    if plan.model_parts.model != plan.job.model:
        rule = "the reference model has no dummy heads"
        raise PlanError("plan.pad_heads", rule, f"Give model.heads: {plan.model_parts.model.heads}", True)
    if keys % tensor:
        rule = f"the reference model shards its {keys} key heads evenly over the tensor-parallel ranks"
        raise PlanError("plan.tp", rule, f"Give a divisor of {keys}", tensor)
    for i, scheme in enumerate(plan.schemes):
        ranks = tensor * plan.mesh.size(scheme.over)
        if scheme.use == "sequence/ulysses" and keys % ranks:
            rule = f"the reference model divides its {keys} key heads evenly over {ranks} ranks and copies none"
            raise PlanError(f"plan.schemes[{i}].use", rule, "Use sequence/all-gather, or fewer ranks", scheme.use)


def check_positions(plan: Plan) -> None:
    """Positions divide into the parts that context-parallel ranks hold."""
    sequence, parts = plan.job.batch.sequence, _position_parts(plan)
    assert sequence is not None
    if sequence % parts:
        rule = f"the reference model splits sequences into {parts} equal parts: two per rank under sequence/all-gather"
        raise PlanError("batch.sequence", rule, f"Give a multiple of {parts}", sequence)


def _position_parts(plan: Plan) -> int:
    """Counts the parts of consecutive positions that a sequence is split into outside of attention."""
    parts = _degree(plan, "tensor") if any(scheme.use == "tensor/megatron-sp" for scheme in plan.schemes) else 1
    context = _degree(plan, "sequence")
    two_per_rank = context > 1 and any(scheme.use == "sequence/all-gather" for scheme in plan.family("sequence"))
    return parts * context * (1 + two_per_rank)


def _degree(plan: Plan, family: str) -> int:
    """Counts the ranks over which the schemes of a family divide."""
    return plan.mesh.size(axis for scheme in plan.family(family) for axis in scheme.over)
