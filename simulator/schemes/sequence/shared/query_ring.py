"""Ring attention whose backward pass sends queries round the ring, while keys, values and their gradients stay.

With queries go the gradient of the output, the row sums of the scores, and D, the row sums of output times its
gradient, from which kernels compute the scores and their gradients again. Gradients of queries follow one step behind,
and are home one hop after the last step (MayDomine/Burst-Attention, burst_attn_interface.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshcast.simulator.ir.attention_mask import ScoreBlock
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.schemes.sequence.shared.attention_steps import AttentionSteps
from meshcast.simulator.schemes.sequence.shared.ring_attention import pass_keys


def ring_of_queries(
    operator: CoreAttention, inner: LowerModule, ring_axes: tuple[str, ...], mask_blocks: Sequence[ScoreBlock]
) -> Fragment:
    """A ring of keys and values forward, and of queries backward: in backward step b a rank has the queries of the rank
    b places before it, so it goes back through the forward step that read keys from b places behind."""
    steps = AttentionSteps(operator, inner, ring_axes, mask_blocks, len(mask_blocks) - 1)
    out, o, do = steps.fragment, steps.o, f"d:{steps.o}"
    arrived = out.grad_entry[o]
    if operator.block is None:
        arrived = sum_rows(out, steps.nbytes(o, do), (row_sums_key(operator.name), steps.lse))
        steps.use_tensors(arrived, o, do)
    rotate(steps, arrived)
    return out


def rotate(steps: AttentionSteps, arrived: Op) -> None:
    """Both passes. arrived: the op after which the gradient of the output and its row sums are there."""
    _read_row_sums(steps)
    pass_keys(steps, lambda i: _backward_keys(steps, -i % steps.count))
    _pass_queries(steps, arrived)


def _read_row_sums(steps: AttentionSteps) -> None:
    """Backward kernels read D in place of the output."""
    for operator, one in zip(steps.step_operators, steps.step_fragments, strict=True):
        back, key = {*one.backward}, row_sums_key(operator.name)
        kept = [use for use in one.tensor_uses if use.op not in back or not use.key.startswith(f"{steps.o}@")]
        if all(use.key != key for use in kept):
            kept += [TensorUse(key, steps.lse, op) for op in dict.fromkeys((one.backward[0], one.backward[-1]))]
        one.tensor_uses = kept


def row_sums_key(name: str) -> str:
    """Memory key of D of an operator."""
    return f"{name}.delta"


def sum_rows(fragment: Fragment, read: int, made: tuple[str, int]) -> Op:
    """Adds the kernel that computes D. read: bytes of the output and its gradient; made: memory of D and its bytes."""
    after = [*fragment.grad_entry.values()]
    op = Op("row sums", work=Memory("rms-norm", read, made[1]), after=after, phase="B")
    fragment.backward.append(op)
    fragment.tensor_uses.append(TensorUse(*made, op, made=True))
    return op


def _pass_queries(steps: AttentionSteps, first: Op) -> None:
    """The backward pass: queries go one rank further for each step but the last, and their gradients p times."""
    out, p = steps.fragment, steps.count
    q, k, v, o = steps.q, steps.k, steps.v, steps.o
    dq, dk, dv, do = (f"d:{name}" for name in (q, k, v, o))
    bundle, queries, dkv = steps.nbytes(q, do) + 2 * steps.lse, steps.nbytes(dq), steps.nbytes(dk, dv)

    def carry_queries(hop: Op, to: int) -> None:
        """Notes the memory of a hop that brings queries, and what goes with them, to backward step `to`."""
        if to == (0 if steps.start else 1):
            steps.use_tensors(hop, q, do)
            keys = steps.memory_key("lse"), row_sums_key(steps.operator.name)
            steps.use_memory(hop, *((key, steps.lse) for key in keys))
        else:
            steps.use_memory(hop, (steps.memory_key("d:bundle", to - 1), bundle))
        steps.use_memory(hop, (steps.memory_key("d:bundle", to), bundle), made=True)

    def carry_gradients(hop: Op, to: int, home: bool = False) -> None:
        """Notes the memory of a hop that brings gradients of queries to step `to`, or home."""
        steps.use_memory(hop, (steps.memory_key("d:dq", to - 1), queries))
        if home:
            steps.use_tensors(hop, dq, made=True)
        else:
            steps.use_memory(hop, (steps.memory_key("d:dq", to), queries), made=True)

    arrived = [first]
    if steps.start:
        arrived = [steps.bring_first("place queries", bundle, arrived, "B", back=True)]
        carry_queries(arrived[0], 0)
        out.backward += arrived
    gradients, total = list[Op](), list[Op]()
    for b in range(p):
        one, block = steps.step_fragments[-b % p], steps.step_operators[-b % p].computed_block
        hops = list[Op]()
        if p > 1:
            nbytes = bundle * (b < p - 1) + queries * (b > 0)
            hops = [steps.shift("ring back", nbytes, 1, [*arrived, *gradients], "B")]
            if b < p - 1:
                carry_queries(hops[0], b + 1)
            if b:
                carry_gradients(hops[0], b)
        out.backward += hops
        one.grad_entry[o].after += arrived
        out.backward += one.backward
        gradients, own = [one.grad_exit[q]], [one.grad_exit[k], one.grad_exit[v]]
        if b:
            gradients = steps.add_gradients(f"d{q}", queries, block.queries, [*hops, *gradients])
            total = steps.add_gradients(f"d{k} d{v}", dkv, block.keys, [*total, *own])
            steps.use_memory(total[0], (steps.memory_key("d:part", b), dkv))
            steps.use_tensors(total[0], dk, dv)
        else:
            gradients, total = [Op(f"copy d{q}", work=Memory("add", queries, queries), after=gradients, phase="B")], own
            out.backward += gradients
        steps.use_memory(gradients[0], (steps.memory_key("d:dq", b), queries), made=not b)
        steps.use_memory(gradients[0], (steps.memory_key("d:part q", b), queries))
        arrived = hops
    returns = [partial(steps.shift, "ring home", queries, 1)] if p > 1 else []
    returns += [partial(steps.bring_first, "ring home to its team", queries)] if steps.start else []
    for i, send in enumerate(returns):
        gradients = [send(gradients, "B")]
        carry_gradients(gradients[0], p + i, home=i == len(returns) - 1)
        out.backward += gradients
    out.grad_exit = {q: gradients[0], k: total[0], v: total[-1]}


def _backward_keys(steps: AttentionSteps, b: int) -> dict[str, str]:
    """Memory keys of backward step b: what has come with the queries, and partial gradients."""
    step, own = steps.step_operators[-b % steps.count].name, steps.operator.name
    q, k, v, do = steps.q, steps.k, steps.v, f"d:{steps.o}"
    bundle, part = steps.memory_key("d:bundle", b), steps.memory_key("d:part", b)
    brought = {row_sums_key(step): row_sums_key(own)}
    if b or steps.start:
        brought = dict.fromkeys((q, do, f"{step}.lse", row_sums_key(step)), bundle)
    partial_keys = {f"d:{k}": part, f"d:{v}": part} if b else {}
    return brought | partial_keys | {f"d:{q}": steps.memory_key("d:part q", b)}
