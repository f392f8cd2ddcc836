"""Longest path: the times of all ops in one pass, where nothing is shared.

An op begins when its stream is free, the host has launched it and all its dependencies have ended. Ops are in an order
in which each comes behind its dependencies, so this is one maximum per op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshcast.simulator.program.flatten import FlatProgram


@dataclass(frozen=True)
class OpTimes:
    """When everything happened in a flat program, as its player noted it [s].

    begin: by op, when it began on its stream.
    end: by op, when it left its stream.
    arrival: by op, when others saw its result.
    launched: by op that takes time of the host, when the host had launched it.
    unissued: by op that waited for the host, when it could have begun without it.
    """

    begin: list[float]
    end: list[float]
    arrival: list[float]
    launched: dict[int, float]
    unissued: dict[int, float]

    @property
    def span(self) -> float:
        """From zero to the last end [s]."""
        return max(self.end, default=0.0)


def longest_path(
    flat: FlatProgram, free: Mapping[tuple[int, str], float] | None = None, host: Sequence[float] = ()
) -> OpTimes:
    """The times of all ops. free, host: when each stream and each host become free [s]; 0 by default."""
    count = len(flat.ops)
    begin, end, arrival = [0.0] * count, [0.0] * count, [0.0] * count
    streams = {key: i for i, key in enumerate(flat.queues)}
    queue = [0] * count
    for key, numbers in flat.queues.items():
        for number in numbers:
            queue[number] = streams[key]
    ready = [free[key] if free else 0.0 for key in flat.queues]
    launched: dict[int, float] = {}
    unissued: dict[int, float] = {}
    clock = list(host) if host else [0.0] * (max(flat.device, default=0) + 1)
    rows = zip(flat.seconds, flat.latency, flat.issue, flat.after, flat.device, queue, strict=True)
    for number, (seconds, latency, issue, after, device, stream) in enumerate(rows):
        at = ready[stream]
        for other in after:
            if arrival[other] > at:
                at = arrival[other]
        if issue:
            clock[device] = launched[number] = issued = clock[device] + issue
            if issued > at:
                unissued[number] = at
                at = issued
        begin[number] = at
        end[number] = ready[stream] = at = at + seconds
        arrival[number] = at + latency
    return OpTimes(begin, end, arrival, launched, unissued)
