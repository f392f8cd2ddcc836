"""A node: GPUs in a chassis, the links between them, and the network ports out of it.

GPUs reach each other over up to three tiers: scale-up links within a *domain* (NVLink, Infinity Fabric), the host
(PCIe) within a node that has several domains, and the network.
"""

from __future__ import annotations

import math
from typing import Annotated

from meshcast.hardware.gpu import GPU
from meshcast.hardware.link import Link
from meshcast.hardware.load import BooleanFact, Count, Fact, Strict, Value, by_name, catalog_model, quantity
from meshcast.hardware.schemas import Field, model_validator

Links = Annotated[int, Field(strict=True, ge=0, le=1000)]

SWITCHED = BooleanFact(value=True, kind="assumed", source="not stated: a switch, as in most nodes")
NO_RAILS = BooleanFact(value=False, kind="assumed", source="not stated: no rails")


class LinkMesh(Fact):
    """Links between two GPUs: a number for all pairs, or a row of numbers for each GPU."""

    value: Annotated[int, Field(strict=True, ge=1, le=1000)] | tuple[tuple[Links, ...], ...]


class RateShare(Fact):
    """What links reach on a node against the same links elsewhere."""

    value: Annotated[float, Field(strict=True, gt=0, le=1)]


class ScaleUp(Strict):
    """The scale-up links of a domain.

    Attributes:
        link: of the catalog.
        switched: whether every GPU can use its whole bandwidth for any other GPU.
        mesh: without a switch, links between two GPUs: a number for all pairs, or a row of numbers for each GPU.
        torus: without a switch, the number of axes of a torus; two links of a GPU go to its neighbours on each.
        domain: GPUs that they join, if not those of the node (72 in a rack of 18 nodes of 4); None: the node.
        rate: what they reach on this node against the same links elsewhere; None: as much.
    """

    link: Annotated[Link, by_name("links", Link)]
    switched: BooleanFact = SWITCHED
    mesh: LinkMesh | None = None
    torus: Count | None = None
    domain: Count | None = None
    rate: RateShare | None = None

    @model_validator(mode="after")
    def _check_switched(self) -> ScaleUp:
        if (self.switched.value, self.mesh is not None, self.torus is not None).count(True) != 1:
            raise ValueError("links go to a switch or to other GPUs. Give `switched: false` its `mesh` or `torus`")
        if self.torus is not None and self.link.links != 2 * self.torus:
            raise ValueError(
                f"a torus of {int(self.torus)} axes takes two links on each, and a GPU has {int(self.link.links)}."
                " Correct one of the two"
            )
        rows = self.mesh.value if self.mesh else ()
        if isinstance(rows, tuple):
            if any(len(row) != len(rows) for row in rows) or any(rows[i][i] for i in range(len(rows))):
                raise ValueError("a mesh has a row and a column for each GPU, and no link to itself. Correct the rows")
            if rows != tuple(zip(*rows, strict=True)) or any(sum(row) > self.link.links for row in rows):
                raise ValueError(f"links join two GPUs, and a GPU has {int(self.link.links)}. Correct the rows")
        return self

    @property
    def most(self) -> float:
        """Most GPUs that such links can join."""
        if self.mesh is None:
            return math.inf
        mesh = self.mesh.value
        return 1 + self.link.links // mesh if isinstance(mesh, int) else len(mesh)

    @property
    def gaps(self) -> bool:
        """Whether some pairs of GPUs have no link."""
        rows = self.mesh.value if self.mesh else 1
        return isinstance(rows, tuple) and any(row.count(0) > 1 for row in rows)

    def between(self, place: int, other: int) -> float:
        """Returns the share of a GPU's links that join it to another GPU; `place` and `other` are places in the
        domain. On a torus it counts as its neighbour."""
        if self.mesh is None:
            return 1.0 if self.torus is None else 1.0 / float(self.link.links)
        links = self.mesh.value if isinstance(self.mesh.value, int) else self.mesh.value[place][other]
        return float(links / self.link.links)

    def among(self, places: tuple[int, ...]) -> float:
        """Returns the share of its links that a member can use in a group at these places of a domain; least of all
        members."""
        if self.mesh is None or len(places) < 2:
            return 1.0
        return min(sum(self.between(place, other) for other in places if other != place) for place in places)


