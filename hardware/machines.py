"""Names of rented machines: what a cloud calls a node, and which GPUs and network it has."""

from __future__ import annotations

import datetime
from functools import cache
from typing import Annotated, Literal

from meshcast.hardware.inline import Network
from meshcast.hardware.load import Strict, catalog, catalog_model, load
from meshcast.hardware.schemas import Field, model_validator


class CloudMachine(Strict):
    """A machine of a cloud: a node of the catalog, or its GPUs and its network.

    Attributes:
        node: node of the catalog that describes it.
        gpu: GPU of the catalog.
        gpus: number of GPUs.
        network: family of its network; None: that of the GPU's usual node.
        gbps: rate of all ports together, one direction [Gbit/s].
        ports: network ports; None: a port for each GPU.
    """

    node: str | None = None
    gpu: str | None = None
    gpus: Annotated[int, Field(gt=0, le=1000)] | None = None
    network: Network | None = None
    gbps: Annotated[float, Field(gt=0)] | None = None
    ports: Annotated[int, Field(gt=0, le=1000)] | None = None

    @model_validator(mode="after")
    def _check_form(self) -> CloudMachine:
        if (self.node is None) == (self.gpu is None) or (self.gpu is None) != (self.gpus is None):
            raise ValueError("a machine is a `node`, or `gpu` and `gpus`. Write one of the two forms")
        return self

    def make_cluster(self, count: int) -> dict[str, object]:
        """Returns the description of a cluster of `count` such machines."""
        if self.node is not None:
            return {"node": self.node, "nodes": count}
        assert self.gpus is not None
        inter: dict[str, object] = {"ports": self.ports} if self.ports else {}
        if self.network is not None:
            inter["kind"] = self.network
        if self.gbps is not None:
            inter["gbps_per_gpu"] = self.gbps / self.gpus
        return {"gpu": self.gpu, "gpus": self.gpus * count, "gpus_per_node": self.gpus, "inter": inter}


class MachineGroup(Strict):
    """Machines whose description has a single source.

    Attributes:
        kind: as of every value of the catalog (`Value`).
        source: document or address.
        checked: day on which the source was read.
        machines: by the cloud's names.
    """

    kind: Literal["peak", "measured", "assumed"]
    source: str = Field(min_length=1)
    checked: datetime.date | None = None
    machines: dict[str, CloudMachine]


@catalog_model("machines")
class Cloud(Strict):
    """The machines of a cloud."""

    name: str
    title: str
    groups: tuple[MachineGroup, ...]


def find_machine(word: str) -> tuple[str, CloudMachine] | None:
    """Returns the machine that a cloud calls so, with the name as the cloud writes it; None if none does.

    Large and small letters, ``-`` and ``_`` are the same; Azure's ``Standard_`` may be left out.
    """
    return _machines().get(_plain(word))


@cache
def _machines() -> dict[str, tuple[str, CloudMachine]]:
    """Returns all machines of all clouds, by their names in small letters."""
    groups = [group for cloud in catalog("machines") for group in load("machines", cloud).groups]
    return {_plain(name): (name, machine) for group in groups for name, machine in group.machines.items()}


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").removeprefix("standard-")
