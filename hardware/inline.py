"""Clusters described by their GPUs and the rate of their network, as in papers; the rest is filled in."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from meshcast.hardware.cluster import Cluster, Fabric, Size
from meshcast.hardware.gpu import GPU
from meshcast.hardware.link import Link
from meshcast.hardware.load import BooleanFact, Strict, assumed_value, by_name, catalog, catalog_model, load
from meshcast.hardware.node import LinkMesh, NICs, Node, ScaleUp
from meshcast.hardware.schemas import Field, model_validator
from meshcast.hardware.units import GIGA

Network = Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "slingshot", "none"]

BY_JOB = "as the job describes the cluster"


class Inter(Strict):
    """The network between nodes.

    Attributes:
        kind: family of the network.
        gbps_per_gpu: rate of all ports of a node, divided by its GPUs [Gbit/s], one direction.
        ports: of a node.
    """

    kind: Network | None = None
    gbps_per_gpu: Annotated[float, Field(strict=True, ge=0.001, le=100_000)] | None = None
    ports: Annotated[int, Field(strict=True, gt=0, le=1000)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Inter:
        for key in ("gbps_per_gpu", "ports"):
            if self.kind == "none" and getattr(self, key) is not None:
                raise ValueError(f"kind is none and {key} is given. Name the network, or leave out {key}")
        return self


@catalog_model("clusters", key="gpu", make=lambda form: form.cluster())
class ByGPU(Strict):
    """A cluster described by its GPUs; what is null is taken from the GPU's usual node, and listed under `assumed`."""

    name: str = ""
    title: str = ""
    source: str = ""
    gpu: Annotated[GPU, by_name("gpus", GPU)]
    gpus: Size
    gpus_per_node: Size | None = None
    scale_up_domain: Size | None = None
    inter: Inter = Inter()
    fabric: Fabric = Fabric()

    def cluster(self) -> Cluster:
        """Returns the same cluster by its nodes. Raises ValueError("rule. remedy") if that is impossible."""
        notes: list[str] = []
        usual = load("nodes", self.gpu.usual_node) if self.gpu.usual_node else None
        per_node = self.gpus_per_node
        if per_node is None:
            if usual is None:
                raise ValueError("gpus_per_node is needed for this GPU. Add `gpus_per_node: ...`")
            per_node = int(usual.gpus)
            notes.append(f"cluster.gpus_per_node: {per_node}, as in {usual.name}")
        scale_up = self._scale_up(per_node, usual, notes)
        node = Node(
            name=f"{per_node} x {self.gpu.name}",
            gpu=self.gpu,
            gpus=assumed_value(per_node, BY_JOB),
            scale_up=scale_up,
            nics=self._nics(per_node, usual, notes, int(scale_up.domain or per_node) if scale_up else 1),
            host=usual.host if usual and int(usual.gpus) == per_node else None,
            peer_access=usual.peer_access if usual else None,
            peer_copies=usual.peer_copies if usual else None,
            staging=usual.staging if usual and int(usual.gpus) == per_node else None,
        )
        return Cluster(
            name=self.name or f"{self.gpus:,} x {self.gpu.name}",
            title=self.title,
            source=self.source,
            node=node,
            nodes=math.ceil(self.gpus / per_node),
            gpus=self.gpus,
            fabric=self.fabric,
            assumed=tuple(notes),
        )

    def _scale_up(self, per_node: int, usual: Node | None, notes: list[str]) -> ScaleUp | None:
        """Returns the scale-up links of the GPU, switched or not as in its usual node."""
        domain = self.scale_up_domain
        if domain is None:
            # A larger board has larger domains; those of bridges and of racks stay what they are.
            whole = usual is None or usual.domain == usual.gpus
            domain = per_node if whole or usual is None else usual.domain
            like = f"as in {usual.name}" if usual else "the whole node"
            notes.append(f"cluster.scale_up_domain: {domain}, {like}")
        if domain == 1:
            return None
        if self.gpu.scale_up is None:
            raise ValueError(f"{self.gpu.name} has no scale-up link. Write `scale_up_domain: 1`")
        link: Link = load("links", self.gpu.scale_up)
        size = assumed_value(domain, BY_JOB) if domain != per_node else None
        if usual is None or (usual.scale_up and usual.scale_up.switched.value):
            return ScaleUp(link=link, domain=size)
        if usual.scale_up and domain <= usual.domain:
            return usual.scale_up.model_copy(update={"domain": size})
        each = int(link.links) // (domain - 1)
        if not each:
            raise ValueError(
                f"{int(link.links)} links do not join {domain} GPUs without a switch. Write a smaller domain"
            )
        even = LinkMesh(value=each, kind="assumed", source="links spread evenly over the others of the domain")
        return ScaleUp(
            link=link, switched=BooleanFact(value=False, kind="assumed", source=BY_JOB), mesh=even, domain=size
        )

    def _nics(self, per_node: int, usual: Node | None, notes: list[str], domain: int) -> NICs | None:
        """Returns the stated ports; what is not stated is taken from the GPU's usual node, or else there is a port per
        GPU."""
        kind, gbps = self.inter.kind, self.inter.gbps_per_gpu
        if kind == "none" or (kind is None and gbps is None and self.gpus <= max(domain, per_node)):
            return None  # nothing crosses a network
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
        rate = gbps * GIGA / 8 * per_node
        similar = nics is not None and kind == nics.link.family
        usual_rate = float(nics.link.bandwidth * nics.count) if nics and usual and per_node == usual.gpus else 0.0
        ports = assumed_value(per_node, "one port per GPU")
        if self.inter.ports is not None:
            ports = assumed_value(self.inter.ports, BY_JOB)
        elif nics and similar and math.isclose(rate, usual_rate):
            ports = nics.count
        link = _port(str(kind), rate / ports)
        return NICs(link=link, count=ports, **({"rail_optimised": nics.rail_optimised} if similar and nics else {}))


def _port(kind: str, rate: float) -> Link:
    """Returns a port of network `kind` and `rate` [bytes/s, one direction], like the catalog's nearest link of
    that kind."""
    known: list[Link] = [link for name in catalog("links") if (link := load("links", name)).family == kind]
    link = min(known, key=lambda link: abs(math.log(link.bandwidth / rate)))
    if math.isclose(link.bandwidth, rate):
        return link
    stated = assumed_value(rate, "the rate that the job gives", f"{rate * 8 / GIGA:g} Gb/s")
    return link.model_copy(update={"name": kind, "rate": stated, "links": assumed_value(1, "a port")})
