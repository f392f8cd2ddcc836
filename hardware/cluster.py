"""A cluster: equal nodes behind one fabric, seen as tiers of bandwidth.

The tiers are those of a node (`hardware.node`): scale-up links within a domain, the host within a node, the network
between nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field, model_validator

from hardware.gpu import GPU
from hardware.link import Link
from hardware.load import Strict, Time, by_name, catalog_model
from hardware.node import Node

MAX_GPUS = 1_000_000
"""Most GPUs of a cluster: ten times the largest one built; beyond it a count is a slip of the keyboard."""

Size = Annotated[int, Field(strict=True, gt=0, le=MAX_GPUS)]
Narrower = Annotated[float, Field(strict=True, ge=1, le=1000)]


@dataclass(frozen=True)
class Tier:
    """One of a cluster's ways between GPUs, nominal: `payload` is not taken off.

    Attributes:
        kind: catalog name of the link (``nvlink4``, ``infiniband-hdr``), the network's family, or ``none``.
        bandwidth: of one GPU [bytes/s], one direction; 0 where there is no such tier.
        latency: end to end [s].
        payload: share of the bandwidth that large transfers reach.
        switched: whether a GPU can give all of it to any one other.
    """

    kind: str
    bandwidth: float
    latency: float
    payload: float = 1.0
    switched: bool = True


NONE = Tier("none", 0.0, 0.0)


def _tier(link: Link, switched: bool = True, ports: float = 1, gpus: int = 1) -> Tier:
    """One GPU's share where `gpus` GPUs have so many `ports` together."""
    bandwidth = float(link.bandwidth * ports / gpus)
    return Tier(link.name, bandwidth, float(link.latency), float(link.payload), switched)


class Level(Strict):
    """One level of the network's switches.

    nodes: it joins blocks of so many nodes; None: all of them.
    oversubscription: of the rate of its ports, a smaller block (of the level below) sends and receives
    1 / oversubscription through this level. 1 is non-blocking.
    """

    nodes: Size | None = None
    oversubscription: Narrower = 1.0


class Fabric(Strict):
    """The switches between nodes.

    oversubscription: short for one level over all nodes; 1 is a full fat tree, 2 has half of that bisection.
    levels: from the smallest blocks to all nodes. hop_latency: of a switch; a group that crosses more levels than the
    lowest passes two more switches for each of them. None: they take no time.
    """

    oversubscription: Narrower = 1.0
    levels: tuple[Level, ...] = ()
    hop_latency: Time | None = None

    @model_validator(mode="after")
    def _grows(self) -> Fabric:
        if self.levels and self.oversubscription != 1:
            raise ValueError("each level has its own oversubscription. Keep `oversubscription` or `levels`")
        sizes = [level.nodes for level in self.levels]
        if None in sizes[:-1]:
            raise ValueError("only the last level joins all nodes. Give the levels below it their `nodes`")
        for small, large in pairwise(size for size in sizes if size):
            if large <= small or large % small:
                raise ValueError(f"blocks of {large} nodes are not made of blocks of {small}. Nest the levels")
        return self

    @property
    def joins(self) -> tuple[Level, ...]:
        """The levels, also where the short form was used."""
        return self.levels or (Level(oversubscription=self.oversubscription),)


class NodeGroup(Strict):
    """Some equal nodes of a cluster that has several kinds."""

    node: Annotated[Node, by_name("nodes", Node)]
    nodes: Size


