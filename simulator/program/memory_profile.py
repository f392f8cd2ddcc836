"""Memory of a pass: allocations and frees of its ops, and the profile that they make.

The caching allocator serves the host, which allocates and frees in the order in which it issues ops, however far behind
the GPU is. So memory follows the issue order: the output of an op is allocated at its issue; a tensor is freed once its
last reader is issued or, where that runs on a communication stream, once somebody has waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import COMPUTE, Fragment, Op, Param, TensorUse, UnitRun

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers", "logits", "other")


class Growth(Protocol):
    """Bytes that the gradient of a parameter takes when the backward pass makes it; hashable."""

    @property
    def freed(self) -> bool:
        """Whether they are freed at the end of the pass."""

    def __call__(self, param: Param) -> float:
        """Returns the bytes of the gradient of a parameter on a rank."""


Event = tuple[int, bool, float, str]
"""An op's place (-1: before the first), at its end (or begin), bytes more or less, category."""


@dataclass(frozen=True)
class Profile:
    """Net change and peak of memory over a run of ops, by `CATEGORIES` [bytes].

    net: from begin to end.
    top: at the peak, relative to the begin; never below zero in sum.
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
        """Returns the profile of events; at a place allocations come before frees."""
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
        """Returns the memory allocated (or, below zero, freed) at once."""
        return cls.of([(0, False, nbytes, category)])

    @classmethod
    def in_series(cls, parts: Iterable[tuple[Profile, int]]) -> Profile:
        """Returns the profile of successive profiles, each so many times."""
        level = top = np.zeros(len(CATEGORIES))
        held = highest = 0.0
        for part, count in parts:
            # What grows from copy to copy is highest in the last.
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
    """Returns allocations and frees by op: a key lives from the first op that uses it to the last.

    The input of a unit was allocated by the unit before and is freed here; its output is allocated here. The same holds
    for other memory that the unit run shares with its neighbours.
    """
    ops = [*forward, *backward]
    place = {op: i for i, op in enumerate(ops)}
    spans: dict[str, list[tuple[int, TensorUse]]] = defaultdict(list)
    for tensor_use in tensor_uses:
        if tensor_use.nbytes and (at := place.get(tensor_use.op)) is not None:
            spans[tensor_use.key].append((at, tensor_use))
    taken, returned = unit_run.keys
    events: dict[Op, list[Event]] = defaultdict(list)
    for key, members in spans.items():
        places = [at for at, _ in members]
        first, last = min(places), max(places)
        nbytes = float(max(use.nbytes for _, use in members))
        category = next((use.category for _, use in members if use.category != "workspace"), "workspace")
        if key in (taken, returned) or (category == "workspace" and first < len(forward) <= last):
            category = "activations"
        if key not in (taken, f"d:{returned}", *unit_run.allocated_before):
            events[ops[first]].append((0, False, nbytes, category))
        if key not in (returned, f"d:{taken}", *unit_run.freed_later):
            events[ops[last]].append((0, True, -nbytes, category))
    return events


def release_weights(tensor_uses: Sequence[TensorUse]) -> list[TensorUse]:
    """Returns the uses of memory by a split backward pass: gathered weights are freed behind the gradients of inputs,
    as those of weights, which may be computed much later, do not read them."""
    read = {use.key for use in tensor_uses if use.category == "parameters" and use.op.phase in "RB"}
    return [use for use in tensor_uses if use.op.phase != "W" or use.key not in read]


def block_events(ops: Sequence[Op], after: Sequence[Sequence[int]], by_op: dict[Op, list[Event]]) -> list[Event]:
    """Returns the events of `ops`, issued in this order, each with its place."""
    last = len(ops) - 1
    waiter: dict[int, int] = {}
    for i, places in enumerate(after):
        for j in places:
            waiter.setdefault(j, i)
    events: list[Event] = []
    for i, op in enumerate(ops):
        end = i if op.stream == COMPUTE else max(i, waiter.get(i, last + 1) - 1)
        events += [(end if at_end else i, at_end, n, category) for _, at_end, n, category in by_op.get(op, ())]
    return events


def growth_events(ops: Sequence[Op], params: Sequence[Param], growth: Growth) -> list[Event]:
    """Returns what the gradients take that these ops of a backward pass complete, and that stays after it."""
    places = {op: place for place, op in enumerate(ops)}
    completed = [(places[param.ready], growth(param)) for param in params if param.trained and param.ready in places]
    return [(place, False, nbytes, "gradients") for place, nbytes in completed]


def update_events(fragment: Fragment, copies: Mapping[Op, Op], ops: Sequence[Op]) -> list[Event]:
    """Returns what the ops of an update allocate as they begin and free as they end.

    copies: the op of the block by that of the fragment; of ops that run elsewhere, such as on the host, there is none.
    """
    places = {op: place for place, op in enumerate(ops)}
    held = [(places[copies[use.op]], use) for use in fragment.tensor_uses if use.op in copies]
    begins = [(place, False, float(use.nbytes), use.category) for place, use in held]
    return begins + [(place, True, -nbytes, category) for place, _, nbytes, category in begins]
