"""Ring attention whose backward pass sends queries round the ring, while keys, values and their gradients stay.

With queries go the gradient of the output, the row sums of the scores, and D, the row sums of output times its
gradient, from which kernels compute the scores and their gradients again. Gradients of queries follow one step behind,
and are home one hop after the last step (MayDomine/Burst-Attention, burst_attn_interface.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.ir.attention_mask import ScoreBlock
from simulator.ir.operators import CoreAttention
from simulator.ir.ops import Fragment, Memory, Op, TensorUse
from simulator.ir.scheme import LowerModule
from simulator.schemes.sequence.shared.attention_steps import AttentionSteps
from simulator.schemes.sequence.shared.ring_attention import pass_keys


def ring_of_queries(
    operator: CoreAttention, inner: LowerModule, ring_axes: tuple[str, ...], mask_blocks: Sequence[ScoreBlock]
) -> Fragment:
    """A ring of keys and values forward, and of queries backward: in backward step b a rank has the queries of the rank
    b places before it, so it goes back through the forward step that read keys from b places behind."""
    steps = AttentionSteps(operator, inner, ring_axes, mask_blocks, len(mask_blocks) - 1)
    _read_row_sums(steps)
    pass_keys(steps, lambda i: _backward_keys(steps, -i % steps.count))
    pass_queries(steps)
    return steps.fragment


def _read_row_sums(steps: AttentionSteps) -> None:
    """Backward kernels read D in place of the output."""
    for operator, one in zip(steps.step_operators, steps.step_fragments, strict=True):
        back, key = {*one.backward}, _row_sums(operator.name)
        kept = [use for use in one.tensor_uses if use.op not in back or not use.key.startswith(f"{steps.o}@")]
        if all(use.key != key for use in kept):
            kept += [TensorUse(key, steps.lse, op) for op in dict.fromkeys((one.backward[0], one.backward[-1]))]
        one.tensor_uses = kept


def _row_sums(name: str) -> str:
    """Memory key of D of an operator."""
    return f"{name}.delta"


def pass_queries(steps: AttentionSteps) -> None:
    """The backward pass: queries go one rank further for each step but the last, and their gradients p times."""
    out, p = steps.fragment, steps.count
    q, k, v, o = steps.q, steps.k, steps.v, steps.o
    dq, dk, dv, do = (f"d:{name}" for name in (q, k, v, o))
    bundle, queries, dkv = steps.nbytes(q, do) + 2 * steps.lse, steps.nbytes(dq), steps.nbytes(dk, dv)
    sums = _row_sums(steps.operator.name)
    arrived = [out.grad_entry[o]]
    if steps.operator.block is None:
        arrived = [_sum_rows(steps, sums)]
    gradients, total = list[Op](), list[Op]()
    for b in range(p):
        one, block = steps.step_fragments[-b % p], steps.step_operators[-b % p].computed_block
        grads = steps.memory_key("d:dq", b)
        hop = steps.shift("ring back", bundle * (b < p - 1) + queries * (b > 0), 1, [*arrived, *gradients], "B")
        if b < p - 1:
            if b:
                steps.use_memory(hop, (steps.memory_key("d:bundle", b), bundle))
            else:
                steps.use_tensors(hop, q, do)
                steps.use_memory(hop, (steps.memory_key("lse"), steps.lse), (sums, steps.lse))
            steps.use_memory(hop, (steps.memory_key("d:bundle", b + 1), bundle), made=True)
        if b:
            steps.use_memory(hop, (steps.memory_key("d:dq", b - 1), queries))
            steps.use_memory(hop, (grads, queries), made=True)
        out.backward.append(hop)
        one.grad_entry[o].after += arrived
        out.backward += one.backward
        gradients, own = [one.grad_exit[q]], [one.grad_exit[k], one.grad_exit[v]]
        if b:
            gradients = steps.add_gradients(f"d{q}", queries, block.queries, [hop, *gradients])
            steps.use_memory(gradients[0], (grads, queries))
            total = steps.add_gradients(f"d{k} d{v}", dkv, block.keys, [*total, *own])
            steps.use_memory(total[0], (steps.memory_key("d:part", b), dkv))
            steps.use_tensors(total[0], dk, dv)
        else:
            gradients, total = [Op(f"copy d{q}", work=Memory("add", queries, queries), after=gradients, phase="B")], own
            steps.use_memory(gradients[0], (grads, queries), made=True)
            out.backward += gradients
        steps.use_memory(gradients[0], (steps.memory_key("d:part q", b), queries))
        arrived = [hop]
    home = steps.shift("ring home", queries, 1, gradients, "B")
    steps.use_memory(home, (steps.memory_key("d:dq", p - 1), queries))
    steps.use_tensors(home, dq, made=True)
    out.backward.append(home)
    out.grad_exit = {q: home, k: total[0], v: total[-1]}


def _sum_rows(steps: AttentionSteps, key: str) -> Op:
    """The kernel that computes D, the row sums of the output times its gradient."""
    out, o, do = steps.fragment, steps.o, f"d:{steps.o}"
    work = Memory("rms-norm", steps.nbytes(o) + steps.nbytes(do), steps.lse)
    made = Op(f"rows {steps.operator.name}", work=work, after=[out.grad_entry[o]], phase="B")
    out.backward.append(made)
    steps.use_tensors(made, o, do)
    steps.use_memory(made, (key, steps.lse), made=True)
    return made


def _backward_keys(steps: AttentionSteps, b: int) -> dict[str, str]:
    """Memory keys of backward step b: what has come with the queries, and partial gradients."""
    step, own = steps.step_operators[-b % steps.count].name, steps.operator.name
    q, k, v, do = steps.q, steps.k, steps.v, f"d:{steps.o}"
    if not b:
        return {f"d:{q}": steps.memory_key("d:part q", 0), _row_sums(step): _row_sums(own)}
    bundle, part = steps.memory_key("d:bundle", b), steps.memory_key("d:part", b)
    brought = dict.fromkeys((q, do, f"{step}.lse", _row_sums(step)), bundle)
    return brought | {f"d:{q}": steps.memory_key("d:part q", b), f"d:{k}": part, f"d:{v}": part}
