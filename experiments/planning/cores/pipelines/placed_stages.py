"""Replicated stages on named GPUs of machines, by the planner that DAPPLE's authors released.

Times are those of a whole batch on one device; a step of m micro-batches of each of the r copies of a pipeline takes

    (m - 1) T / m + W / (r m) + sum of the transfers of one micro-batch
        + largest, over stages s, of its sum of gradients - s T / m, but not less than 0

with T the slowest stage or transfer and W the whole model. Of a stage but the last the sum of gradients counts the
first layer of the next stage, too. Candidates: every pair of stages on all GPUs, of the least step; straight pipelines
(one GPU a stage and copy) of two and of all GPUs, of the least T; and one stage on every multiple of copies.
GPUs are chosen by three policies: machines that are empty, machines in use, or spread over all (AlibabaPAI/DAPPLE,
`src/orchestration`, `src/parallelism/sync_pipeline.rs`, `src/environment/device.rs`; arXiv 2007.01045, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Devices = frozenset[int]

NOBODY: Devices = frozenset()


@dataclass(frozen=True)
class MachineNetwork:
    """Machines of equally many GPUs.

    inside: bandwidth between GPUs of a machine. between: of collectives over machines. message: into one machine from
        others [bytes/s].
    """

    machines: int
    per_machine: int
    inside: float
    between: float
    message: float

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.machines * self.per_machine

    def spans(self, devices: Devices) -> bool:
        """Whether GPUs are of several machines."""
        return min(devices) // self.per_machine != max(devices) // self.per_machine

    def gradient_seconds(self, devices: Devices, nbytes: float) -> float:
        """Seconds of an all-reduce: over machines at their bandwidth, inside one over as many links as pairs."""
        count = len(devices)
        if count == 1:
            return 0.0
        sent = 2 * nbytes * (count - 1) / count
        return sent / self.between if self.spans(devices) else sent / self.inside / (count // 2)

    def transfer_seconds(self, source: Devices, target: Devices, nbytes: float) -> float:
        """Seconds from all GPUs of a stage to all of the next; into one machine, the share that comes from others."""
        if self.spans(target):
            return nbytes / self.between
        others = sum(1 for one in source if self.spans(target | {one}))
        return nbytes * others / len(source) / self.message if others else nbytes / self.inside

    def place(self, used: Devices, need: int) -> list[Devices]:
        """The GPUs that the three policies choose, equal choices once."""
        free = [
            [one for one in range(first, first + self.per_machine) if one not in used]
            for first in range(0, self.gpus, self.per_machine)
        ]
        empty = [one for own in free if len(own) == self.per_machine for one in own]
        begun = [one for own in free if len(own) < self.per_machine for one in own]
        rounds = [own[turn] for turn in range(self.per_machine) for own in free if turn < len(own)]
        chosen = [frozenset(order[:need]) for order in (empty, begun, rounds) if len(order) >= need]
        return [*dict.fromkeys(chosen)]

    def place_copies(self, used: Devices, need: int, copies: int) -> list[Devices]:
        """The GPUs of a stage of several copies of a pipeline, placed one after another."""
        found: dict[Devices, None] = {NOBODY: None}
        for _ in range(copies):
            found = {before | own: None for before in found for own in self.place(used | before, need)}
        return [*found]


class PlacedStage(NamedTuple):
    """The states that a stage begins and ends with, and its GPUs."""

    begin: int
    end: int
    devices: Devices


class PlacedPlan(NamedTuple):
    """Stages, copies of the pipeline that they are of, and seconds of a step."""

    stages: tuple[PlacedStage, ...]
    copies: int
    seconds: float


@dataclass(frozen=True)
class PlacedPipelines:
    """The candidates of one model on a network.

    seconds: of the layers up to every state, of a batch on one device; 0 for the first [states].
    weights: bytes of their parameters [states]. sent: bytes of a batch that leave every state [states].
    follows: whether a state holds all layers of another one [states, states].
    batch, micro: samples of a batch and of a micro-batch.
    """

    network: MachineNetwork
    seconds: np.ndarray
    weights: np.ndarray
    sent: np.ndarray
    follows: np.ndarray
    batch: int
    micro: int

    @cached_property
    def last(self) -> int:
        """The place of the state with all layers."""
        return len(self.seconds) - 1

    def run(self) -> tuple[PlacedPlan, int]:
        """The fastest candidate, and how many there are."""
        plans = [*self.pairs(), *self.straight(), *self.replicas()]
        return min(plans, key=lambda plan: plan.seconds), len(plans)

    def price(self, stages: Sequence[PlacedStage], copies: int, slowest: float) -> PlacedPlan:
        """A plan with the seconds of its step."""
        micro = self.batch // copies // self.micro
        if not micro:
            return PlacedPlan(tuple(stages), copies, math.inf)
        block = slowest / micro
        length = block * (micro - 1) + float(self.seconds[-1]) / copies / micro
        for one, other in pairwise(stages):
            nbytes = float(self.sent[one.end]) / copies / micro
            length += self.network.transfer_seconds(one.devices, other.devices, nbytes)
        ending = 0.0
        for place, (begin, end, devices) in enumerate(stages):
            counted = float(self.weights[min(end + 1, self.last)] - self.weights[begin])
            ending = max(ending, self.network.gradient_seconds(devices, counted) - place * block)
        return PlacedPlan(tuple(stages), copies, length + ending)

    def pairs(self) -> Iterator[PlacedPlan]:
        """Every pair of stages on all GPUs."""
        gpus = self.network.gpus
        places = [
            (first, second)
            for count in range(1, gpus)
            for first in self.network.place(NOBODY, count)
            for second in self.network.place(first, gpus - count)
        ]
        for cut in range(1, self.last):
            before, behind = float(self.seconds[cut]), float(self.seconds[-1] - self.seconds[cut])
            for first, second in places:
                message = self.network.transfer_seconds(first, second, float(self.sent[cut]))
                slowest = max(before / len(first), behind / len(second), message)
                yield self.price((PlacedStage(0, cut, first), PlacedStage(cut, self.last, second)), 1, slowest)

    def replicas(self) -> Iterator[PlacedPlan]:
        """One stage on every multiple of copies: each copy of the pipeline has as many GPUs."""
        for depth in range(2, self.network.gpus + 1):
            copies = self.network.gpus // depth
            devices = self.network.place(NOBODY, depth * copies)[0]
            slowest = float(self.seconds[-1]) / depth / copies
            yield self.price((PlacedStage(0, self.last, devices),), copies, slowest)

    def straight(self) -> Iterator[PlacedPlan]:
        """Pipelines of two stages and of as many as GPUs, with one GPU for a stage of every copy."""
        for depth in sorted({2, self.network.gpus} if self.network.gpus % 2 == 0 else {self.network.gpus}):
            copies = self.network.gpus // depth
            found = self._least_bottleneck(depth, copies)
            if found is not None:
                yield self.price(*found)

    def _least_bottleneck(self, depth: int, copies: int) -> tuple[tuple[PlacedStage, ...], int, float] | None:
        """The stages of the least slowest stage or transfer, by dynamic programming over states and GPUs in use."""
        known: dict[tuple[int, Devices], tuple[float, tuple[PlacedStage, ...]]] = {}
        start = self.network.place(NOBODY, copies)[0]
        for end in range(1, self.last + 1):
            known[end, start] = float(self.seconds[end]) / copies, (PlacedStage(0, end, start),)
        for _ in range(1, depth):
            grown: dict[tuple[int, Devices], tuple[float, tuple[PlacedStage, ...]]] = {}
            for (begin, used), (slowest, stages) in known.items():
                for devices in self.network.place_copies(used, 1, copies):
                    message = self.network.transfer_seconds(stages[-1].devices, devices, 2 * float(self.sent[begin]))
                    for end in np.flatnonzero(self.follows[begin]).tolist():
                        own = float(self.seconds[end] - self.seconds[begin]) / copies
                        value, key = max(slowest, own, message), (end, used | devices)
                        if value < grown.get(key, (math.inf, ()))[0]:
                            grown[key] = value, (*stages, PlacedStage(begin, end, devices))
            known = grown
        ends = [one for (end, _), one in known.items() if end == self.last]
        if not ends:
            return None
        slowest, stages = min(ends, key=lambda one: one[0])
        return stages, copies, slowest
