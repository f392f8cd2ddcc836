"""Where tokens go to their experts and come back: the rounds of a layer's experts, found in what was lowered.

A *round* is one pass of tokens through experts on other ranks: an all-to-all out, the kernels of the experts, an
all-to-all back. A layer has one forward, one backward (the gradients of the results out, those of the tokens back) and
one more where its experts are computed again. Schemes that exchange tokens in another way, or while experts work,
put other ops in their places. Gradients of weights are no part of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from simulator.ir.modules import MoE
from simulator.ir.moe_operators import ExpertLinear, Permute, TopK
from simulator.ir.ops import Collective, Fragment, Op, TensorUse
from simulator.lowering.rewrite import Rewrite, working_predecessors


@dataclass(frozen=True)
class ExpertRound:
    """out, back: the all-to-alls; inside: the ops on the way from one to the other, in issue order."""

    out: Op
    inside: list[Op]
    back: Op

    @property
    def ops(self) -> list[Op]:
        return [self.out, *self.inside, self.back]


@dataclass(frozen=True)
class MoESizes:
    """What a layer's experts are to a scheme.

    hidden: elements of a token; topk: experts that it goes to, of so many `experts`; copies: of tokens, of all ranks of
    the stage together, that go to experts; weights: elements of the matrices of one expert.
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
        tensors = (one.dims for operator in operators if isinstance(operator, ExpertLinear) for one in operator.weights)
        matrices = sum(prod(dim.size for dim in dims.values()) for dims in tensors if {"h", "f"} <= dims.keys())
        copies = sent["b"].size * sent["s"].size
        sizes = sent["h"].size, chosen["k"].size, composite.experts, copies, matrices / composite.experts
        return cls(*map(int, sizes))


def find_rounds(fragment: Fragment, parts: Iterable[str]) -> list[ExpertRound]:
    """The rounds among ranks of `parts` in a fragment that holds one layer's experts; none where no token is sent."""
    return [
        ExpertRound(ends[0], _ops_between(fragment, *ends), ends[1])
        for ends in find_all_to_alls(fragment, parts)
        if len(ends) == 2
    ]


def find_all_to_alls(fragment: Fragment, parts: Iterable[str]) -> list[list[Op]]:
    """The all-to-alls among ranks of `parts` that each pass makes: out and back, or out alone where nobody below the
    experts wants a gradient."""
    mine, found = set(parts), []
    for issued in (fragment.forward, fragment.backward):
        for phase in dict.fromkeys(op.phase for op in issued):
            found.append([op for op in issued if op.phase == phase and _is_all_to_all(op, mine)])
    return [ends for ends in found if ends]


def _is_all_to_all(op: Op, parts: set[str]) -> bool:
    work = op.work
    return isinstance(work, Collective) and work.operation == "all_to_all" and parts >= set(work.axes)


def _ops_between(fragment: Fragment, out: Op, back: Op) -> list[Op]:
    """The ops that wait for `out` and that `back` waits for, in issue order; gradients of weights are none of them."""
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


def chunk_round(rewrite: Rewrite, one: ExpertRound, n: int) -> list[list[Op]]:
    """A round in `n` parts of its tokens: each goes out, passes its experts and comes back by itself. Gradients of
    weights follow when all parts have passed."""
    wait_for_tokens_only(one)
    return rewrite.chunk(one.ops, n)


def chunked_round_s(n: int, exchange: float, computing: float) -> float:
    """Seconds of a round in `n` equal parts, one after another on each stream: PipeMoE, section IV.

    exchange, computing: seconds of one whole exchange (there are two), and of all that the experts compute.
    """
    t, u = exchange / n, computing / n
    return max(2 * n * t + max(0, u - (n - 1) * t), 2 * t + n * u)


def wait_for_tokens_only(one: ExpertRound) -> None:
    """Lets what is sent in a round wait for its tokens only, even where a framework lets it wait for the gradients of
    weights that are issued before."""
    one.back.after = one.inside[-1:]
    for op in one.inside:
        op.after = [other for other in op.after if other.phase != "W"]


def shift_between_groups(steps: Sequence[Op], size: int) -> None:
    """Parts of an all-to-all, each between groups of `size` ranks: of all, step j goes to the j-th group further round.
    The first stays within a group, and of a rank alone nothing moves."""
    for step, op in enumerate(steps):
        assert isinstance(op.work, Collective)
        if step:
            op.work = replace(op.work, operation="shift", by=step * size)
        else:
            op.work = replace(op.work, nbytes=op.work.nbytes if size > 1 else 0, members=tuple(range(size)))


def broadcast_shadows(fragment: Fragment, one: ExpertRound, number: int, nbytes: int) -> list[Op]:
    """So many experts, of `nbytes` each, on their way to all ranks: issued behind the tokens that go out in a round."""
    assert isinstance(one.out.work, Collective)
    work = Collective("broadcast", nbytes, one.out.work.axes)
    ops = [Op(f"shadow {i}", one.out.stream, work, list(one.out.after)) for i in range(number)]
    place = fragment.forward.index(one.out) + 1
    fragment.forward[place:place] = ops
    return ops


def reduce_shadow_gradients(fragment: Fragment, shadows: Sequence[Op]) -> None:
    """Gradients of shadows go to their owners as soon as all are made; until then ranks hold the shadows, and from the
    first on their gradients."""
    trained = [param for param in fragment.params if param.view and param.trained]
    ready = sorted({fragment.backward.index(param.ready) for param in trained})
    made = [fragment.backward[place] for place in ready]
    ops = []
    for op in shadows:
        assert isinstance(op.work, Collective)
        ops.append(replace(op, name=f"d{op.name}", work=replace(op.work, operation="reduce"), after=made, phase="W"))
    nbytes = sum(op.work.nbytes for op in shadows if isinstance(op.work, Collective))
    last = [*fragment.forward, *fragment.backward, *(ops if trained else [])][-1]
    fragment.tensor_uses += [TensorUse("shadows", nbytes, at, at is shadows[0], "buffers") for at in (shadows[0], last)]
    if trained:
        place = ready[-1] + 1
        fragment.backward[place:place] = ops
        fragment.tensor_uses += [TensorUse("d:shadows", nbytes, at, at is made[0], "buffers") for at in (made[0], last)]
        for param in trained:
            param.ready = last
