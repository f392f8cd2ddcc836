"""A cluster: equal nodes joined by a network fabric, with the bandwidth of each tier of links.

The tiers are those of a node (`hardware.node`): scale-up links within a domain, the host within a node, the network
between nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Annotated

from meshcast.hardware.gpu import GPU
from meshcast.hardware.link import Link
from meshcast.hardware.load import Strict, Time, by_name, catalog_model
from meshcast.hardware.node import Node
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field, model_validator

MAX_GPUS = 1_000_000
"""Most GPUs of a cluster: ten times the largest built; a larger number is a typing error."""

STAGING = 63e9
"""Rate at which a host copies data between its GPUs where the node does not state it [bytes/s]: the geometric mean of
four machines, for which NCCL's bus bandwidth times the number of GPUs is 60 GB/s (8 L20; bytedance/flux @19831ca,
docs/performance.md), 72 (4 RTX 4090; NVIDIA/nccl issue 1603), 224 (8 RTX 5090; issue 1639) and 16 (4 and 8 L40S;
ai-dynamo/aiconfigurator @095f58a, NCCL tables)."""

STAGING_SIGMA = 1.1
"""Standard deviation of the logarithm of that rate among the four: a host's memory, its channels and the placement of
buffers decide."""

STATED_STAGING_SIGMA = 0.3
"""The same where a node states the rate: four and eight L40S of a table show 20 and 12 GB/s."""

BLOCK_LINK_SIGMA = 0.12
"""Standard deviation of the logarithm of the rate of a link between two regions: that between four zones of a region
of a cloud and a zone of another, in both directions and with two types of machines, is 0.97 to 1.41 GB/s
(eth-easl/sailor @cf2c8e3, sailor/providers/multizone_bandwidths.json)."""

Size = Annotated[int, Field(strict=True, gt=0, le=MAX_GPUS)]
Narrower = Annotated[float, Field(strict=True, ge=1, le=1000)]


@dataclass(frozen=True)
class Tier:
    """One tier of links between a cluster's GPUs, at nominal rates: `payload` is not applied.

    Attributes:
        kind: catalog name of the link (``nvlink4``, ``infiniband-hdr``), the network's family, or ``none``.
        bandwidth: of a GPU [bytes/s], one direction; 0 if there is no such tier.
        latency: end to end [s].
        payload: share of the bandwidth that large transfers reach.
        switched: whether a GPU can use all of it for any other GPU.
        rate: what it reaches in this cluster against the same links elsewhere.
    """

    kind: str
    bandwidth: float
    latency: float
    payload: float = 1.0
    switched: bool = True
    rate: float = 1.0


NONE = Tier("none", 0.0, 0.0)


def _tier(link: Link, switched: bool = True, ports: float = 1, gpus: int = 1, rate: float = 1.0) -> Tier:
    """Returns a GPU's share of `ports` links that `gpus` GPUs have together."""
    bandwidth = float(link.bandwidth * ports / gpus)
    return Tier(link.name, bandwidth, float(link.latency), float(link.payload), switched, rate)


class Level(Strict):
    """One level of the network's switches.

    Attributes:
        nodes: nodes in each block that it joins; None: all nodes.
        blocks: the same where blocks differ: nodes of each of them, in the order of their ranks.
        oversubscription: a block of the level below sends and receives at 1 / oversubscription of the rate of its ports
            through this level; 1 is non-blocking.
        link: joins a block of the level below to all others in place of switches, as between data centres: everything
            that leaves the block shares it. None: switches do.
        links: such links of a block, as where each machine of a cloud has its share of the way to another region;
            what a node sends goes through a single link.
    """

    nodes: Size | None = None
    blocks: Annotated[tuple[Size, ...], Field(min_length=2)] | None = None
    oversubscription: Narrower = 1.0
    link: Annotated[Link, by_name("links", Link)] | None = None
    links: Size = 1

    @model_validator(mode="after")
    def _check_forms(self) -> Level:
        if self.nodes is not None and self.blocks is not None:
            raise ValueError("blocks have either one size or one each. Keep `nodes` or `blocks`")
        if self.link is not None and self.oversubscription != 1:
            raise ValueError("a link states its own rate. Remove `oversubscription` from this level, or `link`")
        if self.link is None and self.links != 1:
            raise ValueError("links are counted where a link is given. Add `link`, or remove `links`")
        return self


