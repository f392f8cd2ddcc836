"""Sharded weights, unit by unit: whole while a unit computes, and cut while they rest."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from simulator.ops import BYTES, COMPUTE, Chain, Fragment, Link, Memory, Op, Touch
from simulator.sharding import DataScheme


def in_units(scheme: DataScheme, chain: Chain, ahead: bool) -> Chain:
    """`chain` with every unit's weights gathered before its passes and its gradients scattered behind.

    ahead: a unit's weights are gathered while the one before it computes, else while nobody does. An embedding whose
    table is that of the output layer, too, stays whole between its passes, as does the gradient from the output
    layer's on (both belong to the root unit of FSDP, which is not freed behind its forward pass).
    """
    links = chain.links
    held = [_held(scheme, link) for link in links]
    if not any(held):
        return chain
    made: list[Link] = []
    shared = links[0].takes is None and bool(held[0]) and any(link.fragment.borrowed for link in links[1:])
    # Behind a unit that takes nothing from the one before, as an embedding does, a new row of neighbours begins.
    begins = [i == 0 or link.takes is None for i, link in enumerate(links)] + [True]
    for i, link in enumerate(links):
        before, after = {} if begins[i] else held[i - 1], {} if begins[i + 1] else held[i + 1]
        # Copies differ in their neighbours: the first, those between, the last.
        rows = [(1, before, held[i]), (link.count - 2, held[i], held[i]), (1, held[i], after)]
        if link.count == 1:
            rows = [(1, before, after)]
        for place, (count, previous, following) in enumerate(rows):
            if not count:
                continue
            ends = begins[i] and place == 0, begins[i + 1] and place == len(rows) - 1
            own_first = (True, True) if not ahead else ends
            if shared and i == 1 and place == 0:
                previous = {}
            stays = shared and i == 0
            fragment = _whole(scheme, link, held[i], following, previous, own_first, ahead, stays)
            whole = replace(link, fragment=fragment, count=count)
            if shared and fragment.borrowed:
                whole = _lends(scheme, whole, held[0])
            made.append(replace(whole, found=(*whole.found, *map(_table, held[0]))) if stays else whole)
    return Chain(made, chain.ahead, chain.behind)


def _table(axes: tuple[str, ...]) -> str:
    """The key of the gradients of a unit whose table others use too."""
    return f"gradients of the table {axes}"


def _lends(scheme: DataScheme, link: Link, table: Held) -> Link:
    """A unit that makes a first part of the gradients of a table, which are given back where the table is."""
    first = next((op for op in link.fragment.backward if op.phase == "W"), link.fragment.backward[-1])
    for axes, elements in table.items():
        nbytes = elements * BYTES[scheme.habits.gradients]
        link.fragment.touches.append(Touch(_table(axes), nbytes, first, True, "gradients"))
    return replace(link, left=(*link.left, *map(_table, table)))


Held = dict[tuple[str, ...], int]
"""Elements of a unit's parameters, by the axes that they are cut over at rest."""


def _held(scheme: DataScheme, link: Link) -> Held:
    found: Held = defaultdict(int)
    for param in link.fragment.params:
        if axes := scheme.sums(param):
            found[axes] += param.size
    return dict(found)


def _whole(
    scheme: DataScheme,
    link: Link,
    own: Held,
    following: Held,
    previous: Held,
    first: tuple[bool, bool],
    ahead: bool,
    stays: bool,
) -> Fragment:
    """A unit that gathers its weights before its forward and its backward pass, where `first` says so, and `ahead`
    those of the `following` unit in its forward pass and of the `previous` one in its backward pass. stays: it is
    whole in between, too.
    """
    made = link.fragment.copy()
    gradients = BYTES[scheme.habits.gradients]

    def gathers(held: Held, source: list[Op], phase: str, name: str) -> list[Op]:
        return [replace(scheme.gather(axes, n, phase, "every"), name=name, after=source) for axes, n in held.items()]

    def bring(held: Held, ops: list[Op], came: list[Op], phase: str, name: str, gate: dict[str, Op], to: str) -> None:
        """Gathers a neighbour's weights from the begin of a pass on; who waits for its result waits for them too."""
        if not held or to not in gate:
            return
        found = gathers(held, came, phase, name)
        gate[to] = Op(f"{name} of the next", after=[gate[to], *found], phase=phase)
        made.touches += _lives(name, _bytes(scheme, held), found[0], ops[-1])
        # Behind the unit's own weights, and behind what it waits for.
        place = next((i + 1 for i, op in enumerate(ops) if op in came), 0)
        while place < len(ops) and ops[place].stream == found[0].stream:
            place += 1
        ops[place:place] = found

    arrived: dict[str, list[Op]] = {"F": [], "B": []}

    def own_first(ops: list[Op], came: list[Op], phase: str) -> None:
        arrived[phase] = found = gathers(own, came, phase, "gather params")
        for op in ops:
            if op.stream == COMPUTE:
                op.after += found
        ops[:0] = found

    forward, backward = made.forward, made.backward
    came = [made.entry[link.takes]] if link.takes in made.entry else []
    grads = [made.grad_entry[link.gives]] if link.gives in made.grad_entry else []
    if own:
        for ops, source, phase, alone in ((forward, came, "F", first[0]), (backward, grads, "B", first[1])):
            if alone and not (stays and phase == "B"):
                own_first(ops, source, phase)
            key = "weights" if stays else f"weights {phase}"
            made.touches += _lives(key, _bytes(scheme, own), ops[0], ops[-1])
    if ahead:
        bring(following, forward, came, "F", "gather params", made.exit, link.gives or "")
        # Where nothing comes in, the loss begins the backward pass.
        bring(previous, backward, grads or backward[:1], "B", "gather params again", made.grad_exit, link.takes or "")
    # The gradients of the unit whose backward pass came before are still on their way.
    if following:
        sent = sum(following.values()) * gradients
        made.touches += _lives("gradients of the following", sent, backward[0], backward[-1], "gradients")
    if own and scheme.habits.gathers_apart:
        nbytes = _bytes(scheme, own)
        for ops, source, phase in ((forward, came, "F"), (backward, grads, "B"))[: 1 if stays else 2]:
            copy = Op("copy params", work=Memory("concat", nbytes, nbytes), after=source + arrived[phase], phase=phase)
            ops.insert(next((i for i, op in enumerate(ops) if op.stream == COMPUTE), len(ops)), copy)
            made.touches += _lives(f"arrived {phase}", nbytes, ops[0], ops[-1], "buffers")
    for axes, elements in own.items():
        ready = [param.ready for param in made.params if scheme.sums(param) == axes]
        scatter = replace(scheme.reduce(axes, elements, "W", "every"), after=ready)
        begin = next((op for op in backward if op.phase == "W"), backward[-1])
        if scheme.habits.gathers_apart:
            nbytes = elements * gradients
            packed = Op("pack grads", work=Memory("concat", nbytes, nbytes), after=ready, phase="W")
            made.touches += _lives(f"packed {axes}", nbytes, packed, scatter, "buffers")
            backward.append(packed)
            scatter.after = [packed]
        key = _table(axes) if stays else f"gradients {axes}"
        made.touches += _lives(key, elements * gradients, begin, scatter, "gradients")
        backward.append(scatter)
    return made


def _bytes(scheme: DataScheme, held: Held) -> int:
    return sum(held.values()) * BYTES[scheme.habits.weights]


def _lives(key: str, nbytes: int, begin: Op, end: Op, category: str = "parameters") -> list[Touch]:
    return [Touch(key, nbytes, begin, True, category), Touch(key, nbytes, end, False, category)]
