"""A model of NCCL's communicators: streams that run their operations in the order in which they were issued.

Every rank has a compute stream and a stream for each of its communicators. A rank issues its actions in their order
without ever waiting itself. An operation of a communicator begins when those before it on the same stream have ended,
on both ranks, and when each rank has computed what it issued before it; its two ends take the same time. A pass begins
when the pass before it has ended and its message is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import count

Order = list[tuple[int, str, int]]
"""Stage, kind and micro-batch of the actions of a rank, with messages, from `torch_pipelining.orders_with_messages`."""

Communicator = Callable[[int, int, str], Hashable]
"""The communicator of a message from a rank to another in a direction, F or B."""

SECONDS = {"F": 1.0, "BW": 2.0, "B": 1.0, "W": 1.0}


def one_for_all(source: int, target: int, direction: str) -> Hashable:
    return None


def one_a_direction(source: int, target: int, direction: str) -> Hashable:
    return direction


def one_an_edge(source: int, target: int, direction: str) -> Hashable:
    return source, target, direction


def one_a_message() -> Communicator:
    """As many streams as there are messages."""
    numbers = count()
    return lambda source, target, direction: next(numbers)


def play(
    orders: Sequence[Order], devices: Sequence[int], communicator: Communicator, message_seconds: float = 0.0
) -> float | None:
    """Time from the first to the last pass [s]; None in case of a deadlock.

    devices: the rank of each stage.
    """
    after, seconds = defaultdict[Hashable, list[Hashable]](list), dict[Hashable, float]()
    for rank, order in enumerate(orders):
        computed: Hashable = None
        issued: dict[Hashable, Hashable] = {}
        for stage, kind, k in order:
            if kind in SECONDS:
                here = (stage, kind, k)
                seconds[here] = SECONDS[kind]
                other, direction = (stage - 1, "F") if kind == "F" else (stage + 1, "B")
                if kind != "W" and 0 <= other < len(devices) and devices[other] != rank:
                    after[here].append(("message", direction, stage, k))
                previous, computed = computed, here
            else:
                sends, direction = kind.startswith("SEND"), kind[-1]
                other = stage + (1 if sends == (direction == "F") else -1)
                source, target = (rank, devices[other]) if sends else (devices[other], rank)
                here = ("message", direction, other if sends else stage, k)
                seconds[here] = message_seconds
                stream = communicator(source, target, direction)
                previous = computed
                if stream in issued:
                    after[here].append(issued[stream])
                issued[stream] = here
            if previous is not None:
                after[here].append(previous)
    return _longest_path(after, seconds)


def _longest_path(after: dict[Hashable, list[Hashable]], seconds: dict[Hashable, float]) -> float | None:
    end = dict[Hashable, float]()
    waiting = set(seconds)
    while ready := [one for one in waiting if all(other in end for other in after[one])]:
        for one in ready:
            end[one] = seconds[one] + max((end[other] for other in after[one]), default=0.0)
        waiting -= set(ready)
    return None if waiting else max(end.values())


def receive_late(order: Order) -> Order:
    """The same order with each receive right before the pass that needs it."""
    held, found = set[tuple[int, str, int]](), Order()
    for stage, kind, k in order:
        if kind.startswith("RECV"):
            held.add((stage, kind, k))
            continue
        receive = (stage, "RECV_F" if kind == "F" else "RECV_B", k)
        if kind in ("F", "BW", "B") and receive in held:
            held.remove(receive)
            found.append(receive)
        found.append((stage, kind, k))
    return found
