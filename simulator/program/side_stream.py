"""Sides: priced ops beside the parts of a task, such as the sums of gradients behind a backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from simulator.ir.ops import Op, SideOps
from simulator.program.block import COMING, FREE, Price

if TYPE_CHECKING:
    from simulator.program.build import Task


@dataclass(eq=False)
class PricedSideOps:
    """Priced ops beside the parts, one after another; see `simulator.ir.ops.SideOps`.

    after: a side in front of this one, and for each op here the place of the op there that it waits for; -1: of none.
    """

    ops: list[Op]
    seconds: np.ndarray
    spread: np.ndarray
    latency: np.ndarray
    params: np.ndarray
    starts: np.ndarray
    after: tuple[PricedSideOps, np.ndarray] | None = None

    @property
    def stream(self) -> str:
        return self.ops[0].stream

    @property
    def lasting(self) -> np.ndarray:
        """From the begin of every op until others see its result [s]."""
        return self.seconds + self.latency

    @cached_property
    def ends(self) -> np.ndarray:
        """When each op has ended if none waits for anything, from the begin of the first [s]."""
        return np.cumsum(self.seconds)


def price_side_ops(besides: Sequence[SideOps], task: Task, price: Price, host: float) -> list[PricedSideOps]:
    """Priced; what is formed while the program runs is formed by when the task, played alone, has its gradients."""
    formed = [one for each in besides for one in (each.formed(_ready(task, host)) if each.formed else [each])]
    sides: dict[int, PricedSideOps] = {}
    for one in formed:
        sides[id(one)] = side = _price(one, price)
        side.after = (sides[id(one.after[0])], one.after[1]) if one.after else None
    return list(sides.values())


def _ready(task: Task, host: float) -> np.ndarray:
    """When the gradient of every parameter is complete, by its number, if all begins at once [s]."""
    found = np.zeros(sum(part.count * len(marks) for part, marks in zip(task.parts, task.marks, strict=True)))
    free: dict[str, float] = defaultdict(float)
    issued = came = 0.0
    for number, part in enumerate(task.parts):
        block, marks = part.block, task.marks[number]
        (port,) = block.ports
        for copy in range(part.count):
            seen = list[float]()
            for i, op in enumerate(block.ops):
                issued += host if op.work is not None else 0.0
                waits = (seen[j] for j in block.after[i])
                begin = max(free[op.stream], issued if host else 0.0, came if i in port.entry else 0.0, *waits, 0.0)
                free[op.stream] = begin + part.seconds[i]
                seen.append(free[op.stream] + part.latency[i])
            for at, places in enumerate(marks, task.copy_of(number, copy)):
                found[at] = max((came if place == COMING else seen[place] for place in places), default=0.0)
            came = max((seen[place] for place in port.exit), default=0.0 if not port.through else came)
    return found


def _price(beside: SideOps, price: Price) -> PricedSideOps:
    known = {key: price(op.work) if op.work else FREE for key, op in {id(op): op for op in beside.ops}.items()}
    seconds, spread, latency = np.array([known[id(op)] for op in beside.ops]).T
    latency = latency + np.array(beside.waits) if len(beside.waits) else latency
    return PricedSideOps(beside.ops, seconds, spread, latency, beside.params, beside.starts)
