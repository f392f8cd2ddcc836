"""Cost models of NCCL on a GPU's links (scale-up, host, network), and the links of a cluster together with them.

Coefficients are shares of a link's nominal rate, seconds, or plain numbers. Collectives that forward data in steps
(rings, trees, NVLS) share a cost model; all-to-alls, point-to-point messages and the network have a cost model each.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, NamedTuple

from meshcast.hardware.cluster import BLOCK_LINK_SIGMA, STAGING_SIGMA, STATED_STAGING_SIGMA, Cluster, Tier
from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.coefficients import coefficient


@dataclass(frozen=True, slots=True)
class RingCostModel:
    """All-reduce, all-gather, reduce-scatter and broadcast within a node, by NCCL's protocols LL, LL128 and Simple.

    LL sends a flag with every 4 bytes, LL128 with every 120, Simple after each chunk. `nvls_*`: an all-reduce whose
    sums the NVSwitch forms (NVLink SHARP).
    """

    launch: float = coefficient("launch of a collective and synchronisation of its members [s]", 1e-6, 40e-6, 6e-6)
    ll_step: float = coefficient("a step with LL [s]", 0.1e-6, 8e-6, 0.9e-6)
    ll_share: float = coefficient("share of the nominal rate that LL reaches", 0.05, 1.0, 0.4)
    ll_exposed_fill: float = coefficient("exposed share of filling and draining the channels with LL", 0.0, 2.0, 0.3)
    ll128_step: float = coefficient("a step with LL128 [s]", 0.1e-6, 10e-6, 4e-6)
    simple_setup: float = coefficient("setup of a transfer with Simple [s]", 0.0, 60e-6, 10e-6)
    simple_step: float = coefficient("a step with Simple [s]", 0.3e-6, 60e-6, 4e-6)
    simple_share: float = coefficient("share of the nominal rate that Simple reaches", 0.3, 1.0, 0.85)
    self_copy: float = coefficient("copy of a member's own part of the buffer, in steps", 0.0, 2.0, 0.7)
    nvls_setup: float = coefficient("setup of NVLS for each member [s]", 0.1e-6, 15e-6, 2e-6)
    nvls_share: float = coefficient("share of the nominal rate that NVLS reaches", 0.3, 1.0, 0.66)
    nvls_exposed_fill: float = coefficient(
        "exposed share of filling and draining the channels with NVLS", 0.0, 2.0, 0.6
    )
    call_overhead: float = coefficient("overhead of a call against plain NCCL [s]", -5e-6, 80e-6, 0.0, "library", 0.0)
    step_ratio: float = coefficient("duration of a step against plain NCCL", 0.2, 3.0, 1.0, "library", 1.0)
    rate_ratio: float = coefficient("rate against plain NCCL", 0.7, 1.3, 1.0, "library", 1.0)
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True, slots=True)
class AllToAllCostModel:
    """All-to-all within a node: every member sends to every other member directly."""

    launch: float = coefficient("launch of an all-to-all and synchronisation of its members [s]", 1e-6, 40e-6, 8e-6)
    peer_latency: float = coefficient("each further peer [s]", 0.0, 5e-6, 0.2e-6)
    ll_share: float = coefficient("share of the nominal rate that LL reaches", 0.001, 1.0, 0.05)
    simple_setup: float = coefficient("setup of a transfer with Simple [s]", 0.0, 60e-6, 4e-6)
    simple_share: float = coefficient("share of the nominal rate that Simple reaches", 0.2, 1.0, 0.75)
    self_copy: float = coefficient("copy of a member's own part, in parts sent to another member", 0.0, 2.0, 0.5)
    exposed_fill: float = coefficient("exposed share of filling and draining the channels", 0.0, 2.0, 0.3)
    call_overhead: float = coefficient("overhead of a call against plain NCCL [s]", -5e-6, 80e-6, 0.0, "library", 0.0)
    rate_ratio: float = coefficient("rate against plain NCCL", 0.7, 1.3, 1.0, "library", 1.0)
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True, slots=True)
class P2PCostModel:
    """A point-to-point message between two GPUs of a node."""

    latency: float = coefficient("from send to arrival of an empty message, wires aside [s]", 1e-6, 60e-6, 8e-6)
    share: float = coefficient("share of the nominal rate that one message to one peer reaches", 0.2, 1.0, 0.8)
    exposed_fill: float = coefficient("exposed share of filling and draining the channels", 0.0, 2.0, 0.2)
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True, slots=True)
class NetworkCostModel:
    """Collectives and messages between nodes. Shares are of the ports' payload rate."""

    ll_level: float = coefficient("a level of a tree with LL, wires aside [s]", 1e-6, 200e-6, 20e-6)
    simple_level: float = coefficient("a level of a tree with Simple, wires and chunk aside [s]", 1e-6, 120e-6, 30e-6)
    chunk_bytes: float = coefficient("chunk that a level of a tree waits for [bytes]", 1e4, 2e6, 524288.0)
    share: float = coefficient("share of the ports' payload rate that rings and trees reach", 0.3, 1.0, 0.95)
    exposed_fill: float = coefficient("exposed share of filling and draining trees", 0.0, 2.0, 0.2)
    all_to_all_share: float = coefficient("share of the ports' payload rate that an all-to-all reaches", 0.2, 1.0, 0.78)
    p2p_share: float = coefficient("share of the ports' payload rate that one message reaches", 0.2, 1.0, 0.8)
    p2p_latency: float = coefficient("from send to arrival of an empty message, wires aside [s]", 1e-6, 100e-6, 16e-6)
    sigma: float = 0.0
    sigma_short: float = 0.0


