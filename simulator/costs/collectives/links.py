"""The tiers of links as a communication library uses them: their laws, and a cluster's tiers with them.

Coefficients are shares of the links' nominal rate, seconds and plain numbers. Collectives that pass data on (rings,
trees, sums in switches) have one law, all-to-alls another, messages a third, and the network one for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hardware.cluster import Cluster, Tier
from hardware.topology import Reach
from simulator.costs.coefficients import coefficient


@dataclass(frozen=True, slots=True)
class RingLaw:
    """All-reduce, all-gather, reduce-scatter and broadcast over the links of an island.

    NCCL's three protocols: *quick* (LL) sends a flag with every 4 bytes, *line* (LL128) with every 120, *whole*
    (Simple) after each chunk. `switch_*` is an all-reduce whose sums the switch forms (NVLink SHARP).
    """

    begin: float = coefficient("launch of a collective on all members, and their meeting [s]", 1e-6, 40e-6, 6e-6)
    quick_step: float = coefficient("a step of the quick protocol [s]", 0.1e-6, 8e-6, 0.9e-6)
    quick_share: float = coefficient("most of the nominal rate that the quick protocol reaches", 0.05, 1.0, 0.4)
    quick_pipe: float = coefficient("part of filling and draining channels that shows in quick ones", 0.0, 2.0, 0.3)
    line_step: float = coefficient("a step of the line protocol [s]", 0.1e-6, 10e-6, 4e-6)
    base: float = coefficient("setting up a transfer of whole chunks [s]", 0.0, 60e-6, 10e-6)
    step: float = coefficient("a step of the whole-chunk protocol [s]", 0.3e-6, 60e-6, 4e-6)
    share: float = coefficient("most of the nominal rate that the whole-chunk protocol reaches", 0.3, 1.0, 0.85)
    own: float = coefficient("handling a member's own part of the buffer, as a part of a step", 0.0, 2.0, 0.7)
    switch_begin: float = coefficient("setting up sums in the switch, for each member [s]", 0.1e-6, 15e-6, 2e-6)
    switch_share: float = coefficient("most of the nominal rate that sums in the switch reach", 0.3, 1.0, 0.66)
    switch_pipe: float = coefficient("part of filling and draining channels that shows in them", 0.0, 2.0, 0.6)
    call: float = coefficient("what this way of calling adds [s]", -5e-6, 80e-6, 0.0, "library", 0.0)
    latency: float = coefficient("its steps against those of plain NCCL", 0.2, 3.0, 1.0, "library", 1.0)
    rate: float = coefficient("its rates against those of plain NCCL", 0.7, 1.3, 1.0, "library", 1.0)
    crowd: float = coefficient("power of members by which rates over the host fall", 0.0, 4.0, 0.0, "library", 0.0)
    spread: float = 0.0
    spread_short: float = 0.0


@dataclass(frozen=True, slots=True)
class PairLaw:
    """All-to-all over the links of an island: every member sends to every other directly."""

    begin: float = coefficient("launch of an all-to-all on all members, and their meeting [s]", 1e-6, 40e-6, 8e-6)
    peer: float = coefficient("each further peer to serve [s]", 0.0, 5e-6, 0.2e-6)
    quick_share: float = coefficient("most of the nominal rate that the quick protocol reaches", 0.001, 1.0, 0.05)
    base: float = coefficient("setting up a transfer of whole chunks [s]", 0.0, 60e-6, 4e-6)
    share: float = coefficient("most of the nominal rate that an all-to-all reaches", 0.2, 1.0, 0.75)
    own: float = coefficient("copying a member's own part, against what it sends to another", 0.0, 2.0, 0.5)
    pipe: float = coefficient("part of filling and draining channels that shows", 0.0, 2.0, 0.3)
    call: float = coefficient("what this way of calling adds [s]", -5e-6, 80e-6, 0.0, "library", 0.0)
    rate: float = coefficient("its rates against those of plain NCCL", 0.7, 1.3, 1.0, "library", 1.0)
    crowd: float = coefficient("power of members by which rates over the host fall", 0.0, 4.0, 0.0, "library", 0.0)
    spread: float = 0.0
    spread_short: float = 0.0


@dataclass(frozen=True, slots=True)
class MessageLaw:
    """A message from one GPU to another over the links of an island."""

    begin: float = coefficient("from the send to the arrival of an empty message, links aside [s]", 1e-6, 60e-6, 8e-6)
    share: float = coefficient("most of the nominal rate that one message to one peer reaches", 0.2, 1.0, 0.8)
    pipe: float = coefficient("part of filling and draining channels that shows", 0.0, 2.0, 0.2)
    spread: float = 0.0
    spread_short: float = 0.0


@dataclass(frozen=True, slots=True)
class NetworkLaw:
    """How the library uses the network between islands. Shares are of the ports' payload rate."""

    quick_step: float = coefficient("a level of a tree by the quick protocol, wires aside [s]", 1e-6, 200e-6, 20e-6)
    step: float = coefficient("a level of a tree in whole chunks, wires and chunk aside [s]", 1e-6, 120e-6, 30e-6)
    chunk: float = coefficient("what a level waits for: so many bytes at its port", 1e4, 2e6, 524288.0)
    share: float = coefficient("most of the ports' payload rate that rings and trees reach", 0.3, 1.0, 0.95)
    pipe: float = coefficient("part of filling and draining trees that shows", 0.0, 2.0, 0.2)
    all_to_all: float = coefficient("most of the ports' payload rate that an all-to-all reaches", 0.2, 1.0, 0.78)
    send: float = coefficient("most of the ports' payload rate that one message reaches", 0.2, 1.0, 0.8)
    send_begin: float = coefficient("from the send to the arrival of an empty message [s]", 1e-6, 100e-6, 16e-6)
    spread: float = 0.0
    spread_short: float = 0.0


