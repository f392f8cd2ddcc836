"""Rewriting what others have lowered: several ops in the place of one, each with a part of its work.

A rewrite keeps what is done (the same FLOPs, the same bytes) and changes when: a collective and the kernels that read
or make its buffer are cut into parts, so that one part moves while another is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from simulator.ops import COMPUTE, Collective, Fragment, Gemm, Memory, Op, Param, Touch, Transfer, Work


def parts(work: Work, n: int) -> list[Work]:
    """`work` in `n` like parts that add up to it: rows of a product, bytes of a kernel or of a buffer."""
    if isinstance(work, Gemm):
        groups = tuple((count, size / n) for count, size in work.groups)
        m, k = (work.m, work.k / n) if work.layout == "nt" else (work.m / n, work.k)
        return [replace(work, m=m, k=k, groups=groups)] * n
    if isinstance(work, Memory):
        pairs = zip(_shares(work.read, n), _shares(work.write, n), strict=True)
        return [replace(work, read=read, write=write) for read, write in pairs]
    assert isinstance(work, Collective | Transfer), f"nothing says how to part {work}"
    return [replace(work, nbytes=nbytes) for nbytes in _shares(work.nbytes, n)]


def _shares(whole: int, n: int) -> list[int]:
    """`whole` in `n` parts that differ by one at most."""
    ends = [whole * i // n for i in range(n + 1)]
    return [end - begin for begin, end in pairwise(ends)]


class Rewrite:
    """Ops that stand in for some of a fragment, which `done` changes in place."""

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = fragment
        self._ops: dict[Op, list[Op]] = {}
        self._ends: dict[Op, list[Op]] = {}

    def swap(self, op: Op, ops: Sequence[Op], ends: Sequence[Op] = ()) -> None:
        """`ops` stand in for `op`, in its place of the issue order. What waited for it waits for `ends`: the last of
        them where none are named. Their own dependencies are stated with the ops of the old fragment or of swaps."""
        self._ops[op], self._ends[op] = list(ops), list(ends or ops[-1:])

    def chunk(self, ops: Sequence[Op], n: int) -> list[list[Op]]:
        """The chain `ops`, in issue order, in `n` parts, each of which waits for its part of the one before only.

        What comes ahead of the first kernel is issued for all parts first; then one part after another. So a stream of
        communication has all parts of a dispatch in front of those of a combine (PipeMoE, INFOCOM 2023).
        """
        inside = set(ops)
        made: dict[Op, list[Op]] = {}
        for op in ops:
            assert op.work is not None
            made[op] = [replace(op, name=f"{op.name} {i}", work=work) for i, work in enumerate(parts(op.work, n))]
            for i, part in enumerate(made[op]):
                part.after = [one for other in op.after for one in self._part(other, inside, made, i)]
            self.swap(op, made[op])
        first = next(i for i, op in enumerate(ops) if op.stream == COMPUTE)
        for issued in (self.fragment.forward, self.fragment.backward):
            if ops[0] in issued:
                ahead = [part for op in ops[:first] for part in made[op]]
                rest = [made[op][i] for i in range(n) for op in ops[first:]]
                self._reissue(issued, ops, first, ahead, rest)
        return [made[op] for op in ops]

    def _part(self, other: Op, inside: set[Op], made: dict[Op, list[Op]], i: int) -> list[Op]:
        """What part `i` waits for in the place of `other`; marks between ops of the chain are looked through."""
        if other in inside:
            return [made[other][i]]
        if other.work is None and _leads(other, inside):
            return [one for further in other.after for one in self._part(further, inside, made, i)]
        return [other]

    def _reissue(self, issued: list[Op], ops: Sequence[Op], first: int, ahead: list[Op], rest: list[Op]) -> None:
        """Puts parts in their order, in the places of the first op of the chain and of its first kernel, or behind what
        kernels wait for besides."""
        waits = {other for op in ops[first:] for other in _sources(op)} - set(ops)
        place = max(issued.index(ops[first]), *(issued.index(op) + 1 for op in waits if op in issued), 0)
        kept = [op for op in issued[:place] if op not in ops]
        begin = sum(op not in ops for op in issued[: issued.index(ops[0])])
        issued[:] = [*kept[:begin], *ahead, *kept[begin:], *rest, *(op for op in issued[place:] if op not in ops)]

    def done(self) -> Fragment:
        """The fragment, changed."""
        frag = self.fragment
        for issued in (frag.forward, frag.backward):
            issued[:] = [one for op in issued for one in self._ops.get(op, [op])]
        marks = [op for ends in (frag.entry, frag.exit, frag.grad_entry, frag.grad_exit) for op in ends.values()]
        seen: set[Op] = set()
        left = [*frag.forward, *frag.backward, *marks]
        while left:
            op = left.pop()
            if op not in seen:
                seen.add(op)
                op.after = [end for other in op.after for end in self._ends.get(other, [other])]
                left += op.after
        for ends in (frag.exit, frag.grad_exit):
            for name, op in ends.items():
                ends[name] = self._end(op)
        frag.params = [self._param(param) for param in frag.params]
        frag.touches = [one for touch in frag.touches for one in self._touches(touch)]
        return frag

    def _end(self, op: Op) -> Op:
        ends = self._ends.get(op, [op])
        return ends[0] if len(ends) == 1 else Op(op.name, after=ends, phase=op.phase)

    def _param(self, param: Param) -> Param:
        used = self._ops.get(param.used, [param.used])[0]
        return replace(param, ready=self._end(param.ready), used=used)

    def _touches(self, touch: Touch) -> Iterable[Touch]:
        """Memory that an op needs is there from the first to the last of those that stand in for it."""
        ops = self._ops.get(touch.op)
        if ops is None:
            return [touch]
        ends = [replace(touch, op=ops[0])]
        return ends if len(ops) == 1 else [*ends, replace(touch, op=ops[-1], made=False)]


def _sources(op: Op) -> set[Op]:
    """The ops with work that an op waits for, through marks."""
    found: set[Op] = set()
    for other in op.after:
        found |= {other} if other.work is not None else _sources(other)
    return found


def _leads(mark: Op, inside: set[Op]) -> bool:
    """Whether a mark waits for one of these."""
    return bool(_sources(mark) & inside)