class LinkCostModels(NamedTuple):
    """The cost models of a kind of link. Processes of a host have the same for all (`processes.ProcessCostModel`)."""

    ring: Any
    all_to_all: Any
    p2p: Any


class TierCostModels(NamedTuple):
    """The cost models of a cluster's three tiers.

    Attributes:
        scale_up: links within a scale-up domain.
        host: links from GPUs to their host.
        network: between nodes.
    """

    scale_up: LinkCostModels
    host: LinkCostModels
    network: NetworkCostModel


@dataclass(slots=True, eq=False)
class Links:
    """The tiers of a cluster with their cost models.

    Attributes:
        cluster: whose links they are.
        models: a cost model for each tier.
        speed: rate of all links against the calibrated rate; the nominal rate is never exceeded.
        nvls: whether the library may use NVLS (it adds no 8-bit integers).
        rings: whether all-reduces run over rings alone (``NCCL_ALGO=Ring``).
        sharp: whether the switches of an InfiniBand network form sums, as with NVIDIA's SHARP plug-in.
    """

    cluster: Cluster
    models: TierCostModels
    speed: float = 1.0
    nvls: bool = True
    rings: bool = False
    sharp: bool = False
    scale_up: Tier = field(init=False)
    host: Tier = field(init=False)
    network: Tier = field(init=False)
    groups: dict[Any, Any] = field(init=False, default_factory=dict)
    """`collective.Group` by operation and reach, filled by `collective.find_group`."""

    def __post_init__(self) -> None:
        self.scale_up, self.host, self.network = self.cluster.scale_up, self.cluster.host, self.cluster.scale_out

    def models_within_node(self, reach: Reach) -> LinkCostModels:
        """Returns the cost models of the slowest links that a group uses within its nodes."""
        return self.models.host if crosses_host(reach) else self.models.scale_up

    def wire_latency(self, reach: Reach) -> float:
        """Returns the latency [s] of the network: of the ports, and of two switches for each level above the lowest."""
        hop = 2 * float(self.cluster.fabric.hop_latency or 0.0)
        return self.network.latency + hop * max(0, len(reach.levels) - 1)

    def scale_up_byte(self, share: float, links: float = 1.0) -> float:
        """Returns seconds of a byte over a GPU's scale-up links. share: of the nominal rate. links: share of them."""
        rate = self.scale_up.bandwidth
        return 1.0 / (rate * links * min(1.0, share * self.speed * self.scale_up.rate)) if rate else math.inf

    @property
    def node_gpus(self) -> int:
        """GPUs in use of a node."""
        return min(self.cluster.gpus, self.cluster.gpus_per_node)

    def host_byte(self, share: float, senders: float = 1.0) -> float:
        """Returns the seconds of a byte over a GPU's link to the host, at a share of its nominal rate.

        senders: GPUs of the node that send so at the same time, which share the memory of the host where data is staged
        there.
        """
        seconds = 1.0 / (self.host.bandwidth * min(1.0, share * self.speed))
        return max(seconds, senders / (self.cluster.staging * min(1.0, self.speed))) if self.cluster.staged else seconds

    def place_sigma(self, reach: Reach) -> float:
        """Returns the sigma of a group's place: of the rate of the host's memory where it sends through that, and of
        the rate of links between blocks of nodes."""
        variance = 0.0
        if self.cluster.staged and crosses_host(reach):
            variance += (STAGING_SIGMA if self.cluster.node.staging is None else STATED_STAGING_SIGMA) ** 2
        if any(level.blocks for level in reach.levels):
            variance += BLOCK_LINK_SIGMA**2
        return math.sqrt(variance)

    def port_rate(self, reach: Reach) -> float:
        """Returns the nominal rate of a member to the network [bytes/s]: that of the ports that it has, through its
        link to the host.
        """
        return self.cluster.port_rate(reach.ports)

    def network_byte(self, share: float, reach: Reach) -> float:
        """Returns the seconds of a byte over a member's ports to the network, at a share of their payload rate."""
        return 1.0 / (self.port_rate(reach) * min(1.0, share * self.network.payload * self.speed))


def crosses_host(reach: Reach) -> bool:
    """Tells whether some of a group's traffic within its nodes goes over the host."""
    return reach.domains.number > reach.nodes.number
