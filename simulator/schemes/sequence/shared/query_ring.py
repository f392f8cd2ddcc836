"""Ring attention whose backward pass sends queries round the ring, while keys, values and their gradients stay.

With queries go the gradient of the output, the row sums of the scores, and D, the row sums of output times its
gradient, from which kernels compute the scores and their gradients again. Gradients of queries follow a step behind,
and are home a hop after the last step (MayDomine/Burst-Attention, burst_attn_interface.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from meshcast.simulator.ir.attention_mask import ScoreBlock
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment, Memory, Op, TensorUse
from meshcast.simulator.ir.scheme import LowerModule
from meshcast.simulator.schemes.sequence.shared.attention_steps import AttentionSteps
from meshcast.simulator.schemes.sequence.shared.ring_attention import pass_keys

PassForward = Callable[[AttentionSteps, Callable[[int], Mapping[str, str]]], None]
"""Adds a forward pass, as `pass_keys` does."""


def ring_of_queries(
    operator: CoreAttention,
    inner: LowerModule,
    ring_axes: tuple[str, ...],
    mask_blocks: Sequence[ScoreBlock],
    pass_forward: PassForward = pass_keys,
) -> Fragment:
    """Computes attention by a ring of keys and values, or by `pass_forward`, forward, and of queries backward: in
    backward step b a rank has the queries of the rank b places before it, so it goes back through the forward step
    whose block has queries and keys at that distance."""
    steps = AttentionSteps(operator, inner, ring_axes, mask_blocks, len(mask_blocks) - 1)
    out, o, do = steps.fragment, steps.o, steps.do
    arrived = out.grad_entry[o]
    if operator.block is None:
        arrived = sum_rows(out, steps.nbytes(o, do), (row_sums_key(operator.name), steps.lse))
        steps.use_tensors(arrived, o, do)
    rotate(steps, arrived, pass_forward)
    return out


def rotate(steps: AttentionSteps, arrived: Op, pass_forward: PassForward = pass_keys) -> None:
    """Adds both passes. arrived: the op after which the gradient of the output and its row sums are there."""
    _read_row_sums(steps)
    pass_forward(steps, lambda i: _backward_keys(steps, -i % steps.count))
    _QueryRing(steps).run(arrived)


def _read_row_sums(steps: AttentionSteps) -> None:
    """Lets backward kernels read D in place of the output."""
    for operator, step in zip(steps.step_operators, steps.step_fragments, strict=True):
        back, key = {*step.backward}, row_sums_key(operator.name)
        kept = [use for use in step.tensor_uses if use.op not in back or not use.key.startswith(f"{steps.o}@")]
        if all(use.key != key for use in kept):
            kept += [TensorUse(key, steps.lse, op) for op in dict.fromkeys((step.backward[0], step.backward[-1]))]
        step.tensor_uses = kept


def row_sums_key(name: str) -> str:
    """Returns the memory key of D of an operator."""
    return f"{name}.delta"


def sum_rows(fragment: Fragment, read: int, written: tuple[str, int]) -> Op:
    """Adds the kernel that computes D. read: bytes of the output and its gradient; written: memory of D and its
    bytes."""
    after = [*fragment.grad_entry.values()]
    op = Op("row sums", work=Memory("rms-norm", read, written[1]), after=after, phase="B")
    fragment.backward.append(op)
    fragment.tensor_uses.append(TensorUse(*written, op, made=True))
    return op


class _QueryRing:
    """The backward pass: queries go a rank further for each step but the last, and their gradients p times.

    bundle: bytes of queries and what goes with them.
    queries: bytes of their gradients.
    """

    def __init__(self, steps: AttentionSteps) -> None:
        self.steps, self.out = steps, steps.fragment
        self.bundle = steps.nbytes(steps.q, steps.do) + 2 * steps.lse
        self.queries = steps.nbytes(f"d:{steps.q}")

    def run(self, first: Op) -> None:
        """Adds the pass. first: the op after which the gradient of the output and its row sums are there."""
        steps, out, p = self.steps, self.out, self.steps.count
        arrived, gradients, total = [first], list[Op](), list[Op]()
        if steps.start:
            arrived = [steps.bring_first("place queries", self.bundle, arrived, "B", back=True)]
            self._carry_queries(arrived[0], 0)
            out.backward += arrived
        for b in range(p):
            step = steps.step_fragments[-b % p]
            hops = [self._send_back(b, [*arrived, *gradients])] if p > 1 else []
            step.grad_entry[steps.o].after += arrived
            out.backward += step.backward
            gradients = self._add_query_gradients(b, [*hops, step.grad_exit[steps.q]])
            total = self._add_key_gradients(b, [*total, step.grad_exit[steps.k], step.grad_exit[steps.v]])
            arrived = hops
        returns = [partial(steps.shift, "ring home", self.queries, 1)] if p > 1 else []
        returns += [partial(steps.bring_first, "ring home to its team", self.queries)] if steps.start else []
        for i, send in enumerate(returns):
            gradients = [send(gradients, "B")]
            self._carry_gradients(gradients[0], p + i, home=i == len(returns) - 1)
            out.backward += gradients
        out.grad_exit = {steps.q: gradients[0], steps.k: total[0], steps.v: total[-1]}

    def _send_back(self, b: int, after: Sequence[Op]) -> Op:
        last = b == self.steps.count - 1
        nbytes = self.bundle * (not last) + self.queries * (b > 0)
        hop = self.steps.shift("ring back", nbytes, 1, after, "B")
        if not last:
            self._carry_queries(hop, b + 1)
        if b:
            self._carry_gradients(hop, b)
        self.out.backward.append(hop)
        return hop

    def _carry_queries(self, hop: Op, to: int) -> None:
        """Notes the memory of a hop that brings queries, and what goes with them, to backward step `to`."""
        steps = self.steps
        if to == (0 if steps.start else 1):
            steps.use_tensors(hop, steps.q, steps.do)
            keys = steps.memory_key("lse"), row_sums_key(steps.operator.name)
            steps.use_memory(hop, *((key, steps.lse) for key in keys))
        else:
            steps.use_memory(hop, (steps.memory_key("d:bundle", to - 1), self.bundle))
        steps.use_memory(hop, (steps.memory_key("d:bundle", to), self.bundle), made=True)

    def _carry_gradients(self, hop: Op, to: int, home: bool = False) -> None:
        """Notes the memory of a hop that brings gradients of queries to step `to`, or home."""
        self.steps.use_memory(hop, (self.steps.memory_key("d:dq", to - 1), self.queries))
        if home:
            self.steps.use_tensors(hop, f"d:{self.steps.q}", made=True)
        else:
            self.steps.use_memory(hop, (self.steps.memory_key("d:dq", to), self.queries), made=True)

    def _add_query_gradients(self, b: int, after: Sequence[Op]) -> list[Op]:
        steps, name = self.steps, self.steps.q
        if b:
            block = steps.step_operators[-b % steps.count].computed_block
            sums = steps.add_gradients(f"d{name}", self.queries, block.queries, after)
        else:
            work = Memory("add", self.queries, self.queries)
            sums = [Op(f"copy d{name}", work=work, after=list(after[-1:]), phase="B")]
            self.out.backward += sums
        steps.use_memory(sums[0], (steps.memory_key("d:dq", b), self.queries), made=not b)
        steps.use_memory(sums[0], (steps.memory_key("d:part q", b), self.queries))
        return sums

    def _add_key_gradients(self, b: int, after: list[Op]) -> list[Op]:
        steps = self.steps
        if not b:
            return after
        block, names = steps.step_operators[-b % steps.count].computed_block, (f"d:{steps.k}", f"d:{steps.v}")
        nbytes = steps.nbytes(*names)
        sums = steps.add_gradients(f"d{steps.k} d{steps.v}", nbytes, block.keys, after)
        steps.use_memory(sums[0], (steps.memory_key("d:part", b), nbytes))
        steps.use_tensors(sums[0], *names)
        return sums


def _backward_keys(steps: AttentionSteps, b: int) -> dict[str, str]:
    """Returns the memory keys of backward step b: what has come with the queries, and partial gradients."""
    step, merged = steps.step_operators[-b % steps.count].name, steps.operator.name
    q, k, v, do = steps.q, steps.k, steps.v, steps.do
    bundle, part = steps.memory_key("d:bundle", b), steps.memory_key("d:part", b)
    brought = {row_sums_key(step): row_sums_key(merged)}
    if b or steps.start:
        brought = dict.fromkeys((q, do, f"{step}.lse", row_sums_key(step)), bundle)
    partial_keys = {f"d:{k}": part, f"d:{v}": part} if b else {}
    return brought | partial_keys | {f"d:{q}": steps.memory_key("d:part q", b)}
