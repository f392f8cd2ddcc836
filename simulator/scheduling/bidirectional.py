"""Orders in which forward passes of one way through the devices are paired with backward passes of the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simulator.scheduling.schedule import Action, OverlappedPasses, ScheduleItem


def eight_steps(
    entering: tuple[int, Sequence[int]], other: tuple[int, Sequence[int]], place: int, half: int
) -> list[ScheduleItem]:
    """The order of a device with two stages through which micro-batches go opposite ways, forward passes of one paired
    with backward passes of the other (arXiv 2412.19437, figure 5).

    entering, other: stage and micro-batches (n each) of the way that comes by sooner, and of the one that comes later.
    place: devices that the first has passed before. half: devices up to where both come by at once; n >= 2 half.
    """
    (x, _), (y, _) = entering, other
    forward = {stage: iter([Action(stage, "F", k) for k in some]) for stage, some in (entering, other)}
    backward = {stage: iter(some) for stage, some in (entering, other)}
    owed: deque[Action] = deque()

    def back(stage: int, whole: bool = True) -> Action:
        k = next(backward[stage])
        if not whole:
            owed.append(Action(stage, "W", k))
        return Action(stage, "BW" if whole else "B", k)

    rest, steady = half - 1 - place, len(entering[1]) - 2 * half + place + 1
    turns: list[ScheduleItem] = [next(forward[x]) for _ in range(2 * rest)]
    for _ in range(place + 1):
        turns += [next(forward[x]), next(forward[y])]
    for _ in range(rest):
        turns += [back(y, whole=False), owed.popleft(), next(forward[y])]
    for i in range(steady):
        pair = OverlappedPasses(next(forward[x]), back(y))
        # In the middle the first backward pass comes late, and the forward pass must not wait for it.
        turns += pair if i == rest == 0 else [pair]
        turns.append(OverlappedPasses(next(forward[y]), back(x)))
    for _ in range(rest):
        turns += [back(y), OverlappedPasses(next(forward[y]), back(x))]
    # Half of those that are left are whole; the others' weights fill the gaps while the pipe runs dry.
    turns += [back((y, x)[i % 2], whole=i <= place) for i in range(2 * (place + 1))]
    for _ in range(rest):
        turns += [owed.popleft(), back(x, whole=False)]
    return [*turns, *owed]
