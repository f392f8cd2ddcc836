"""A store of checkpoints: a parallel file system or an object store that all nodes write to."""

from __future__ import annotations

from typing import Annotated

from meshcast.hardware.load import Count, Strict, Value, catalog_model, quantity

StoreRate = Annotated[Value, quantity("bandwidth", per=("node",))]
"""A rate of a whole store [bytes/s]."""


@catalog_model("stores")
class CheckpointStore(Strict):
    """A store of checkpoints.

    Attributes:
        write: rate at which all nodes together write [bytes/s].
        read: likewise; None: as fast as they write.
        per_node: most that one node writes or reads [bytes/s]; None: its network ports limit it.
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
