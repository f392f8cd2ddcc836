"""Bytes of parameters, gradients and optimizer state that live through the whole step."""

from __future__ import annotations

from simulator.ir.ops import BYTES, Param
from simulator.lowering.scope import shards_at_rest
from simulator.lowering.update import by_axes
from simulator.plan.plan import Plan


def resident_bytes(plan: Plan, params: tuple[tuple[Param, int], ...]) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state on one rank.

    Sharded weights (ZeRO-3, FSDP) are the optimizer's own copy where the schemes say so; otherwise the optimizer keeps
    main weights of its own, unless the formats are equal. Frozen weights and secondary copies have neither gradients
    nor optimizer state. Offloaded states take no GPU memory.
    """
    framework = plan.job.framework
    compute, full, moments = BYTES[framework.weights], BYTES[framework.main_weights], 2 * BYTES[framework.moments]
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for param, size in by_axes(params):
        at_rest = {state: plan.mesh.size(shards_at_rest(plan.schemes, state, param)) for state in found}
        cut = at_rest["parameters"] > 1 and all(scheme.updates_weights for scheme in plan.schemes)
        second = [axes for scheme in plan.schemes if (axes := scheme.secondary_shards(param)) is not None]
        found["parameters"] += sum(size * compute / plan.mesh.size(axes) for axes in second)
        if not param.trained:
            found["parameters"] += size * compute / at_rest["parameters"]
            continue
        main = full if framework.main_weights != framework.weights and not cut else 0
        found["parameters"] += size * (full if cut else compute) / at_rest["parameters"]
        found["gradients"] += size * BYTES[framework.gradients] / at_rest["gradients"]
        found["optimizer"] += size * (main + moments) / at_rest["optimizer"]
    return {state: 0.0 if any(s.offloads(state) for s in plan.schemes) else found[state] for state in found}


def stashed_weight_bytes(plan: Plan, params: tuple[tuple[Param, int], ...], versions: int) -> float:
    """Bytes of the older weight versions on one rank, in the compute format. versions: all, the newest included."""
    nbytes = BYTES[plan.job.framework.weights]
    trained = [(param, size) for param, size in by_axes(params) if param.trained]
    cut = (size / plan.mesh.size(shards_at_rest(plan.schemes, "parameters", param)) for param, size in trained)
    return float((versions - 1) * nbytes * sum(cut))
