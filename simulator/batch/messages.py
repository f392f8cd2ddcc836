"""Messages between the stages of a plan, priced once for those that cross the same links."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.simulator.batch.loops.arrays import SlotMessages
from meshcast.simulator.batch.tables import TableArrays
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.ops import Transfer


class Hops(NamedTuple):
    """The messages between devices of a timetable: whether backward, and the stages from which and to which.

    stages: number of all stages.
    groups: the number of the links that each crosses.
    ends: devices at the ends of one of each group.
    priced: prices and bytes of all messages by the bytes of each; see `SlotMessages`, here by way and stage.
    """

    stages: int
    way: np.ndarray
    stage: np.ndarray
    other: np.ndarray
    groups: list[int]
    ends: list[tuple[int, int]]
    priced: dict[bytes, tuple[np.ndarray, np.ndarray]]


class MessagePrices:
    """Prices of the messages of plans, by what they cross and their bytes."""

    def __init__(self) -> None:
        self._hops: dict[Hashable, Hops] = {}

    def price(
        self, costs: Costs, table: TableArrays, axis: str, forward: np.ndarray, backward: np.ndarray
    ) -> SlotMessages:
        """Prices the messages of a plan.

        axis: of the pipeline.
        forward, backward: by stage, the bytes of its output, and of the gradient of its input.
        """
        hops = remember(self._hops, (costs, table.route), lambda: _find_hops(costs, table, axis))
        nbytes = np.where(hops.way > 0, backward[hops.other], forward[hops.stage])
        prices, moved = remember(hops.priced, nbytes.tobytes(), lambda: _price_hops(costs, hops, axis, nbytes))
        of_slot = table.backward, table.stages
        return SlotMessages(prices[of_slot], moved[of_slot])


def _price_hops(costs: Costs, hops: Hops, axis: str, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns prices and bytes of messages. nbytes: of each."""
    keys = list(zip(hops.groups, nbytes.tolist(), strict=True))
    known = {key: costs.estimate(Transfer(key[1], axis, *hops.ends[key[0]])) for key in dict.fromkeys(keys)}
    prices, moved = np.zeros((2, hops.stages, 3)), np.zeros((2, hops.stages, 2))
    if keys:
        prices[hops.way, hops.stage] = [(known[key].seconds, known[key].latency, known[key].sigma) for key in keys]
        moved[hops.way, hops.stage, 0] = moved[hops.way, hops.other, 1] = nbytes
    return prices, moved


def _find_hops(costs: Costs, table: TableArrays, axis: str) -> Hops:
    """Returns the messages of a timetable, grouped by the links that they cross."""
    numbers: dict[Hashable, int] = {}
    groups, ends = list[int](), list[tuple[int, int]]()
    hops, devices = table.route
    for _, *ends_of in hops:
        pair = devices[ends_of[0]], devices[ends_of[1]]
        reaches = costs.places.pair_reaches(Transfer(0, axis, *pair))
        if reaches not in numbers:
            numbers[reaches] = len(ends)
            ends.append(pair)
        groups.append(numbers[reaches])
    way, stage, other = np.array(hops, np.int64).reshape(-1, 3).T
    return Hops(len(devices), way, stage, other, groups, ends, {})
