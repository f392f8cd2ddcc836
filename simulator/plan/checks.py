"""The rules that hold for a whole plan.

Every rule is a small function ``check_...`` that raises one PlanError; all are asked before any work is done.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from hardware.errors import PlanError
from simulator.ir.layout import required_layout
from simulator.ir.modules import Operator, walk
from simulator.ir.operators import QUANTISED
from simulator.ir.registry import find_scheme, scheme_names
from simulator.job.framework import Format
from simulator.lowering.scope import Scope
from simulator.plan.plan import Plan

DIM_NAMES = {
    "b": "batch.micro x data-parallel ranks",
    "s": "batch.sequence",
    "h": "model.hidden",
    "a": "model.heads (and kv_heads)",
    "f": "model.ffn",
    "v": "the padded vocabulary",
    "e": "model.moe.experts",
}

EXPERT_NAMES = {**DIM_NAMES, "f": "model.moe.expert_ffn"}
"""The same where experts are."""


MAX_PASSES = 2_000_000
"""Most passes of micro-batches through stages, forward and backward: ten or twenty seconds."""


def check_formats(plan: Plan) -> None:
    """The GPU multiplies numbers of the format that products run in."""
    gpu, framework = plan.job.cluster.gpu, plan.job.framework
    number = QUANTISED[framework.quantised].dtype if framework.quantised else framework.weights
    if framework.quantised == "mxfp8" and "fp4" not in gpu.peak and "fp8" in gpu.peak:
        rule = f"{gpu.name} multiplies no blocks of 32 with scales of their own; GPUs that do have fp4 as well"
        raise PlanError("precision.compute", rule, "Use fp8-blockwise or fp8-tensorwise", framework.quantised)
    if number not in gpu.peak:
        words = [word for word, one in QUANTISED.items() if one.dtype in gpu.peak]
        known = ", ".join([*(word for word in get_args(Format) if word in gpu.peak), *words])
        rule = f"{gpu.name} has no peak rate for products in {number}"
        raise PlanError("precision.compute", rule, f"Use one of {known}", plan.job.precision.compute)


def check_world(plan: Plan) -> None:
    """The mesh uses every GPU once."""
    gpus = plan.job.cluster.gpus
    if plan.mesh.world != gpus:
        product = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.named_axes.items())
        rule = f"the product of the axes ({product} = {plan.mesh.world}) must be the {gpus} GPUs of the cluster"
        others = {axis: plan.mesh.world // size for axis, size in plan.mesh.named_axes.items()}
        fits = [f"{axis} = {gpus // rest}" for axis, rest in others.items() if gpus % rest == 0]
        remedy = f"{' or '.join(fits)} would work" if fits else "Change an axis, or the number of nodes"
        raise PlanError("plan.mesh", rule, remedy, dict(plan.mesh.named_axes))


def check_axes(plan: Plan) -> None:
    """Every axis larger than one has one scheme that says what it does."""
    owners: dict[str, str] = {}
    for scheme in plan.schemes:
        for axis in scheme.axes:
            if axis in owners:
                rule = f"{owners[axis]} and {scheme.use} both claim the axis {axis!r}"
                raise PlanError("plan.schemes", rule, "Give each scheme an axis of its own")
            owners[axis] = scheme.use
    for axis, size in plan.mesh.named_axes.items():
        if size > 1 and axis not in owners:
            remedy = f"Add a scheme with `over: {axis}`, for example data/ddp"
            raise PlanError(f"plan.mesh.{axis}", "no scheme says what this axis does", remedy, size)


def check_batch(plan: Plan) -> None:
    """The global batch is a whole number of micro-batches for every replica."""
    batch = plan.job.batch
    assert batch.total is not None
    one = batch.micro * plan.replicas
    if batch.total % one:
        near = max(1, round(batch.total / one)) * one
        rule = f"it must be a multiple of batch.micro x data-parallel ranks = {batch.micro} x {plan.replicas} = {one}"
        raise PlanError("batch.global", rule, f"{near} would work", batch.total)


def check_towers(plan: Plan) -> None:
    """Every tower has its like part of a sequence."""
    towers, seq = plan.job.model.towers, plan.job.batch.sequence
    assert seq is not None
    if seq % towers:
        rule = f"each of the {towers} towers of {plan.job.model.name} has its like part of a sequence"
        near = max(1, round(seq / towers)) * towers
        raise PlanError("batch.sequence", rule, f"{near} would work", seq)


def check_noise(plan: Plan) -> None:
    """Steps of ranks that differ are played one by one, each from an empty to an empty pipe."""
    if plan.job.noise is not None and not plan.schedule.flush:
        rule = f"steps under noise begin and end with an empty pipe, and {plan.schedule.use} has no flush"
        raise PlanError("noise", rule, "Leave it out, or use pipeline/1f1b")


def check_period(plan: Plan) -> None:
    """Steps of a period differ, so they are forecast as the mean of their kinds: each from an empty to an empty pipe,
    and on ranks that are alike."""
    if plan.period > 1 and (plan.job.noise is not None or not plan.schedule.flush):
        told = next(i for i, scheme in enumerate(plan.schemes) if scheme.period > 1)
        rule = "steps that differ are forecast without noise, and with a pipeline that empties in between"
        raise PlanError(f"plan.schemes[{told}].period", rule, "Set it to 1, or leave the other out", plan.period)


def check_size(plan: Plan) -> None:
    """Every pass of a micro-batch through a stage is played, so there is an end to how many there can be."""
    shape = plan.played_shape
    each = 2 * shape.stages * shape.slices
    if shape.m * each > MAX_PASSES:
        most = MAX_PASSES * plan.shape.m // shape.m // each * plan.job.batch.micro * plan.replicas
        cut = f" in {shape.slices} slices" if shape.slices > 1 else ""
        rule = f"{shape.m:,} micro-batches{cut} through {shape.stages} stages are more than {MAX_PASSES:,} passes"
        raise PlanError("batch.global", rule, f"At most {most:,}, or a larger batch.micro", plan.job.batch.total)


def check_roles(plan: Plan) -> None:
    """A plan has one schedule, and one scheme that says what is recomputed: two would do it twice. What a scheme
    relies on is there."""
    for role in sorted({scheme.role for scheme in plan.schemes} - {""}):
        found = [scheme.use for scheme in plan.schemes if scheme.role == role]
        if len(found) > 1:
            raise PlanError("plan.schemes", f"a plan has one {role}", "Keep one", found)
    for scheme in plan.schemes:
        for role in scheme.required_roles:
            if not any(other.role == role for other in plan.schemes):
                found = [use for use in scheme_names() if find_scheme(use).role == role]
                rule = f"{scheme.use} needs a {role}, and the plan has none"
                raise PlanError("plan.schemes", rule, f"Add {' or '.join(found)}")


def check_experts(plan: Plan) -> None:
    """Experts are spread where the model has some."""
    if plan.mesh.views and plan.job.model.moe is None:
        rule = f"{plan.job.model.name} has no experts, so nothing is read another way"
        raise PlanError("plan.views", rule, "Leave out ep and views, or choose a model with experts")
    for name, view in plan.mesh.views.items():
        for axis in list(view)[1:]:
            if view[axis] > 1 and axis not in plan.claimed_axes:
                remedy = f"Add {{use: expert/all-to-all, over: {axis}}}; only along the first axis experts are copied"
                raise PlanError(f"plan.views.{name}.{axis}", "no scheme says what this axis does", remedy, view[axis])


def check_divisible(plan: Plan, known: set[Hashable]) -> None:
    """Every dim of every operator divides by the axes that shard it.

    known: what was found to divide before, for this plan or another; new findings are added.
    """
    # The samples of all replicas divide by their number, whatever it is.
    key = (
        replace(plan.architecture, replicas=1),
        tuple(plan.mesh.views),
        *(scheme.lowering_key for scheme in plan.stage_schemes),
    )
    if key in known:
        return
    scope = Scope(plan.mesh, plan.stage_schemes)

    # A tower's part of a sequence is the least that must divide.
    called = DIM_NAMES | ({"s": "batch.sequence / model.towers"} if plan.job.model.trunk else {})

    def visit(operator: Operator) -> None:
        divide = scope.division(operator)
        for tensor in (*operator.ins, *operator.outs, *operator.weights):
            parts: dict[str, list[str]] = {}
            layout = scope.at_rest(operator, tensor) if tensor in operator.weights else required_layout(tensor, divide)
            for part, dim in layout.items():
                parts.setdefault(dim, []).append(part)
            for dim, cutting in parts.items():
                size, count = tensor.dims[dim], plan.mesh.size(cutting)
                if not size.is_divisible_by(count):
                    names = EXPERT_NAMES if operator.view else called
                    axes = list(dict.fromkeys(plan.axis_of(part, operator.view) for part in cutting))
                    _refuse(names, dim, int(size.size // size.unit), count, axes)

    for unit in plan.architecture.units:
        walk(unit, visit)
    known.add(key)


def check_slices(plan: Plan) -> None:
    """Every slice of a sequence is a whole number of tokens, which divides as sequences do."""
    model, sequence, grain = plan.job.model, plan.job.batch.sequence, plan.slice_granularity
    assert sequence is not None
    where = next(f"plan.schemes[{i}].slices" for i, e in enumerate(plan.job.plan.schemes) if e.use == plan.schedule.use)
    if model.trunk:
        rule = f"the trunk of {model.name} joins whole sequences of all towers"
        raise PlanError(where, rule, "Use a schedule that cuts no sequences, for example pipeline/1f1b")
    for share in plan.schedule.slices:
        tokens = share * sequence
        if abs(tokens - round(tokens)) > 1e-6 or round(tokens) % grain:
            multiple = f"a multiple of {grain} tokens" if grain > 1 else "a whole number of tokens"
            rule = f"every slice of a sequence of {sequence} is {multiple}"
            fits = [n for n in range(1, sequence // grain + 1) if sequence // grain % n == 0]
            number = min(fits, key=lambda n: abs(n - len(plan.schedule.slices)))
            raise PlanError(where, rule, f"{number} would work", f"{tokens:g} tokens")


def _refuse(called: Mapping[str, str], dim: str, units: int, parts: int, axes: Sequence[str]) -> None:
    fits = [n for n in range(1, parts + 1) if units % n == 0]
    above = next((n for n in range(parts, units + 1) if units % n == 0), None)
    axis = " x ".join(axes)
    rule = f"{called.get(dim, dim)} = {units} must divide by {axis}"
    choices = " or ".join(str(n) for n in dict.fromkeys((fits[-1], above)) if n)
    raise PlanError(f"plan.{axis}", rule, f"{axis} = {choices} would work", parts)


ALWAYS = (
    check_formats,
    check_world,
    check_axes,
    check_roles,
    check_experts,
    check_batch,
    check_towers,
    check_noise,
    check_period,
)
"""What holds for every plan, before its stages are known."""
