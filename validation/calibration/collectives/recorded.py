"""Samples from measurement files: collectives that were measured here or imported, for calibrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import reach
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.simulator.loading.load import load_job
from meshcast.validation.calibration.collectives.reader import OPERATIONS
from meshcast.validation.calibration.collectives.sample import CollectiveSample
from meshcast.validation.measurements.measurement import MeasurementRow, read

MESSAGES = ("p2p", "send_recv")
"""Operations between two GPUs."""


@dataclass(frozen=True)
class Recorded:
    """Samples of a machine, which calibrations take like those of a table.

    Attributes:
        samples: of kernels or of collectives.
        origin: where they were measured.
    """

    samples: list[Any]
    origin: str

    def source(self, _: Any) -> str:
        """Returns the origin of any of the samples."""
        return self.origin


def make_samples(
    rows: Sequence[MeasurementRow], cluster_of: Callable[[int], Cluster], gpu: str, library: str, section: str = ""
) -> list[CollectiveSample]:
    """Returns a sample for each operation and number of members: the first ranks of the cluster for that number.

    section: that prices all of them; by default that of the operation, or of the network between nodes.
    """
    groups: dict[tuple[str, int], list[MeasurementRow]] = {}
    for row in rows:
        if row.samples and row.shape.get("operation") in OPERATIONS and {"members", "bytes"} <= row.shape.keys():
            groups.setdefault((row.shape["operation"], row.shape["members"]), []).append(row)
    samples = []
    for (operation, members), some in groups.items():
        cluster = cluster_of(members)
        place = reach(cluster, [0, members - 1] if operation in MESSAGES else list(range(members)))
        nbytes: Any = np.array([float(row.shape["bytes"]) for row in some])
        seconds = np.array([row.median for row in some], float)
        plain = "all_to_all" if operation == "alltoall" else operation
        work: Any = Transfer(nbytes, "x", 0, 1) if operation in MESSAGES else Collective(plain, nbytes, ("x",))
        priced_by = section or ("network" if place.nodes.number > 1 else OPERATIONS[operation])
        rows_of = priced_by, gpu, library, np.arange(len(some)), seconds, plain
        samples.append(CollectiveSample(*rows_of, cluster=cluster, reach=place, work=work, nvls=True))
    return samples


def read_recorded(path: Path) -> Recorded:
    """Returns the collectives of a measurement file. Raises PlanError if it holds none, or no job that names their
    cluster."""
    measured = read(path)
    if measured.kind != "collectives" or not measured.job:
        rule = "a calibration needs measured collectives and the job whose cluster they ran on"
        remedy = "Measure collectives, or import them with --job JOB"
        raise PlanError("--data", rule, remedy, str(path))
    try:
        cluster = load_job(measured.job).cluster
    except MeshcastError as error:
        raise error.at(f"{path} job") from None
    samples = make_samples(measured.rows, lambda members: cluster, cluster.gpu.name, "nccl-tests")
    return Recorded(samples, f"{measured.title} on {measured.machine.name}, {path.name}")
