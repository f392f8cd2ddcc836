"""Messages between the stages of a plan, priced once for those that cross the same links."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.simulator.batch.tables import TableArrays
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.ops import Transfer


class SlotMessages(NamedTuple):
    """Messages by slot of a timetable.

    ports: that by which the result is sent; -1: it is not.
    prices: seconds and latency [s].
    moved: bytes that are sent and received.
    """

    ports: np.ndarray
    prices: np.ndarray
    moved: np.ndarray


class MessagePrices:
    """Prices of the messages of plans, by what they cross and their bytes."""

    def __init__(self) -> None:
        self._reaches: dict[Hashable, tuple[list[int], list[tuple[int, int]]]] = {}

    def price(
        self, costs: Costs, table: TableArrays, axis: str, forward: Sequence[int], backward: Sequence[int]
    ) -> SlotMessages:
        """Prices the messages of a plan.

        axis: of the pipeline.
        forward, backward: by stage, the bytes of its output, and of the gradient of its output that comes back.
        """
        count = len(forward)
        sent, received = np.zeros((2, count, 4)), np.zeros((2, count))  # port, seconds, latency, bytes
        sent[:, :, 0] = -1
        groups, ends = remember(self._reaches, (costs, table, axis), lambda: _group_pairs(costs, table, axis))
        known: dict[tuple[int, int], tuple[float, float]] = {}
        for (way, stage, other), group in zip(table.hops, groups, strict=True):
            nbytes = backward[other] if way else forward[stage]
            if (group, nbytes) not in known:
                seconds, _, latency = costs.estimate(Transfer(nbytes, axis, *ends[group]))
                known[group, nbytes] = seconds, latency
            sent[way, stage] = way, *known[group, nbytes], nbytes
            received[way, other] = nbytes
        of_slot = sent[table.backward, table.stages]
        moved = np.column_stack([of_slot[:, 3], received[table.backward, table.stages]])
        return SlotMessages(of_slot[:, 0].astype(np.int64), np.ascontiguousarray(of_slot[:, 1:3]), moved)


def _group_pairs(costs: Costs, table: TableArrays, axis: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns for each of the hops of a timetable the number of what it crosses, and a pair of devices for each."""
    numbers: dict[Hashable, int] = {}
    groups, ends = list[int](), list[tuple[int, int]]()
    for _, stage, other in table.hops:
        pair = int(table.devices[stage]), int(table.devices[other])
        reaches = costs.places.pair_reaches(Transfer(0, axis, *pair))
        if reaches not in numbers:
            numbers[reaches] = len(ends)
            ends.append(pair)
        groups.append(numbers[reaches])
    return groups, ends
