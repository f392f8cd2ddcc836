"""A cluster: equal nodes behind one fabric, seen as two tiers of bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from hardware.gpu import GPU
from hardware.link import Link
from hardware.load import Strict, assumed, by_name, catalog, described, load
from hardware.node import NICs, Node, ScaleUp
from hardware.units import GIGA

MAX_GPUS = 1_000_000
"""Most GPUs of a cluster: ten times the largest one built; beyond it a count is a slip of the keyboard."""

Size = Annotated[int, Field(strict=True, gt=0, le=MAX_GPUS)]


@dataclass(frozen=True)
class Tier:
    """One of a cluster's two ways between GPUs, nominal: neither `payload` nor `oversubscription` is taken off.

    Attributes:
        kind: catalog name of the link (``nvlink4``, ``infiniband-hdr``), the network's family, or ``none``.
        bandwidth: of one GPU [bytes/s], one direction; 0 where there is no such tier.
        latency: end to end [s].
        payload: share of the bandwidth that large transfers reach.
        oversubscription: by how much the fabric's upper levels are narrower than its ports (1: not at all).
    """

    kind: str
    bandwidth: float
    latency: float
    payload: float = 1.0
    oversubscription: float = 1.0


class Fabric(Strict):
    """The switches between nodes. oversubscription: 1 is a full fat tree, 2 has half of that bisection."""

    oversubscription: Annotated[float, Field(strict=True, ge=1, le=1000)] = 1.0


@described("clusters")
class Cluster(Strict):
    """`nodes` equal nodes, of which the first `gpus` GPUs are used.

    assumed: what nobody stated and was filled in, one sentence each.
    """

    name: str = "inline"
    title: str = ""
    node: Annotated[Node, BeforeValidator(by_name("nodes"))]
    nodes: Size
    used: Size | None = Field(default=None, alias="gpus")
    fabric: Fabric = Fabric()
    source: str = ""
    assumed: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _sound(self) -> Cluster:
        full = self.nodes * self.gpus_per_node
        if full > MAX_GPUS:
            raise ValueError(f"{full:,} GPUs are more than {MAX_GPUS:,}. Write fewer nodes")
        if not full - self.gpus_per_node < self.gpus <= full:
            raise ValueError(
                f"{self.gpus:,} GPUs do not fill {self.nodes:,} nodes of {self.gpus_per_node}."
                f" Write {full - self.gpus_per_node + 1:,} to {full:,} GPUs, or another number of nodes"
            )
        if self.gpus > self.scale_up_domain and self.node.nics is None:
            raise ValueError(
                f"{self.gpus:,} GPUs in scale-up domains of {self.scale_up_domain} and no network between them."
                " Give the nodes a network, or use GPUs of one domain"
            )
        return self

    @property
    def gpu(self) -> GPU:
        return self.node.gpu

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a full node (a cluster may use fewer of its last one)."""
        return int(self.node.gpus)

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.used or self.nodes * self.gpus_per_node

    @property
    def scale_up_domain(self) -> int:
        """GPUs joined at full speed: at most what is there."""
        return min(self.node.domain, self.gpus)

    @property
    def scale_up(self) -> Tier:
        """Between GPUs of one scale-up domain."""
        link = self.node.scale_up.link
        return Tier(link.name, link.bandwidth, float(link.latency), float(link.payload))

    @property
    def scale_out(self) -> Tier:
        """Between domains: a GPU's share of its node's ports. Kind ``none``, bandwidth 0 where there is no network."""
        nics = self.node.nics
        if nics is None:
            return Tier("none", 0.0, 0.0)
        share = float(nics.link.bandwidth * nics.count / self.gpus_per_node)
        link = nics.link
        return Tier(link.name, share, float(link.latency), float(link.payload), self.fabric.oversubscription)

    def __hash__(self) -> int:  # cheap: a cluster is a key of what is kept for it
        return hash((self.name, self.node.name, self.nodes, self.used))

    def __str__(self) -> str:
        return f"{self.gpus:,} x {self.gpu.name} in {self.nodes:,} nodes ({self.scale_up.kind}, {self.scale_out.kind})"


# ------------------------------------------------------------------------------ described by its GPUs

Network = Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "slingshot", "none"]