class Fabric(Strict):
    """The switches between nodes.

    Attributes:
        oversubscription: short form for a single level over all nodes; 1 is a full fat tree, 2 has half of its
            bisection.
        levels: from the smallest blocks to all nodes.
        hop_latency: of a switch [s]; a group that crosses more levels than the lowest passes two more switches for each
            of them. None: no latency.
    """

    oversubscription: Narrower = 1.0
    levels: tuple[Level, ...] = ()
    hop_latency: Time | None = None

    @model_validator(mode="after")
    def _grows(self) -> Fabric:
        if self.levels and self.oversubscription != 1:
            raise ValueError("each level has its own oversubscription. Keep `oversubscription` or `levels`")
        if any(level.nodes is None and level.blocks is None for level in self.levels[:-1]):
            raise ValueError("only the last level joins all nodes. Give the levels below it their `nodes`")
        if any(level.blocks for level in (*self.levels[:-2], *self.levels[-1:])):
            raise ValueError("blocks that differ are joined by the last level alone. Give `blocks` to the one below it")
        for below, level in pairwise(self.levels):
            small = below.nodes or 1
            for large in level.blocks or (level.nodes or 0,):
                if large and ((large <= small and not level.blocks) or large % small):
                    raise ValueError(f"blocks of {large} nodes are not made of blocks of {small}. Nest the levels")
        return self

    @property
    def joins(self) -> tuple[Level, ...]:
        """The levels, also of the short form."""
        return self.levels or _join_all(self.oversubscription)


@lru_cache
def _join_all(oversubscription: float) -> tuple[Level, ...]:
    """Returns a level over all nodes."""
    return (Level(oversubscription=oversubscription),)


class NodeGroup(Strict):
    """Equal nodes of a cluster of several kinds of nodes.

    Attributes:
        node: the kind.
        nodes: how many.
    """

    node: Annotated[Node, by_name("nodes", Node)]
    nodes: Size


