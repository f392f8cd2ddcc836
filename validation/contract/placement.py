"""Placement of data: the rank whose block a kernel reads, and the rank whose results a sum adds.

All ranks run the same ops, so the place of data is relative to a rank. A *part* is the result of one op, or a tensor
that came in; it lies so many ranks further round a group than where it was made. `Contents` follows the parts through
a fragment: a shift moves the parts that it carries, an addition joins them, any other op makes new ones. It demands:

1. No rank receives its own part, or one part twice; but gradients that go round a whole ring come home (`HOME`), and
   the backward pass may bring a rank what the forward pass has added up from several ranks, itself among them.
2. A sum has each part once, and at most one op's result from each other rank.
3. Attention in steps (`attention_problems`) computes each block of queries and keys once, with the FLOPs that a causal
   mask leaves of this block; the results of all steps are in the output, and all their gradients in those of queries,
   keys and values, each on the rank that the queries, keys or values came from.
4. A scheme without axes of its own, which rewrites what others have lowered, adds up as many bytes as there are
   without it (`bytes_added`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Attention, Collective, Fragment, HostCopy, Memory, Op
from meshcast.simulator.ir.scheme import LowerModule, Scheme
from meshcast.validation.contract.dataflow import STATES, through_marks

HOME = "ring home"
"""The name of the last message of gradients that go round a whole ring, as in zhuzilin/ring-flash-attention."""

Shift = tuple[tuple[tuple[str, ...], int], ...]
"""Ranks further round a group, by the axes of the group; groups without a shift are left out."""

Part = tuple[Op | None, str]
"""The op that has made a part, None for a tensor that came in; and the name of its memory."""

Content = Counter[tuple[Part, Shift]]

Distance = tuple[int, ...]
"""Ranks further round each of several groups."""


class Contents:
    """Parts in the memory of a rank while the ops of a fragment run in issue order.

    reads: parts that each kernel has read.
    results: parts that each op has made, moved or added, with the keys of their memory.
    problems: violations of the first two rules, in words.
    """

    def __init__(self, fragment: Fragment, mesh: Mesh) -> None:
        self.mesh = mesh
        self.reads: dict[Op, Content] = {}
        self.results: dict[Op, list[tuple[frozenset[str], Content]]] = {}
        self.problems: list[str] = []
        self._memory: dict[str, Content] = {}
        self._brought: set[str] = set()
        self._arrived: dict[tuple[str, str], Content] = defaultdict(Counter)
        reads, writes = defaultdict[Op, dict[str, None]](dict), defaultdict[Op, dict[str, None]](dict)
        for use in fragment.tensor_uses:
            if use.category not in STATES:
                (writes if use.made else reads)[use.op].setdefault(use.key)
        for op in (*fragment.forward, *fragment.backward):
            read, written = [*reads[op]], [*writes[op]]
            if is_shift(op):
                contents = self._shift(op, read, written)
            elif isinstance(op.work, Collective) and (op.work.operation == "reduce_scatter" or op.work.targets):
                # Adds up what the ranks have, or brings each rank the parts of another key, whichever that is.
                contents = [
                    (frozenset([key]), join_contents(self._parts_in(key, op) for key in read))
                    for key in written or [""]
                ]
            elif isinstance(op.work, Memory) and op.work.what == "add":
                contents = [(frozenset({*read, *written} or {""}), self._sum(op, {*read, *written}))]
            else:
                self.reads[op] = join_contents(self._parts_in(key) for key in read)
                contents = [(frozenset([key]), Counter({((op, tensor_of(key)), ()): 1})) for key in written or [""]]
            self.results[op] = contents
            self._memory |= {key: content for keys, content in contents for key in keys & {*written}}

    def of(self, end: Op) -> Content:
        """Parts that an op, or the ops behind a mark, have made, moved or added."""
        ops = [end] if end in self.results else [op for op in through_marks(end) if op in self.results]
        return join_contents(content for op in dict.fromkeys(ops) for _, content in self.results[op])

    def _parts_in(self, key: str, reader: Op | None = None) -> Content:
        """Parts in the memory of a key: those that the last op which the reader names has put there, such as a sum,
        else those of the writer."""
        named = {*through_marks(reader)} if reader is not None else set()
        for op in reversed(self.results) if named else ():
            for keys, content in self.results[op] if op in named else ():
                if key in keys:
                    return content
        return self._memory.setdefault(key, Counter({((None, tensor_of(key)), ()): 1}))

    def _shift(self, op: Op, read: Sequence[str], written: Sequence[str]) -> list[tuple[frozenset[str], Content]]:
        """Moves the parts that a message carries. Memory that it reads and memory that it writes belong together where
        their keys differ in a number only; other memory that it reads goes into the other memory that it writes."""
        pairs = {key: [source for source in read if without_number(source) == without_number(key)] for key in written}
        rest = [key for key in read if not any(key in some for some in pairs.values())]
        carried = {key: join_contents(self._parts_in(source, op) for source in pairs[key] or rest) for key in written}
        if not written:
            # One of several messages into the same memory, which the first of them writes.
            sources = [self._parts_in(key, op) for key in read if key not in self._brought]
            carried = {"": join_contents(sources or [self.of(source) for source in op.after])}
        self._brought |= {*written}
        return [(frozenset([key]), self._move(op, content)) for key, content in carried.items()]

    def _move(self, op: Op, carried: Content) -> Content:
        assert isinstance(op.work, Collective)
        axes, ranks = op.work.axes, self.mesh.size(op.work.axes)
        arrived, moved = self._arrived[op.phase, without_number(op.name)], Content()
        added_up = {shift for (maker, _), shift in carried if maker is not None and maker.phase != op.phase}
        for (part, shift), count in carried.items():
            to = {**dict(shift), axes: (dict(shift).get(axes, 0) + op.work.by) % ranks}
            there = part, tuple(sorted((group, by) for group, by in to.items() if by))
            moved[there] += count
            arrived[there] += 1
            comes_home = op.name.startswith(HOME) or (shift in added_up and len(added_up) > 1)
            if op.work.by % ranks == 0 or (not there[1] and not comes_home):
                self.problems.append(f"{op} brings a rank its own {name_of(part)}")
            elif arrived[there] > 1:
                self.problems.append(f"{op} brings {name_of(part)} of one rank again")
        return moved

    def _sum(self, op: Op, keys: set[str]) -> Content:
        """Joins the parts that the ops which an addition names have put into the memory that it uses."""
        total = Content()
        for source in dict.fromkeys(through_marks(op)):
            # An addition may also wait for gathers of weights, which bring no addend.
            is_addend = is_shift(source) or not isinstance(source.work, HostCopy | Collective)
            some = {*keys, ""} if is_addend else keys
            total += join_contents(
                content for inside, content in self.results.get(source, ()) if inside & some or not keys
            )
        for (part, _), count in total.items():
            if count > 1:
                self.problems.append(f"{op} adds {name_of(part)} {count} times")
        ops_at: dict[Shift, set[Op | None]] = defaultdict(set)
        for (maker, _), shift in total:
            ops_at[shift].add(maker)
        for shift, makers in ops_at.items():
            if shift and len(makers) > 1:
                self.problems.append(f"{op} adds results of {len(makers)} ops from one rank, shifted by {dict(shift)}")
        return total


def is_shift(op: Op) -> bool:
    """Whether an op moves parts by one distance on all ranks."""
    return isinstance(op.work, Collective) and op.work.operation == "shift" and not op.work.targets


def join_contents(contents: Iterable[Content]) -> Content:
    total: Content = Counter()
    for content in contents:
        total.update(content)
    return total


def tensor_of(key: str) -> str:
    """The key of a tensor without its layout."""
    return key.partition("@")[0]


def without_number(name: str) -> str:
    return name.rstrip("0123456789")


def name_of(part: Part) -> str:
    op, name = part
    return f"{name} of {op}" if op is not None else name


# ----------------------------------------------------------------------------------------------- attention

POSITIONS: Mapping[str, Callable[[int, int, int], Sequence[int]]] = {
    "contiguous": lambda rank, ranks, n: range(rank * n, (rank + 1) * n),
    "with helpers": lambda rank, ranks, n: range(rank * n, (rank + 1) * n),
    "striped": lambda rank, ranks, n: range(rank, ranks * n, ranks),
    "zigzag": lambda rank, ranks, n: [
        part * n // 2 + i for part in (rank, 2 * ranks - 1 - rank) for i in range(n // 2)
    ],
}
"""The n positions of a sequence that each rank of a group holds, by the order that sequence schemes name."""


def pairs_in_block(order: str, ranks: int, distance: int, n: int) -> float:
    """Pairs of queries and keys that a causal mask leaves of a block of n x n, in the mean over ranks; keys come from
    the rank `distance` places before that of the queries. A pair of equal positions counts half."""
    pairs = 0.0
    for rank in range(ranks):
        keys = POSITIONS[order]((rank - distance) % ranks, ranks, n)
        for query in POSITIONS[order](rank, ranks, n):
            pairs += sum((key < query) + (key == query) / 2 for key in keys)
    return pairs / ranks


class CoreWatch(Scheme):
    """Outermost scheme of a lowering: changes nothing and keeps the fragments of attention cores in `cores`."""

    family = "tensor"
    name = "core-watch"

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[tuple[CoreAttention, Fragment]] = []

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if isinstance(module, CoreAttention):
            self.cores.append((module, fragment.copy()))
        return fragment


def attention_problems(core: CoreAttention, fragment: Fragment, mesh: Mesh, order: str, sequence: int) -> list[str]:
    """Violations in an attention core. order: of the positions on ranks, a key of `POSITIONS`, empty where several
    schemes cut them; sequence: its tokens."""
    steps = CoreSteps(core, fragment, Contents(fragment, mesh), order, sequence)
    return [*steps.contents.problems, *(steps.problems() if steps.sizes and steps.ops["F"] else ())]


@dataclass(frozen=True)
class CoreSteps:
    """The fused attention kernels of a core whose keys and values, or queries, are shifted round groups of ranks.

    contents: of the fragment. order, sequence: see `attention_problems`.
    """

    core: CoreAttention
    fragment: Fragment
    contents: Contents
    order: str
    sequence: int

    @property
    def sizes(self) -> Mapping[tuple[str, ...], int]:
        """Ranks of each group that something is shifted round."""
        works = [op.work for op in (*self.fragment.forward, *self.fragment.backward) if is_shift(op)]
        return {work.axes: self.contents.mesh.size(work.axes) for work in works if isinstance(work, Collective)}

    @property
    def ops(self) -> Mapping[str, Sequence[Op]]:
        """The kernels of the forward and of the backward pass, without recomputation."""
        issued = {"F": self.fragment.forward, "B": self.fragment.backward}
        return {
            phase: [op for op in ops if isinstance(op.work, Attention) and op.phase == phase]
            for phase, ops in issued.items()
        }

    def problems(self) -> Iterator[str]:
        q, k, v = (tensor.name for tensor in self.core.ins)
        none = (0,) * len(self.sizes)
        # A backward pass may begin with the keys and values that the forward pass has ended with.
        begins = {none, *self.distances(self.ops["F"][-1], k)}
        yield from self.block_problems(self.ops["F"], none)
        yield from min(([*self.block_problems(self.ops["B"], begin)] for begin in begins), key=len)
        output = self.core.outs[0].name
        yield from self.result_problems(output, self.ops["F"], self.fragment.exit[output], q, {none})
        for name in (q, k, v):
            homes = {self.add(none, begin, -1) for begin in begins}
            yield from self.result_problems(f"d{name}", self.ops["B"], self.fragment.grad_exit[name], name, homes)

    def distances(self, op: Op, name: str) -> set[Distance]:
        """Distances that the parts of a tensor have come which a kernel reads."""
        shifts = [dict(shift) for (_, tensor), shift in self.contents.reads[op] if tensor == name]
        return {tuple(shift.get(axes, 0) for axes in self.sizes) for shift in shifts}

    def add(self, one: Distance, other: Distance, sign: int = 1) -> Distance:
        return tuple((a + sign * b) % n for a, b, n in zip(one, other, self.sizes.values(), strict=True))

    def blocks(self, op: Op, begin: Distance) -> set[Distance]:
        """Blocks that a step computes: distances between the rank of the queries and the rank of the keys. A rank that
        helps another reads both ranks' queries and keys, and computes the blocks that have one of each.

        begin: distance that keys had come when the pass began.
        """
        q, k, _ = (tensor.name for tensor in self.core.ins)
        pairs = product(self.distances(op, q), (self.add(key, begin) for key in self.distances(op, k)))
        return {self.add(key, query, -1) for query, key in pairs if key != query} or {(0,) * len(self.sizes)}

    def block_problems(self, ops: Sequence[Op], begin: Distance) -> Iterator[str]:
        """Blocks that a pass does not compute exactly once, and kernels with other FLOPs than their block."""
        computed = Counter(block for op in ops for block in self.blocks(op, begin))
        wanted = Counter(product(*(range(n) for n in self.sizes.values())))
        if computed != wanted:
            yield f"{ops[0].name} computes blocks {sorted(computed.elements())}, not each of {sorted(wanted)} once"
        if len(self.sizes) > 1 or not self.order:
            return
        ((axes, ranks),) = self.sizes.items()
        for op in ops:
            work = op.work
            assert isinstance(work, Attention)
            pairs = work.flops / (2 * work.batch * work.heads * (work.qk_dim + work.v_dim))
            pairs /= 2.5 if work.backward else 1
            blocks = [distance for (distance,) in self.blocks(op, begin)]
            left = sum(pairs_in_block(self.order, ranks, block, self.sequence // ranks) for block in blocks)
            if abs(pairs - left) > 1e-6 * left:
                yield f"{op} computes {pairs:.1f} pairs of its block {blocks} along {axes}, which has {left:.1f}"

    def result_problems(self, name: str, ops: Sequence[Op], end: Op, home: str, homes: set[Distance]) -> Iterator[str]:
        """Steps whose result is missing in a sum, or that comes to another rank than the tensor `home` came from.

        homes: distances at which the tensor is at home.
        """
        parts = [(op, shift) for (op, _), shift in self.contents.of(end) if op in ops]
        if missing := {*ops} - {op for op, _ in parts}:
            yield f"{name} lacks the results of {sorted(map(repr, missing))}"
        places = []
        for op, shift in parts:
            come = tuple(dict(shift).get(axes, 0) for axes in self.sizes)
            places.append(
                {self.add(come, distance) for distance in self.distances(op, home)} if op is not None else set()
            )
        if places and not set.intersection(*places) & homes:
            yield f"results for {name} come to another rank than {home} is from"


# ---------------------------------------------------------------------------------------------------- sums


def bytes_added(ops: Iterable[Op], mesh: Mesh) -> Mapping[str, float]:
    """Bytes that a rank adds to others in kernels and reductions, by phase, without recomputation."""
    added: dict[str, float] = defaultdict(float)
    for op in ops:
        if isinstance(op.work, Memory) and op.work.what == "add":
            added[op.phase] += op.work.read - op.work.write
        elif isinstance(op.work, Collective) and op.work.operation in ("all_reduce", "reduce_scatter"):
            ranks = len(op.work.members or ()) or mesh.size(op.work.axes)
            added[op.phase] += op.work.nbytes * (ranks - 1) / ranks
    return {phase: nbytes for phase, nbytes in added.items() if phase != "R"}