class NICs(Strict):
    """The ports of a node that carry training traffic (not those for storage).

    Attributes:
        link: of the catalog.
        count: ports of a node.
        rail_optimised: whether the i-th ports of all nodes share a switch, so that GPUs at the same place of their
            nodes are a switch apart and others are not.
    """

    link: Annotated[Link, by_name("links", Link)]
    count: Count
    rail_optimised: BooleanFact = NO_RAILS


Together = Annotated[Value, quantity("bandwidth", per=("node",))]
"""A rate that all GPUs of a node share [bytes/s]."""


PerNode = Annotated[Value, quantity("bytes", per=("node",))]
"""A size that all GPUs of a node share [bytes]."""


class Host(Strict):
    """The CPUs of a node with their memory and the local disks, for offloading.

    Attributes:
        memory: bandwidth of all sockets together, reads and writes in sum; None: unknown.
        capacity: size of this memory, for which vendors write TB where they mean 1024 GiB; None: unknown.
        uplinks: number of links through which all GPUs reach the host, each as fast as a GPU's; None: as many as GPUs.
        read: rate of all disks together; None: unknown, or no disks.
        write: likewise.
        disk_capacity: size of all disks for data together; None: unknown, or no disks.
    """

    memory: Together | None = None
    capacity: PerNode | None = None
    uplinks: Count | None = None
    read: Together | None = None
    write: Together | None = None
    disk_capacity: PerNode | None = None


@catalog_model("nodes")
class Node(Strict):
    """A node with GPUs of a single type.

    Attributes:
        gpus: number of GPUs.
        scale_up: links between them; None if PCIe alone joins them.
        nics: network ports; None for a node that stands alone.
        host: CPUs, memory and disks; None if unknown.
        peer_access: whether GPUs that no scale-up link joins reach each other directly over PCIe. NCCL does so below
            PCIe switches, and not from a host bridge of the CPUs to another (`ncclTopoCheckP2p` in
            src/graph/paths.cc of NVIDIA/nccl @5067397): there data is copied to the memory of the host and from there.
            None: they do, as below switches.
        staging: rate of that for all GPUs of the node together; None: unknown.
        peer_copies: where NCCL does not: whether what a program itself copies or stores to other GPUs, by CUDA's peer
            access, goes directly over PCIe. None: it does not.
    """

    name: str = "inline"
    title: str = ""
    gpu: Annotated[GPU, by_name("gpus", GPU)]
    gpus: Count
    scale_up: ScaleUp | None = None
    nics: NICs | None = None
    host: Host | None = None
    peer_access: BooleanFact | None = None
    staging: Together | None = None
    peer_copies: BooleanFact | None = None
    note: str = ""

    @property
    def domain(self) -> int:
        """GPUs of a scale-up domain; 1 without scale-up links."""
        return int(self.scale_up.domain or self.gpus) if self.scale_up else 1

    @property
    def local_gpus(self) -> int:
        """GPUs that reach each other without the network: those of a node, or of a domain that spans nodes."""
        return max(self.domain, int(self.gpus))

    @model_validator(mode="after")
    def _check_domains(self) -> Node:
        # Rank r lives in node r // gpus and in domain r // domain: either must be composed of whole ones of the other.
        if self.domain % int(self.gpus) and int(self.gpus) % self.domain:
            raise ValueError(
                f"a scale-up domain of {self.domain} GPUs and a node of {int(self.gpus)} do not nest."
                " One must be a multiple of the other"
            )
        if self.scale_up and self.domain > self.scale_up.most:
            raise ValueError(
                f"the mesh joins {self.scale_up.most} GPUs, the domain has {self.domain}. Correct one of the two"
            )
        return self
