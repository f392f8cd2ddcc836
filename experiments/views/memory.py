"""Memory of a GPU: every pipeline device at its peak, and a device over the step.

Besides tensors a GPU holds fragmentation of the caching allocator, and the CUDA context with buffers of libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.metrics import Metrics

COLUMNS = 1440
"""Columns of time of a curve, finer than print resolves."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device at the peak of its tensors [bytes].

    by: tensors by category, in the order of `CATEGORIES`.
    fragmentation: reserved by the caching allocator, but not allocated.
    context: CUDA context and buffers of libraries.
    capacity: memory of the GPU.
    """

    device: int
    name: str
    by: dict[str, float]
    fragmentation: float
    context: float
    capacity: float

    @property
    def allocated(self) -> float:
        return sum(self.by.values())

    @property
    def total(self) -> float:
        """What nvidia-smi shows."""
        return self.allocated + self.fragmentation + self.context

    @property
    def free(self) -> float:
        """What is left of the capacity; negative if it does not suffice."""
        return self.capacity - self.total


@dataclass(frozen=True)
class MemoryCurve:
    """Tensors of a device over a step.

    moments: times of changes [s].
    held: bytes from each moment on [moments, categories].
    span: of the step [s].
    """

    moments: np.ndarray
    held: np.ndarray
    span: float

    @property
    def peak_moment(self) -> float:
        """The first of the moments at the peak [s]."""
        total = self.held.sum(axis=1)
        return float(self.moments[int(np.argmax(total > total.max() * (1 - 1e-9)))])

    def sample(self, count: int = COLUMNS) -> np.ndarray:
        """Returns bytes at the fullest moment of every column of time [count, categories], so that no peak is lost."""
        edges = np.linspace(0.0, self.span, count + 1)
        total = self.held.sum(axis=1)
        best = np.searchsorted(self.moments, edges[:-1], side="right") - 1
        column = np.clip(np.searchsorted(edges, self.moments, side="right") - 1, 0, count - 1)
        order = np.lexsort((total, column))
        last = np.searchsorted(column[order], np.arange(count), side="right") - 1
        inside = order[last]
        better = (column[inside] == np.arange(count)) & (total[inside] > total[best])
        fullest: np.ndarray = np.where(better, inside, best)
        samples: np.ndarray = self.held[fullest]
        return samples


def device_memories(metrics: Metrics) -> list[DeviceMemory]:
    """Returns the memory of every pipeline device at its peak."""
    context = metrics.job.framework.memory.context_gib * GIB
    devices = []
    for device, (peak, need) in enumerate(zip(metrics.play.peaks, metrics.needs, strict=True)):
        by = {category: float(peak.by.get(category, 0.0)) for category in CATEGORIES}
        fragmentation = max(0.0, need - sum(by.values()) - context)
        name = name_device(metrics.play.plan, device)
        devices.append(DeviceMemory(device, name, by, fragmentation, context, metrics.usable[device]))
    return devices


def memory_curve(metrics: Metrics, device: int) -> MemoryCurve:
    """Returns the memory of a pipeline device over the step."""
    return MemoryCurve(*metrics.play.memory(device), metrics.play.step.span)


def fullest_device(devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """Finds the device that lacks most, or has the least left."""
    return min(devices, key=lambda device: device.free)


def merge_levels(levels: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges neighbouring columns of equal height."""
    new = np.concatenate([[True], levels[1:] != levels[:-1]])
    return levels[new], np.append(edges[:-1][new], edges[-1])