class LinkLaw(NamedTuple):
    """The laws of one kind of link. Processes of one host have one for all (`processes.ProcessLaw`)."""

    ring: Any
    pair: Any
    message: Any


class Laws(NamedTuple):
    """The laws of the three tiers."""

    inner: LinkLaw
    host: LinkLaw
    outer: NetworkLaw


@dataclass(slots=True, eq=False)
class Links:
    """The tiers of `cluster` with their laws.

    speed: rate of all links against the calibrated one, never beyond the nominal. switch_sums, network_sums: whether
    the library lets switches of scale-up links, and of an InfiniBand network, form sums (the latter only where its
    owner runs NVIDIA's plug-in; no switch adds 8-bit integers).
    """

    cluster: Cluster
    laws: Laws
    speed: float = 1.0
    switch_sums: bool = True
    network_sums: bool = False
    up: Tier = field(init=False)
    middle: Tier = field(init=False)
    out: Tier = field(init=False)
    ways: dict[Any, Any] = field(init=False, default_factory=dict)
    """What is known of groups: by operation and reach."""

    def __post_init__(self) -> None:
        self.up, self.middle, self.out = self.cluster.scale_up, self.cluster.host, self.cluster.scale_out

    def law(self, reach: Reach) -> LinkLaw:
        """The law of the slowest links that a group uses inside its islands."""
        return self.laws.host if hosted(reach) else self.laws.inner

    def wait(self, reach: Reach) -> float:
        """Latency [s] of the network: of the ports, and of two switches for each level above the lowest."""
        hop = 2 * float(self.cluster.fabric.hop_latency or 0.0)
        return self.out.latency + hop * max(0, len(reach.levels) - 1)

    def inside(self, share: float, links: float = 1.0) -> float:
        """Seconds of a byte over a part of one GPU's links in the domain."""
        return 1.0 / (self.up.bandwidth * links * min(1.0, share * self.speed)) if self.up.bandwidth else math.inf

    def over_host(self, share: float) -> float:
        """Seconds of a byte over one GPU's link to the host."""
        return 1.0 / (self.middle.bandwidth * min(1.0, share * self.speed))

    def across(self, share: float) -> float:
        """Seconds of a byte over one GPU's port to the network."""
        return 1.0 / (self.out.bandwidth * min(1.0, share * self.out.payload * self.speed))


def hosted(reach: Reach) -> bool:
    """Whether some of a group's traffic inside its islands goes over the host."""
    return reach.domains.number > reach.islands.number
