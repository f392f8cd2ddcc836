"""Data flow of a unit run: reads wait for writes, messages and gradients are used, no message is empty.

Apart from the work of its ops a scheme states three things: the stream of each op, its predecessors (`Op.after`) and
the memory that it writes and reads (`TensorUse`). The simulator plays the first two and sums up the third, so a
kernel that starts before its data has arrived looks fast instead of failing. `run_problems` compares the three. Of
every scheme it demands:

1. A reader waits for the writer, through `after` or through the order of a stream. A fused kernel may start on the part
   that is there, if all users of its result wait for the rest.
2. A message (collective, all-to-all, transfer, copy from the host) is named in the `after` of a kernel or of a result
   of the unit. A later message on the same stream does not stand for it: list every message that a kernel reads. What
   it brings is read by a kernel, and what a kernel writes is read.
3. Every op of phase W is named, through others, by the `ready` of a parameter; behind a product that does not
   accumulate its weight gradient follows an addition or a reduction.
4. No message has zero bytes, and no buffer that one reads or writes.
5. A message on the stream of a family runs along the axes of that family (`misplaced_messages`).

`placement` follows the data from rank to rank: each block and each gradient once, on the right rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import (
    COMPUTE,
    Collective,
    Communication,
    Exchange,
    Gemm,
    HostCopy,
    Memory,
    Op,
    TensorUse,
    UnitRun,
)
from meshcast.simulator.ir.scheme import Scheme
from meshcast.validation.contract.measure import waits_for

STATES = ("parameters", "gradients", "optimizer")
"""Memory categories of model states: ops hold them, and `Param.used` and `Param.ready` order their readers."""


class Flow:
    """Dependencies of one unit run, its forward pass first and then its backward pass.

    weights_last: weight gradients are issued behind all gradients of activations, as in a split backward pass.
    borrowers: operators that add to the gradients of weights which another operator holds.
    """

    def __init__(self, run: UnitRun, weights_last: bool = False, borrowers: Set[str] = frozenset()) -> None:
        self.run, self.fragment, self.borrowers = run, run.fragment, borrowers
        self.ops = list(run.fragment.forward)
        self.ops += sorted(run.fragment.backward, key=lambda op: weights_last and op.phase == "W")
        self.place = {op: i for i, op in enumerate(self.ops)}
        self.entry = run.fragment.entry.get(run.residual_in or "")
        self.exit = run.fragment.exit.get(run.residual_out or "")
        self.grad_entry = run.fragment.grad_entry.get(run.residual_out or "")
        self.grad_exit = run.fragment.grad_exit.get(run.residual_in or "")
        marks = [mark for mark in (self.entry, self.grad_entry) if mark is not None]
        self._bit = {op: 1 << i for i, op in enumerate([*self.ops, *marks])}
        self._awaited: dict[Op, int] = {}
        on_stream: dict[str, int] = defaultdict(int)
        for op in self.ops:
            self._awaited[op] = on_stream[op.stream] = self._bits_awaited(op) | on_stream[op.stream]

    # --------------------------------------------------------------------------------------- dependencies

    def _bits_awaited(self, op: Op) -> int:
        """`op` and all that it waits for through `after`, a bit each. Ops that are issued later are left out: a pass
        does not wait for a later pass, and within a pass `misordered_ops` reports them."""
        bits, seen, left = self._bit.get(op, 0), {op}, [*op.after]
        while left:
            source = left.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self.place:
                bits |= self._awaited.get(source, 0)
                continue
            bits |= self._bit.get(source, 0)
            # The gradient of the result comes in after the result has gone out.
            left += [*source.after, *([self.exit] if source is self.grad_entry and self.exit is not None else [])]
        return bits

    def waits(self, op: Op, other: Op) -> bool:
        """Whether an op or mark waits for another, through `after` or through the order of streams."""
        if op not in self._awaited:
            self._awaited[op] = self._bits_awaited(op)
        return bool(self._awaited[op] & self._bit[other])

    @cached_property
    def results(self) -> set[Op]:
        """Ops and marks behind which others find the results of the unit: activations and gradients."""
        ends = {param.ready for param in self.fragment.params}
        return ends | {op for op in (self.exit, self.grad_exit) if op is not None}

    @cached_property
    def _named_by(self) -> Mapping[Op, Sequence[Op]]:
        """Ops and marks by each op in their `after`."""
        readers: dict[Op, list[Op]] = defaultdict(list)
        left = {*self.ops, *self.results}
        seen: set[Op] = set()
        while left:
            op = left.pop()
            seen.add(op)
            left |= {*op.after} - seen
            for other in op.after:
                readers[other].append(op)
        return readers

    def users(self, op: Op) -> Iterator[Op]:
        """Ops and results that name `op` in their `after`, directly or through marks."""
        for other in self._named_by.get(op, ()):
            if other in self.place or other in self.results:
                yield other
            else:
                yield from self.users(other)

    def downstream(self, op: Op) -> set[Op]:
        """Ops and marks that name `op` through any number of others."""
        reached: set[Op] = set()
        left = [*self._named_by.get(op, ())]
        while left:
            other = left.pop()
            if other not in reached:
                reached.add(other)
                left += self._named_by.get(other, ())
        return reached

    @cached_property
    def uses(self) -> Mapping[str, Sequence[TensorUse]]:
        """Uses of memory by its key, without model states."""
        by_key: dict[str, list[TensorUse]] = defaultdict(list)
        for use in self.fragment.tensor_uses:
            if use.op in self.place and use.category not in STATES:
                by_key[use.key].append(use)
        return by_key

    # ---------------------------------------------------------------------------------------------- rules

    def problems(self) -> Iterator[str]:
        """Violations of all rules, in words."""
        yield from self.misordered_ops()
        yield from self.early_reads()
        yield from self.unawaited_messages()
        yield from self.unread_buffers()
        yield from self.empty_messages()
        yield from self.lost_gradients()

    def misordered_ops(self) -> Iterator[str]:
        """Ops that are issued ahead of an op that they wait for."""
        for op in self.ops:
            for other in through_marks(op):
                if self.place.get(other, -1) > self.place[op]:
                    yield f"{op} is issued ahead of {other}, which it waits for"

    def early_reads(self) -> Iterator[str]:
        """Readers that do not wait for the writer."""
        incoming = {self.run.keys[0]: self.entry, f"d:{self.run.keys[1]}": self.grad_entry}
        for key, uses in self.uses.items():
            writers = sorted({self.place[use.op] for use in uses if use.made})
            # Activations are held until a copy to or from the host has ended.
            reads = (use for use in uses if not use.made and use.category != "activations")
            source = incoming.get(key)
            for place in sorted({self.place[use.op] for use in reads} - set(writers)):
                op, earlier = self.ops[place], [self.ops[writer] for writer in writers if writer < place]
                if source is not None and not self.waits(op, source):
                    yield f"{op} reads {key} and does not wait until it comes in"
                if writers and not earlier and source is None and key not in self.run.allocated_before:
                    yield f"{op} reads {key} before {self.ops[writers[0]]} writes it"
                late = [writer for writer in earlier if not (self.waits(op, writer) or self._starts_early(op, writer))]
                # Of several messages that bring the same, one is enough.
                brought = any(is_message(writer) for writer in earlier if writer not in late)
                for writer in late:
                    if not (brought and is_message(writer)):
                        yield f"{op} reads {key} and does not wait for {writer}"

    def _starts_early(self, op: Op, writer: Op) -> bool:
        """Whether a fused op may start on a part of its input: all its users wait for the writer. Several kernels of
        one operator, which share its name, count as one."""
        users = [*self.users(op)]
        return bool(users) and all(
            self.waits(user, writer) or (user.name == op.name and self._starts_early(user, writer)) for user in users
        )

    def unawaited_messages(self) -> Iterator[str]:
        """Messages that no kernel and no result names, directly or through further messages; nobody needs those that
        bring the result of a layer that is computed again, behind its last kernel."""
        forward = [op for op in self.ops if op.phase == "F"]
        kernels = [place for place, op in enumerate(forward) if op.stream == COMPUTE]
        results = {f"re {op.name}" for op in forward[max(kernels, default=-1) + 1 :]}
        for op in self.ops:
            arrives = is_message(op) or (isinstance(op.work, HostCopy) and op.work.back)
            discarded = op.phase == "R" and op.name in results
            if arrives and not discarded and not any(map(self._consumes, (op, *self.downstream(op)))):
                yield f"nobody waits for {op}"

    def _consumes(self, op: Op) -> bool:
        """Whether an op uses arrived data, beyond passing it on. A mark on a stream passes it to the next unit; of a
        shift over different distances, some ranks may keep what they have."""
        if op.work is None:
            return op in self.results or op in self.place
        if isinstance(op.work, Collective) and op.work.targets:
            return any(i == to for i, to in enumerate(op.work.targets))
        return op in self.results or not isinstance(op.work, Communication | HostCopy)

    def unread_buffers(self) -> Iterator[str]:
        """Buffers that a message fills and no kernel reads, or that a kernel writes and no op reads."""
        outgoing = {self.run.keys[1], f"d:{self.run.keys[0]}", *self.run.freed_later}
        readers: dict[str, list[Op]] = defaultdict(list)
        written: dict[Op, list[str]] = defaultdict(list)
        for key, uses in self.uses.items():
            for use in uses:
                if use.made:
                    written[use.op].append(key)
                else:
                    readers[without_layout(key)].append(use.op)
        for op, keys in written.items():
            unread = []
            for key in keys:
                # Of what is computed again, a slice keeps the key that it had.
                names = {without_layout(key), without_layout(key.removesuffix("~"))}
                first = self.place[op] + is_message(op)
                later = [reader for name in names for reader in readers[name] if self.place[reader] >= first]
                read = any(map(self._consumes, later)) if is_message(op) else bool(later)
                if not read and not {key, key.removesuffix("~")} & outgoing:
                    unread.append(key)
            # The loss is the end of a model. A kernel of a forward pass may write more than is read; a kernel that runs
            # again may write what is not needed again.
            is_loss = self.run.residual_out is None and op is self.fragment.forward[-1]
            nothing_read = op.phase == "F" and len(unread) == len(keys)
            if not is_loss and (is_message(op) or op.phase in "BW" or nothing_read):
                yield from (f"no kernel reads {key}, which {op} writes" for key in unread)

    def empty_messages(self) -> Iterator[str]:
        """Messages of zero bytes, and buffers of zero bytes that a message reads or writes."""
        for op in self.ops:
            if isinstance(op.work, Communication | HostCopy) and op.work.nbytes <= 0:
                yield f"{op} sends zero bytes"
        for key, uses in self.uses.items():
            for use in uses:
                if is_message(use.op) and use.nbytes <= 0:
                    yield f"{use.op} reads or writes {key}, which has zero bytes"

    def lost_gradients(self) -> Iterator[str]:
        """Ops of weight gradients that no parameter waits for, and products whose result nothing adds."""
        done: set[Op] = set()
        for param in self.fragment.params:
            if param.trained:
                done |= {param.ready, *waits_for(param.ready)}
        for op in self.fragment.backward:
            if op.phase == "W" and {word.removeprefix("w") for word in op.name.split()} & self.borrowers:
                done |= {op, *waits_for(op)}
        for op in self.fragment.backward:
            if op.phase != "W" or op.work is None:
                continue
            if op not in done:
                yield f"no parameter waits for {op}"
            if isinstance(op.work, Gemm) and op.work.layout == "nt" and not op.work.accumulate:
                if not any(map(adds_gradients, self.downstream(op))):
                    yield f"nothing adds the weight gradient that {op} computes"


def is_message(op: Op) -> bool:
    return isinstance(op.work, Communication)


def without_layout(key: str) -> str:
    """The key of a tensor without its layout: slicing a full copy moves nothing and keeps its memory."""
    name, _, layout = key.partition("@")
    return name + layout[layout.find("~") :] if "~" in layout else name


def adds_gradients(op: Op) -> bool:
    """Whether an op may add a weight gradient to others: a kernel that writes one, or a reduction."""
    if isinstance(op.work, Gemm):
        return op.work.accumulate
    if isinstance(op.work, Collective):
        return op.work.operation in ("reduce_scatter", "all_reduce")
    return isinstance(op.work, Memory)


def through_marks(op: Op) -> Iterator[Op]:
    """Ops in `after`, directly and through marks."""
    for other in op.after:
        if other.work is None:
            yield from through_marks(other)
        yield other


def run_problems(run: UnitRun, borrowers: Set[str] = frozenset()) -> list[str]:
    """Violations of the rules in a unit run, with a combined and with a split backward pass."""
    combined, split = Flow(run, borrowers=borrowers), Flow(run, weights_last=True)
    return [*dict.fromkeys([*combined.problems(), *split.early_reads()])]


def misplaced_messages(ops: Iterable[Op], mesh: Mesh, schemes: Sequence[Scheme]) -> list[str]:
    """Messages on the stream of a family along axes that no scheme of it is over. The streams of data parallelism may
    run along the axes of all schemes inside a stage: ranks along them may hold copies of a weight."""
    over: dict[str, set[str]] = defaultdict(set)
    for scheme in schemes:
        over[scheme.family] |= set(scheme.over)
    over["data"] = set().union(*over.values())
    problems = []
    for op in ops:
        axes = mesh.parts(op.work.axes) if isinstance(op.work, Collective | Exchange) else ()
        family = op.stream.partition("-")[0]
        if family in over and not set(axes) <= over[family]:
            problems.append(f"{op} runs along {', '.join(axes)}, and {family} schemes along {sorted(over[family])}")
    return problems
