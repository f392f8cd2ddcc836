"""Token dispatch and combine: finds the rounds of a layer's experts in its lowered ops, and rewrites them.

A *round* is a pass of tokens through experts on other ranks: an all-to-all (dispatch), the kernels of the experts, an
all-to-all (combine). A layer has a round forward, a round backward (gradients of results out, gradients of tokens
back), and another where its experts are recomputed. Schemes that exchange tokens otherwise, or while experts compute,
replace these ops. Gradients of weights belong to no round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.modules import MoE
from meshcast.simulator.ir.moe_operators import ExpertLinear, Permute, TopK
from meshcast.simulator.ir.ops import COMPUTE, READ_BY_HOST, Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.routing import ExpertLoad
from meshcast.simulator.lowering.rewrite import Rewrite, working_predecessors


@dataclass(frozen=True)
class ExpertRound:
    """One round of tokens through the experts.

    out: the dispatching all-to-all.
    inside: the ops between the all-to-alls, in issue order.
    back: the combining all-to-all.
    """

    out: Op
    inside: list[Op]
    back: Op

    @property
    def ops(self) -> list[Op]:
        return [self.out, *self.inside, self.back]


@dataclass(frozen=True)
class MoESizes:
    """Sizes of a layer with experts.

    hidden: elements of a token.
    topk: experts of a token.
    experts: routed experts.
    copies: copies of tokens sent to experts, over all ranks of the stage.
    weights: elements of the matrices of an expert.
    """

    hidden: int
    topk: int
    experts: int
    copies: int
    weights: int

    @classmethod
    def of(cls, composite: MoE) -> MoESizes:
        operators = composite.operators()
        (sent,) = (operator.outs[0].dims for operator in operators if isinstance(operator, Permute))
        (chosen,) = (operator.outs[0].dims for operator in operators if isinstance(operator, TopK))
        tensors = (
            weight.dims for operator in operators if isinstance(operator, ExpertLinear) for weight in operator.weights
        )
        matrices = sum(prod(dim.size for dim in dims.values()) for dims in tensors if {"h", "f"} <= dims.keys())
        copies = sent["b"].size * sent["s"].size
        sizes = sent["h"].size, chosen["k"].size, composite.experts, copies, matrices / composite.experts
        return cls(*map(int, sizes))


def find_rounds(fragment: Fragment, parts: Iterable[str]) -> list[ExpertRound]:
    """Returns the rounds among the ranks of `parts` in a fragment with a layer's experts; none where no token is
    sent."""
    return [
        ExpertRound(ends[0], _ops_between(fragment, *ends), ends[1])
        for ends in find_all_to_alls(fragment, parts)
        if len(ends) == 2
    ]


def find_all_to_alls(fragment: Fragment, parts: Iterable[str]) -> list[list[Op]]:
    """Returns the all-to-alls of each pass among the ranks of `parts`: dispatch and combine, or dispatch alone where no
    gradient of tokens is needed.
    """
    mine, exchanges = set(parts), []
    for issued in (fragment.forward, fragment.backward):
        for phase in dict.fromkeys(op.phase for op in issued):
            exchanges.append([op for op in issued if op.phase == phase and _is_all_to_all(op, mine)])
    return [ends for ends in exchanges if ends]


def _is_all_to_all(op: Op, parts: set[str]) -> bool:
    work = op.work
    return isinstance(work, Collective) and work.operation == "all_to_all" and parts >= set(work.axes)


def _ops_between(fragment: Fragment, out: Op, back: Op) -> list[Op]:
    """Returns the ops that wait for `out` and that `back` waits for, in issue order, without gradients of weights."""
    reached, needed, left = {out}, set[Op](), [back]
    issued = fragment.forward if out in fragment.forward else fragment.backward
    ops = [op for op in issued if op.phase == out.phase]
    for op in ops:
        if working_predecessors(op) & reached:
            reached.add(op)
    while left:
        further = working_predecessors(left.pop()) - needed
        needed |= further
        left += further
    return [op for op in ops if op in reached and op in needed and op is not out]


def exchange_counts(
    fragment: Fragment, parts: Iterable[str], nbytes: int, operation: str = "all_to_all", late: bool = False
) -> None:
    """Inserts an exchange of token counts, `nbytes` in all, after the router; the first dispatch waits for it, and so
    does the host where it must know the counts.

    late: the host launches the kernel that orders tokens before it waits; otherwise it waits first.
    """
    dispatch = next((ends[0] for ends in find_all_to_alls(fragment, parts) if ends[0].phase == "F"), None)
    if dispatch is not None:
        assert isinstance(dispatch.work, Collective)
        chosen = [op for op in fragment.forward if isinstance(op.work, Memory) and op.work.what == "router"]
        work = Collective(operation, nbytes, dispatch.work.axes)
        counts = Op(f"{operation} counts", dispatch.stream, work, chosen, tag=READ_BY_HOST)
        place = fragment.forward.index(dispatch if late or not chosen else chosen[-1]) + (not late and bool(chosen))
        fragment.forward.insert(place, counts)
        dispatch.after.append(counts)


def exchange_once(rewrite: Rewrite, op: Op, axes: tuple[str, ...], ranks: int) -> Op:
    """Lets `ranks` ranks along `axes`, which hold the same tokens, exchange a part of them each, and all-gather the
    parts that arrive. Returns the exchange."""
    assert isinstance(op.work, Collective)
    part = replace(op, work=replace(op.work, nbytes=op.work.nbytes // ranks))
    gather = replace(op.work, operation="all_gather", axes=axes)
    rewrite.swap(op, [part, replace(op, name=f"all_gather {op.name}", work=gather, after=[part])])
    return part


def exchange_expert_by_expert(
    rewrite: Rewrite, op: Op, loads: Sequence[tuple[float, float]], even_nbytes: int
) -> list[Op]:
    """Replaces an all-to-all by an all-to-all for each expert of a rank that has tokens, in order.

    loads: for each expert of a rank the bytes that its exchange sends over those of even routing, and its pace.
    even_nbytes: bytes of the whole exchange under even routing.
    """
    assert isinstance(op.work, Collective)
    ends = accumulate((even_nbytes * remote / len(loads) for remote, _ in loads), initial=0.0)
    sizes = [round(stop) - round(start) for start, stop in pairwise(ends)]
    pairs = [(size, pace) for size, (_, pace) in zip(sizes, loads, strict=True) if size]
    works = [replace(op.work, nbytes=size, pace=pace) for size, pace in pairs] or [op.work]
    parts = [
        replace(op, name=f"{op.name} {i}", work=work, launches=op.launches if i == 0 else 0.0)
        for i, work in enumerate(works)
    ]
    rewrite.swap(op, parts, parts)
    return parts


def chunk_round(rewrite: Rewrite, expert_round: ExpertRound, sizes: Sequence[int]) -> list[list[Op]]:
    """Splits a round into chunks of its tokens, of these relative sizes, each dispatched, computed and combined by
    itself. Gradients of weights follow the last chunk.
    """
    wait_for_tokens_only(expert_round)
    return rewrite.chunk(expert_round.ops, sizes)


def wait_for_tokens_only(expert_round: ExpertRound) -> None:
    """Lets the ops of a round wait for its tokens alone, even where the framework lets communication wait for the
    weight gradients issued before.
    """
    expert_round.back.after = expert_round.inside[-1:]
    for op in expert_round.inside:
        op.after = [other for other in op.after if other.phase != "W"]


def exchange_between_groups(rewrite: Rewrite, expert_round: ExpertRound, ranks: int, size: int) -> Op:
    """Splits a round into shifted steps: in step j each group of `size` ranks sends to group (i + j) mod n.

    Step 0 stays within a group; a group of a single rank moves nothing. The host launches every step by itself. Returns
    the first kernel of the last step.
    """
    whole = {op: op.launches for op in expert_round.ops}
    out, *inside, back = chunk_round(rewrite, expert_round, (1,) * (ranks // size))
    for op, steps in zip(expert_round.ops, (out, *inside, back), strict=True):
        for part in steps:
            part.launches = whole[op]
    for steps in (out, back):
        for step, op in enumerate(steps):
            assert isinstance(op.work, Collective)
            if step:
                op.work = replace(op.work, operation="shift", by=step * size)
            else:
                op.work = replace(op.work, nbytes=op.work.nbytes if size > 1 else 0, members=tuple(range(size)))
    return _first_kernels(inside)[-1]


def _first_kernels(parts: Sequence[list[Op]]) -> list[Op]:
    """Returns the parts of the first kernel: gathers over ranks that share experts may come before it."""
    return next(ops for ops in parts if ops[0].stream == COMPUTE)


PARTS = 1 << 20
"""Parts of all tokens of which unequal chunks are multiples."""


def exchange_within_machines(
    rewrite: Rewrite, expert_round: ExpertRound, load: ExpertLoad, outgoing: float, machine: int, size: int
) -> Op:
    """Splits a round into shifted steps between the groups of `size` ranks of a machine of `machine` ranks, and then
    between machines, to which a share `outgoing` of the copies goes. Returns the first kernel of the last step.

    Step j within a machine goes to the j-th group further round in it; the steps to the d-th machine further round,
    each for a group, go to the ranks at the same place there.
    """
    work = expert_round.out.work
    assert isinstance(work, Collective)
    ranks, groups = len(load.rank_loads), machine // size
    far = outgoing * (work.nbytes / load.remote if load.remote else 0.0)
    near = max(0.0, work.nbytes * (ranks - 1) / ranks - far) / max(1, machine - 1) * size
    steps_outside = groups * (ranks // machine - 1)
    inside, outside = round(PARTS * (1 - outgoing) / groups), round(PARTS * outgoing / steps_outside)
    parts = chunk_round(rewrite, expert_round, [inside] * groups + [outside] * (steps_outside if outside else 0))
    for steps in (parts[0], parts[-1]):
        _shift_within_machine(steps[:groups], round(near), machine, size)
        for step, op in enumerate(steps[groups:]):
            assert isinstance(op.work, Collective)
            further = step // groups + 1
            op.work = replace(op.work, operation="shift", by=further * machine, nbytes=round(far / steps_outside))
    return _first_kernels(parts[1:-1])[-1]


def _shift_within_machine(steps: Sequence[Op], nbytes: int, machine: int, size: int) -> None:
    """Lets each step but the first go so many groups of `size` ranks further in a machine of `machine` ranks."""
    for step, op in enumerate(steps):
        assert isinstance(op.work, Collective)
        if step:
            members, by = tuple(range(machine)), step * size
            op.work = replace(op.work, nbytes=nbytes, members=members, operation="shift", by=by)
        else:
            op.work = replace(op.work, nbytes=nbytes if size > 1 else 0, members=tuple(range(size)))


def broadcast_shadows(fragment: Fragment, expert_round: ExpertRound, number: int, nbytes: int) -> list[Op]:
    """Broadcasts `number` experts of `nbytes` each to all ranks, issued after the dispatch of a round."""
    assert isinstance(expert_round.out.work, Collective)
    work = Collective("broadcast", nbytes, expert_round.out.work.axes)
    ops = [Op(f"shadow {i}", expert_round.out.stream, work, list(expert_round.out.after)) for i in range(number)]
    place = fragment.forward.index(expert_round.out) + 1
    fragment.forward[place:place] = ops
    return ops


def reduce_shadow_gradients(fragment: Fragment, shadows: Sequence[Op]) -> None:
    """Reduces the gradients of shadows to their owners as soon as all are computed; until then ranks hold the shadows,
    and from the first gradient on their gradients.
    """
    trained = [param for param in fragment.params if param.view and param.trained]
    ready = sorted({fragment.backward.index(param.ready) for param in trained})
    gradients = [fragment.backward[place] for place in ready]
    ops = []
    for op in shadows:
        assert isinstance(op.work, Collective)
        ops.append(
            replace(op, name=f"d{op.name}", work=replace(op.work, operation="reduce"), after=gradients, phase="W")
        )
    nbytes = sum(op.work.nbytes for op in shadows if isinstance(op.work, Collective))
    last = [*fragment.forward, *fragment.backward, *(ops if trained else [])][-1]
    fragment.tensor_uses += [TensorUse("shadows", nbytes, at, at is shadows[0], "buffers") for at in (shadows[0], last)]
    if trained:
        place = ready[-1] + 1
        fragment.backward[place:place] = ops
        fragment.tensor_uses += [
            TensorUse("d:shadows", nbytes, at, at is gradients[0], "buffers") for at in (gradients[0], last)
        ]
        for param in trained:
            param.ready = last
