"""The figures of a job's hardware that can change its forecast, each with the change that makes it better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.link import Link
from meshcast.hardware.node import Host
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.host import DISKS, MEMORIES, MEMORY
from meshcast.simulator.ir.operators import QUANTISED
from meshcast.simulator.job.job import Job

NEVER_IN_TRAINING = frozenset({"fp64", "int8"})
"""Number formats of peak rates in which no work of a training step computes."""

HOST_RATES = {
    "memory": "bandwidth of host memory",
    "read": "read rate of the disks",
    "write": "write rate of the disks",
}
"""Rates of `hardware.node.Host`, of all GPUs of a node together."""

Change = Callable[[Job, float], Job]
"""Makes a figure of a job's hardware better by a factor: a rate larger, a latency shorter."""


@dataclass(frozen=True)
class HardwareFigure:
    """One figure of the hardware.

    value: in SI units, as the catalog or the job states it.
    unit: of the value, for people.
    """

    name: str
    label: str
    value: float
    unit: str
    change: Change


def hardware_figures(job: Job, offloads: bool = False) -> list[HardwareFigure]:
    """Returns the figures of a job's hardware that can change its forecast.

    offloads: whether its plan offloads something to the memory or the disks of the host.
    Raises PlanError for several kinds of nodes.
    """
    cluster = job.cluster
    if cluster.groups:
        rule = "its nodes are of several kinds, each with figures of its own"
        raise PlanError("cluster", rule, "Explain a job on one kind of nodes", cluster.name)
    return [*_gpu_figures(job), *_network_figures(cluster), *_host_figures(job, cluster, offloads)]


def _gpu_figures(job: Job) -> Iterator[HardwareFigure]:
    """Yields peak rates by number format, what of them lasts, memory, cache and clock of the GPU."""
    gpu = job.cluster.gpu
    for number, peak in gpu.peak.items():
        if number not in NEVER_IN_TRAINING:
            yield HardwareFigure(f"peak_{number}", f"peak rate in {number}", peak, "FLOP/s", _change_peak(number))
    recipe = job.framework.quantised
    dtype = QUANTISED[recipe].dtype if recipe else "bf16"
    sustained = Calibration.shipped().sustained_rate(gpu, dtype)
    yield HardwareFigure("sustained_rate", "sustained share of the peak rates", sustained, "", _change_sustained_rate)
    yield HardwareFigure(
        "memory_bandwidth", "memory bandwidth", gpu.memory_bandwidth, "B/s", _change_gpu("memory_bandwidth")
    )
    yield HardwareFigure("l2", "L2 cache", gpu.l2, "B", _change_gpu("l2"))
    if gpu.clock:
        yield HardwareFigure("clock", "clock, with the same peak rates", gpu.clock, "Hz", _change_gpu("clock"))


def _network_figures(cluster: Cluster) -> Iterator[HardwareFigure]:
    """Yields the links between GPUs, within a domain and between nodes."""
    node, fabric = cluster.node, cluster.fabric
    if node.scale_up and cluster.scale_up_domain > 1:
        yield from _link_figures("scale_up", cluster.scale_up.kind, node.scale_up.link, _change_scale_up)
    if node.nics and cluster.gpus > cluster.local_gpus:
        yield from _link_figures("network", cluster.scale_out.kind, node.nics.link, _change_network)
        if fabric.hop_latency:
            latency = float(fabric.hop_latency)
            yield HardwareFigure("hop_latency", "latency of a switch", latency, "s", _change_hop_latency)
        for i, level in enumerate(fabric.levels):
            if level.link:
                yield from _link_figures("block_link", level.link.name, level.link, _change_block_link(i))


def _host_figures(job: Job, cluster: Cluster, offloads: bool) -> Iterator[HardwareFigure]:
    """Yields the link to the host, its memory and disks where the plan offloads, and its time to launch ops."""
    yield from _link_figures("host_link", cluster.host.kind, cluster.gpu.host, _change_host_link)
    if offloads:
        host, gpus = cluster.node.host or Host(), cluster.gpus_per_node
        usual = {"memory": MEMORIES.get(cluster.host.kind, MEMORY), "read": DISKS, "write": DISKS}
        for key, label in HOST_RATES.items():
            rate = float(getattr(host, key) or usual[key] * gpus)
            yield HardwareFigure(f"host_{key}", label, rate, "B/s", _change_host(key, rate))
    if cluster.staged:
        yield HardwareFigure("staging", "copies through host memory", cluster.staging, "B/s", _change_staging)
    framework = job.framework
    if framework.launch_s and framework.cuda_graphs is not True:
        yield HardwareFigure("launch", "launch time of the host", framework.launch_s, "s", _change_time("launch_s"))
    if framework.step_overhead_s:
        overhead = framework.step_overhead_s
        yield HardwareFigure(
            "step_overhead", "time of the host for each step", overhead, "s", _change_time("step_overhead_s")
        )


