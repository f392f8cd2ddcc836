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
    """Begin and end of every instance of a flat program [s].

    unissued: for ops that waited for the host, when they could have begun without it [s].
    """

    begin: list[float]
    end: list[float]
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
    begin, end, seen = [0.0] * count, [0.0] * count, [0.0] * count
    streams = {key: i for i, key in enumerate(flat.queues)}
    queue = [0] * count
    for key, numbers in flat.queues.items():
        for number in numbers:
            queue[number] = streams[key]
    ready = [free[key] if free else 0.0 for key in flat.queues]
    unissued: dict[int, float] = {}
    clock = list(host) if host else [0.0] * (max(flat.device, default=0) + 1)
    rows = zip(flat.seconds, flat.latency, flat.issue, flat.after, flat.device, queue, strict=True)
    for number, (seconds, latency, issue, after, device, stream) in enumerate(rows):
        at = ready[stream]
        for other in after:
            if seen[other] > at:
                at = seen[other]
        if issue:
            clock[device] = issued = clock[device] + issue
            if issued > at:
                unissued[number] = at
                at = issued
        begin[number] = at
        end[number] = ready[stream] = at = at + seconds
        seen[number] = at + latency
    return OpTimes(begin, end, unissued)
