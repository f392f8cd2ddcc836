"""Memory along the order of a device, and collectives beside its passes."""

from __future__ import annotations

import numpy as np
import pytest

from meshcast.simulator.bounds.device_orders import DeviceOrder, PassMemory, PassTimes, device_orders
from meshcast.simulator.bounds.schedule_bound import PASSES
from tests.simulator.bounds.test_critical_paths import make


def memory(shape_stages: int, weights: float = 0.0, gradients: float = 0.0) -> PassMemory:
    """A forward pass leaves 4 bytes and needs 5; B frees 1 of them, W or BW the rest; 2 are in use meanwhile."""
    net, peak = np.tile([4.0, -4.0, -1.0, -3.0], (shape_stages, 1)), np.tile([5.0, 2.0, 2.0, 0.0], (shape_stages, 1))
    return PassMemory(net, peak, np.full(shape_stages, weights), np.full(shape_stages, gradients))


@pytest.mark.parametrize("m", [8, 40])
def test_1f1b_holds_as_many_activations_as_stages_follow(m: int) -> None:
    schedule, shape = make("1f1b", 4, m)
    found = [order.peak(memory(4)) for order in device_orders(schedule, shape, range(4)).values()]
    assert found == [4 * held + 2 for held in (4, 3, 2, 1)]


def test_halves_of_a_backward_pass_free_one_after_the_other() -> None:
    schedule, shape = make("zb-h1", 4, 8)
    first, *_, last = (order.peak(memory(4)) for order in device_orders(schedule, shape, range(4)).values())
    assert first == 4 * 4 + 2
    assert last == 3 * 3 + 4 + 2  # 4 micro-batches wait for W, the last of them in its B


def peak_by_hand(order: DeviceOrder, memory: PassMemory) -> float:
    """Walks the passes of a device one after the other, with what lives during each."""
    passes, level, peak = list(zip(order.part.tolist(), order.kind.tolist(), strict=True)), 0.0, 0.0
    places = {part: [at for at, (other, _) in enumerate(passes) if other == part] for part, _ in passes}
    for at, (part, kind) in enumerate(passes):
        whole = 0.0
        for other, own in places.items():
            forward, backward = ([n for n in own if (passes[n][1] == 0) == first] for first in (True, False))
            backward = [n for n in backward if PASSES[passes[n][1]] != "B"]  # which makes no gradient of weights
            # All forward passes first: weights are freed between. Those that are gathered again, and the gradients of
            # the pass that gathers them, may not be there at its peak.
            freed = forward[-1] < backward[0] and len(backward) > 1
            if forward[0] <= at <= (forward[-1] if freed else backward[-1]):
                whole += memory.whole_weights[other]
            if backward[0] + freed * (at == backward[0]) <= at <= backward[-1]:
                whole += memory.whole_gradients[other]
        peak = max(peak, level + whole + memory.peak[part, kind])
        level += memory.net[part, kind]
    return peak


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "breadth-first", "zb-h1"])
def test_whole_weights_and_gradients_live_from_first_to_last_use(name: str, seed: int) -> None:
    draw, chunks = np.random.default_rng(seed).uniform, 1 + (name in ("interleaved-1f1b", "breadth-first"))
    schedule, shape = make(name, 4, 8, chunks)
    left = draw(1, 5, (shape.stages, 1))
    net, peak = np.hstack([left, -left, -left / 4, -3 * left / 4]), draw(0, 6, (shape.stages, 4)) + [5, 0, 0, 0]
    drawn = PassMemory(net, peak, *draw(0, 30, (2, shape.stages)))
    for order in device_orders(schedule, shape, range(4)).values():
        assert order.peak(drawn) == pytest.approx(peak_by_hand(order, drawn))


def test_gradients_of_weights_come_with_the_passes_that_make_them() -> None:
    schedule, shape = make("zb-h1", 4, 8)
    for order in device_orders(schedule, shape, range(4)).values():
        assert [PASSES[kind] for kind in order.kind[order.begins_gradients | order.ends_gradients]] == ["W", "W"]


@pytest.mark.parametrize("m", [16, 40])
def test_of_passes_that_run_together_what_both_leave_counts(m: int) -> None:
    schedule, shape = make("dualpipe", 4, m)
    assert device_orders(*make("dualpipe", 4, 16, 2), [0]) == {}, "a shape that it refuses"
    orders = device_orders(schedule, shape, range(4)).values()
    assert all((np.bincount(order.place) == 2).any() for order in orders)
    # At the ends a fifth activation is there beside a backward pass only, whose own is then no longer whole.
    assert [order.peak(memory(4)) for order in orders] == [4 * held + 2 for held in (4, 5, 5, 4)]


def pass_times(gathers: float, again: float, reductions: float, unit: float = 1.0) -> PassTimes:
    """One stage on each of two devices: forward passes of 2 s, backward passes of 4 s, of one unit."""
    seconds = np.tile([2.0, 4.0, 3.0, 1.0], (2, 1))
    columns = (np.full(2, value) for value in (gathers, again, reductions))
    return PassTimes(seconds, unit * seconds, *columns)


def test_passes_wait_for_the_weights_of_their_last_unit() -> None:
    schedule, shape = make("1f1b", 2, 2)
    order = device_orders(schedule, shape, [0])[0]
    assert order.whole and order.last_end(pass_times(0, 0, 0)) == 2 * (2 + 4)
    assert order.last_end(pass_times(5, 0, 0)) == 5 + 12
    # Of two units only the last one waits for all weights.
    assert order.last_end(pass_times(5, 0, 0, unit=0.5)) == 4 + 12
    assert not device_orders(*make("1f1b", 2, 40), [0])[0].whole, "a long batch"
    # Gradients are reduced from the begin of the last backward pass on.
    assert order.last_end(pass_times(5, 0, 7)) == 5 + 8 + 7


@pytest.mark.parametrize("again", [6.0, 0.0])
def test_collectives_run_in_the_order_of_the_passes(again: float) -> None:
    """The last backward pass of stage 2 begins at 1 + 8 + 4 s. Then its gradients are reduced, and weights of stage 0
    gathered again; the second backward pass follows the first, and reductions begin with it. Without gathers, backward
    passes of stage 0 run beside the reductions of stage 2, which those of stage 0 follow."""
    schedule, shape = make("breadth-first", 2, 2, 2)
    order = device_orders(schedule, shape, [0])[0]  # F0 F0 F2 F2 B2 B2 B0 B0
    columns, seconds = (np.full(4, value) for value in (1.0, again, 9.0)), np.tile([2.0, 4.0, 3.0, 1.0], (4, 1))
    assert order.last_end(PassTimes(seconds, seconds, *columns)) == 13 + 9 + (again + 4 if again else 0) + 9
