"""Token gather: every token goes once to all ranks that share the experts.

`permute_after_gather` rebuilds a block so that its permutations follow the gather (Megatron-Core's all-gather
dispatcher). In Comet the expert GEMMs permute: the first reads rows of gathered tokens through an index, the last
adds up the results of each token on the rank, and a reduce-scatter adds up those of all ranks. `fuse_permutations`
rebuilds a block so, before it is lowered; `find_gather_rounds` finds the ops of its passes in the lowered block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import Module, MoE, Operator, Stage, replace_children
from meshcast.simulator.ir.moe_operators import (
    EXPERTS,
    ExpertCast,
    ExpertLinear,
    ExpertPermute,
    ExpertUnpermute,
    FusedExpertLinear,
    Permute,
    Unpermute,
)
from meshcast.simulator.ir.operators import Boundary, Cast
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, Memory, Op
from meshcast.simulator.lowering.rewrite import working_predecessors
from meshcast.simulator.schemes.expert.shared.fused_exchange import FusedRound


def fuse_permutations(block: MoE, kind: type[FusedExpertLinear] = FusedExpertLinear) -> MoE:
    """Returns the block with its permutations inside the GEMMs of the experts, which are of this kind."""
    if any(isinstance(child, Operator) and child.view == EXPERTS and child.has("rank") for child in block.children):
        rule = "adapters of experts read tokens that are permuted, and these GEMMs permute themselves"
        raise PlanError("train.targets", rule, "Leave out expert_up and expert_down, or use expert/all-to-all")
    (permute,) = (child for child in block.children if isinstance(child, Permute))
    (unpermute,) = (child for child in block.children if isinstance(child, Unpermute))
    (tokens,), (copies,), (results, weights) = permute.ins, permute.outs, unpermute.ins
    sent = {copies.name: replace(tokens, name=copies.name)}
    children: list[Module] = []
    for child in block.children:
        if child is permute:
            children.append(Boundary("tokens", (tokens,), (sent[copies.name],)))
        elif isinstance(child, ExpertCast) and child.ins[0].name in sent:
            tokens_in, cast = sent[child.ins[0].name], child.outs[0]
            sent[cast.name] = replace(cast, dims=tokens_in.dims)
            children.append(Cast(child.name, (tokens_in,), (sent[cast.name],), (), child.quantised))
        elif isinstance(child, ExpertLinear) and child.ins[0].name in sent:
            children.append(replace_linear(child, kind, ins=(sent[child.ins[0].name],)))
        elif isinstance(child, ExpertLinear) and child.outs[0].name == results.name:
            summed = replace(unpermute.outs[0], name=results.name)
            children.append(replace_linear(child, kind, ins=(*child.ins, weights), outs=(summed,)))
        elif child is unpermute:
            children.append(Boundary("combine", (summed,), unpermute.outs))
        else:
            children.append(child)
    return replace(block, children=tuple(children))


def fuse_permutations_of(stage: Stage, gathers: Callable[[float], bool]) -> Stage:
    """Returns the stage with the permutations of its blocks inside their GEMMs, where `gathers` says so of the expert
    slots that a token of the block takes.
    """

    def fuse(module: Module) -> Module:
        if isinstance(module, MoE):
            (permute,) = (operator for operator in module.operators() if isinstance(operator, Permute))
            if gathers(float(permute.outs[0].dims["s"].unit)):
                return fuse_permutations(module)
        return module

    return replace_children(stage, fuse)


def permute_after_gather(block: MoE) -> MoE:
    """Returns the block with its permutations on the ranks of the experts, which hold all tokens."""
    children: list[Module] = []
    for child in block.children:
        if isinstance(child, Permute):
            children.append(ExpertPermute(child.name, child.ins, child.outs))
        elif isinstance(child, Unpermute):
            children.append(ExpertUnpermute(child.name, child.ins, child.outs))
        elif isinstance(child, ExpertLinear):
            # The permutation has sorted the tokens by expert.
            children.append(replace(child, sorts=""))
        else:
            children.append(child)
    return replace(block, children=tuple(children))


def replace_linear(linear: ExpertLinear, kind: type[ExpertLinear], **tensors: tuple[Tensor, ...]) -> ExpertLinear:
    """Returns the linear layer as a layer of another kind, with other tensors."""
    attributes: dict[str, Any] = {field.name: getattr(linear, field.name) for field in fields(linear)}
    return kind(**{**attributes, **tensors})


def find_gather_rounds(fragment: Fragment, parts: Iterable[str]) -> list[FusedRound]:
    """Returns the rounds among the ranks of `parts` in a fragment with a block whose GEMMs permute.

    Their all-gathers wait for the router: they are launched after it, together with the GEMM that reads its choice.
    """
    mine, rounds = set(parts), list[FusedRound]()
    for issued in (fragment.forward, fragment.backward):
        for phase in dict.fromkeys(op.phase for op in issued if op.phase != "W"):
            ops = [op for op in issued if op.phase == phase]
            products = [op for op in ops if isinstance(op.work, Gemm) and op.work.groups]
            if len(products) > 1:
                rounds.append(_gather_round(ops, products[0], products[-1], mine))
    return rounds


def _gather_round(ops: list[Op], first: Op, last: Op, parts: set[str]) -> FusedRound:
    needed = _predecessors(ops, first)
    gathers = [op for op in ops if op in needed and _is_collective(op, parts, "all_gather")]
    for op in ops[: ops.index(gathers[0])] if gathers else ():
        gathers[0].after += [op] if isinstance(op.work, Memory) and op.work.what == "router" else []
    kernels = [] if gathers else [first]
    for op in ops[: ops.index(first) + 1]:
        if op.stream == COMPUTE and op in {*needed, first} and working_predecessors(op) & {*gathers, *kernels}:
            kernels.append(op)
    return FusedRound(gathers, kernels, [last], _find_sends(ops, last, parts))


def _predecessors(ops: list[Op], last: Op) -> set[Op]:
    """Returns those of `ops` that `last` depends on."""
    needed, left = set[Op](), [last]
    while left:
        further = working_predecessors(left.pop()) & set(ops) - needed
        needed |= further
        left += further
    return needed


def _find_sends(ops: list[Op], last: Op, parts: set[str]) -> list[Op]:
    """Finds the addition of the copies of a token that follows the last GEMM, and the reductions of its result."""
    sends: list[Op] = []
    for op in ops[ops.index(last) + 1 :]:
        adds = isinstance(op.work, Memory) and op.work.what == "permute" and not sends
        reduces = _is_collective(op, parts, "reduce_scatter", "all_reduce") and sends
        if (adds or reduces) and working_predecessors(op) & {last, *sends}:
            sends.append(op)
    return sends


def _is_collective(op: Op, parts: set[str], *operations: str) -> bool:
    return isinstance(op.work, Collective) and op.work.operation in operations and parts >= set(op.work.axes)
