"""Rooflines of a step: kernels against the peak rate and memory bandwidth of their GPU, communication against links.

A kernel of F FLOPs and B bytes has the intensity F / B; no kernel is faster than its roof

    min(peak FLOP/s of its number format, F / B x memory bandwidth)

(Williams, Waterman, Patterson 2009, "Roofline"). The bytes are the least traffic: every operand read and every result
written once. The network has roofs of the same form: a GPU that executes F FLOPs of a step and sends B bytes over links
of a tier in it cannot execute more than F / B x link rate. FLOPs of memory-bound kernels are neglected, so their
intensity is 0 and their attained bandwidth says how close they are to the roof.

All figures are of a rank of a pipeline device, in a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.explain.collective_messages import switch_link_shares
from meshcast.experiments.explain.executed_ops import list_executed_ops
from meshcast.experiments.explain.rank_messages import (
    MessagesOfPlan,
    RankMessages,
    list_rank_messages,
    split_by_tier,
)
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.estimate import TIERS
from meshcast.simulator.costs.kernels.libraries import attention_format
from meshcast.simulator.costs.kernels.roofline import peak
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory
from meshcast.simulator.program.categories import COMPUTING, EXPOSED
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.metrics import Metrics


@dataclass(frozen=True)
class KernelPoint:
    """Equal kernels of the same name.

    name, phase: of the op, see `Op`.
    kind: part of the breakdown that its time counts for.
    dtype: number format whose peak is its roof; empty of memory-bound kernels.
    flops, nbytes: FLOPs and least memory traffic [bytes] of an execution.
    seconds: of an execution [s].
    count: executions in a step; a mean may be a fraction.
    peak, memory_bandwidth: of the GPU in that format [FLOP/s], [bytes/s].
    """

    name: str
    phase: str
    kind: str
    dtype: str
    flops: float
    nbytes: float
    seconds: float
    count: float
    peak: float
    memory_bandwidth: float

    @property
    def total_seconds(self) -> float:
        """Time of all executions in a step [s]."""
        return self.seconds * self.count

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory traffic."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    @property
    def attained(self) -> float:
        """Attained rate [FLOP/s]."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def attained_bandwidth(self) -> float:
        """Attained memory traffic [bytes/s]; a lower bound, as caches are not modelled."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def roof(self) -> float:
        """Rate that no kernel of this intensity can exceed [FLOP/s]; 0 of memory-bound kernels."""
        return min(self.peak, self.intensity * self.memory_bandwidth)

    @property
    def share_of_roof(self) -> float:
        """Attained rate over the roof; of memory-bound kernels attained bandwidth over that of the memory."""
        return self.attained / self.roof if self.flops else self.attained_bandwidth / self.memory_bandwidth


@dataclass(frozen=True)
class NetworkPoint:
    """What an axis of communication sends over the links of a tier in a step.

    axis: a key of `EXPOSED`.
    tier: of `TIERS`.
    nbytes: bytes that a rank sends over these links [bytes]; the mean over the ranks of the device.
    seconds: for which ops that send over this tier occupy their streams [s].
    link_rate: nominal rate of a GPU's links of this tier in a direction [bytes/s].
    flops: FLOPs that a rank executes in the step.
    peak: of the GPU [FLOP/s].
    step_seconds: duration of the step [s].
    """

    axis: str
    tier: str
    nbytes: float
    seconds: float
    link_rate: float
    flops: float
    peak: float
    step_seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs of the step per byte sent."""
        return self.flops / self.nbytes

    @property
    def roof(self) -> float:
        """Rate of FLOPs that these links admit, if they were always busy with this axis alone [FLOP/s]."""
        return min(self.peak, self.intensity * self.link_rate)

    @property
    def attained(self) -> float:
        """Rate of FLOPs of the whole step [FLOP/s]."""
        return self.flops / self.step_seconds

    @property
    def attained_rate(self) -> float:
        """Rate of bytes while the axis communicates [bytes/s]."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def busy_share(self) -> float:
        """Least share of the step for which the links are busy, at their nominal rate."""
        return self.nbytes / self.link_rate / self.step_seconds


@dataclass(frozen=True)
class StepRoofline:
    """The rooflines of a rank of a pipeline device.

    device: number and name of the pipeline device.
    gpu, peaks, memory_bandwidth: of its GPUs: name, dense peaks of the formats in use [FLOP/s], [bytes/s].
    links: nominal rates of a GPU's links by tier, without tiers that the cluster does not have [bytes/s].
    kernels: from the kernel that takes longest in a step.
    network: axis by axis and tier by tier, in the order of `EXPOSED` and `TIERS`.
    """

    device: int
    name: str
    gpu: str
    peaks: dict[str, float]
    memory_bandwidth: float
    links: dict[str, float]
    kernels: tuple[KernelPoint, ...]
    network: tuple[NetworkPoint, ...]
    step_seconds: float

    @cached_property
    def flops(self) -> float:
        """FLOPs that a rank executes in a step."""
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @cached_property
    def nbytes(self) -> float:
        """Least memory traffic of a rank in a step [bytes]."""
        return sum(kernel.nbytes * kernel.count for kernel in self.kernels)

    @property
    def with_flops(self) -> list[KernelPoint]:
        """The kernels that have a place on the axis of intensity."""
        return [kernel for kernel in self.kernels if kernel.flops]

    @property
    def memory_bound(self) -> tuple[float, float]:
        """Share of the step of the other kernels, and what they attain of the memory bandwidth; 0 of none."""
        kernels = [kernel for kernel in self.kernels if not kernel.flops and kernel.nbytes]
        if not (seconds := sum(kernel.total_seconds for kernel in kernels)):
            return 0.0, 0.0
        nbytes = sum(kernel.nbytes * kernel.count for kernel in kernels)
        return seconds / self.step_seconds, nbytes / seconds / self.memory_bandwidth

    @property
    def top(self) -> float:
        """Highest roof [FLOP/s]."""
        return max(self.peaks.values(), default=1e12)

    def links_above(self, share: float) -> list[NetworkPoint]:
        """Returns the axes on links that are busy with them for at least a share of the step."""
        return [point for point in self.network if point.busy_share >= share]


class KernelGroup(NamedTuple):
    """Kernels of the same name, phase and kind, as a point.

    intensity: FLOPs a byte.
    attained, roof: rates [FLOP/s].
    seconds: in a step [s].
    """

    name: str
    phase: str
    kind: str
    intensity: float
    attained: float
    roof: float
    seconds: float


def group_kernels(kernels: Iterable[KernelPoint]) -> list[KernelGroup]:
    """Groups kernels with FLOPs by name and phase, those that take longest first."""
    groups: dict[tuple[str, str, str], list[KernelPoint]] = defaultdict(list)
    for kernel in kernels:
        if kernel.flops:
            groups[kernel.name, kernel.phase, kernel.kind].append(kernel)
    grouped = []
    for key, members in groups.items():
        seconds = sum(kernel.total_seconds for kernel in members)
        flops = sum(kernel.flops * kernel.count for kernel in members)
        nbytes = sum(kernel.nbytes * kernel.count for kernel in members)
        # Kernels in turn are as fast as their roofs together let them be.
        fastest = sum(kernel.flops * kernel.count / kernel.roof for kernel in members)
        grouped.append(KernelGroup(*key, flops / nbytes, flops / seconds, flops / fastest, seconds))
    return sorted(grouped, key=lambda group: -group.seconds)


def step_roofline(metrics: Metrics, device: int | None = None, calibration: Calibration | None = None) -> StepRoofline:
    """Finds the rooflines of a forecast.

    device: pipeline device; by default that which computes longest, which the breakdown describes.
    calibration: with which the job was forecast; by default that which ships with meshcast.
    """
    owner = metrics.device if device is None else device
    plan = metrics.play.plan
    cluster = plan.ranks.clusters[owner]
    traits = plan.on(owner).job.framework.kernel_traits
    kernels = _kernel_points(metrics, owner, cluster.gpu, attention_format(traits.attention))
    peaks = {kernel.dtype: kernel.peak for kernel in kernels if kernel.dtype}
    flops, top = sum(kernel.flops * kernel.count for kernel in kernels), max(peaks.values(), default=0.0)
    links = link_rates(cluster)
    finder = MessagesOfPlan(plan, calibration)
    ranks = len(plan.ranks.of_device(owner))
    nbytes: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for messages in list_rank_messages(metrics, calibration, owner):
        for tier, sent in _bytes_on_links(messages, finder, owner).items():
            if sent:
                nbytes[messages.axis, tier] += sent * messages.times / ranks
                seconds[messages.axis, tier] += messages.seconds * messages.times
    network = tuple(
        NetworkPoint(*key, nbytes[key], seconds[key], links[key[1]], flops, top, metrics.step_time)
        for key in ((axis, tier) for axis in EXPOSED for tier in TIERS)
        if key in nbytes
    )
    name, memory = name_device(plan, owner), float(cluster.gpu.memory_bandwidth)
    return StepRoofline(owner, name, cluster.gpu.name, peaks, memory, links, kernels, network, metrics.step_time)


def link_rates(cluster: Cluster) -> dict[str, float]:
    """Returns nominal rates of a GPU's links by tier in a direction [bytes/s], without tiers that no two GPUs use."""
    rates = {
        "scale-up": float(cluster.scale_up.bandwidth) if cluster.scale_up_domain > 1 else 0.0,
        "host": float(cluster.host.bandwidth) if cluster.over_host else 0.0,
        "network": float(cluster.port_rate()) if cluster.gpus > cluster.local_gpus else 0.0,
    }
    return {tier: rate for tier, rate in rates.items() if rate}


