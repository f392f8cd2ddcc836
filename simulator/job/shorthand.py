"""Expands the short form of a plan to the long form: every axis gets its documented default scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hardware.errors import PlanError, nearest
from hardware.load import validate_data
from simulator.ir.registry import find_scheme, scheme_names
from simulator.job.job import LongPlan, SchemeEntry, ShortPlan
from simulator.models.model import Model


def add_tensor_overlap(plan: LongPlan, use: str) -> LongPlan:
    """The plan with the scheme `use`, if it has tensor parallelism and no scheme that overlaps it."""
    uses = [entry.use for entry in plan.schemes]
    tensor = [i for i, use in enumerate(uses) if use.startswith("tensor/") and use in scheme_names()]
    if not tensor or any(find_scheme(uses[i]).most_axes == 0 for i in tensor):
        return plan
    schemes = [*plan.schemes]
    schemes.insert(tensor[0], SchemeEntry(use=use))
    return plan.model_copy(update={"schemes": tuple(schemes)})


def add_early_stop(plan: LongPlan) -> LongPlan:
    """The plan whose full recomputation stops early, where it does not say whether it does."""
    schemes = [
        entry.model_copy(update={"early_stop": True})
        if entry.use == "memory/recompute-full" and "early_stop" not in (entry.model_extra or {})
        else entry
        for entry in plan.schemes
    ]
    return plan.model_copy(update={"schemes": tuple(schemes)})


def family_degree(plan: LongPlan, family: str) -> int:
    """The product of the sizes of the axes of a family of schemes."""
    scheme_axes = (
        find_scheme(entry.use).all_axes(entry.over, entry.model_extra or {})
        for entry in plan.schemes
        if entry.use.startswith(f"{family}/") and entry.use in scheme_names()
    )
    axes = [axis for own in scheme_axes for axis in own]
    return math.prod(plan.mesh.get(axis, 1) for axis in axes)


def expand_plan(plan: Mapping[str, Any], gpus: int, model: Model) -> LongPlan:
    """The long form of a plan.

    gpus: number of GPUs of the cluster.
    Raises PlanError for a mistake in the plan.
    """
    if "mesh" in plan or "schemes" in plan:
        return validate_data(LongPlan, dict(plan), "plan", PlanError)
    short = validate_data(ShortPlan, dict(plan), "plan", PlanError)
    model_ranks = short.tp * short.pp * short.cp
    if short.dp is None and gpus % model_ranks:
        raise _degrees_error({"tp": short.tp, "pp": short.pp, **({"cp": short.cp} if short.cp > 1 else {})}, gpus)
    dp = short.dp or gpus // model_ranks
    schedule = short.schedule or ("interleaved-1f1b" if (short.chunks or 1) > 1 else "1f1b")
    try:
        kind = find_scheme(f"pipeline/{schedule}")
    except PlanError:
        known = [use.removeprefix("pipeline/") for use in scheme_names() if use.startswith("pipeline/")]
        remedy = nearest(schedule.rpartition("/")[2], known)
        raise PlanError("plan.schedule", "no such schedule", remedy, schedule) from None
    chunks = short.chunks or kind.Options.model_fields["chunks"].default
    data = "data/fsdp" if short.fsdp else f"data/zero-{short.zero}" if short.zero else "data/ddp"
    schemes: list[dict[str, Any]] = [
        {"use": f"pipeline/{schedule}", "over": "pp", "chunks": chunks},
        {"use": data, "over": "dp"},
        *([{"use": "sequence/all-gather", "over": "cp"}] if short.cp > 1 else []),
        {"use": "tensor/megatron-sp" if short.sequence_parallel else "tensor/megatron", "over": "tp"},
    ]
    views = _views(short, dp * short.cp * short.tp, model.moe.experts if model.moe else 1)
    if views:
        schemes.append({"use": "expert/all-to-all", "over": ["ep", "etp"] if views["experts"]["etp"] > 1 else ["ep"]})
    if short.recompute == "full":
        schemes.append({"use": "memory/recompute-full"})
    elif short.recompute == "selective":
        schemes.append({"use": "memory/recompute-selective", "modules": ["core_attn"]})
    mesh = {"pp": short.pp, "dp": dp, **({"cp": short.cp} if short.cp > 1 else {}), "tp": short.tp}
    long = {"mesh": mesh, "views": views, "schemes": schemes}
    long |= {"partition": short.partition, "pad_heads": short.pad_heads}
    return validate_data(LongPlan, long, "plan", PlanError)


def _degrees_error(degrees: dict[str, int], gpus: int) -> PlanError:
    """The error for degrees whose product does not divide the GPUs, with a degree that would."""
    product = math.prod(degrees.values())
    culprit = next((name for name, n in degrees.items() if gpus % (product // n) == 0 and n > 1), "tp")
    others = product // degrees[culprit]
    fits = [n for n in range(1, 2 * degrees[culprit]) if gpus % (n * others) == 0]
    near = min(fits, key=lambda n: abs(n - degrees[culprit]), default=None)
    rule = f"{' x '.join(degrees)} = {' x '.join(map(str, degrees.values()))} = {product} must divide the {gpus} GPUs"
    kept = " and ".join(f"{name} = {n}" for name, n in degrees.items() if name != culprit)
    remedy = f"With {kept}, {culprit} = {near} would work" if near else "Choose degrees that divide it"
    return PlanError(f"plan.{culprit}", rule, remedy, degrees[culprit])


def _views(short: ShortPlan, ranks: int, experts: int) -> dict[str, dict[str, int]]:
    """The axes of the experts over the ranks of one pipeline stage; empty if they are those of everything else."""
    if short.ep == 1 and short.etp is None:
        return {}
    etp = short.etp or 1
    if ranks % (short.ep * etp):
        name, given = ("ep", short.ep) if ranks % short.ep else ("etp", etp)
        rest = etp if name == "ep" else short.ep
        fits = [n for n in range(1, ranks + 1) if ranks % (n * rest) == 0 and (name == "etp" or experts % n == 0)]
        near = min(fits, key=lambda n: abs(n - given), default=None)
        rule = f"ep x etp = {short.ep} x {etp} must divide dp x cp x tp = {ranks}"
        raise PlanError(f"plan.{name}", rule, f"{name} = {near} would work" if near else "Lower the other one", given)
    return {"experts": {"edp": ranks // (short.ep * etp), "ep": short.ep, "etp": etp}}
