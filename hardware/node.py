"""A node: GPUs in one chassis, the links between them, and the network ports out of it.

GPUs reach each other in three ways, of which a node may lack some: by scale-up links within a *domain* (NVLink,
Infinity Fabric), over the host (PCIe) within a node that is larger than its domains, and through the network.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from hardware.gpu import GPU
from hardware.link import Link
from hardware.load import Count, Fact, Strict, Value, by_name, catalog_model, quantity

Links = Annotated[int, Field(strict=True, ge=0, le=1000)]
Mesh = Annotated[int, Field(strict=True, ge=1, le=1000)] | tuple[tuple[Links, ...], ...]

SWITCHED = Fact[bool](value=True, kind="assumed", source="not told: a switch, as in most nodes")
ANYWHERE = Fact[bool](value=False, kind="assumed", source="not told: ports hang on any switch")


class ScaleUp(Strict):
    """How the GPUs of a domain are joined at full speed.

    switched: every GPU can give its whole bandwidth to any one other.
    mesh: without a switch, links between two GPUs: one number for all pairs, or a row of numbers for each GPU.
    domain: GPUs so joined, where that is not the node (72 in a rack of 18 nodes of 4); None means the node.
    """

    link: Annotated[Link, by_name("links", Link)]
    switched: Fact[bool] = SWITCHED
    mesh: Fact[Mesh] | None = None
    domain: Count | None = None

    @model_validator(mode="after")
    def _check_switched(self) -> ScaleUp:
        if self.switched.value != (self.mesh is None):
            raise ValueError("links go either to a switch or to other GPUs. Give `switched: false` its `mesh`")
        rows = self.mesh.value if self.mesh else ()
        if isinstance(rows, tuple):
            if any(len(row) != len(rows) for row in rows) or any(rows[i][i] for i in range(len(rows))):
                raise ValueError("a mesh has a row and a column for each GPU, and no link to itself. Correct the rows")
            if rows != tuple(zip(*rows, strict=True)) or any(sum(row) > self.link.links for row in rows):
                raise ValueError(f"links join two GPUs, and a GPU has {int(self.link.links)}. Correct the rows")
        return self

    @property
    def most(self) -> float:
        """Most GPUs that can be joined so."""
        if self.mesh is None:
            return math.inf
        mesh = self.mesh.value
        return 1 + self.link.links // mesh if isinstance(mesh, int) else len(mesh)

    @property
    def gaps(self) -> bool:
        """Whether some pairs have no link."""
        rows = self.mesh.value if self.mesh else 1
        return isinstance(rows, tuple) and any(row.count(0) > 1 for row in rows)

    def between(self, one: int, other: int) -> float:
        """Share of a GPU's links that join it to one other; `one` and `other` are places in the domain."""
        if self.mesh is None:
            return 1.0
        links = self.mesh.value if isinstance(self.mesh.value, int) else self.mesh.value[one][other]
        return float(links / self.link.links)

    def among(self, places: tuple[int, ...]) -> float:
        """Share of its links that the member with the fewest can use in a group at these places of a domain."""
        if self.mesh is None or len(places) < 2:
            return 1.0
        return min(sum(self.between(one, other) for other in places if other != one) for one in places)


class NICs(Strict):
    """The ports of a node that carry training traffic (not those for storage).

    rail_optimised: the i-th port of every node hangs on the same switch, so that GPUs at the same place of their nodes
    are one switch apart; those at different places are not.
    """

    link: Annotated[Link, by_name("links", Link)]
    count: Count
    rail_optimised: Fact[bool] = ANYWHERE


Together = Annotated[Value, quantity("bandwidth", per=("node",))]
"""What all GPUs of a node share [bytes/s]."""


class Host(Strict):
    """The processors of a node, their memory and the local disks, as GPUs see them that keep something there.

    memory: bandwidth of all sockets together, reads and writes in sum. uplinks: links, each as fast as a GPU's own to
    the host, through which all GPUs reach it; None: one for each GPU. read, write: of all disks together; None: not
    known, or there are none.
    """

    memory: Together
    uplinks: Count | None = None
    read: Together | None = None
    write: Together | None = None


@catalog_model("nodes")
class Node(Strict):
    """`gpus` GPUs of one type; `scale_up` is None where PCIe alone joins them, `nics` for a node that stands alone,
    `host` where it is not known.
    """

    name: str = "inline"
    title: str = ""
    gpu: Annotated[GPU, by_name("gpus", GPU)]
    gpus: Count
    scale_up: ScaleUp | None = None
    nics: NICs | None = None
    host: Host | None = None
    note: str = ""

    @property
    def domain(self) -> int:
        """GPUs joined at full speed."""
        return int(self.scale_up.domain or self.gpus) if self.scale_up else 1

    @property
    def local_gpus(self) -> int:
        """GPUs that reach each other without the network: those of a node, or of a domain that spans nodes."""
        return max(self.domain, int(self.gpus))

    @model_validator(mode="after")
    def _check_domains(self) -> Node:
        # Rank r lives in node r // gpus and in domain r // domain: one must be made of whole ones of the other.
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
