"""DynaPipe: a cyclic schedule for micro-batches of different lengths, whose devices keep forward passes in stock.

1F1B makes a device wait for every micro-batch that takes longer on its neighbour. Here orders are built in cycles: in
each a device runs the first backward and the first forward pass that wait for it, and what these make may be used from
the next cycle on. So a forward pass is ready about p - i cycles before device i runs its backward pass: twice 1F1B's
micro-batches are in flight, and a longer micro-batch delays no other. A forward pass is put off while its activations
would exceed the limit of memory; with less than 2 p - 1 micro-batches the first device then idles. Devices run these
orders without waiting for the ends of cycles.

    p = 3, m = 5
    device 0   F0 F1 F2 F3 F4 .. B0 .. B1 .. B2 .. B3 .. B4
    device 1   .. F0 F1 F2 B0 F3 B1 F4 B2 .. B3 .. B4
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

Micro-batches are clustered by the times of their passes on the first and the last device, into four clusters (three of
more than twenty micro-batches); of all orders of these clusters, and the batch's order, that of the shortest step runs.

Of equal micro-batches: bubble (p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a device), at most
2 (p - i) - 1 micro-batches in flight on device i; of all messages between stages only 2 (p-1) delay the step: those of
the first micro-batch on its way down, and of the last on its way up.

`samples.join: shortest-step` of a batch makes micro-batches as the system does. Not modelled: a choice of recomputation
in every step; several chunks a device.

References: Jiang et al. 2024 (EuroSys), arXiv 2311.10418, sections 4 to 6; the rules of a cycle and the clusters:
awslabs/optimizing-multitask-training-through-dynamic-pipelines, dynapipe/schedule_opt.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import permutations
from math import inf

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.activation_transfer import equal_durations
from meshcast.simulator.scheduling.list_scheduler import reorder_at_run_time
from meshcast.simulator.scheduling.schedule import (
    Action,
    Orders,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    actions_of,
)

ROUNDING = 1e-9


class DynaPipe(Schedule):
    paper = Paper("arXiv:2311.10418", "DynaPipe: Optimizing Multi-task Training through Dynamic Pipelines", 2024)
    needs_durations = True

    class Options(Schedule.Options):
        memory_limit: float | None = Field(default=None, ge=1)
        """Micro-batches, of the mean of their activations, that a device may hold; null: any number."""
        reorder: bool = True
        """Whether micro-batches of different lengths are put into the order of the shortest step."""

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> Orders:
        known = durations or equal_durations(shape)
        tried = [[*shape.microbatches]]
        if self.options.reorder and known.each:
            tried += [[k for some in order for k in some] for order in permutations(cluster_by_time(known.each))]
        candidates = [_run_cycles(shape, known, order, self.options.memory_limit or inf) for order in tried]

        def step(orders: Orders) -> tuple[float, float]:
            played = reorder_at_run_time(
                self, shape, orders, lambda item: sum(map(known.of, actions_of([item]))), known.hop
            )
            return played.step_time(known.barrier)

        return min(candidates, key=step) if len(candidates) > 1 else candidates[0]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        held = [min(m, 2 * (p - i) - 1) for i in range(p)]
        yield ClosedForm("in_flight_b", held, "section 5: a stock of forward passes; replay of the order")
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B's")
        yield ClosedForm("bubble_per_hop", 2 * (p - 1), "section 5: other messages arrive before they are needed")


def _run_cycles(
    shape: PipelineShape, durations: PassDurations, microbatches: Sequence[int], limit: float
) -> list[list[Action]]:
    """Returns the orders that cycles give if micro-batches enter in this order. limit: micro-batches that a device
    holds."""
    p, means = shape.p, durations.stored
    orders: list[list[Action]] = [[] for _ in range(p)]
    waiting = {(device, kind): deque[int]() for device in range(p) for kind in ("F", "BW")}
    waiting[0, "F"].extend(microbatches)
    held = [0.0] * p

    def size(microbatch: int, device: int) -> float:
        return durations.of_microbatch(microbatch).stored[device] / means[device] if any(means) else 1.0

    while any(waiting.values()):
        ready = []
        for device, order in enumerate(orders):
            back, ahead = waiting[device, "BW"], waiting[device, "F"]
            if back:
                order.append(Action(device, "BW", microbatch := back.popleft()))
                held[device] -= size(microbatch, device)
                ready += [((device - 1, "BW"), microbatch)] if device else []
            # A micro-batch that exceeds the limit by itself runs alone.
            if ahead and (held[device] < ROUNDING or held[device] + size(ahead[0], device) < limit + ROUNDING):
                order.append(Action(device, "F", microbatch := ahead.popleft()))
                held[device] += size(microbatch, device)
                ready.append(((device + 1, "F") if device + 1 < p else (device, "BW"), microbatch))
        for place, microbatch in ready:
            waiting[place].append(microbatch)
    return orders


MAX_ROUNDS = 20
"""Rounds of k-means; few clusters in a single dimension settle in less."""


def cluster_by_time(each: Sequence[PassDurations]) -> list[list[int]]:
    """Returns the numbers of the micro-batches of every cluster, in order: k-means of the times of forward and backward
    passes on the first and the last device, from evenly spaced quantiles; four clusters, three of more than twenty
    micro-batches.

    each: durations of the passes of every micro-batch.
    """
    ends = (0, len(each[0].forward) - 1)
    times = np.array(
        [[durations.of(Action(stage, kind, 0)) for stage in ends for kind in ("F", "BW")] for durations in each]
    )
    count = min(len(each), 3 if len(each) > 20 else 4)
    by_time = times[np.argsort(times.sum(axis=1), kind="stable")]
    centres = np.unique(by_time[np.linspace(0, len(each) - 1, count).round().astype(int)], axis=0)
    for _ in range(MAX_ROUNDS):
        nearest = np.linalg.norm(times[:, None] - centres, axis=2).argmin(axis=1)
        centres = np.array([times[nearest == i].mean(axis=0) for i in np.unique(nearest)])
    return [np.flatnonzero(nearest == i).tolist() for i in np.unique(nearest)]
