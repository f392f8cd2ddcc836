"""How often parts of a cluster fail as somebody observed them, how long they are away, and how fast checkpoints reach
a store: a parallel file system or an object store that all nodes write to."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.load import Count, Strict, Time, Value, catalog_model, quantity
from meshcast.hardware.schemas import Field, model_validator

Unit = Literal["gpu", "nic", "node", "switch", "job"]
"""What fails: a GPU, a network port, a node, a leaf switch; or the job as a whole."""

Loss = Literal["node", "nothing"]
"""What a failure takes from the job: the node, until it is repaired; or nothing, so that the same nodes start again."""

UNITS: tuple[Unit, ...] = ("gpu", "nic", "node", "switch", "job")


class ObservedFailures(Strict):
    """Failures of a kind, as counted in a run or stated as a mean.

    Attributes:
        per: the unit whose failures were counted.
        failures: their number; with `units` and `Reliability.observed` it gives the mean time between failures.
        units: number of units observed.
        mtbf: mean time between failures of a unit [s], where the source states it instead.
        loses: what a failure takes from the job.
    """

    per: Unit
    failures: Count | None = None
    units: Count | None = None
    mtbf: Time | None = None
    loses: Loss = "node"

    @model_validator(mode="after")
    def _check_rate(self) -> ObservedFailures:
        if (self.failures is None) != (self.units is None) or (self.failures is None) == (self.mtbf is None):
            raise ValueError("a rate is a number of failures and of units, or a mean time. Give both counts, or `mtbf`")
        return self


@catalog_model("reliability")
class Reliability(Strict):
    """Failure rates of a cluster.

    Attributes:
        observed: time in which the failures were counted [s]; None where means are stated.
        components: failures by kind.
        detection: from a failure until it is known and its node is known [s].
        scheduling: from there until all processes run again [s], without loading a checkpoint.
        warm_up: from a loaded checkpoint to the first step of usual duration [s].
        repair: until a node that was lost is back [s].
    """

    name: str
    title: str = ""
    observed: Time | None = None
    components: Annotated[dict[str, ObservedFailures], Field(min_length=1)]
    detection: Time
    scheduling: Time
    warm_up: Time
    repair: Time
    note: str = ""

    def __hash__(self) -> int:  # `components` is a dict; equal entries have equal names
        return hash(self.name)

    @model_validator(mode="after")
    def _check_observed(self) -> Reliability:
        if self.observed is None and any(failures.failures is not None for failures in self.components.values()):
            raise ValueError("failures are counted in a time. Give `observed`")
        return self

    def mtbf(self, component: str) -> float:
        """Returns the mean time between failures of a unit of a component [s]."""
        observed = self.components[component]
        if observed.mtbf is not None:
            return float(observed.mtbf)
        assert self.observed is not None and observed.failures is not None and observed.units is not None
        return float(self.observed * observed.units / observed.failures)


StoreRate = Annotated[Value, quantity("bandwidth", per=("node",))]
"""A rate of a whole store [bytes/s]."""


@catalog_model("stores")
class CheckpointStore(Strict):
    """A store of checkpoints.

    Attributes:
        write: rate at which all nodes together write [bytes/s].
        read: likewise; None: as fast as they write.
        per_node: most that a node writes or reads [bytes/s]; None: its network ports limit it.
        nodes: nodes that share these rates; on other numbers of nodes they grow in proportion. None: the rates are
            those of the store, however many nodes use it.
    """

    name: str
    title: str = ""
    write: StoreRate
    read: StoreRate | None = None
    per_node: StoreRate | None = None
    nodes: Count | None = None
    note: str = ""

    def rates(self, nodes: int) -> tuple[float, float]:
        """Rates of writing and of reading of so many nodes together [bytes/s]."""
        share = nodes / float(self.nodes) if self.nodes else 1.0
        return float(self.write) * share, float(self.read or self.write) * share
