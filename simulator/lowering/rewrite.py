"""Rewrites lowered fragments: replaces an op by several, each with a part of its work.

A rewrite keeps the work (the same FLOPs and bytes) and changes its order: a collective and the kernels that read or
write its buffer are split, so that one part moves while another is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil

from meshcast.simulator.ir.ops import (
    COMPUTE,
    Collective,
    Exchange,
    Fragment,
    Gemm,
    Memory,
    Op,
    Param,
    TensorUse,
    Transfer,
    Work,
)


def split_work(work: Work, n: int) -> list[Work]:
    """Divides `work` into `n` equal parts that add up to it: rows of a GEMM, bytes of a kernel or of a buffer."""
    return split_work_by(work, (1,) * n)


def split_work_by(work: Work, sizes: Sequence[int]) -> list[Work]:
    """Divides `work` into parts of these relative sizes."""
    whole = sum(sizes)
    if isinstance(work, Gemm):
        parts: list[Work] = []
        for size in sizes:
            groups = tuple((count, tokens * size / whole) for count, tokens in work.groups)
            m, k = (work.m, work.k * size / whole) if work.layout == "nt" else (work.m * size / whole, work.k)
            parts.append(replace(work, m=m, k=k, groups=groups))
        return parts
    if isinstance(work, Memory):
        pairs = zip(_split_integer(work.read, sizes), _split_integer(work.write, sizes), strict=True)
        return [replace(work, read=read, write=write) for read, write in pairs]
    if isinstance(work, Exchange):
        return [replace(work, tokens=tokens) for tokens in _split_integer(work.tokens, sizes)]
    assert isinstance(work, Collective | Transfer), f"{work} cannot be split"
    return [replace(work, nbytes=nbytes) for nbytes in _split_integer(work.nbytes, sizes)]


TILE = (128, 256)
"""Rows and columns of an output tile: the widest tiles of GEMM libraries on GPUs since Ampere."""


def wave_count(product: Gemm, wave: int, rows: int = TILE[0]) -> int:
    """Waves in which the output tiles of a GEMM are computed. wave: tiles computed at a time; rows: of a tile."""
    return ceil(ceil(product.m / rows) * ceil(product.n / TILE[1]) * product.batch / wave)


def split_kernel(op: Op, share: float) -> tuple[Op, Op]:
    """Splits a GEMM into two parts of a kernel, which together take the time of the kernel, and of which the host
    launches the first. share: of the first part, in rows and in time.
    """
    assert isinstance(op.work, Gemm)
    first, rest = (
        replace(op, name=f"{op.name} {i}", work=work, after=list(op.after), launches=op.launches * (i == 0))
        for i, work in enumerate(_split_rows(op.work, (share, 1 - share)))
    )
    return first, rest


def _split_rows(kernel: Gemm, shares: Iterable[float]) -> list[Work]:
    """Divides a kernel into parts, by their shares of its rows."""
    parts: list[Work] = []
    for share in shares:
        groups = tuple((count, tokens * share) for count, tokens in kernel.groups)
        parts.append(replace(kernel, m=kernel.m * share, groups=groups, part=kernel.part * share))
    return parts


def _split_integer(whole: int, sizes: Sequence[int]) -> list[int]:
    """Divides `whole` into parts of these relative sizes, each rounded to an integer."""
    ends = [whole * end // sum(sizes) for end in accumulate(sizes, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


class Rewrite:
    """Replacements for ops of a fragment, which `apply` changes in place."""

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = fragment
        self._ops: dict[Op, list[Op]] = {}
        self._ends: dict[Op, list[Op]] = {}

    def swap(self, op: Op, ops: Sequence[Op], ends: Sequence[Op] = ()) -> None:
        """Replaces `op` by `ops` in the issue order; by none where other ops do its work.

        ends: what dependents of `op` wait for; by default the last of `ops`. Dependencies of the new ops are ops of the
            old fragment or of other swaps.
        """
        self._ops[op], self._ends[op] = list(ops), list(ends or ops[-1:])

    def chunk(self, ops: Sequence[Op], sizes: Sequence[int], one_kernel: bool = False) -> list[list[Op]]:
        """Splits the chain `ops`, in issue order, into parts of these relative sizes, each of which waits only
        for its part of the op before. The host launches all parts of an op as a single op of the framework.

        Communication before the first kernel is issued for all parts first, then part by part: so on a stream
        of communication all dispatches precede the combines (PipeMoE, INFOCOM 2023).

        one_kernel: the parts of a GEMM are of a single kernel, take its time together and are launched with the first.
        """
        parts: dict[Op, list[Op]] = {}
        for op in ops:
            assert op.work is not None
            if one_kernel and isinstance(op.work, Gemm):
                works = _split_rows(op.work, [size / sum(sizes) for size in sizes])
            else:
                works = split_work_by(op.work, sizes)
            launches = (
                [op.launches, *[0.0] * (len(sizes) - 1)] if one_kernel else [op.launches / len(sizes)] * len(sizes)
            )
            parts[op] = [
                replace(op, name=f"{op.name} {i}", work=work, launches=launches[i]) for i, work in enumerate(works)
            ]
            for i, part in enumerate(parts[op]):
                part.after = replace_dependencies(op.after, {other: [parts[other][i]] for other in parts})
            self.swap(op, parts[op], parts[op])
        first = next(i for i, op in enumerate(ops) if op.stream == COMPUTE)
        for issued in (self.fragment.forward, self.fragment.backward):
            if ops[0] in issued:
                ahead = [part for op in ops[:first] for part in parts[op]]
                rest = [parts[op][i] for i in range(len(sizes)) for op in ops[first:]]
                self._reissue(issued, ops, first, ahead, rest)
        return [parts[op] for op in ops]

    def _reissue(self, issued: list[Op], ops: Sequence[Op], first: int, ahead: list[Op], rest: list[Op]) -> None:
        """Issues the parts in their order: `ahead` in place of the first op of the chain, `rest` in place of its first
        kernel or after what its kernels also wait for, before all that waits for those kernels.
        """
        waits = {other for op in ops[first:] for other in working_predecessors(op)} - set(ops)
        place = max(issued.index(ops[first]), *(issued.index(op) + 1 for op in waits if op in issued), 0)
        begin = sum(op not in ops for op in issued[: issued.index(ops[0])])
        kept, behind, kernels = list[Op](), list[Op](), set(ops[first:])
        for op in (op for op in issued[:place] if op not in ops):
            (behind if working_predecessors(op) & {*kernels, *behind} else kept).append(op)
        behind += [op for op in issued[place:] if op not in ops]
        issued[:] = [*kept[:begin], *ahead, *kept[begin:], *rest, *behind]

    def apply(self) -> Fragment:
        """Changes the fragment, and returns it."""
        frag = self.fragment
        for issued in (frag.forward, frag.backward):
            issued[:] = [new for op in issued for new in self._ops.get(op, [op])]
        marks = [op for ends in (frag.entry, frag.exit, frag.grad_entry, frag.grad_exit) for op in ends.values()]
        seen: set[Op] = set()
        left = [
            *frag.forward,
            *frag.backward,
            *marks,
            *(op for param in frag.params for op in (param.ready, param.used)),
        ]
        while left:
            op = left.pop()
            if op not in seen:
                seen.add(op)
                op.after = [end for other in op.after for end in self._ends.get(other, [other])]
                left += op.after
        for ends in (frag.exit, frag.grad_exit):
            for name, op in ends.items():
                ends[name] = self._last_op(op)
        frag.params = [self._rewrite_param(param) for param in frag.params]
        frag.tensor_uses = [use for tensor_use in frag.tensor_uses for use in self._rewrite_tensor_use(tensor_use)]
        return frag

    def _last_op(self, op: Op) -> Op:
        ends = self._ends.get(op, [op])
        return ends[0] if len(ends) == 1 else Op(op.name, after=ends, phase=op.phase)

    def _replacements(self, op: Op) -> list[Op]:
        """Returns the ops that replace another, or do its work."""
        return self._ops.get(op, [op]) or self._ends[op]

    def _rewrite_param(self, param: Param) -> Param:
        if param.ready not in self._ops and param.used not in self._ops:
            return param
        return replace(param, ready=self._last_op(param.ready), used=self._replacements(param.used)[0])

    def _rewrite_tensor_use(self, tensor_use: TensorUse) -> Iterable[TensorUse]:
        """Returns the uses of an op's memory by its replacements on the same stream, and by the last. The memory lives
        from the first to the last of them; the first writes it.
        """
        if tensor_use.op not in self._ops:
            return [tensor_use]
        first, *others = self._replacements(tensor_use.op)
        users = [op for op in others if op.stream == tensor_use.op.stream or op is others[-1]]
        return [replace(tensor_use, op=first), *(replace(tensor_use, op=op, made=False) for op in users)]


def working_predecessors(op: Op) -> set[Op]:
    """Returns the ops with work that an op waits for, looking through ops without work."""
    working: set[Op] = set()
    for other in op.after:
        working |= {other} if other.work is not None else working_predecessors(other)
    return working


def replace_dependencies(after: Iterable[Op], stand: Mapping[Op, Sequence[Op]]) -> list[Op]:
    """Returns dependencies in which some ops are replaced; ops without work that wait for these are looked through."""
    dependencies: list[Op] = []
    for op in after:
        if op in stand:
            dependencies += stand[op]
        elif op.work is None and working_predecessors(op) & stand.keys():
            dependencies += replace_dependencies(op.after, stand)
        else:
            dependencies.append(op)
    return dependencies
