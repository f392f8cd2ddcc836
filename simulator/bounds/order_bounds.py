"""Lower bounds of the step time and the memory of a pipeline, from the order of its passes and from its units."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.bounds.collectives import UnitCollectives
from meshcast.simulator.bounds.critical_paths import CriticalPaths, Replays, critical_paths
from meshcast.simulator.bounds.device_orders import DeviceOrder, MarkedOrders, PassMemory, PassTimes, device_orders
from meshcast.simulator.bounds.device_states import DeviceStates, hop_seconds
from meshcast.simulator.bounds.schedule_bound import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    WHOLE,
    DeviceBound,
    StagePlaces,
    StageTimes,
    bound_devices,
    has_bound,
    least_in_flight,
    shortest_step,
)
from meshcast.simulator.bounds.unit_prices import Stages, UnitPrices
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule


@dataclass(frozen=True, eq=False)
class KnownShapes:
    """What is known of shapes that differ in the number of micro-batches alone, whatever layers their stages have.

    marked: orders of some devices.
    held: passes whose activations devices hold.
    """

    marked: MarkedOrders = field(default_factory=dict)
    held: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class KnownOrders:
    """What is known of pipelines that differ in the number of micro-batches alone.

    replays: their critical paths.
    shapes: what is known of their shapes.
    """

    replays: Replays = field(default_factory=dict)
    shapes: KnownShapes = field(default_factory=KnownShapes)


@dataclass(frozen=True, eq=False)
class OrderBounds:
    """What the order of the passes of a pipeline bounds, however long they take.

    schedule: the schedule, with orders that exist for this shape.
    shape: numbers of its devices, stages and micro-batches.
    layers: number of layers of every part of the model.
    like: what is known of pipelines that differ in the number of micro-batches alone.
    """

    schedule: Schedule
    shape: PipelineShape
    layers: tuple[int, ...]
    like: KnownOrders = field(default_factory=KnownOrders)

    @cached_property
    def place(self) -> StagePlaces:
        """The places of the virtual stages."""
        return StagePlaces(self.schedule, self.shape)

    @cached_property
    def in_flight(self) -> np.ndarray:
        """Least activations in flight on every device."""
        return least_in_flight(self.schedule, self.shape, self.like.shapes.held)

    @cached_property
    def known(self) -> bool:
        """Whether the schedule has bounds."""
        return has_bound(self.schedule, self.shape)

    @cached_property
    def device_orders(self) -> dict[int, DeviceOrder]:
        """Orders of some devices: of the first and the last device, and of such as have neither embedding nor loss."""
        devices = sorted({0, min(1, self.shape.p - 1), self.shape.p // 2, self.shape.p - 1})
        return device_orders(self.schedule, self.shape, devices, self.like.shapes.marked)

    @remembered_by(lambda order, times: ())
    def critical_paths(self, times: StageTimes) -> CriticalPaths | None:
        """Returns the critical paths, chosen by the durations of the first call; None if the schedule has none."""
        return critical_paths(self.schedule, self.shape, times, {0, self.shape.p - 1}, self.like.replays)


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Bounds of a pipeline with priced stages.

    order: the order of its passes.
    units: units of every part.
    prices: prices of the units.
    shared: work that is shared with other pipelines.
    """

    order: OrderBounds
    units: Stages
    prices: UnitPrices
    shared: SharedWork

    def times(self, plan: Plan | None) -> StageTimes:
        """Returns the least durations of passes. plan: gives prices of messages; without a plan they take no time."""
        return self._times(self._hop(plan))

    def _hop(self, plan: Plan | None) -> float:
        """Returns the seconds of a message between two stages."""
        return hop_seconds(plan, self.prices.message_nbytes, self.shared) if plan is not None else 0.0

    @remembered
    def _times(self, hop: float) -> StageTimes:
        return self.prices.stage_times(self.units, hop)

    @remembered
    def _bound_devices(self, hop: float, blocking: bool) -> DeviceBound:
        """Returns when devices are done with their passes, at the earliest. blocking: see `seconds`."""
        order = self.order
        return bound_devices(order.schedule, order.shape, order.place, self._times(hop), blocking)

    @remembered
    def _chains(self, hop: float) -> tuple[CriticalPaths, np.ndarray] | None:
        """Returns the critical paths with their lengths [s]; None if the schedule has none."""
        paths = self.order.critical_paths(self._times(hop))
        return (paths, paths.seconds(self._times(hop))) if paths is not None else None

    # ------------------------------------------------------------------------------------------ memory

    def memory(self, state: DeviceStates, offloads: bool, whole_weights: bool) -> float:
        """Returns the least memory of the fullest device [bytes].

        offloads: whether activations leave the GPU.
        whole_weights: whether weights and gradients that a micro-batch gathers live through the whole step.
        """
        order, place = self.order, self.order.place
        if offloads or not order.known:
            return float(state.resident.max())
        held = state.resident + self._activations
        whole = self._whole_of_stages(state) * whole_weights
        nbytes = max(float(held.max()), self._memory_in_order(state, whole))
        if order.schedule.pairs_passes and whole.any():  # both directions have begun at the peak
            nbytes = max(nbytes, float((held + place.sum(whole[0])).max()))
        return nbytes

    @cached_property
    def _activations(self) -> np.ndarray:
        """The least memory of activations at the peak of every device [bytes]."""
        in_flight, place = self.order.in_flight, self.order.place
        grown, forward, backward = place.least(self.prices.activations(self.units)[place.part]).T
        if self.order.schedule.pairs_passes:  # a forward pass takes the memory that a backward pass gives back
            return np.asarray((in_flight - 1) * grown)
        return np.maximum((in_flight - 1) * grown + forward, in_flight * grown + backward)

    def _whole_of_stages(self, state: DeviceStates) -> np.ndarray:
        """Returns gathered weights and unreduced gradients that live from the first to the last micro-batch
        [2, stages] [bytes]."""
        place = self.order.place
        if state.whole.shape[1] == len(place.part):
            return state.whole
        # States are those of a pipeline with a stage a device: its chunks have shares of them. A matrix that
        # embedding and output layer share is no part of the share of either.
        elements = self.prices.elements(self.units)[place.part]
        counted = self.prices.elements(self.units, not state.plan.model_parts.model.tied)[place.part]
        return np.asarray(state.whole[:, place.device] * counted / np.maximum(place.sum(elements)[place.device], 1.0))

    def _memory_in_order(self, state: DeviceStates, whole_of_stages: np.ndarray) -> float:
        """Returns the least memory of some devices, from the orders of their passes [bytes]. whole_of_stages: as
        `_whole_of_stages` gives it."""
        place, largest, memory = self.order.place, 0.0, self.prices.pass_memory(self.units)
        if not whole_of_stages.any():
            return max((float(state.resident[device]) + peak for device, peak in self._peaks.items()), default=0.0)
        for device, order in self.order.device_orders.items():
            whole, here = np.zeros((2, len(self.units))), place.device == device
            for of_parts, of_stages in zip(whole, whole_of_stages, strict=True):
                np.add.at(of_parts, place.part[here], of_stages[here])
            largest = max(largest, float(state.resident[device]) + order.peak(PassMemory(*memory, *whole)))
        return largest

    @cached_property
    def _peaks(self) -> dict[int, float]:
        """The most memory of the passes of some devices, where no whole weights or gradients live [bytes]."""
        memory = PassMemory(*self.prices.pass_memory(self.units), *np.zeros((2, len(self.units))))
        return {device: order.peak(memory) for device, order in self.order.device_orders.items()}

    # -------------------------------------------------------------------------------------------- time

    def chain_seconds(self, plan: Plan | None) -> float:
        """Returns a lower bound of the time of all passes, from their order alone [s]; 0 if there is none."""
        if not self.order.schedule.barrier:
            return 0.0
        chains = self._chains(self._hop(plan))
        return 0.0 if chains is None else float(chains[1][0])

    def seconds(self, state: DeviceStates, blocking: bool, gathers_ahead: bool, copies: float) -> float:
        """Returns a lower bound of the step time [s]; 0 if the schedule has none.

        blocking: whether devices wait for each message that they send.
        gathers_ahead: whether sharded weights are gathered during the computation before.
        copies: copies of the activations of a layer to the host, or back [s].
        """
        order = self.order
        if not order.known:
            return 0.0
        hop = self._hop(state.plan)
        times, bound = self._times(hop), self._bound_devices(hop, blocking)
        bound = bound._replace(computed=bound.computed + state.summed)
        copied = order.shape.m * ((state.plan.model_parts.model.layers // order.shape.p - 1) * copies)
        longest = 0.0
        for collectives in state.collectives:  # streams run side by side
            sides = collectives.of_stages(order.layers, order.place.part)
            beside = max(copied, self._beside(times, sides, order.schedule.pairs_passes or gathers_ahead))
            reductions = order.place.least(sides.last)
            longest = max(longest, shortest_step(order.schedule, bound, state.update, reductions, beside))
            if order.schedule.barrier:
                last = self._last_reduction(times, sides) + float(state.summed.min())
                longest = max(longest, last + float(state.update.max()))
        return longest

    def _beside(self, times: StageTimes, sides: UnitCollectives, overlaps: bool) -> float:
        """Returns the least time of the collectives on their stream [s]. overlaps: whether weights of a pass are
        gathered while another pass computes."""
        place = self.order.place
        every = place.sum(place.turns * sides.each + sides.once)
        if overlaps:
            return float(every.max())
        # Nothing of a pass computes while weights are gathered for it.
        kernels = times.busy[place.part, :, 0]
        backward = np.minimum(kernels[:, WHOLE], kernels[:, INPUTS] + kernels[:, WEIGHTS])
        serial = place.sum(place.turns * (kernels[:, FORWARD] + backward + sides.each_between))
        return max(float(every.max()), float(serial.max()))

    def _last_reduction(self, times: StageTimes, sides: UnitCollectives) -> float:
        """Returns when all passes have ended and all gradients are reduced, at the earliest [s]."""
        last = self._last_in_order(times, sides)
        if (chains := self._chains(times.hop)) is None:
            return last
        paths, lengths = chains
        # All chains begin with the first forward pass of the first stage, which waits for its weights.
        late = max(float(sides.first[0] - times.stream[self.order.place.part[0], 0, 0]), 0.0)
        return max(last, paths.last_reduction(lengths, sides.last, sides.first, sides.each_last, late))

    def _last_in_order(self, times: StageTimes, sides: UnitCollectives) -> float:
        """Returns when the passes of the first and of the last device and the collectives beside them have ended, at
        the earliest [s]."""
        order = self.order
        if not sides.once.any() or order.schedule.pairs_passes or order.schedule.directions > 1:
            return 0.0
        ends = [order.device_orders[device] for device in {0, order.shape.p - 1} if device in order.device_orders]
        layers = [units[0][1] if len(units) == 1 else np.inf for units in self.units]
        seconds = times.stream[:, :, 0]
        passes = PassTimes(seconds, seconds / np.array(layers)[:, None], sides.first, sides.again, sides.last)
        return max((end.last_end(passes) for end in ends if end.whole), default=0.0)
