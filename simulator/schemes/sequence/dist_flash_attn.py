"""DistFlashAttn: ranks that the causal mask would leave idle compute blocks for later ranks.

Every rank holds a contiguous 1/p of the positions. In step t rank r attends to the keys and values of rank r-t, which
it fetches directly. The first t ranks have no such rank: they fetch queries of the last ranks instead, attend with
their keys, and return the partial outputs a step later. So floor(p/2) steps after the diagonal step do the work of
p-1, and no masked block is sent. What the next step needs is fetched during the current step; what a rank fetches and
returns during a step is a batched group of messages in the public code, each after the other.

    p = 4   step 0      step 1      step 2 (no rank left to help)
    rank 0  q0 x kv0    q3 x kv0    .
    rank 1  q1 x kv1    q1 x kv0    .
    rank 2  q2 x kv2    q2 x kv1    q2 x kv0
    rank 3  q3 x kv3    q3 x kv2    q3 x kv1

A rank computes 1/2 + floor(p/2) blocks where p/2 would be ideal: nothing is lost for odd p, 1/(p+1) for even p. With n
tokens and k, h the widths of keys and queries, step t sends 2 k (p-t)/p + 2 h t/p of n/p elements per rank on average
(the second term where a rank helps, 2t < p) forward, without the row sums: (p-1)/p n h in all for MHA and odd p.
Backward, with the output, its gradient and the results, it is twice that.

References: Li et al. 2023, arXiv 2310.03294, sections 3.1 and 3.2; LightSeq, async_communication.py.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from meshcast.simulator.ir.attention_mask import DIAGONAL, WHOLE, RankShare, ScoreBlock
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment, Op
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.attention_steps import HALF, AttentionSteps, Shares
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme


class DistFlashAttn(RingScheme):
    role = "schedule of helpers"
    kernels, kernels_reason = "flash", "skips masked blocks, which only flash kernels do"
    only_causal = True
    paper = Paper(
        "arXiv:2310.03294", "DISTFLASHATTN: Distributed Memory-efficient Attention for Long-context LLMs Training", 2023
    )

    @property
    def token_order(self) -> str:
        return "with helpers"

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        return HelperAttention(operator, inner, self.ring_axes, self.ranks).fragment

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, kv, h = setting.cp, setting.kv_width, setting.h
        n = setting.b * setting.s / p * 2
        forward = backward = Fraction(0)
        for t in range(1, p // 2 + 1):
            helpers = t if 2 * t < p else 0
            forward += Fraction((p - t) * 2 * kv + helpers * 2 * h, p)
            backward += Fraction((p - t) * 4 * kv + helpers * 4 * h, p)
        yield ClosedForm("sent_forward", float(forward * n), "section 3.1, summed over the steps")
        yield ClosedForm("sent_backward", float(backward * n), "section 3.1, summed over the steps")
        if p > 1:
            efficiency = 1.0 if p % 2 else p / (p + 1)
            yield ClosedForm("attention_efficiency", efficiency, "section 3.1: idle 1/(2p) of p^2 for even p")


class HelperAttention(AttentionSteps):
    """Attention in steps: step t computes on the keys and values of the rank t places before; the first t ranks, which
    have none, help the last t.

    What step t needs is fetched during the step before, and what it computed for other ranks is returned during the
    next: outputs of helpers; backward, the gradients of fetched keys and values, and of the queries of helped ranks.

    last: the number of the last step.
    helpers: by step, how many ranks help.
    """

    def __init__(self, operator: CoreAttention, inner: LowerModule, ring_axes: tuple[str, ...], ranks: int) -> None:
        self.ranks, self.last = ranks, ranks // 2
        self.helpers = [t if 2 * t < ranks else 0 for t in range(self.last + 1)]
        blocks = [DIAGONAL, *(WHOLE if helpers else ScoreBlock((RankShare(HALF),)) for helpers in self.helpers[1:])]
        super().__init__(operator, inner, ring_axes, blocks, self.last + sum(map(bool, self.helpers)))
        self.query_bytes, self.output_bytes = self.nbytes(self.q), self.nbytes(self.o)
        self.key_value_bytes = self.nbytes(self.k, self.v)
        self.gradients = {name: f"d:{name}" for name in (self.q, self.k, self.v)}
        self.key_value_gradient_bytes = self.nbytes(self.gradients[self.k], self.gradients[self.v])
        self._run_forward()
        self._run_backward()

    def ranks_with_own_block(self, t: int) -> Shares:
        """Returns the ranks that compute a block of their queries in step t: their keys are t places before."""
        return Fraction(self.ranks - t, self.ranks), self.ranks / (self.ranks - t)

    def helping_ranks(self, t: int) -> Shares:
        """Returns the ranks that help in step t; as many are helped."""
        return Fraction(t, self.ranks), self.ranks / t

    def _run_forward(self) -> None:
        fetched, computed = list[Op](), list[Op]()
        for t in range(self.last + 2):
            arrived, fetched = fetched, []
            if t < self.last:
                entry = self.fragment.entry.values()
                fetched = [self._fetch(t + 1, self.query_bytes, [*entry, *computed], "F")]
            returned = [self._return_output(t - 1, computed)] if t and self.helpers[t - 1] else []
            if t <= self.last:
                computed = self._compute_forward(t, arrived)
            if returned:
                self.merge_output(self.helping_ranks(t - 1), returned, self._returned_output(t - 1))

    def _run_backward(self) -> None:
        first = self.step_fragments[0].grad_exit
        sums = {self.q: [first[self.q]], self.k: [first[self.k], first[self.v]]}
        fetched, computed = list[Op](), list[Op]()
        for t in range(self.last + 2):
            arrived, fetched = fetched, []
            if t < self.last:
                asked = self.query_bytes + 2 * self.output_bytes
                fetched = [self._fetch(t + 1, asked, [self.fragment.grad_entry[self.o], *computed], "B")]
            returned = [self._return_gradients(t - 1, computed)] if t > 1 else []
            if t <= self.last:
                computed = self._compute_backward(t, arrived)
                if t:
                    self._add_up(sums, self.q, self.ranks_with_own_block(t), computed, self.memory_key("d:q", t))
                if self.helpers[t]:
                    self._add_up(sums, self.k, self.helping_ranks(t), computed, self.memory_key("d:kv", t))
            if returned:
                key = self.memory_key("d:returned", t - 1)
                self._add_up(sums, self.k, self.ranks_with_own_block(t - 1), returned, key)
                if self.helpers[t - 1]:
                    self._add_up(sums, self.q, self.helping_ranks(t - 1), returned, key)
        self.fragment.grad_exit = {self.q: sums[self.q][0], self.k: sums[self.k][0], self.v: sums[self.k][0]}

    # ------------------------------------------------------------------------------------------ messages

    def _fetch(self, t: int, asked: int, after: Sequence[Op], phase: str) -> Op:
        """Fetches keys and values for step t, or for helpers queries and what goes with them: `asked` bytes."""
        fetch = self._send("fetch", t, t, (self.key_value_bytes, asked), after, phase)
        nbytes = max(self.key_value_bytes, asked) if self.helpers[t] else self.key_value_bytes
        memory = self.memory_key(f"{phase} fetched", t), nbytes
        self.use_tensors(fetch, self.q, self.k, self.v)
        self.use_memory(fetch, memory, made=True)
        step, out = self.step_fragments[t], self.fragment
        readers, ops = (step.forward, out.forward) if phase == "F" else (step.backward, out.backward)
        self.use_memory(readers[0], memory)
        self.use_memory(readers[-1], memory)
        ops.append(fetch)
        return fetch

    def _return_output(self, t: int, computed: Sequence[Op]) -> Op:
        """Returns what helpers computed in step t to the ranks of the queries."""
        back = self._send("return", t, -t, (0, self.output_bytes), computed, "F")
        self.use_memory(back, *self.partial_output(t))
        self.use_memory(back, self._returned_output(t), made=True)
        self.fragment.forward.append(back)
        return back

    def _return_gradients(self, t: int, computed: Sequence[Op]) -> Op:
        """Returns the gradients of fetched keys and values and those of the queries of helped ranks."""
        key_values, queries = self.key_value_gradient_bytes, self.query_bytes
        back = self._send("return", t, -t, (key_values, queries), computed, "B")
        self.use_memory(back, (self.memory_key("d:kv", t), key_values), (self.memory_key("d:q", t), queries))
        self.use_memory(back, (self.memory_key("d:returned", t), max(key_values, queries)), made=True)
        self.fragment.backward.append(back)
        return back

    def _send(self, name: str, t: int, by: int, nbytes: tuple[int, int], after: Sequence[Op], phase: str) -> Op:
        """Sends to the ranks `by` places further: in step t ranks with a block of their queries the first of `nbytes`,
        ranks that help or are helped the second.
        """
        sent = [nbytes[0]] * (self.ranks - t) + [nbytes[1]] * self.helpers[t]
        mean = Fraction(sum(sent), self.ranks)
        return self.shift(name, float(mean), by, after, phase, float(max(sent) / mean))

    def _returned_output(self, t: int) -> tuple[str, int]:
        """Returns the memory of the outputs of step t that helpers returned, with their row sums."""
        return self.memory_key("returned", t), self.output_bytes + self.lse

    # ---------------------------------------------------------------------------------------- computation

    def _compute_forward(self, t: int, arrived: Sequence[Op]) -> list[Op]:
        gradients = dict(zip(self.gradients.values(), ("d:q", "d:kv", "d:kv"), strict=True)) if t else {}
        self.take_over_memory(t, {}, {name: self.memory_key(key, t) for name, key in gradients.items()})
        step = self.step_fragments[t]
        step.entry[self.k].after += arrived
        self.fragment.forward += step.forward
        computed = [step.exit[self.o]]
        if t:
            self.merge_output(self.ranks_with_own_block(t), computed, *self.partial_output(t))
        return computed

    def _compute_backward(self, t: int, arrived: Sequence[Op]) -> list[Op]:
        step = self.step_fragments[t]
        step.grad_entry[self.o].after += arrived
        self.fragment.backward += step.backward
        return [step.grad_exit[name] for name in self.gradients]

    def _add_up(self, sums: dict[str, list[Op]], name: str, shares: Shares, after: Sequence[Op], key: str) -> None:
        """Adds gradients in memory `key` to the running sum: of the queries, or of keys and values."""
        names = [self.gradients[self.q]] if name == self.q else [self.gradients[self.k], self.gradients[self.v]]
        nbytes = self.query_bytes if name == self.q else self.key_value_gradient_bytes
        label = " ".join(names).replace(":", "")
        sums[name] = self.add_gradients(label, nbytes, shares, [*sums[name], *after])
        self.use_memory(sums[name][0], (key, nbytes))
        self.use_tensors(sums[name][0], *names)
