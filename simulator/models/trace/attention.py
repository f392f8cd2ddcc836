"""Describes attention of a traced layer: heads, key/value heads, latents, gates, norms, windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshcast.simulator.models.trace.record import Step
from meshcast.simulator.models.trace.steps import Fields, LayerBlock, LayerSteps, PlacedStep


def find_attention(layer: LayerSteps) -> list[PlacedStep]:
    """Returns the attention of a layer: as it was called, or as products and a softmax between them."""
    return layer.of_kind("attention") or _find_scores(layer)


def _find_scores(layer: LayerSteps) -> list[PlacedStep]:
    """Returns attention that is written as products and a softmax."""
    tokens = layer.tokens
    matmuls = [(i, step) for i, step in layer.of_kind("matmul") if step.sizes[1] == tokens]
    scores = next(((i, step) for i, step in matmuls if step.sizes[2] == tokens), None)
    soft = any(step.sizes[-1] == tokens for _, step in layer.of_kind("softmax"))
    if scores is None or not soft:
        return []
    place, asking = scores
    values = [step for i, step in matmuls if i > place and step.sizes[3] == tokens]
    if not values:
        return []
    heads, _, _, qk = asking.sizes
    call = Step("attention", asking.module, heads=heads, kv_heads=heads, qk=qk, v=values[0].sizes[2])
    return [PlacedStep(place, call)]


def read_attention(layer: LayerSteps, place: int, call: Step) -> LayerBlock | None:
    """Returns the block of attention with its projections; None if these are no known ones."""
    products, width = layer.products(), call.heads * call.v
    scope = _find_scope(call.module, [step for i, step in products if i < place])
    behind = [step for i, step in products if i > place and (step.inner, step.outer) == (width, layer.hidden)]
    if not behind:
        return None
    last = behind[0]
    first = [(i, step) for i, step in layer.products([last], scope) if scope or i < place]
    reading = [(i, step) for i, step in first if (step.inner, step.rows) == (layer.hidden, layer.tokens)]
    if not reading:
        return None
    latent = any(i < place and step.inner != layer.hidden for i, step in first)
    steps = [step for _, step in (first if latent else reading)]
    fields = _read_latents(layer, call, steps) if latent else None
    if fields is None:
        steps = [step for _, step in reading]
        fields = _read_projections(layer, call, steps, scope)
    if fields is None:  # beside them may be a gate with a number for each head
        steps = [step for step in steps if step.outer >= call.v]
        fields = _read_projections(layer, call, steps, scope)
    if fields is None:
        return None
    fields |= {"heads": call.heads, "proj_bias": layer.have_bias([last])} | _read_core(layer, call, scope)
    return LayerBlock("*", fields, [*steps, last], min(i for i, _ in reading), call.module)


def _find_scope(module: str, before: Sequence[Step]) -> str:
    """Returns the module around attention that also has products in front of it; empty: the whole layer."""
    while module and not any(step.module.startswith(module) for step in before):
        module = module.rpartition(".")[0]
    return module


def _read_core(layer: LayerSteps, call: Step, scope: str) -> Fields:
    """Returns the fields of what is between the projections."""
    return {
        "window": call.window,
        "bidirectional": not call.causal,
        "sinks": call.sinks and layer.has_shape(scope, call.heads),
        "softcaps": ("attention",) if call.softcap else (),
    }


def _read_projections(layer: LayerSteps, call: Step, steps: Sequence[Step], scope: str) -> Fields | None:
    """Returns the fields of projections to queries, keys and values, and to a gate; None if their widths are others.

    Heads of keys and of values that differ in width count as heads of their mean: all parameters and products stay.
    """
    kv, projected = call.kv_heads, sum(step.outer for step in steps)
    queries, gate = call.heads * call.qk, call.heads * call.v
    if projected in (queries + call.heads * (call.qk + call.v), queries + call.heads * (call.qk + call.v) + gate):
        kv = call.heads
    elif kv == call.heads:  # keys and values were copied to all heads before
        for more in (0, gate):
            kv, rest = divmod(projected - queries - more, call.qk + call.v)
            if kv > 0 and not rest and call.heads % kv == 0:
                break
    plain = queries + kv * (call.qk + call.v)
    width, odd = divmod(call.qk + call.v, 2)
    if projected not in (plain, plain + gate) or odd or kv < 1 or call.heads % kv:
        return None
    turned = next((step.width for _, step in layer.of_kind("rotation") if step.module.startswith(scope)), 0)
    return {
        "kv_heads": kv,
        "head_dim": width,
        "attention_gate": projected > plain,
        "fused_qkv": len(steps) == 1,
        "qk_layernorm": _read_query_norms(layer, scope, queries, call.qk),
        "qkv_bias": layer.have_bias(steps),
        "positions": "rope" if turned else "none",
        "rope_share": turned / width if 0 < turned < width else 1.0,
    }


def _read_query_norms(layer: LayerSteps, scope: str, width: int, head: int) -> bool | str:
    """Returns the field of norms over queries and keys. width: of all heads of queries."""
    norms = [step.module for _, step in layer.of_kind("norm") if step.module.startswith(f"{scope}.")] if scope else []
    sizes = [math.prod(layer.parameters.get(f"{norm}.weight", (0,))) for norm in norms]
    if sizes[:2] == [head, head]:
        return True
    return "all" if len(sizes) > 1 and sizes[0] == width else False


def _read_latents(layer: LayerSteps, call: Step, steps: Sequence[Step]) -> Fields | None:
    """Returns the fields of latent attention; None if it is none."""
    heads, queries = call.heads, call.heads * call.qk
    ups = [step for step in steps if step.inner != layer.hidden]
    downs = {step.outer: step for step in steps if step.inner == layer.hidden}
    asking = next((step for step in ups if step.outer == queries), None)
    keys = [step for step in ups if step is not asking]
    if len(keys) != 1 or len(downs) != 2 or downs.pop(asking.inner if asking else queries, None) is None:
        return None
    rank = keys[0].inner
    rope, (nope, rest) = next(iter(downs)) - rank, divmod(keys[0].outer, heads)
    nope -= call.v
    if rest or rope <= 0 or rope % 2 or nope <= 0 or rope + nope != call.qk:
        return None
    latents = {"kv_lora_rank": rank, "qk_nope": nope, "qk_rope": rope, "v": call.v}
    latents |= {"q_lora_rank": asking.inner} if asking else {}
    normed = any(step.width == rank for _, step in layer.of_kind("norm"))
    shape = {"mla": latents, "positions": "rope", "kv_heads": heads, "head_dim": call.v}
    return shape | {"qk_layernorm": normed, "qkv_bias": False}
