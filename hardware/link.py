"""Links: scale-up links and links to the host within a node, and network ports between nodes."""

from __future__ import annotations

from meshcast.hardware.load import Count, LinkRate, Ratio, Strict, Time, catalog_model


@catalog_model("links")
class Link(Strict):
    """A scale-up link (NVLink), a link to the host (PCIe) or a network port (InfiniBand, Ethernet).

    Attributes:
        family: ``nvlink``, ``pcie``, ``infiniband``, ...: the kind of network in descriptions of clusters.
        rate: of a link or port [bytes/s], one direction, nominal.
        links: number of parallel links of a GPU (or a network adapter).
        latency: from one end to the other [s], of the hardware alone; what a communication library's
            protocol adds is no property of the link.
        payload: share of the rate that large transfers reach.
    """

    name: str
    title: str = ""
    family: str
    rate: LinkRate
    links: Count
    latency: Time
    payload: Ratio
    note: str = ""

    @property
    def bandwidth(self) -> float:
        """All links together [bytes/s], one direction, nominal."""
        return float(self.rate * self.links)