def _link_figures(name: str, kind: str, link: Link, put: Callable[[Job, Link], Job]) -> Iterator[HardwareFigure]:
    """Yields bandwidth and latency of a kind of links. put: makes the job with other links of this kind."""

    def rate(job: Job, by: float) -> Job:
        return put(job, link.model_copy(update={"rate": type(link.rate)(link.rate * by)}))

    def latency(job: Job, by: float) -> Job:
        return put(job, link.model_copy(update={"latency": type(link.latency)(link.latency / by)}))

    yield HardwareFigure(f"{name}_bandwidth", f"bandwidth of {kind}", link.bandwidth, "B/s", rate)
    if link.latency:
        yield HardwareFigure(f"{name}_latency", f"latency of {kind}", link.latency, "s", latency)


def _with_cluster(job: Job, **changes: Any) -> Job:
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=changes)})


def _with_node(job: Job, **changes: Any) -> Job:
    return _with_cluster(job, node=job.cluster.node.model_copy(update=changes))


def _with_gpu(job: Job, **changes: Any) -> Job:
    return _with_node(job, gpu=job.cluster.gpu.model_copy(update=changes))


def _with_framework(job: Job, **changes: Any) -> Job:
    return job.model_copy(update={"framework": job.framework.model_copy(update=changes)})


def _change_peak(dtype: str) -> Change:
    def change(job: Job, by: float) -> Job:
        peaks = job.cluster.gpu.peak
        old = next(rate for known, rate in peaks.items() if known == dtype)
        return _with_gpu(job, peak={**peaks, dtype: type(old)(old * by)})

    return change


def _change_sustained_rate(job: Job, by: float) -> Job:
    rates = job.framework.rates
    return _with_framework(job, rates={**rates, "kernel": rates.get("kernel", 1.0) * by})


def _change_gpu(field: str) -> Change:
    def change(job: Job, by: float) -> Job:
        value = getattr(job.cluster.gpu, field)
        return _with_gpu(job, **{field: type(value)(value * by)})

    return change


def _change_scale_up(job: Job, link: Link) -> Job:
    up = job.cluster.node.scale_up
    assert up is not None
    return _with_node(job, scale_up=up.model_copy(update={"link": link}))


def _change_network(job: Job, link: Link) -> Job:
    nics = job.cluster.node.nics
    assert nics is not None
    return _with_node(job, nics=nics.model_copy(update={"link": link}))


def _change_hop_latency(job: Job, by: float) -> Job:
    fabric = job.cluster.fabric
    return _with_cluster(job, fabric=fabric.model_copy(update={"hop_latency": (fabric.hop_latency or 0.0) / by}))


def _change_block_link(place: int) -> Callable[[Job, Link], Job]:
    """Returns the function that changes the link of a level of the fabric."""

    def change(job: Job, link: Link) -> Job:
        levels = list(job.cluster.fabric.levels)
        levels[place] = levels[place].model_copy(update={"link": link})
        return _with_cluster(job, fabric=job.cluster.fabric.model_copy(update={"levels": tuple(levels)}))

    return change


def _change_host_link(job: Job, link: Link) -> Job:
    return _with_gpu(job, host=link)


def _change_host(field: str, rate: float) -> Change:
    """Changes a rate of the host. rate: what it is, or what is assumed for it [bytes/s]."""

    def change(job: Job, by: float) -> Job:
        host = job.cluster.node.host or Host()
        return _with_node(job, host=host.model_copy(update={field: rate * by}))

    return change


def _change_staging(job: Job, by: float) -> Job:
    return _with_node(job, staging=job.cluster.staging * by)


def _change_time(field: str) -> Change:
    """Changes a time of the framework's host."""

    def change(job: Job, by: float) -> Job:
        return _with_framework(job, **{field: getattr(job.framework, field) / by})

    return change