class Inter(Strict):
    """The network between nodes. gbps_per_gpu: a node's port rates together, divided by its GPUs [Gbit/s, one way]."""

    kind: Network | None = None
    gbps_per_gpu: Annotated[float, Field(strict=True, gt=0, le=100_000)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Inter:
        if self.kind == "none" and self.gbps_per_gpu is not None:
            raise ValueError("kind is none and gbps_per_gpu is given. Name the network, or leave out gbps_per_gpu")
        return self


class ByGPU(Strict):
    """A cluster told by its GPUs and the rate of its network, as papers do; what is null is filled in."""

    name: str = "inline"
    title: str = ""
    source: str = ""
    gpu: Annotated[GPU, BeforeValidator(by_name("gpus"))]
    gpus: Size
    gpus_per_node: Size | None = None
    scale_up_domain: Size | None = None
    inter: Inter = Inter()
    fabric: Fabric = Fabric()

    def cluster(self) -> Cluster:
        """The same as nodes. Raises ValueError("rule. remedy") where that cannot be."""
        notes: list[str] = []
        usual = load("nodes", self.gpu.usual_node) if self.gpu.usual_node else None
        if self.gpu.scale_up is None:
            raise ValueError(f"the catalog knows no scale-up link of {self.gpu.name}. Describe the cluster by its node")
        per_node = self.gpus_per_node
        if per_node is None:
            if usual is None:
                raise ValueError("gpus_per_node is needed for this GPU. Add `gpus_per_node: ...`")
            per_node = int(usual.gpus)
            notes.append(f"cluster.gpus_per_node: {per_node}, as in {usual.name}")
        told = "as the job describes the cluster"
        node = Node(
            name=f"{per_node} x {self.gpu.name}",
            gpu=self.gpu,
            gpus=assumed(per_node, told),
            scale_up=ScaleUp(
                link=load("links", self.gpu.scale_up),
                domain=assumed(self.scale_up_domain, told) if self.scale_up_domain else None,
            ),
            nics=self._nics(per_node, usual, notes),
        )
        return Cluster(
            name=self.name,
            title=self.title,
            source=self.source,
            node=node,
            nodes=math.ceil(self.gpus / per_node),
            gpus=self.gpus,
            fabric=self.fabric,
            assumed=tuple(notes),
        )

    def _nics(self, per_node: int, usual: Node | None, notes: list[str]) -> NICs | None:
        """One port per GPU, at the rate told; what is not told is taken from the GPU's usual node."""
        kind, gbps = self.inter.kind, self.inter.gbps_per_gpu
        known = self.scale_up_domain or per_node
        if kind == "none" or (kind is None and gbps is None and self.gpus <= known):
            return None  # all GPUs in one domain: nothing crosses a network
        nics = usual.nics if usual else None
        if kind is None or gbps is None:
            if usual is None or nics is None:
                raise ValueError("this GPU's usual network is not known. Add `inter: {kind, gbps_per_gpu}`")
            if kind is None:
                kind = nics.link.family  # type: ignore[assignment]
                notes.append(f"cluster.inter.kind: {kind}, as in {usual.name}")
            if gbps is None:
                gbps = float(nics.link.bandwidth * nics.count / usual.gpus) * 8 / GIGA
                notes.append(f"cluster.inter.gbps_per_gpu: {gbps:g}, as in {usual.name}")
        link = _port(str(kind), gbps * GIGA / 8)
        rails = nics is not None and nics.rail_optimised and link.family == nics.link.family
        return NICs(link=link, count=assumed(per_node, "one port per GPU"), rail_optimised=rails)


def _port(kind: str, rate: float) -> Link:
    """A port of network `kind` and `rate` [bytes/s, one direction], like the catalog's nearest link of that kind."""
    known: list[Link] = [link for name in catalog("links") if (link := load("links", name)).family == kind]
    link = min(known, key=lambda one: abs(math.log(one.bandwidth / rate)))
    if link.bandwidth == rate:
        return link
    told = assumed(rate, "the rate per GPU that the job gives", f"{rate * 8 / GIGA:g} Gb/s")
    return link.model_copy(update={"name": kind, "rate": told, "links": assumed(1, "one port per GPU")})
