"""Orders of DualPipe and DualPipeV: two stages per device, micro-batches in both directions, overlapped passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from meshcast.simulator.scheduling.schedule import Action, OverlappedPasses, ScheduleItem


def eight_step_order(
    near: tuple[int, Sequence[int]], far: tuple[int, Sequence[int]], position: int, half: int
) -> list[ScheduleItem]:
    """Makes the order of a device in the eight steps of arXiv 2412.19437, figure 5: forward passes of one direction
    are overlapped with backward passes of the other.

    near, far: stage and micro-batches (n each) of the direction whose micro-batches reach the device first, and of the
    other direction.
    position: number of devices between the start of the near direction and this device.
    half: number of devices that the near direction reaches first (DualPipe p/2, DualPipeV p); n >= 2 half.
    """
    (x, _), (y, _) = near, far
    forward = {stage: iter([Action(stage, "F", k) for k in microbatches]) for stage, microbatches in (near, far)}
    backward = {stage: iter(microbatches) for stage, microbatches in (near, far)}
    pending: deque[Action] = deque()

    def next_backward(stage: int, split: bool = False) -> Action:
        k = next(backward[stage])
        if split:
            pending.append(Action(stage, "W", k))
        return Action(stage, "B" if split else "BW", k)

    inner, steady = half - 1 - position, len(near[1]) - 2 * half + position + 1
    # Step 1: warm-up with forward passes of the near direction.
    items: list[ScheduleItem] = [next(forward[x]) for _ in range(2 * inner)]
    # Step 2: forward passes of both directions in turn.
    for _ in range(position + 1):
        items += [next(forward[x]), next(forward[y])]
    # Step 3: split backward passes, whose weight gradients (W) fill idle time.
    for _ in range(inner):
        items += [next_backward(y, split=True), pending.popleft(), next(forward[y])]
    # Step 4, the steady state: every forward pass is overlapped with a backward pass.
    for i in range(steady):
        pair = OverlappedPasses(next(forward[x]), next_backward(y))
        # On the middle devices the first backward pass arrives late, and the forward pass must not wait for it.
        items += pair if i == inner == 0 else [pair]
        items.append(OverlappedPasses(next(forward[y]), next_backward(x)))
    # Step 5: the near direction has no forward passes left.
    for _ in range(inner):
        items += [next_backward(y), OverlappedPasses(next(forward[y]), next_backward(x))]
    # Step 6: of the remaining backward passes the first half is whole, the second half split.
    items += [next_backward((y, x)[i % 2], split=i > position) for i in range(2 * (position + 1))]
    # Steps 7 and 8: weight gradients (W) fill the cool-down.
    for _ in range(inner):
        items += [pending.popleft(), next_backward(x, split=True)]
    return [*items, *pending]
