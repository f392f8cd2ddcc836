"""DistFlashAttn: the steps of attention in which ranks that the causal mask would leave idle help later ranks.

What a rank fetches and what it returns during one step is one batched group of messages in the public code (LightSeq,
async_communication.py: batch_isend_irecv), which leaves by the same port: both are on one stream, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from meshcast.simulator.ir.attention_mask import DIAGONAL, WHOLE, RankShare, ScoreBlock
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment, Op
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.schemes.sequence.shared.attention_steps import HALF, AttentionSteps, Shares


def attend_with_helpers(
    operator: CoreAttention, inner: LowerModule, ring_axes: tuple[str, ...], ranks: int
) -> Fragment:
    """DistFlashAttn: step t computes on the keys and values of the rank t places before; the first t ranks, which have
    none, help the last t.

    What step t needs is fetched during the step before, and what it computed for other ranks is returned during the
    next: outputs of helpers; backward, the gradients of fetched keys and values, and of the queries of helped ranks.
    """
    p, last = ranks, ranks // 2
    helpers = [t if 2 * t < p else 0 for t in range(last + 1)]
    found = [DIAGONAL, *(WHOLE if helpers[t] else ScoreBlock((RankShare(HALF),)) for t in range(1, last + 1))]
    steps = AttentionSteps(operator, inner, ring_axes, found, last + sum(n > 0 for n in helpers))
    out, q, k, v, o = steps.fragment, steps.q, steps.k, steps.v, steps.o
    dq, dk, dv = (f"d:{name}" for name in (q, k, v))
    kv, dkv, queries, output = (steps.nbytes(*names) for names in ((k, v), (dk, dv), (q,), (o,)))

    def send(name: str, t: int, by: int, keys: int, other: int, after: Sequence[Op], phase: str) -> Op:
        """p - t ranks send `keys` bytes of keys and values; ranks that help or are helped send `other` bytes of
        queries.
        """
        nbytes = [keys] * (p - t) + [other] * helpers[t]
        mean = Fraction(sum(nbytes), p)
        return steps.shift(name, float(mean), by, after, phase, float(max(nbytes) / mean))

    def behind(t: int) -> Shares:
        return Fraction(p - t, p), p / (p - t)

    def few(t: int) -> Shares:
        return Fraction(t, p), p / t

    def fetch(t: int, asked: int, after: Sequence[Op], phase: str, one: Fragment) -> Op:
        """Fetches keys and values, or for helpers queries and what goes with them, for step t."""
        hop = send("fetch", t, t, kv, asked, after, phase)
        key, nbytes = steps.memory_key(f"{phase} fetched", t), max(kv, asked) if helpers[t] else kv
        steps.use_tensors(hop, q, k, v)
        steps.use_memory(hop, (key, nbytes), made=True)
        ops = one.forward if phase == "F" else one.backward
        steps.use_memory(ops[0], (key, nbytes))
        steps.use_memory(ops[-1], (key, nbytes))
        return hop

    came, free = list[Op](), list[Op]()
    for t in range(last + 2):
        arrived = came
        if t < last:
            came = [fetch(t + 1, queries, [*out.entry.values(), *free], "F", steps.step_fragments[t + 1])]
            out.forward += came
        back = t > 0 and helpers[t - 1]
        if back:
            hop = send("return", t - 1, 1 - t, 0, output, free, "F")
            steps.use_memory(hop, *steps.partial_output(t - 1))
            steps.use_memory(hop, (steps.memory_key("returned", t - 1), output + steps.lse), made=True)
            out.forward.append(hop)
        if t <= last:
            one = steps.step_fragments[t]
            made = (
                {dq: steps.memory_key("d:q", t), dk: steps.memory_key("d:kv", t), dv: steps.memory_key("d:kv", t)}
                if t
                else {}
            )
            steps.take_over_memory(t, {}, made)
            one.entry[k].after += arrived
            out.forward += one.forward
            free = [one.exit[o]]
            if t:
                steps.merge_output(behind(t), free, *steps.partial_output(t))
        if back:
            steps.merge_output(few(t - 1), [hop], (steps.memory_key("returned", t - 1), output + steps.lse))

    came, free = [], []
    total = {q: [steps.step_fragments[0].grad_exit[q]], k: [steps.step_fragments[0].grad_exit[name] for name in (k, v)]}

    def add_gradients(name: str, nbytes: int, shares: Shares, after: Sequence[Op], key: str) -> None:
        whole = (dq,) if name == q else (dk, dv)
        total[name] = steps.add_gradients(" ".join(whole).replace(":", ""), nbytes, shares, [*total[name], *after])
        steps.use_memory(total[name][0], (key, nbytes))
        steps.use_tensors(total[name][0], *whole)

    for t in range(last + 2):
        arrived = came
        if t < last:
            asked = queries + 2 * output
            came = [fetch(t + 1, asked, [out.grad_entry[o], *free], "B", steps.step_fragments[t + 1])]
            out.backward += came
        key = steps.memory_key("d:returned", t - 1)
        if t > 1:
            hop = send("return", t - 1, 1 - t, dkv, queries, free, "B")
            steps.use_memory(hop, (steps.memory_key("d:kv", t - 1), dkv), (steps.memory_key("d:q", t - 1), queries))
            steps.use_memory(hop, (key, max(dkv, queries)), made=True)
            out.backward.append(hop)
        if t <= last:
            one = steps.step_fragments[t]
            one.grad_entry[o].after += arrived
            out.backward += one.backward
            free = [one.grad_exit[name] for name in (q, k, v)]
            if t:
                add_gradients(q, queries, behind(t), free, steps.memory_key("d:q", t))
            if helpers[t]:
                add_gradients(k, dkv, few(t), free, steps.memory_key("d:kv", t))
        if t > 1:
            add_gradients(k, dkv, behind(t - 1), [hop], key)
        if t > 1 and helpers[t - 1]:
            add_gradients(q, queries, few(t - 1), [hop], key)
    out.grad_exit = {q: total[q][0], k: total[k][0], v: total[k][0]}
    return out