@catalog_model("clusters")
class Cluster(Strict):
    """`nodes` equal nodes, of which the first `gpus` GPUs are used.

    groups: what a cluster of several kinds of nodes is really made of; `node` is then as slow as the slowest in
    everything. assumed: what nobody stated and was filled in, one sentence each.
    """

    name: str = "inline"
    title: str = ""
    node: Annotated[Node, by_name("nodes", Node)]
    nodes: Size
    used: Size | None = Field(default=None, alias="gpus")
    fabric: Fabric = Fabric()
    source: str = ""
    groups: tuple[NodeGroup, ...] = ()
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
        if self.gpus > self.node.local_gpus and self.node.nics is None:
            joined = f"domains of {self.node.domain}" if self.node.domain > 1 else f"nodes of {self.gpus_per_node}"
            raise ValueError(
                f"{self.gpus:,} GPUs in scale-up {joined} and no network between them."
                " Give the nodes a network, or use GPUs of one domain"
            )
        sizes = [level.nodes for level in self.fabric.levels if level.nodes]
        if len(sizes) == len(self.fabric.levels) and sizes and sizes[-1] < self.nodes:
            raise ValueError(f"the last level joins {sizes[-1]:,} of {self.nodes:,} nodes. Add one without `nodes`")
        if odd := [size for size in sizes if size * self.gpus_per_node % self.node.local_gpus and size < self.nodes]:
            raise ValueError(
                f"a block of {odd[0]} nodes divides a scale-up domain of {self.node.domain} GPUs."
                f" Write multiples of {self.node.local_gpus // self.gpus_per_node} nodes"
            )
        return self

    @property
    def gpu(self) -> GPU:
        return self.node.gpu

    @cached_property
    def kinds(self) -> dict[str, Cluster]:
        """Of several kinds of nodes each by its name: a cluster of as many GPUs that has no other nodes."""
        found = {}
        for node in {group.node.name: group.node for group in self.groups}.values():
            similar = int(node.gpus) == self.gpus_per_node
            found[node.name] = Cluster(
                name=f"{self.name}: {node.name}",
                node=node,
                nodes=-(-self.gpus // int(node.gpus)),
                gpus=self.gpus,
                # Blocks of switches are counted in nodes of the common size.
                fabric=self.fabric if similar else Fabric(hop_latency=self.fabric.hop_latency),
            )
        return found

    def where(self, ranks: Iterable[int]) -> Cluster:
        """The cluster that `ranks` see: where they all lie on one kind of nodes, one of that kind alone."""
        ends = list(accumulate(group.nodes * int(group.node.gpus) for group in self.groups))
        names = {self.groups[bisect_right(ends, rank)].node.name for rank in ranks} if ends else set()
        return self.kinds[names.pop()] if len(names) == 1 else self

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a full node (a cluster may use fewer of its last one)."""
        return int(self.node.gpus)

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.used or self.nodes * self.gpus_per_node

    @cached_property
    def domain(self) -> int:
        """GPUs in use of each scale-up domain.

        Of domains of several nodes that are not all filled the same number is used of every one, as schedulers deal
        them out: 256 GPUs in racks of 72 are four times 64. Filled one after another, groups of ranks would straddle
        racks. Where less than half of each would be used, they are filled all the same.
        """
        whole, each = self.node.domain, self.gpus_per_node
        if whole <= each or self.gpus <= whole:
            return whole
        fits = (used for used in range(whole, whole // 2, -1) if used % each == 0 and self.gpus % used == 0)
        return next(fits, whole)

    @property
    def local_gpus(self) -> int:
        """GPUs in use that reach each other without the network: those of a node, or of a domain that spans nodes."""
        return max(self.domain, self.gpus_per_node)

    @property
    def scale_up_domain(self) -> int:
        """GPUs joined at full speed: at most what is there."""
        return min(self.domain, self.gpus)

    @property
    def filled_in(self) -> tuple[str, ...]:
        """What nobody stated, one sentence each."""
        if self.domain == self.node.domain:
            return self.assumed
        return *self.assumed, f"cluster: {self.domain} GPUs used of each scale-up domain of {self.node.domain}"

    @property
    def pattern(self) -> int:
        """Ranks after which places repeat: groups that are shifted by it are spread alike."""
        levels = self.fabric.joins
        return self.block(levels[-2]) if len(levels) > 1 and levels[-2].nodes else self.local_gpus

    def block(self, level: Level) -> int:
        """GPUs in use of a block of nodes that `level` joins."""
        return (level.nodes or self.nodes) * self.gpus_per_node * self.domain // self.node.domain

    @property
    def scale_up(self) -> Tier:
        """Between GPUs of one scale-up domain. Kind ``none``, bandwidth 0 where PCIe alone joins GPUs."""
        up = self.node.scale_up
        return _tier(up.link, up.switched.value) if up else NONE

    @property
    def host(self) -> Tier:
        """From a GPU to the host, and over it to GPUs of its node that are outside of its domain."""
        return _tier(self.gpu.host)

    @property
    def over_host(self) -> bool:
        """Whether some GPUs of a node reach each other over the host only."""
        up = self.node.scale_up
        return self.node.domain < min(self.gpus, self.gpus_per_node) or (up is not None and up.gaps)

    @property
    def scale_out(self) -> Tier:
        """Between nodes: a GPU's share of its node's ports. Kind ``none``, bandwidth 0 where there is no network."""
        nics = self.node.nics
        return _tier(nics.link, ports=nics.count, gpus=self.gpus_per_node) if nics else NONE

    def __hash__(self) -> int:  # cheap: a cluster is a key of what is kept for it
        return hash((self.name, self.node.name, self.nodes, self.used))

    def __str__(self) -> str:
        ways = [self.scale_up] if self.node.scale_up else []
        ways += [self.host] if self.over_host else []
        groups = [(group.nodes * int(group.node.gpus), group.node.gpu) for group in self.groups]
        made = " + ".join(f"{count:,} x {gpu.name}" for count, gpu in groups or [(self.gpus, self.gpu)])
        nodes = "node" if self.nodes == 1 else "nodes"
        return f"{made} in {self.nodes:,} {nodes} ({', '.join(tier.kind for tier in [*ways, self.scale_out])})"
