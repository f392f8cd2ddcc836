"""Shared experts beside the exchanges of tokens (Megatron-Core's --moe-shared-expert-overlap).

Shared experts see the tokens of their own rank, which no exchange delays. Instead of behind the routed experts they run
while the tokens of these travel: their first linear layer and the activation beside the dispatch, the last one beside
the combine; backward in the same places.

    network   dispatch               | combine               |
    compute   shared up, activation  | experts | shared down | unpermute

Kernels and bytes are the same. An exchange is hidden for as long as the shared experts beside it last.

Not modelled: shared experts then leave the CUDA graph of the router, so that the host launches their kernels.

References: NVIDIA/Megatron-LM @d98e8a64dd, megatron/core/transformer/moe/token_dispatcher.py (`dispatch_preprocess`,
`token_dispatch`, `token_combine`) and shared_experts.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.modules import CompositeModule, Layer, Module, MoE, SharedExperts
from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import Collective, Exchange, Fragment, Op
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme


class OverlapsSharedExperts(ExpertScheme):
    """Base of the expert schemes of Megatron-Core."""

    class Options(ExpertScheme.Options):
        overlap_shared: bool = False
        """Shared experts run beside dispatch and combine instead of behind the routed experts (Megatron-Core's
        --moe-shared-expert-overlap)."""

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        pairs = [entry.use for entry in job.plan.schemes if (entry.model_extra or {}).get("overlap_passes")]
        if self.options.overlap_shared and pairs:
            rule = f"exchanges run beside shared experts or, with overlap_passes of {pairs[0]}, beside another pass"
            raise PlanError(f"{self.use}.overlap_shared", rule, "Leave out one of both", True)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if self.options.overlap_shared and isinstance(module, Layer):
            for block in module.children:
                if isinstance(block, MoE):
                    run_beside_exchanges(fragment, block, self.family)
        return fragment


def run_beside_exchanges(fragment: Fragment, block: MoE, stream: str) -> None:
    """Moves the ops of the shared experts of a layer behind the begin of its exchanges.

    stream: of the exchanges; without two of them each way nothing moves.
    """
    shared = [name for child in block.children if isinstance(child, SharedExperts) for name in _names(child)]
    if not shared:
        return
    first, last = shared[:-1], shared[-1:]
    for ops, way, order in ((fragment.forward, "F", (first, last)), (fragment.backward, "BW", (last, first))):
        exchanges = [op for op in ops if op.stream == stream and op.phase in way and moves_tokens(op)]
        if len(exchanges) < 2:
            continue
        moved = {
            op: exchange
            for names, exchange in zip(order, (exchanges[0], _second(exchanges, ops)), strict=True)
            for op in ops
            if op.phase in way and op.name.removeprefix("d").removeprefix("w") in names
        }
        ops[:] = move_behind(ops, moved)


def moves_tokens(op: Op) -> bool:
    """Says whether an op on the stream of exchanges is one of tokens, not of the map of their routing."""
    return isinstance(op.work, Exchange) or (isinstance(op.work, Collective) and op.work.operation == "all_to_all")


def _names(shared: CompositeModule) -> list[str]:
    """Returns the names of the operators of shared experts up to the last linear layer, which ends the list."""
    operators = shared.operators()
    last = max(at for at, operator in enumerate(operators) if isinstance(operator, Linear))
    return [operator.name for operator in operators[: last + 1]]


def _second(exchanges: Sequence[Op], ops: Sequence[Op]) -> Op:
    """Returns the first of the exchanges that has kernels between it and the first."""
    place = {op: at for at, op in enumerate(ops)}
    begin = place[exchanges[0]]
    for at, op in enumerate(exchanges[1:], 1):
        if place[op] > begin + at:
            return op
    return exchanges[-1]


def move_behind(ops: Sequence[Op], moved: Mapping[Op, Op]) -> list[Op]:
    """Returns ops in another order: each of `moved` directly behind another op. What these need comes before them, and
    what needs them behind; all others keep their order."""
    place = {op: at for at, op in enumerate(ops)}
    key = {op: (place[moved.get(op, op)], op in moved, at) for op, at in place.items()}

    def needs(op: Op) -> Iterator[Op]:
        for other in op.after:
            if other in place:
                yield other
            elif other.work is None:
                yield from needs(other)

    for op in reversed(ops):
        for other in needs(op):
            if key[other] > key[op]:
                key[other] = (*key[op][:2], place[other]) if op in moved or key[op][1] else key[other]
    for op in ops:
        for other in needs(op):
            if key[other] > key[op]:
                key[op] = (key[other][0], True, place[op])
    return sorted(ops, key=key.__getitem__)