@catalog_model("clusters")
class Cluster(Strict):
    """`nodes` equal nodes, of which the first `gpus` GPUs are used.

    Attributes:
        groups: the nodes of a cluster of several kinds; `node` is then as slow as the slowest kind in every figure.
        fabric_gpus: GPUs of a node as the levels of the fabric count nodes; None: those of `node`.
        assumed: what was filled in, a sentence each.
    """

    name: str = "inline"
    title: str = ""
    node: Annotated[Node, by_name("nodes", Node)]
    nodes: Size
    used: Size | None = Field(default=None, alias="gpus")
    fabric: Fabric = Fabric()
    source: str = ""
    groups: tuple[NodeGroup, ...] = ()
    fabric_gpus: Size | None = None
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
        self._check_levels()
        return self

    def _check_levels(self) -> None:
        """Raises ValueError if blocks of the fabric are not composed of whole nodes, or do not hold all of them."""
        if self.fabric_gpus:  # as part of a cluster that was checked
            return
        blocks = next((level.blocks for level in self.fabric.levels if level.blocks), None)
        if blocks and sum(blocks) != self.nodes:
            raise ValueError(f"blocks of {sum(blocks):,} nodes in a cluster of {self.nodes:,}. Correct one of the two")
        sizes = [level.nodes for level in self.fabric.levels if level.nodes]
        if not blocks and len(sizes) == len(self.fabric.levels) and sizes and sizes[-1] < self.nodes:
            raise ValueError(f"the last level joins {sizes[-1]:,} of {self.nodes:,} nodes. Add one without `nodes`")
        if odd := [
            size
            for size in (*sizes, *(blocks or ()))
            if size * self.gpus_per_node % self.node.local_gpus and size < self.nodes
        ]:
            raise ValueError(
                f"a block of {odd[0]} nodes divides a scale-up domain of {self.node.domain} GPUs."
                f" Write multiples of {self.node.local_gpus // self.gpus_per_node} nodes"
            )

    @property
    def gpu(self) -> GPU:
        return self.node.gpu

    @cached_property
    def kinds(self) -> dict[str, Cluster]:
        """For each of several kinds of nodes, by name: a cluster of the same number of GPUs with this kind
        alone."""
        clusters = {}
        for node in {group.node.name: group.node for group in self.groups}.values():
            clusters[node.name] = Cluster(
                name=f"{self.name}: {node.name}",
                node=node,
                nodes=-(-self.gpus // int(node.gpus)),
                gpus=self.gpus,
                fabric=self.fabric,
                fabric_gpus=self.gpus_per_node,
            )
        return clusters

    def where(self, ranks: Iterable[int]) -> Cluster:
        """Returns the cluster for a group of `ranks`: of a single kind of nodes if they all lie on that kind, else this
        cluster."""
        names = {node.name for node in self.kinds_of(ranks)} if self.groups else set()
        return self.kinds[names.pop()] if len(names) == 1 else self

    def kinds_of(self, ranks: Iterable[int]) -> list[Node]:
        """Returns the kinds of nodes that `ranks` lie on, each once, in the order of ranks."""
        ends = list(accumulate(group.nodes * int(group.node.gpus) for group in self.groups))
        nodes = {i: self.groups[i].node for i in sorted({bisect_right(ends, rank) for rank in ranks})} if ends else {}
        return list(nodes.values()) or [self.node]

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a full node (a cluster may use fewer of its last node)."""
        return int(self.node.gpus)

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.used or self.nodes * self.gpus_per_node

    @cached_property
    def domain(self) -> int:
        """GPUs in use of each scale-up domain.

        If domains of several nodes are not all full, every domain has the same number of GPUs in use, as schedulers
        allocate them: 256 GPUs in racks of 72 are four times 64. Filled in turn, groups of ranks would
        straddle racks. If less than half of each domain would be used, they are filled in turn all the same.
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
        """GPUs of a scale-up domain, at most those of the cluster."""
        return min(self.domain, self.gpus)

    @property
    def filled_in(self) -> tuple[str, ...]:
        """What was filled in, a sentence each."""
        if self.domain == self.node.domain:
            return self.assumed
        return *self.assumed, f"cluster: {self.domain} GPUs used of each scale-up domain of {self.node.domain}"

    @property
    def pattern(self) -> int:
        """Period of ranks after which places repeat: groups that are shifted by it have equal reaches."""
        below = self.fabric.joins[-2] if len(self.fabric.joins) > 1 else None
        if below and below.blocks:
            return self.gpus
        return math.lcm(self.block(below), self.local_gpus) if below and below.nodes else self.local_gpus

    def block(self, level: Level) -> int:
        """Returns the number of GPUs in use in a block of nodes that `level` joins."""
        return self._block_gpus(level.nodes or self.nodes)

    def find_block(self, level: Level | None, rank: int) -> range:
        """Returns the ranks of the block in which `rank` lies, of those that `level` joins; None: of its node."""
        if level and level.blocks:
            ends = (0, *accumulate(map(self._block_gpus, level.blocks)))
            place = bisect_right(ends, rank)
            return range(ends[place - 1], min(ends[place], self.gpus))
        size = self.block(level) if level else self.local_gpus
        first = rank - rank % size
        return range(first, min(first + size, self.gpus))

    def _block_gpus(self, nodes: int) -> int:
        """Returns the number of GPUs in use of `nodes` nodes, as the fabric counts them."""
        return nodes * (self.fabric_gpus or self.gpus_per_node) * self.domain // self.node.domain

    @property
    def scale_up(self) -> Tier:
        """Links between GPUs of a scale-up domain. Kind ``none``, bandwidth 0 if PCIe alone joins GPUs."""
        up = self.node.scale_up
        return _tier(up.link, up.switched.value, rate=up.rate.value if up.rate else 1.0) if up else NONE

    @property
    def host(self) -> Tier:
        """Links from a GPU to the host, and over it to GPUs of its node outside of its domain."""
        return _tier(self.gpu.host)

    @property
    def over_host(self) -> bool:
        """Whether some GPUs of a node reach each other only over the host."""
        up = self.node.scale_up
        return self.node.domain < min(self.gpus, self.gpus_per_node) or (up is not None and up.gaps)

    @property
    def scale_out(self) -> Tier:
        """Network between nodes: a GPU's share of its node's ports. Kind ``none``, bandwidth 0 without a network."""
        nics = self.node.nics
        return _tier(nics.link, ports=nics.count, gpus=self.gpus_per_node) if nics else NONE

    def port_rate(self, ports: float = 1.0) -> float:
        """Returns the rate of a GPU to the network [bytes/s], nominal: of `ports` of its even share of the node's
        ports, through its link to the host.
        """
        even = self.scale_out.bandwidth
        return min(even * ports, max(even, self.host.bandwidth))

    @property
    def ports_shared(self) -> bool:
        """Whether several GPUs of a node share a port to the network."""
        return self.node.nics is not None and self.node.nics.count < self.gpus_per_node

    @cached_property
    def messages_alone(self) -> bool:
        """Whether no message shares ports, links between blocks or the memory of a host with other messages."""
        shares_links = any(level.link is not None for level in self.fabric.joins)
        return not (self.ports_shared or shares_links or self.staged)

    @property
    def staged(self) -> bool:
        """Whether data between GPUs that no scale-up link joins passes through the memory of their host."""
        facts = (self.node.peer_access, self.gpu.peer_access)
        return self.over_host and any(fact is not None and not fact.value for fact in facts)

    @cached_property
    def of_peer_copies(self) -> Cluster:
        """The cluster as copies see it that a program makes by CUDA's peer access: itself, unless NCCL goes through the
        memory of the host where they go directly."""
        facts = self.node.peer_copies, self.gpu.peer_access
        if not self.staged or not (facts[0] and facts[0].value) or (facts[1] and not facts[1].value):
            return self
        return self.model_copy(update={"node": self.node.model_copy(update={"peer_access": None})})

    @cached_property
    def layout(self) -> Hashable:
        """What the reaches of messages and groups depend on (`hardware.topology`): clusters that differ in the rates of
        GPUs and links alone have the same, unless messages share links between blocks."""
        node, joins = self.node, self.fabric.joins
        up = None
        if node.scale_up:
            up = (node.scale_up.switched, node.scale_up.mesh, node.scale_up.torus, node.scale_up.link.links)
        nics = (node.nics.count, node.nics.rail_optimised) if node.nics else None
        rates = self if any(level.link is not None for level in joins) else None
        sizes = self.gpus, self.nodes, self.gpus_per_node, self.fabric_gpus, self.domain, node.domain
        return *sizes, up, nics, joins, self.staged, rates

    @property
    def staging(self) -> float:
        """Rate at which it does, for all GPUs of a node together [bytes/s]."""
        return float(self.node.staging or STAGING)

    def __hash__(self) -> int:  # cheap: a cluster is a key of what is kept for it; of what sweeps vary
        nics = self.node.nics
        network = (float(nics.link.rate), float(nics.count)) if nics else ()
        return hash((self.name, self.node.name, self.nodes, self.used, self.node.gpu, *network))

    def __str__(self) -> str:
        ways = [self.scale_up] if self.node.scale_up else []
        ways += [self.host] if self.over_host else []
        groups = [(group.nodes * int(group.node.gpus), group.node.gpu) for group in self.groups]
        gpus = " + ".join(f"{count:,} x {gpu.name}" for count, gpu in groups or [(self.gpus, self.gpu)])
        nodes = "node" if self.nodes == 1 else "nodes"
        kinds = [tier.kind for tier in (*ways, self.scale_out)] + [
            level.link.name for level in self.fabric.levels if level.link
        ]
        return f"{gpus} in {self.nodes:,} {nodes} ({', '.join(kinds)})"
