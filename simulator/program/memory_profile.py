"""Memory as it was played: peaks per device, by category.

An allocator serves the host, which takes and gives memory back in the order in which it issues ops, however far behind
the GPU is. So memory follows the issue order: what an op makes is there from its issue; what it was the last to need
is free once it is issued, or, where it runs on a stream beside the computation, once somebody has waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.ir.ops import COMPUTE, Op, TensorUse, UnitRun

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers", "logits", "other")

Event = tuple[int, bool, float, str]
"""An op's place (-1: before the first), at its end (or begin), bytes more or less, category."""


@dataclass(frozen=True)
class Profile:
    """What a run of ops does to memory, by `CATEGORIES` [bytes]: `net` from its begin to its end, `top` at its peak.

    The peak is never below what was there before.
    """

    net: np.ndarray
    top: np.ndarray

    @cached_property
    def grown(self) -> float:
        """The sum of `net`."""
        return float(self.net.sum())

    @cached_property
    def peak(self) -> float:
        """The sum of `top`."""
        return float(self.top.sum())

    @classmethod
    def of(cls, events: Iterable[Event]) -> Profile:
        """From events; at one place memory is taken before it is given back."""
        level, highest = [0.0] * len(CATEGORIES), 0.0
        total, top = 0.0, list(level)
        for _, _, nbytes, category in sorted(events, key=lambda event: event[:2]):
            level[CATEGORIES.index(category)] += nbytes
            total += nbytes
            if total > highest:
                top, highest = list(level), total
        return cls(np.array(level), np.array(top))

    @classmethod
    def step(cls, nbytes: float, category: str) -> Profile:
        """Memory taken (or, below zero, given back) at once."""
        return cls.of([(0, False, nbytes, category)])

    @classmethod
    def in_series(cls, parts: Iterable[tuple[Profile, int]]) -> Profile:
        """Of profiles one after another, each so many times."""
        level = top = np.zeros(len(CATEGORIES))
        held = highest = 0.0
        for part, count in parts:
            # What grows from copy to copy is highest in the last one.
            before = count - 1 if part.grown > 0 else 0
            if held + before * part.grown + part.peak > highest:
                top = level + before * part.net + part.top
                highest = held + before * part.grown + part.peak
            level = level + count * part.net
            held += count * part.grown
        return cls(level, top)


def memory_events(
    tensor_uses: Iterable[TensorUse], forward: list[Op], backward: list[Op], unit_run: UnitRun
) -> dict[Op, list[Event]]:
    """When memory comes and goes, by op: from the first op that touches a key to the last one.

    What comes in from the unit before was taken there and is given back here; what goes out is taken here. So it is
    with what the link finds, and leaves to others.
    """
    place = {op: i for i, op in enumerate([*forward, *backward])}
    spans: dict[str, list[TensorUse]] = defaultdict(list)
    for tensor_use in tensor_uses:
        if tensor_use.op in place and tensor_use.nbytes:
            spans[tensor_use.key].append(tensor_use)
    taken, given = unit_run.keys
    found: dict[Op, list[Event]] = defaultdict(list)
    for key, members in spans.items():
        first = min(members, key=lambda t: place[t.op]).op
        last = max(members, key=lambda t: place[t.op]).op
        nbytes = float(max(t.nbytes for t in members))
        category = next((t.category for t in members if t.category != "workspace"), "workspace")
        if key in (taken, given) or (category == "workspace" and place[first] < len(forward) <= place[last]):
            category = "activations"
        if key not in (taken, f"d:{given}", *unit_run.allocated_before):
            found[first].append((0, False, nbytes, category))
        if key not in (given, f"d:{taken}", *unit_run.freed_later):
            found[last].append((0, True, -nbytes, category))
    return found


def block_events(ops: Sequence[Op], after: Sequence[Sequence[int]], by_op: dict[Op, list[Event]]) -> list[Event]:
    """The events of `ops`, issued in this order, each at its place."""
    last = len(ops) - 1
    waiter: dict[int, int] = {}
    for i, places in enumerate(after):
        for j in places:
            waiter.setdefault(j, i)
    found: list[Event] = []
    for i, op in enumerate(ops):
        end = i if op.stream == COMPUTE else max(i, waiter.get(i, last + 1) - 1)
        found += [(end if at_end else i, at_end, n, category) for _, at_end, n, category in by_op.get(op, ())]
    return found
