"""Recomputation: what a site makes is forgotten after its forward pass, and made again when its gradients need it.

In two ways. `recompute` forgets the inside of a site, and all of it is made again once the gradient of what it has made
arrives. `discard` forgets also what chosen ops have made for others, and those ops are done again just before the
backward pass of the first that reads it (output-discarding checkpoints of Megatron-Core).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from simulator.ir.modules import Layer, Leaf, Nest, Site, Stage, Unit
from simulator.ir.operators import Cast
from simulator.ir.ops import Communication, Fragment, Op, Touch
from simulator.ir.scheme import Inner
from simulator.lowering.rewrite import Rewrite, sources


def recompute(site: Site, inner: Inner, kept: Callable[[str], bool] | None = None) -> Fragment:
    """`site` with its inside forgotten after the forward pass and computed again, once the gradient has arrived.

    Kept are the tensors that come in from outside, and those that others need; all else lives within one pass. kept:
    whether memory of a name inside is kept, too; what nothing else needs is then not done again.
    """
    first, again = inner(site), inner(site)
    gradient = list(again.grad_entry.values())
    if kept is not None:
        _spare(again, kept, gradient)
    for mark in again.entry.values():
        mark.after += gradient
    for op in again.forward:
        op.phase, op.name = "R", f"re {op.name}"
    before, anew = set(map(id, first.forward)), set(map(id, again.forward))
    inside = {t.key for t in again.touches if t.made and id(t.op) in anew}
    touches = [t for t in first.touches if id(t.op) in before]
    touches += [
        Touch(f"{t.key}~" if t.key in inside and not t.stays else t.key, t.nbytes, t.op, t.made, t.category)
        for t in again.touches
    ]
    for param, other in zip(again.params, first.params, strict=True):
        param.used = other.used
    return Fragment(
        forward=first.forward,
        backward=[*again.forward, *again.backward],
        entry=first.entry,
        exit=first.exit,
        grad_entry=again.grad_entry,
        grad_exit=again.grad_exit,
        params=again.params,
        borrowed=again.borrowed,
        touches=touches,
    )


def _spare(again: Fragment, kept: Callable[[str], bool], gradient: Sequence[Op]) -> None:
    """Leaves out of `again` the forward ops that make only what is `kept`, or what those read. Who waits for them waits
    for the `gradient`."""
    made, read = defaultdict[Op, set[str]](set), defaultdict[Op, set[str]](set)
    for touch in again.touches:
        (made if touch.made else read)[touch.op].add(touch.key)
    asked = {key for keys in read.values() for key in keys}
    # What leaves the site is made again, as recomputation does.
    wanted = {key for op in again.forward for key in made[op] - asked if not kept(key)}
    wanted |= {key for op in again.backward for key in read[op] if not kept(key)}
    waited: set[Op] = set()
    dead = Rewrite(again)
    left: set[Op] = set()
    for op in reversed(again.forward):
        # Ops in the middle of a leaf make nothing that has a name.
        if made[op] & wanted or (not made[op] and op in waited):
            wanted |= {key for key in read[op] if not kept(key)}
            waited |= sources(op)
        else:
            left.add(op)
            dead.swap(op, [], gradient)
    again.touches = [touch for touch in again.touches if touch.op not in left]
    dead.done()


def discard(fragment: Fragment, ops: Sequence[Op]) -> None:
    """Changes `fragment` so that what its forward `ops` have made is forgotten with the forward pass.

    They are done again in front of the first backward op that needs some of it, when that could begin, and so is the
    communication from one to another, and that to and from them whose result nobody else keeps. What no backward op
    needs is not made again; what later slices of a sequence read stays.
    """
    backward = set(map(id, fragment.backward))
    staying = {t.key for t in fragment.touches if t.stays}
    saved = {t.key for t in fragment.touches if id(t.op) in backward} - staying
    own = _with_moves(fragment, ops, saved)
    made = {t.key: t.op for t in fragment.touches if t.made and t.op in own and t.key not in staying}
    readers = {t.op: t.key for t in fragment.touches if t.key in made and id(t.op) in backward}
    if not readers:
        return
    place, first = next((i, op) for i, op in enumerate(fragment.backward) if op in readers)
    again = {op: replace(op, name=f"re {op.name}", phase="R", after=[]) for op in fragment.forward if op in own}
    for op, other in again.items():
        other.after = [again[one] for one in sources(op) if one in again] or list(first.after)
    touches = [replace(t, key=f"{t.key}~") if t.op in readers and t.key in made else t for t in fragment.touches]
    touches += [
        replace(t, key=f"{t.key}~" if t.key in made else t.key, op=again[t.op])
        for t in fragment.touches
        if t.op in again
    ]
    for touch in fragment.touches:
        if touch.op in readers and touch.key in made:
            touch.op.after.append(again[made[touch.key]])
    fragment.touches = touches
    fragment.backward[place:place] = again.values()


class Forgetting:
    """The leaves of a unit of which `discard` forgets what they make, as they are lowered.

    chosen: those that options name. The casts of what they make belong to them. Leaves that read from each other are
    one group; a group is discarded by the first nest that holds all who read from it.
    """

    def __init__(self, unit: Unit, chosen: Callable[[Leaf], bool]) -> None:
        leaves = unit.leaves()
        made = {t.name for leaf in leaves if chosen(leaf) for t in leaf.outs}
        self._own = {leaf for leaf in leaves if chosen(leaf) or (isinstance(leaf, Cast) and leaf.ins[0].name in made)}
        self._readers: dict[str, list[Leaf]] = defaultdict(list)
        for leaf in leaves:
            for tensor in leaf.ins:
                self._readers[tensor.name].append(leaf)
        self._ops: dict[Leaf, list[Op]] = {}

    def note(self, leaf: Leaf, fragment: Fragment) -> None:
        """A leaf has been lowered."""
        if leaf in self._own:
            self._ops[leaf] = list(fragment.forward)

    def discard(self, nest: Nest, fragment: Fragment) -> None:
        """A nest has been lowered: `fragment` is changed."""
        inside = set(nest.leaves())
        for group in self._groups():
            if all(reader in inside for leaf in group for t in leaf.outs for reader in (leaf, *self._readers[t.name])):
                discard(fragment, [op for leaf in group for op in self._ops.pop(leaf)])

    def _groups(self) -> list[list[Leaf]]:
        found: list[list[Leaf]] = []
        for leaf in self._ops:
            mine = [group for group in found if any(leaf in self._readers[t.name] for one in group for t in one.outs)]
            found = [group for group in found if group not in mine] + [[*(one for g in mine for one in g), leaf]]
        return found


def _with_moves(fragment: Fragment, ops: Iterable[Op], saved: set[str]) -> set[Op]:
    """`ops`, with the communication between them, that which brings what is not saved anyway, and that whose result
    is."""
    own, found = set(ops), set(ops)
    results = {t.op for t in fragment.touches if t.made and t.key in saved}
    for op in fragment.forward:
        for chain in _moves(op):
            inside = bool(own & sources(chain[-1]))
            if (op in own and (inside or chain[0] not in results)) or (inside and op in results and chain[0] is op):
                found |= set(chain)
    return found


def _moves(op: Op) -> list[list[Op]]:
    """The chains of communication that bring an op what it reads, or, if it is communication itself, the one that ends
    with it: the last first."""
    chains = []
    for last in {op} if isinstance(op.work, Communication) else sources(op):
        chain: list[Op] = []
        while isinstance(last.work, Communication):
            chain.append(last)
            last = next(iter(sources(last)), Op("what comes in"))
        if chain:
            chains.append(chain)
    return chains


def marked(stage: Stage, layers: float, mark: str) -> Stage:
    """`stage` whose first so many layers bear a mark; units in a row of which some do are two."""
    units: list[Unit] = []
    for unit in stage.units:
        some = int(min(layers, unit.count)) if isinstance(unit, Layer) else 0
        layers -= some
        if some:
            units.append(replace(unit, count=some, marks=unit.marks | {mark}))
        if some < unit.count:
            units.append(replace(unit, count=unit.count - some))
    return replace(stage, units=tuple(units))
