"""The passes of a device in the order in which its schedule runs them: their memory, and collectives beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.bounds.critical_paths import FEW
from meshcast.simulator.bounds.schedule_bound import PASSES
from meshcast.simulator.scheduling.schedule import OverlappedPasses, PipelineShape, Schedule, actions_of


@dataclass(frozen=True, eq=False)
class PassMemory:
    """Memory of the parts of a model in a micro-batch [bytes].

    net: what a pass of each kind (`PASSES`) leaves behind [parts, kinds].
    peak: the most during it, relative to its begin [parts, kinds].
    whole_weights, whole_gradients: what lives from the first to the last micro-batch [parts].
    """

    net: np.ndarray
    peak: np.ndarray
    whole_weights: np.ndarray
    whole_gradients: np.ndarray


@dataclass(frozen=True, eq=False)
class PassTimes:
    """Least durations of the parts of a model, and of the collectives on a stream [s].

    seconds: of a pass of each kind (`PASSES`) [parts, kinds].
    last: of its last unit, 0 if unknown [parts, kinds].
    gathers, again: of weights before the first forward and, where they were freed, the first backward pass [parts].
    reductions: of gradients, from the last backward pass on [parts].
    """

    seconds: np.ndarray
    last: np.ndarray
    gathers: np.ndarray
    again: np.ndarray
    reductions: np.ndarray


@dataclass(frozen=True, eq=False)
class DeviceOrder:
    """The passes of a device in their order.

    whole: whether it has all passes of a step.
    part, kind: of every pass.
    place: of the first pass of those that run together with it.
    begins_weights, ends_weights, begins_gradients, ends_gradients: whether whole weights or gradients of its part begin
        to live before it, or end after it.
    """

    whole: bool
    part: np.ndarray
    kind: np.ndarray
    place: np.ndarray
    begins_weights: np.ndarray
    ends_weights: np.ndarray
    begins_gradients: np.ndarray
    ends_gradients: np.ndarray

    def peak(self, memory: PassMemory) -> float:
        """Returns the most memory of the passes, without messages [bytes].

        Weights that are gathered again before the first backward pass arrive, and the gradients of this pass come to
        be, unit by unit while it frees activations: they do not count.
        """
        again = self.begins_weights & (self.kind != 0)
        freed = np.isin(self.part, self.part[again]) & (self.kind != 0)
        weights, gradients = memory.whole_weights[self.part], memory.whole_gradients[self.part]
        begin = (self.begins_weights & ~again) * weights + self.begins_gradients * gradients
        end = (self.ends_weights & ~freed) * weights + self.ends_gradients * gradients
        net = memory.net[self.part, self.kind]
        held = np.cumsum(begin + net - end)
        alone = np.bincount(self.place)[self.place] == 1
        during = (held - net + end - again * gradients + memory.peak[self.part, self.kind])[alone]
        # Of passes that run together only what is left after both is known.
        after = held[np.diff(self.place, append=len(held)) > 0]
        return max(float(during.max(initial=0.0)), float(after.max(initial=0.0)))

    def last_end(self, times: PassTimes) -> float:
        """Returns when all passes and collectives have ended, at the earliest [s], if no other device is waited for,
        and no passes run together.

        Collectives run on their stream in the order of the passes to which they belong. A pass ends no earlier than its
        last unit, after its weights have arrived.
        """
        seconds = times.seconds[self.part, self.kind]
        ends = np.cumsum(seconds)
        late = free = 0.0  # how late the passes are; when the stream of the collectives is free
        for number in np.flatnonzero(self.begins_weights | self.ends_gradients).tolist():
            part, kind = self.part[number], self.kind[number]
            gathers = (times.again if kind else times.gathers)[part] if self.begins_weights[number] else 0.0
            if gathers:  # a pass without gathers does not wait for their stream
                free += gathers
                late = max(late, free + times.last[part, kind] - ends[number])
            if self.ends_gradients[number]:
                free = max(free, ends[number] - seconds[number] + late) + times.reductions[part]
        return float(max(ends[-1] + late, free))


MarkedOrders = dict[tuple[int, bool], dict[int, DeviceOrder]]
"""Orders of some devices by the number of micro-batches, and whether they have all passes of a step."""


def device_orders(
    schedule: Schedule, shape: PipelineShape, devices: Sequence[int], known: MarkedOrders | None = None
) -> dict[int, DeviceOrder]:
    """Returns the orders of some devices; empty for a schedule whose orders depend on durations.

    A long batch holds as much as a short batch: what is between warm-up and cool-down repeats.
    known: orders of the same devices, of shapes that differ in the number of micro-batches alone.
    """
    if schedule.needs_durations:
        return {}
    few = FEW * shape.p + shape.m % shape.p
    short = replace(shape, m=few) if few < shape.m else shape
    mark = partial(_mark_orders, schedule, short, devices, short.m == shape.m)
    return remember({} if known is None else known, (short.m, short.m == shape.m), mark)


def _mark_orders(
    schedule: Schedule, shape: PipelineShape, devices: Sequence[int], whole: bool
) -> dict[int, DeviceOrder]:
    """Returns the orders of some devices. whole: whether they have all passes of a step."""
    try:
        schedule.check(shape)
        orders = schedule.orders(shape)
    except MeshcastError:
        return {}
    marked = dict[int, DeviceOrder]()
    for device in devices:
        actions = actions_of(orders[device])
        if any(action.kind not in PASSES for action in actions):
            return {}
        part = np.array([schedule.model_part(shape, action.stage) for action in actions])
        kind = np.array([PASSES.index(action.kind) for action in actions])
        numbers = [len(item) if isinstance(item, OverlappedPasses) else 1 for item in orders[device]]
        place = np.repeat(np.cumsum([0, *numbers[:-1]]), numbers)
        marked[device] = _mark_lives(part, kind, place, whole)
    return marked


def _mark_lives(part: np.ndarray, kind: np.ndarray, place: np.ndarray, whole: bool) -> DeviceOrder:
    """Marks the passes at which whole weights and gradients begin and end to live: gradients from the first to the last
    backward pass of a part, weights from its first forward pass on; freed between where all forward passes come first.
    """
    begins_w, ends_w, begins_g, ends_g = np.zeros((4, len(part)), bool)
    for number in np.unique(part):
        here = part == number
        forward = np.flatnonzero(here & (kind == 0))
        backward = np.flatnonzero(here & (kind != 0))
        sums = np.flatnonzero(here & ((kind == 1) | (kind == 3)))
        begins_w[forward[0]] = True
        if not len(sums):
            continue
        begins_g[sums[0]] = ends_g[sums[-1]] = ends_w[sums[-1]] = True
        if len(sums) > 1 and forward[-1] < backward[0]:
            ends_w[forward[-1]] = begins_w[backward[0]] = True
    return DeviceOrder(whole, part, kind, place, begins_w, ends_w, begins_g, ends_g)
