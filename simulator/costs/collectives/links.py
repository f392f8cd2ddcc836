"""The tiers of links as a communication library uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hardware.cluster import Cluster, Tier
from hardware.topology import Reach


@dataclass(frozen=True, slots=True)
class LinkLaw:
    """How the library uses the links of an island; calibration/*.yaml says what each value means.

    A low-latency protocol (quick_*) and a full-rate one serve all operations; the faster one is used.
    """

    begin: float
    quick_step: float
    quick_share: float
    step: float
    all_reduce: float
    gather: float
    all_to_all: float
    own: float
    in_switch: float
    in_switch_begin: float
    send: float
    send_begin: float
    spread: float


@dataclass(frozen=True, slots=True)
class NetworkLaw:
    """How the library uses the network between islands."""

    quick_step: float
    quick_share: float
    step: float
    ring_step: float
    ring: float
    all_to_all: float
    send: float
    send_begin: float
    spread: float


class Laws(NamedTuple):
    """The laws of the three tiers."""

    inner: LinkLaw
    host: LinkLaw
    outer: NetworkLaw


class Protocol(NamedTuple):
    """One way to move data.

    inner, outer: a step in the island, between islands [s], the latter without the network's own latency. share: the
    most of the links' rate; None leaves it to the operation.
    """

    inner: float
    outer: float
    share: tuple[float, float] | None


class Links:
    """The tiers of `cluster` with their laws.

    speed: rate of all links against the calibrated one, never beyond the nominal.
    """

    def __init__(self, cluster: Cluster, laws: Laws, speed: float = 1.0) -> None:
        self.inner, self.host, self.outer = self.laws = laws
        self.up: Tier = cluster.scale_up
        self.middle: Tier = cluster.host
        self.out: Tier = cluster.scale_out
        self.speed = speed
        self._hop = 2 * float(cluster.fabric.hop_latency or 0.0)
        self._protocols = {law: self._made(law) for law in (self.inner, self.host)}

    def _made(self, law: LinkLaw) -> tuple[Protocol, ...]:
        outer = self.outer
        return (
            Protocol(law.quick_step, outer.quick_step, (law.quick_share, outer.quick_share)),
            Protocol(law.step, outer.step, None),
        )

    def law(self, reach: Reach) -> LinkLaw:
        """The law of the slowest links that a group uses inside its islands."""
        return self.host if hosted(reach) else self.inner

    def protocols(self, reach: Reach) -> tuple[Protocol, ...]:
        """What the library may choose from."""
        return self._protocols[self.law(reach)]

    def wait(self, reach: Reach) -> float:
        """Latency [s] of the network: of the ports, and of two switches for each level above the lowest."""
        return self.out.latency + self._hop * max(0, len(reach.levels) - 1)

    def inside(self, nbytes: float, share: float, links: float = 1.0) -> float:
        """Time [s] of `nbytes` over a part of one GPU's links in the domain."""
        return nbytes / (self.up.bandwidth * links * min(1.0, share * self.speed)) if nbytes else 0.0

    def over_host(self, nbytes: float, share: float) -> float:
        """Time [s] of `nbytes` over one GPU's link to the host."""
        return nbytes / (self.middle.bandwidth * min(1.0, share * self.speed))

    def across(self, nbytes: float, share: float) -> float:
        """Time [s] of `nbytes` over one GPU's port to the network."""
        return nbytes / (self.out.bandwidth * min(1.0, share * self.out.payload * self.speed))


def hosted(reach: Reach) -> bool:
    """Whether some of a group's traffic inside its islands goes over the host."""
    return reach.domains.number > reach.islands.number
