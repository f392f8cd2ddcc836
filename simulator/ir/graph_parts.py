"""Parts of layers that CUDA graphs launch, by the modules that programs name for them.

The modules are those of `cuda_graph_modules`, once `cuda_graph_scope`, of Megatron-Core (transformer_config.py and
transformer_layer.py in megatron/core/transformer @d98e8a64dd):

    attn            norm, attention of any kind and addition to the residual stream (`_forward_attention`)
    mlp             norm, MLP and addition, of layers without experts (`_forward_mlp`)
    moe             norm, router, experts and addition: only where experts are padded
    moe_router      norm, router, and the shared experts
    moe_preprocess  what `MoELayer.preprocess` does: the counts of tokens, and their permutation before an all-to-all
    mamba           a Mamba-2 layer

The dispatch of tokens, the experts, what combines their results and the addition behind them are in no graph but `moe`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from meshcast.simulator.ir.linear_attention_operators import LinearMixer
from meshcast.simulator.ir.mamba_operators import Mamba
from meshcast.simulator.ir.modules import (
    MLP,
    CompositeModule,
    CrossAttention,
    Layer,
    Module,
    MoE,
    Operator,
    SelfAttention,
    SharedExperts,
)
from meshcast.simulator.ir.moe_operators import Permute, TopK
from meshcast.simulator.ir.operators import Norm

GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]

CudaGraphs = bool | tuple[GraphModule, ...]
"""What CUDA graphs hold: the whole step, nothing, or these modules of each layer."""

SHARED = "shared"
"""The part of the shared experts, which is in the graph of the router wherever its ops stand."""

PARTS: dict[str, frozenset[str]] = {
    **{module: frozenset({module}) for module in ("attn", "mlp", "mamba")},
    "moe_router": frozenset({"router", SHARED}),
    "moe_preprocess": frozenset({"preprocess"}),
    "moe": frozenset({"router", SHARED, "preprocess", "experts"}),
}
"""The parts of a layer, as `find_parts` names them, in the graph of each module."""

BLOCKS: dict[type[CompositeModule], str] = {
    **{kind: "attn" for kind in (SelfAttention, CrossAttention, LinearMixer)},
    MLP: "mlp",
    Mamba: "mamba",
}


def find_graphed(layer: Layer, modules: Collection[str]) -> dict[str, str]:
    """Returns the part of a layer to which each operator belongs that graphs of these modules launch, by its name."""
    graphed = frozenset[str]().union(*(PARTS[module] for module in modules))
    return {name: part for name, part in find_parts(layer).items() if part in graphed}


def find_parts(layer: Layer) -> dict[str, str]:
    """Returns the part of a layer to which each of its operators belongs, by its name.

    Operators between blocks belong to the block whose results they read, or else to the next: a norm before a block to
    that, a norm and an addition behind it to the block before.
    """
    parts: dict[str, str] = {}
    ahead, made, last = list[Operator](), set[str](), ""
    for child in layer.children:
        if isinstance(child, CompositeModule):
            block = _find_parts_of_block(child)
            names = list(block.values())
            parts |= {operator.name: names[0] for operator in ahead} | block
            ahead, made, last = [], {tensor.name for tensor in child.outputs}, names[-1]
        elif isinstance(child, Operator) and made & {tensor.name for tensor in child.ins}:
            parts[child.name] = last
            made |= {tensor.name for tensor in child.outs} if isinstance(child, Norm) else set()
        elif isinstance(child, Operator):
            ahead.append(child)
    return parts


def _find_parts_of_block(block: CompositeModule) -> dict[str, str]:
    """Returns the part of each operator of a block; the first is what its norm belongs to, the last its addition."""
    if not isinstance(block, MoE):
        part = BLOCKS.get(type(block), "")
        return {operator.name: part for operator in block.operators()}
    parts, routed = dict[str, str](), False
    for child in block.children:
        part = _part_of_experts(child) if routed else "router"
        operators = child.operators() if isinstance(child, CompositeModule) else [child]
        parts |= {operator.name: part for operator in operators if isinstance(operator, Operator)}
        routed = routed or isinstance(child, TopK)
    apart = {name: part for name, part in parts.items() if part != "experts"}
    return apart | {name: part for name, part in parts.items() if part == "experts"}


def _part_of_experts(child: Module) -> str:
    """Returns the part to which a module of experts belongs behind their router."""
    if isinstance(child, SharedExperts) or (isinstance(child, Operator) and child.name.startswith(f"{SHARED}.")):
        return SHARED
    return "preprocess" if isinstance(child, Permute) and not child.view else "experts"
