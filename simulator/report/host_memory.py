"""Host memory and disks that the ranks of a node fill with what they offload, against what the node has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshcast.hardware.cluster import NodeGroup
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.ir.capabilities import ShardsStates, schemes_with
from meshcast.simulator.ir.ops import BYTES
from meshcast.simulator.report.forecast import Forecast

PLACES = {"cpu": "host memory", "nvme": "disk space"}
"""Where states and activations are offloaded to, in words."""


@dataclass(frozen=True)
class HostUse:
    """What the ranks of the fullest node of a kind take in a place.

    place: ``cpu`` or ``nvme``.
    node: the kind of node.
    needed: peak over the step [bytes].
    capacity: what such a node has [bytes]; None: unknown.
    """

    place: str
    node: str
    needed: float
    capacity: float | None

    @property
    def excess(self) -> float:
        """Bytes beyond the capacity; not above zero where they fit or the capacity is unknown."""
        return 0.0 if self.capacity is None else self.needed - self.capacity

    @property
    def room(self) -> float:
        """How many times what is needed a node has; infinite where nothing is needed or the capacity is unknown."""
        return math.inf if self.capacity is None or not self.needed else self.capacity / self.needed

    def __str__(self) -> str:
        if self.capacity is None:
            return f"{self.needed / GIB:,.1f} GiB of {PLACES[self.place]} a node; what a {self.node} has is not known"
        return f"{self.needed / GIB:,.1f} of {self.capacity / GIB:,.0f} GiB of {PLACES[self.place]} of a {self.node}"


def host_uses(play: Forecast) -> list[HostUse]:
    """Returns the use of every place that the plan offloads to, for every group of equal nodes."""
    cluster = play.plan.job.cluster
    uses = []
    for place in PLACES:
        of_device = np.array([by.get(place, 0.0) for by in play.offloaded])
        if not of_device.any():
            continue
        held = of_device[_device_of_each_rank(play, cluster.gpus)]
        groups = cluster.groups or (NodeGroup(node=cluster.node, nodes=cluster.nodes),)
        ends = np.minimum(np.cumsum([0, *(group.nodes * int(group.node.gpus) for group in groups)]), cluster.gpus)
        for group, (first, end) in zip(groups, pairwise(ends.tolist()), strict=True):
            host = group.node.host
            capacity = (host.capacity if place == "cpu" else host.disk_capacity) if host else None
            starts = np.arange(0, end - first, int(group.node.gpus))
            needed = float(np.add.reduceat(held[first:end], starts).max()) if end > first else 0.0
            uses.append(HostUse(place, group.node.name, needed, None if capacity is None else float(capacity)))
    return uses


def loading_use(play: Forecast) -> HostUse | None:
    """Returns the host memory of a node in which each of its ranks loads the whole model; None where none does.

    Weights are loaded in the format of the main weights, frozen weights in that of the computation.
    """
    job = play.plan.job
    framework, node = job.framework, job.cluster.node
    divided = any(scheme.divides_while_loading for scheme in schemes_with(play.plan.every_scheme, ShardsStates))
    if not framework.memory.each_rank_loads or job.cluster.groups or play.plan.shape.p > 1 or divided:
        return None
    width = BYTES[framework.weights if job.adapters else framework.main_weights]
    ranks = min(int(node.gpus), job.cluster.gpus)
    capacity = node.host.capacity if node.host else None
    needed = ranks * float(width) * job.model.parameters
    return HostUse("cpu", node.name, needed, None if capacity is None else float(capacity))


def sum_offloaded(uses: Sequence[HostUse], place: str) -> float:
    """Returns the bytes on the fullest node in host memory (``cpu``) or on disks (``nvme``)."""
    return max((use.needed for use in uses if use.place == place), default=0.0)


def _device_of_each_rank(play: Forecast, ranks: int) -> np.ndarray:
    """Returns the pipeline device of every rank."""
    devices = np.zeros(ranks, int)
    for device in range(play.plan.ranks.devices):
        devices[play.plan.ranks.of_device(device)] = device
    return devices