def _kernel_points(metrics: Metrics, device: int, gpu: GPU, attention: str) -> tuple[KernelPoint, ...]:
    """Lists kernels of a device by name, phase, work and price.

    attention: number format of attention; empty: that of its work.
    """
    counts: dict[tuple[Any, ...], float] = defaultdict(float)
    for executed in list_executed_ops(metrics, device):
        op = executed.op
        if isinstance(op.work, Gemm | Attention | Memory) and executed.kind in COMPUTING:
            counts[op.name, op.phase, executed.kind, op.work, executed.seconds] += executed.count
    memory = float(gpu.memory_bandwidth)
    points = []
    for (name, phase, kind, work, seconds), count in counts.items():
        dtype = "" if isinstance(work, Memory) else work.dtype
        dtype = attention or dtype if isinstance(work, Attention) else dtype
        top = peak(gpu, dtype) if dtype else 0.0
        points.append(KernelPoint(name, phase, kind, dtype, work.flops, work.bytes, seconds, count, top, memory))
    return tuple(sorted(points, key=lambda kernel: (-kernel.total_seconds, kernel.name, kernel.phase)))


def _bytes_on_links(messages: RankMessages, finder: MessagesOfPlan, device: int) -> dict[str, float]:
    """Returns bytes of an execution that all ranks of a device send over links of each tier."""
    work = messages.work
    if isinstance(work, Collective) and work.operation == "all_reduce":
        groups = [ranks for ranks in finder.groups(device, work) if len(ranks) > 1]
        names = [finder.algorithm(device, work, ranks) for ranks in groups]
        if all(name.startswith("NVLS") for name in names):
            members, sent = finder.plan.ranks.of_device(device), {"scale-up": 0.0, "network": 0.0}
            for ranks, name in zip(groups, names, strict=True):
                nodes = (ranks // finder.cluster.local_gpus).tolist()
                held = int(np.isin(ranks, members).sum())
                for tier, share in zip(sent, switch_link_shares(nodes, "SHARP" in name), strict=True):
                    sent[tier] += share * work.nbytes * held
            return sent
    return split_by_tier(finder.cluster, messages)
