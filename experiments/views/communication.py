"""Bytes that ranks, nodes or pipeline devices send each other in a step, by axis, and the scale of their colours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import numpy as np

from meshcast.experiments.explain.executed_ops import list_executed_ops
from meshcast.experiments.explain.rank_messages import list_rank_messages
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.ir.ops import HostCopy
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.categories import EXPOSED
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.metrics import Metrics

Grouping = Literal["rank", "node", "stage"]
"""Rows and columns of a matrix: single ranks, nodes (or scale-up domains that span nodes), or pipeline devices."""

MAX_ROWS = 512
"""Largest matrix that `choose_grouping` takes."""


@dataclass(frozen=True)
class CommunicationMatrix:
    """Bytes in a step from the ranks of a group to those of another.

    grouping: what a row and a column is.
    names: of the groups, in the order of rows and columns.
    by_axis: by axis of communication (`EXPOSED`) the bytes that the group of a row sends to that of a column [groups,
        groups]; what ranks of a group send each other is on the diagonal. Only axes with bytes.
    host: bytes that the ranks of every group copy to their hosts, and from them [groups, 2].
    """

    grouping: Grouping
    names: tuple[str, ...]
    by_axis: dict[str, np.ndarray]
    host: np.ndarray

    @cached_property
    def total(self) -> np.ndarray:
        """Bytes over all axes [groups, groups]."""
        return sum(self.by_axis.values(), np.zeros((len(self.names), len(self.names))))

    @property
    def sums(self) -> dict[str, float]:
        """Bytes that all ranks together send in a step, by axis."""
        return {axis: float(matrix.sum()) for axis, matrix in self.by_axis.items()}

    def find_scale(self, decades: float, axes: Iterable[str] = ()) -> tuple[float, float]:
        """Finds the ends of a logarithmic scale of all matrices: the least and the largest bytes of a cell.

        decades: longest scale; cells of less have the value of its lower end.
        axes: those that are drawn, or all.
        """
        high = float(self.total.max())
        least = min(float(matrix[matrix > 0].min()) for matrix in (self.by_axis[axis] for axis in axes or self.by_axis))
        return max(least, high / 10**decades), high


def communication_matrix(
    metrics: Metrics, grouping: Grouping | None = None, calibration: Calibration | None = None
) -> CommunicationMatrix:
    """Sums the bytes that ranks send each other in a step of a forecast.

    grouping: of the matrix; by default the finest of at most `MAX_ROWS` rows, or pipeline devices.
    calibration: with which the job was forecast; by default that which ships with meshcast.
    """
    plan = metrics.play.plan
    kind = grouping or choose_grouping(plan.job.cluster)
    names, group_of = group_ranks(plan, kind)
    size = len(names)
    cells: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(size * size))
    for messages in list_rank_messages(metrics, calibration):
        places = group_of[messages.sources] * size + group_of[messages.targets]
        cells[messages.axis] += np.bincount(places, messages.nbytes * messages.times, size * size)
    by_axis = {axis: cells[axis].reshape(size, size) for axis in EXPOSED if axis in cells and cells[axis].any()}
    return CommunicationMatrix(kind, names, by_axis, _host_bytes(metrics, group_of, size))


def choose_grouping(cluster: Cluster, rows: int = MAX_ROWS) -> Grouping:
    """Chooses the finest grouping of at most `rows` rows, or pipeline devices if even nodes are more."""
    if cluster.gpus <= rows:
        return "rank"
    return "node" if -(-cluster.gpus // cluster.local_gpus) <= rows else "stage"


def group_ranks(plan: Plan, grouping: Grouping) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns names of all groups, and the group of every rank; ranks of no pipeline device are in group 0."""
    cluster = plan.job.cluster
    ranks = np.arange(cluster.gpus)
    if grouping == "rank":
        return tuple(f"rank {rank}" for rank in ranks), ranks
    if grouping == "node":
        nodes = ranks // cluster.local_gpus
        noun = "domain" if cluster.local_gpus > cluster.gpus_per_node else "node"
        return tuple(f"{noun} {node}" for node in range(int(nodes[-1]) + 1)), nodes
    devices = np.zeros(cluster.gpus, int)
    for device in range(plan.ranks.devices):
        devices[plan.ranks.of_device(device)] = device
    return tuple(name_device(plan, device) for device in range(plan.ranks.devices)), devices


def pool_cells(matrix: np.ndarray, rows: int) -> np.ndarray:
    """Takes the largest of every block of cells, so that at most `rows` rows are left."""
    block = -(-len(matrix) // max(1, rows))
    starts = np.arange(0, len(matrix), block)
    pooled: np.ndarray = np.maximum.reduceat(np.maximum.reduceat(matrix, starts, axis=0), starts, axis=1)
    return pooled


def _host_bytes(metrics: Metrics, group_of: np.ndarray, size: int) -> np.ndarray:
    """Sums the bytes of `CommunicationMatrix.host`."""
    plan, nbytes = metrics.play.plan, np.zeros((size, 2))
    by_device = np.zeros((plan.ranks.devices, 2))
    for executed in list_executed_ops(metrics):
        work = executed.op.work
        if isinstance(work, HostCopy):
            by_device[executed.device, int(work.back)] += work.nbytes * executed.count
    for device in range(plan.ranks.devices):
        np.add.at(nbytes, group_of[plan.ranks.of_device(device)], by_device[device])
    return nbytes
