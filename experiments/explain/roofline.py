"""Rooflines of a step: kernels against the peak rate and memory bandwidth of their GPU, communication against links.

A kernel of F FLOPs and B bytes has the intensity F / B; no kernel is faster than its roof

    min(peak FLOP/s of its number format, F / B x memory bandwidth)

(Williams, Waterman, Patterson 2009, "Roofline"). The bytes are the least traffic: every operand read and every result
written once. The network has roofs of the same form: a GPU that executes F FLOPs of a step and sends B bytes over links
of one tier in it cannot execute more than F / B x link rate. FLOPs of memory-bound kernels are neglected, so their
intensity is 0 and their attained bandwidth says how close they are to the roof.

All figures are of one rank of one pipeline device, in a step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshcast.experiments.explain.collective_messages import switch_link_shares
from meshcast.experiments.explain.communication_matrix import (
    MessagesOfPlan,
    RankMessages,
    list_rank_messages,
    split_by_tier,
)
from meshcast.experiments.explain.executed_ops import list_executed_ops
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.gpu import GPU
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.estimate import TIERS
from meshcast.simulator.costs.kernels.libraries import attention_format
from meshcast.simulator.costs.kernels.roofline import peak
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory
from meshcast.simulator.program.categories import COMPUTING, EXPOSED
from meshcast.simulator.report.metrics import Metrics
from meshcast.simulator.report.words import name_device


@dataclass(frozen=True)
class KernelPoint:
    """Equal kernels of one name.

    name, phase: of the op, see `Op`.
    kind: part of the breakdown that its time counts for.
    dtype: number format whose peak is its roof; empty of memory-bound kernels.
    flops, nbytes: FLOPs and least memory traffic [bytes] of one execution.
    seconds: of one execution [s].
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
    """What one axis of communication sends over the links of one tier in a step.

    axis: a key of `EXPOSED`.
    tier: one of `TIERS`.
    nbytes: bytes that a rank sends over these links [bytes]; the mean over the ranks of the device.
    seconds: for which ops that send over this tier occupy their streams [s].
    link_rate: nominal rate of a GPU's links of this tier, one direction [bytes/s].
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
    """The rooflines of one rank of a pipeline device.

    device: number and name of the pipeline device.
    gpu, peaks, memory_bandwidth: of its GPUs: name, dense peaks of the formats in use [FLOP/s], [bytes/s].
    links: nominal rates of a GPU's links by tier, without tiers that the cluster does not have [bytes/s].
    kernels: from the one that takes longest in a step.
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


def step_roofline(metrics: Metrics, device: int | None = None, calibration: Calibration | None = None) -> StepRoofline:
    """Returns the rooflines of a forecast.

    device: pipeline device; by default the one that computes longest, which the breakdown describes.
    calibration: with which the job was forecast; by default the one that ships with meshcast.
    """
    owner = metrics.device if device is None else device
    plan = metrics.play.plan
    cluster = plan.ranks.clusters[owner]
    traits = plan.on(owner).job.framework.kernel_traits
    kernels = _kernel_points(metrics, owner, cluster.gpu, attention_format(traits.attention))
    peaks = {messages.dtype: messages.peak for messages in kernels if messages.dtype}
    flops, most = sum(messages.flops * messages.count for messages in kernels), max(peaks.values(), default=0.0)
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
        NetworkPoint(*key, nbytes[key], seconds[key], links[key[1]], flops, most, metrics.step_time)
        for key in ((axis, tier) for axis in EXPOSED for tier in TIERS)
        if key in nbytes
    )
    name, memory = name_device(plan, owner), float(cluster.gpu.memory_bandwidth)
    return StepRoofline(owner, name, cluster.gpu.name, peaks, memory, links, kernels, network, metrics.step_time)


def link_rates(cluster: Cluster) -> dict[str, float]:
    """Returns nominal rates of a GPU's links by tier, one direction [bytes/s], without tiers that no two GPUs use."""
    rates = {
        "scale-up": float(cluster.scale_up.bandwidth) if cluster.scale_up_domain > 1 else 0.0,
        "host": float(cluster.host.bandwidth) if cluster.over_host else 0.0,
        "network": float(cluster.port_rate()) if cluster.gpus > cluster.local_gpus else 0.0,
    }
    return {tier: rate for tier, rate in rates.items() if rate}


def _kernel_points(metrics: Metrics, device: int, gpu: GPU, attention: str) -> tuple[KernelPoint, ...]:
    """Returns kernels of a device by name, phase, work and price. attention: number format of attention; empty: of its
    work."""
    counts: dict[tuple[Any, ...], float] = defaultdict(float)
    for executed in list_executed_ops(metrics, device):
        if isinstance(executed.op.work, Gemm | Attention | Memory) and executed.kind in COMPUTING:
            counts[executed.op.name, executed.op.phase, executed.kind, executed.op.work, executed.seconds] += (
                executed.count
            )
    memory = float(gpu.memory_bandwidth)
    points = []
    for (name, phase, kind, work, seconds), count in counts.items():
        dtype = "" if isinstance(work, Memory) else work.dtype
        dtype = attention or dtype if isinstance(work, Attention) else dtype
        top = peak(gpu, dtype) if dtype else 0.0
        points.append(KernelPoint(name, phase, kind, dtype, work.flops, work.bytes, seconds, count, top, memory))
    return tuple(sorted(points, key=lambda executed: (-executed.total_seconds, executed.name, executed.phase)))


def _bytes_on_links(messages: RankMessages, finder: MessagesOfPlan, device: int) -> dict[str, float]:
    """Returns bytes of one execution that all ranks of a device send over links of each tier."""
    work = messages.work
    if isinstance(work, Collective) and work.operation == "all_reduce":
        groups = [ranks for ranks in finder.groups(device, work) if len(ranks) > 1]
        names = [finder.algorithm(device, work, ranks) for ranks in groups]
        if all(name.startswith("NVLS") for name in names):
            members, nbytes = finder.plan.ranks.of_device(device), {"scale-up": 0.0, "network": 0.0}
            for ranks, name in zip(groups, names, strict=True):
                nodes = (ranks // finder.cluster.local_gpus).tolist()
                held = int(np.isin(ranks, members).sum())
                for tier, share in zip(nbytes, switch_link_shares(nodes, "SHARP" in name), strict=True):
                    nbytes[tier] += share * work.nbytes * held
            return nbytes
    return split_by_tier(finder.cluster, messages)
