"""Describes the MLPs and the experts of a traced layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshcast.simulator.models.trace.record import Step
from meshcast.simulator.models.trace.steps import Fields, LayerBlock, LayerSteps


def read_experts(layer: LayerSteps, taken: Sequence[Step]) -> LayerBlock | None:
    """Returns the block of routed experts with their router and with shared experts; None without known ones. A router
    of another kind than a product counts as one, and what it has beside is left.

    taken: products of other blocks.
    """
    for place, call in layer.of_kind("experts"):
        fields = _read_weights(layer, call)
        if fields is None:
            continue
        scope, products = call.module.rpartition(".")[0], _find_router(layer, call, taken)
        fields["moe"] |= {"top_k": call.top_k, "router_bias": layer.has_shape(scope, fields["moe"]["experts"])}
        shared = _read_mlp(layer, [*taken, *products])
        if shared and all(shared.fields[key] == fields[key] for key in ("gated", "mlp_bias")):
            weighing = [step for _, step in layer.products(taken) if (step.inner, step.outer) == (layer.hidden, 1)][:1]
            fields["moe"] |= {"shared_experts": 1, "shared_ffn": shared.fields["ffn"], "shared_gate": bool(weighing)}
            products += [*shared.products, *weighing]
        return LayerBlock("E", fields, products, place)
    return None


def _read_weights(layer: LayerSteps, call: Step) -> Fields | None:
    """Returns the fields that the weights of all experts say: two matrices, or three, between the width of the stream
    and that of an expert."""
    matrices = [shape for shape in call.weights.values() if len(shape) == 3]
    widths = [rows if columns == layer.hidden else columns for _, rows, columns in matrices]
    reads = all(layer.hidden in shape[1:] for shape in matrices)
    if not reads or len(matrices) not in (2, 3) or max(widths) not in (min(widths), 2 * min(widths)):
        return None
    moe = {"experts": matrices[0][0], "expert_ffn": min(widths)}
    gated = len(matrices) == 3 or max(widths) > min(widths)
    return {"gated": gated, "mlp_bias": any(len(shape) == 2 for shape in call.weights.values()), "moe": moe}


def _find_router(layer: LayerSteps, call: Step, taken: Sequence[Step]) -> list[Step]:
    """Returns the product with a number for each expert, if there is any: of several the one beside the experts."""
    experts = next(iter(call.weights.values()))[0]
    scope = call.module.rpartition(".")[0]
    routers = [step for _, step in layer.products(taken) if (step.inner, step.outer) == (layer.hidden, experts)]
    return ([step for step in routers if step.module.rpartition(".")[0] == scope] or routers)[:1]


def read_mlps(layer: LayerSteps, taken: Iterable[Step]) -> list[LayerBlock]:
    """Returns all MLPs among the products that are left, the largest first. taken: products of other blocks."""
    mlps, taken = list[LayerBlock](), list(taken)
    while mlp := _read_mlp(layer, taken):
        mlps.append(mlp)
        taken += mlp.products
    return sorted(mlps, key=lambda block: -sum(step.flops for step in block.products))


def _read_mlp(layer: LayerSteps, taken: Sequence[Step]) -> LayerBlock | None:
    """Returns the first MLP among the products that are left: one or two linear layers up, and one down."""
    left = [(i, step) for i, step in layer.products(taken) if step.rows == layer.tokens]
    for place, down in left:
        ups = [(i, step) for i, step in left if i < place and step.inner == layer.hidden]
        halves = [placed for placed in ups if placed[1].outer == down.inner]
        both = [placed for placed in ups if placed[1].outer == 2 * down.inner]
        chosen = both[-1:] or halves[-2:]
        if down.outer == layer.hidden and chosen:
            products = [*(step for _, step in chosen), down]
            gated = bool(both) or len(chosen) > 1
            fields = {"ffn": down.inner, "gated": gated, "mlp_bias": layer.have_bias(products)}
            return LayerBlock("-", fields, products, chosen[0][0])
    return None
