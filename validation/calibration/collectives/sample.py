"""Samples of measured collectives, and their forecasts by cost models."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.collectives import collective, p2p
from meshcast.simulator.costs.collectives.links import Links, TierCostModels, crosses_host
from meshcast.simulator.ir.ops import Collective, Transfer


@dataclass(frozen=True, eq=False)
class CollectiveSample:
    """Rows of a table that differ in bytes only: one group of GPUs, one library, one operation.

    Attributes:
        operation: section of the cost model that prices them: ring, all_to_all, p2p or network.
        gpu: its name in the catalog.
        library: program that called and timed them, by the names of calibrations.
        cluster: that they ran on.
        reach: where the group sits in the cluster.
        work: with an array of bytes.
        nvls: whether NVLS may be used (it adds no 8-bit integers, and it can be turned off).
        index: rows of the table, from 0.
        seconds: measured [s].
        kind: the collective operation.
        classes: named sets of the rows, scored separately.
    """

    operation: str
    gpu: str
    library: str
    cluster: Cluster
    reach: Reach
    work: Collective | Transfer
    nvls: bool
    index: np.ndarray
    seconds: np.ndarray
    kind: str
    classes: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def link(self) -> str:
        """Catalog name of the slowest links within the nodes."""
        return self.cluster.host.kind if crosses_host(self.reach) else self.cluster.scale_up.kind

    @property
    def network(self) -> str:
        """Catalog name of the network between nodes, "" within one."""
        return self.cluster.scale_out.kind if self.reach.nodes.number > 1 else ""

    def shape(self, at: int) -> str:
        """The sizes of one row."""
        return f"{self.reach.members} GPUs in {self.reach.nodes.number}, {self.work.nbytes[at]:,.0f} bytes"  # type: ignore[index]


def links_of(sample: CollectiveSample, models: TierCostModels) -> Links:
    """The links of a sample's cluster as its library uses them."""
    return Links(sample.cluster, models, nvls=sample.nvls)


def predict(sample: CollectiveSample, models: TierCostModels) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a sample's rows, and the part of them that moves no bytes."""
    links = links_of(sample, models)
    if isinstance(sample.work, Transfer):
        busy, latency = p2p.seconds(sample.work.nbytes, sample.reach, links)
        return busy + latency, latency + np.zeros(len(sample.index))
    return collective.seconds(sample.work, sample.reach, links)


def lower_bound(sample: CollectiveSample, models: TierCostModels) -> np.ndarray:
    """Time [s] that no collective of these sizes can beat on these links."""
    links = links_of(sample, models)
    if isinstance(sample.work, Transfer):
        return p2p.lower_bound(sample.work.nbytes, sample.reach, links)
    return collective.lower_bound(sample.work, sample.reach, links)
