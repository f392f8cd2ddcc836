"""Attention in steps, one block of scores each: queries stay on their ranks, keys and values arrive from the others.

Each step computes a rank's queries against the keys at hand, lowered by the schemes inside. The outputs of the steps
are merged by their row sums (online softmax), in fp32 until the last step; gradients are added up. What the next step
needs arrives during the current one, in a second buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hardware.errors import PlanError
from simulator.ir.attention_mask import DIAGONAL, WHOLE, RankShare, ScoreBlock
from simulator.ir.modules import Module, Operator
from simulator.ir.operators import CoreAttention
from simulator.ir.ops import BYTES, Collective, Fragment, Memory, Op, TensorUse
from simulator.ir.registry import find_scheme
from simulator.ir.scheme import LowerModule, SequenceScheme
from simulator.scheduling.schedule import Schedule

STREAM = "sequence"
INNER = "sequence-inner"
"""The stream of a ring inside another ring: both send at the same time, to different neighbours."""

Shares = tuple[Fraction, float]
"""A share of the work, mean over ranks, and the pace of the most loaded rank (see `slowest_rank`)."""

HALF = Fraction(1, 2)

# ------------------------------------------------------------------------------------------------ schemes


class RingScheme(SequenceScheme):
    """Base of the schemes that bring keys and values to the queries, block by block."""

    @property
    def token_order(self) -> str:
        """Which rank holds which positions (see `mask_blocks`); schemes of a plan that shard the same sequences agree
        on it.
        """
        return "contiguous"

    @property
    def passes_keys(self) -> bool:
        """Whether keys and values pass from rank to rank; otherwise attention uses all-gathers or all-to-alls."""
        return True

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.over)

    @property
    def ring_axes(self) -> tuple[str, ...]:
        """Its axes with more than one rank."""
        return tuple(axis for axis in self.over if self.mesh.size(axis) > 1)

    def layouts(self, operator: Operator) -> str | None:
        if isinstance(operator, CoreAttention):
            # Keys and values keep their layout.
            return "s|t"
        return "s" if operator.has("s") else None

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if self.ranks == 1 or not self.passes_keys or not isinstance(module, CoreAttention):
            return inner(module)
        return self.attend(module, inner)

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        """The attention core on several ranks."""
        return ring(operator, inner, self.ring_axes, mask_blocks(self.token_order, self.ranks))

    def check_job(self, job: Any) -> None:
        """Raises PlanError where sequences cannot be split so, or where attention has more than a causal mask."""
        if self.ranks == 1:
            return
        plan, sequence = job.plan, job.batch.sequence // job.model.towers
        schemes = [(entry, find_scheme(entry.use)) for entry in plan.schemes]
        ranks = self.mesh.size(axis for e, kind in schemes if kind.family == self.family for axis in e.over)
        if self.token_order == "zigzag" and sequence % (2 * ranks):
            rule = f"{self.use} splits sequences into two parts per rank of {ranks}: a multiple of {2 * ranks} tokens"
            near = max(1, round(sequence / (2 * ranks))) * 2 * ranks * job.model.towers
            raise PlanError("batch.sequence", rule, f"{near} would work", job.batch.sequence)
        if not self.passes_keys:
            return
        if job.model.window is not None and job.model.window < sequence:
            rule = f"{self.use} supports no sliding windows, and {job.model.name} has one of {job.model.window} tokens"
            raise PlanError("plan.schemes", rule, "Use sequence/all-gather or sequence/ulysses")
        for entry, kind in schemes:
            if not issubclass(kind, Schedule | RingScheme):
                continue
            other = kind(entry.over, kind.Options(**(entry.model_extra or {})), self.mesh)
            if isinstance(other, Schedule) and len(other.slices) != 1:
                rule = f"{self.use} needs all keys of a sequence at once, and {other.use} splits sequences into slices"
                raise PlanError("plan.schemes", rule, "Use sequence/all-gather or sequence/ulysses")
            if isinstance(other, RingScheme) and other.token_order != self.token_order:
                rule = f"{self.use} orders tokens {self.token_order}, and {other.use} {other.token_order}"
                raise PlanError("plan.schemes", rule, "Give all rings of a plan one token order")


def mask_blocks(token_order: str, ranks: int) -> list[ScoreBlock]:
    """The score blocks that `ranks` compute one after another under a causal mask: first that of their own keys, then
    those of the keys of the rank one, two, ... places before them.

    A step differs between ranks that lie behind the owner of the keys and ranks in front of it:

    contiguous (the r-th part of the positions on rank r): the whole block; nothing.
    striped (every p-th position): the half of the block with its diagonal; the half without it.
    zigzag (parts r and 2p-1-r of 2p): all queries against the first half of the keys; the second half of the queries
        against all keys.
    """
    found = [DIAGONAL]
    for i in range(1, ranks):
        behind, front = Fraction(ranks - i, ranks), Fraction(i, ranks)
        cases = {
            "contiguous": (RankShare(behind),),
            "striped": (RankShare(behind, pairs=HALF, diagonals=HALF), RankShare(front, pairs=HALF, diagonals=-HALF)),
            "zigzag": (RankShare(behind, keys=HALF), RankShare(front, queries=HALF)),
        }
        found.append(ScoreBlock(cases[token_order]))
    return found


# ------------------------------------------------------------------------------------------------ steps


class AttentionSteps:
    """The attention of one operator in steps, one for each score block, whose outputs `merges` kernels merge.

    Inside an off-diagonal block of an outer ring all steps are equal parts of that block.
    """

    def __init__(
        self,
        operator: CoreAttention,
        inner: LowerModule,
        ring_axes: tuple[str, ...],
        mask_blocks: Sequence[ScoreBlock],
        merges: int,
    ) -> None:
        self.operator, self.ring_axes, self.count, self.merges_left = operator, ring_axes, len(mask_blocks), merges
        inside = operator.block if operator.block not in (None, DIAGONAL) else None
        self.step_operators = [
            replace(operator, name=f"{operator.name} {i}", block=inside or block) for i, block in enumerate(mask_blocks)
        ]
        self.step_fragments = [inner(part) for part in self.step_operators]
        self.stream = STREAM if operator.block is None else INNER
        self.q, self.k, self.v = (tensor.name for tensor in operator.ins)
        self.o = operator.outs[0].name
        out = self.fragment = Fragment(entry={t.name: Op(f"{t.name} in") for t in operator.ins})
        out.grad_entry = {self.o: Op(f"d{self.o} in", phase="B")}
        for one in self.step_fragments:
            for name in (self.q, self.k, self.v):
                one.entry[name].after.append(out.entry[name])
            one.grad_entry[self.o].after.append(out.grad_entry[self.o])
        self._sums: list[Op] = []
        self.lse = max(
            t.nbytes for t in self.step_fragments[0].tensor_uses if t.key == f"{self.step_operators[0].name}.lse"
        )

    def nbytes(self, *names: str) -> int:
        """Local bytes of tensors; of gradients, with ``d:`` in front of the name."""
        tensor_uses = self.step_fragments[0].tensor_uses
        return sum(max(t.nbytes for t in tensor_uses if t.key.startswith(f"{name}@")) for name in names)

    def memory_key(self, what: str, i: int | str = "") -> str:
        return f"{self.operator.name}.{what}{i}"

    def take_over_memory(self, i: int, forward: Mapping[str, str], backward: Mapping[str, str]) -> None:
        """Takes over the memory uses of step i.

        forward, backward: memory keys in place of those of tensors (gradients: ``d:``).

        Forward, the output and its row sums get keys of the step; backward, those of the merged output. What a step
        recomputes is its own.
        """
        one, lse = self.step_fragments[i], f"{self.step_operators[i].name}.lse"
        ahead = {self.o: self.memory_key("o", i), lse: self.memory_key("lse", i), **forward}
        back = {lse: self.memory_key("lse"), **backward}
        inside = set(one.forward)
        for tensor_use in one.tensor_uses:
            stem, of_tensor, _ = tensor_use.key.partition("@")
            key = (ahead if tensor_use.op in inside else back).get(stem, tensor_use.key)
            if of_tensor and "~" in tensor_use.key:
                key = f"{tensor_use.key}.{i}"
            self.fragment.tensor_uses.append(replace(tensor_use, key=key))

    def use_memory(self, op: Op, *memory: tuple[str, int], made: bool = False) -> None:
        """Notes that `op` uses memory, given as keys and bytes."""
        self.fragment.tensor_uses += [TensorUse(key, nbytes, op, made) for key, nbytes in memory]

    def use_tensors(self, op: Op, *names: str, made: bool = False) -> None:
        """Notes that `op` writes or reads tensors (gradients: ``d:``) in their layouts outside the steps."""
        stems = dict.fromkeys(names)
        for one in self.step_fragments:
            for tensor_use in one.tensor_uses:
                stem, at, _ = tensor_use.key.partition("@")
                if at and stem in stems and stems[stem] is None and "~" not in tensor_use.key:
                    stems[stem] = tensor_use.key
        self.use_memory(op, *((key, self.nbytes(name)) for name, key in stems.items() if key), made=made)

    def partial_output(self, i: int) -> list[tuple[str, int]]:
        """Memory of the output of step i and of its row sums."""
        return [(self.memory_key("o", i), self.nbytes(self.o)), (self.memory_key("lse", i), self.lse)]

    def shift(self, name: str, nbytes: float, by: int, after: Iterable[Op], phase: str, pace: float = 1) -> Op:
        """Every rank sends to the rank `by` places further round the group."""
        work = Collective("shift", round(nbytes), self.ring_axes, by=by, pace=pace)
        return Op(f"{name} {self.operator.name}", self.stream, work, list(after), phase)

    def merge_output(self, shares: Shares, after: Sequence[Op], *parts: tuple[str, int]) -> None:
        """Merges a partial output, in memory `parts`, into the running output, both rescaled by their row sums."""
        self.merges_left -= 1
        part, last = self.nbytes(self.o), not self.merges_left
        total = part // BYTES[self.operator.outs[0].dtype] * 4
        held = total if self._sums else part
        mean, pace = shares
        read, write = held + part + 2 * self.lse, (part if last else total) + self.lse
        work = Memory("add", round(mean * read), round(mean * write), pace=pace)
        op = Op(
            f"merge {self.operator.name}",
            work=work,
            after=[*(self._sums or [self.step_fragments[0].exit[self.o]]), *after],
        )
        if not self._sums:
            self.use_memory(op, *self.partial_output(0))
        if held == total or not last:
            self.use_memory(op, (self.memory_key("sum"), total), made=not self._sums)
        self.use_memory(op, *parts)
        self.use_memory(op, (self.memory_key("lse"), self.lse), made=not self._sums)
        if last:
            self.use_tensors(op, self.o, made=True)
            self.fragment.exit = {self.o: op}
        self._sums = [op]
        self.fragment.forward.append(op)

    def add_gradients(self, name: str, nbytes: int, shares: Shares, after: Sequence[Op]) -> Op:
        """Adds gradients of `nbytes` to the running sum."""
        mean, pace = shares
        work = Memory("add", round(2 * mean * nbytes), round(mean * nbytes), pace=pace)
        op = Op(f"add {name}", work=work, after=list(after), phase="B")
        self.fragment.backward.append(op)
        return op


def ring(
    operator: CoreAttention, inner: LowerModule, ring_axes: tuple[str, ...], mask_blocks: Sequence[ScoreBlock]
) -> Fragment:
    """Ring attention: in every step each rank computes the block of the keys at hand and sends them one place further.

    Backward they go round the other way, from where the forward pass left them, and their gradients with them: those of
    a step travel during the next one, and all are home after the last (Transformer Engine). So of p steps p-1 send keys
    and values, and p-1 their gradients. The keys left by the forward pass occupy the memory of the local ones.
    """
    steps = AttentionSteps(operator, inner, ring_axes, mask_blocks, len(mask_blocks) - 1)
    out, p = steps.fragment, steps.count
    q, k, v, o = steps.q, steps.k, steps.v, steps.o
    dq, dk, dv = (f"d:{name}" for name in (q, k, v))
    kv, dkv = steps.nbytes(k, v), steps.nbytes(dk, dv)

    came, free = [out.entry[k], out.entry[v]], list[Op]()
    for i, one in enumerate(steps.step_fragments):
        buffer = steps.memory_key("kv", i)
        one.entry[k].after += came
        one.entry[v].after += came
        steps.take_over_memory(i, {k: buffer, v: buffer} if i else {}, _backward_keys(steps, p - 1 - i))
        if i < p - 1:
            hop = steps.shift("ring", kv, 1, [*came, *free], "F")
            if i:
                steps.use_memory(hop, (buffer, kv))
            else:
                steps.use_tensors(hop, k, v)
            steps.use_memory(hop, (steps.memory_key("kv", i + 1), kv), made=True)
            out.forward.append(hop)
            came = [hop]
        out.forward += one.forward
        free = [one.exit[o]]
        if i:
            steps.merge_output(steps.step_operators[i].computed_block.queries, free, *steps.partial_output(i))

    arrived: list[Op] = [out.grad_entry[o]]
    gradients: list[Op] = []
    total = steps.step_fragments[-1].grad_exit[q]
    for b, one in enumerate(reversed(steps.step_fragments)):
        # The keys and values of the next step travel with the gradients of all earlier steps.
        taken, grads, made = steps.memory_key("d:kv", b), steps.memory_key("d:dkv", b - 1), steps.memory_key("d:dkv", b)
        hop = steps.shift("ring back", kv * (b < p - 1) + dkv * (b > 0), -1, [*arrived, *gradients], "B")
        if b < p - 1:
            if b:
                steps.use_memory(hop, (taken, kv))
            else:
                steps.use_tensors(hop, k, v)
            steps.use_memory(hop, (steps.memory_key("d:kv", b + 1), kv), made=True)
        if b:
            steps.use_memory(hop, (grads, dkv))
            steps.use_memory(hop, (made, dkv), made=True)
        out.backward.append(hop)
        one.grad_entry[o].after += arrived
        out.backward += one.backward
        gradients = [one.grad_exit[k], one.grad_exit[v]]
        if b:
            block = steps.step_operators[p - 1 - b].computed_block
            total = steps.add_gradients(f"d{q}", steps.nbytes(dq), block.queries, [total, one.grad_exit[q]])
            steps.use_memory(total, (steps.memory_key("d:q", b), steps.nbytes(dq)))
            steps.use_tensors(total, dq)
            gradients = [steps.add_gradients(f"d{k} d{v}", dkv, block.keys, [hop, *gradients])]
            steps.use_memory(gradients[0], (made, dkv))
            if b < p - 1:
                steps.use_memory(gradients[0], (steps.memory_key("d:part", b), dkv))
            else:
                steps.use_tensors(gradients[0], dk, dv)
        arrived = [hop]
    out.grad_exit = {q: total, k: gradients[0], v: gradients[0]}
    return out


def _backward_keys(steps: AttentionSteps, b: int) -> dict[str, str]:
    """Memory keys of backward step b. The first step starts with the local keys and values and the gradient of the
    queries; the last one produces the gradients of the local keys and values.
    """
    q, k, v = steps.q, steps.k, steps.v
    kept = (
        {k: steps.memory_key("d:kv", b), v: steps.memory_key("d:kv", b), f"d:{q}": steps.memory_key("d:q", b)}
        if b
        else {}
    )
    part = steps.memory_key("d:part", b) if b else steps.memory_key("d:dkv", b)
    return kept | ({f"d:{k}": part, f"d:{v}": part} if b < steps.count - 1 else {})


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
        total[name] = [steps.add_gradients(" ".join(whole).replace(":", ""), nbytes, shares, [*total[name], *after])]
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
