"""What a reader of a table of collectives makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hardware.cluster import Cluster
from hardware.topology import Reach
from simulator.costs.collectives import collective, p2p
from simulator.costs.collectives.links import Laws, Links, hosted
from simulator.ir.ops import Collective, Transfer


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of a table that differ in bytes only: one group of GPUs, one library, one operation.

    operation: the law that prices them: ring, pair, message or network. gpu: its name in the catalog. library: the
    program that called and timed them, by the names of calibrations. work: with an array of bytes. reach: how the group
    spreads over `cluster`. sums: whether switches may add up (they add no 8-bit integers, and it can be turned off).
    index: the rows in the table, from 0. seconds: measured. kind: the operation. classes: named sets of the rows, to be
    scored apart.
    """

    operation: str
    gpu: str
    library: str
    cluster: Cluster
    reach: Reach
    work: Collective | Transfer
    sums: bool
    index: np.ndarray
    seconds: np.ndarray
    kind: str
    classes: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def link(self) -> str:
        """Catalog name of the slowest links inside the islands."""
        return self.cluster.host.kind if hosted(self.reach) else self.cluster.scale_up.kind

    @property
    def network(self) -> str:
        """Catalog name of the network between islands, empty within one."""
        return self.cluster.scale_out.kind if self.reach.islands.number > 1 else ""

    def shape(self, at: int) -> str:
        """The sizes of one row."""
        return f"{self.reach.members} GPUs in {self.reach.islands.number}, {self.work.nbytes[at]:,.0f} bytes"  # type: ignore[index]


def links_of(sample: Sample, laws: Laws) -> Links:
    """The links of a sample's cluster as its library uses them."""
    return Links(sample.cluster, laws, switch_sums=sample.sums)


def predict(sample: Sample, laws: Laws) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a sample's rows, and the part of them that is no work."""
    links = links_of(sample, laws)
    if isinstance(sample.work, Transfer):
        busy, latency = p2p.seconds(sample.work.nbytes, sample.reach, links)
        return busy + latency, latency + np.zeros(len(sample.index))
    return collective.seconds(sample.work, sample.reach, links)


def least(sample: Sample, laws: Laws) -> np.ndarray:
    """What no collective of these sizes can beat on these links [s]."""
    links = links_of(sample, laws)
    if isinstance(sample.work, Transfer):
        return p2p.least(sample.work.nbytes, sample.reach, links)
    return collective.least(sample.work, sample.reach, links)
