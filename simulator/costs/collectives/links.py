"""The two tiers of links as a communication library uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hardware.cluster import Cluster, Tier


@dataclass(frozen=True, slots=True)
class LinkLaw:
    """How the library uses the links inside a scale-up domain; calibration/*.yaml says what each value means.

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
    """How the library uses the network between domains."""

    quick_step: float
    quick_share: float
    step: float
    ring_step: float
    ring: float
    all_to_all: float
    send: float
    send_begin: float
    spread: float


class Protocol(NamedTuple):
    """One way to move data.

    inner, outer: a step in the domain, between domains [s]. share: the most of the links' rate; None leaves it to the
    operation.
    """

    inner: float
    outer: float
    share: tuple[float, float] | None


class Links:
    """Both tiers of `cluster` with their laws.

    speed: rate of all links against the calibrated one, never beyond the nominal.
    """

    def __init__(self, cluster: Cluster, inner: LinkLaw, outer: NetworkLaw, speed: float = 1.0) -> None:
        self.inner, self.outer = inner, outer
        self.up: Tier = cluster.scale_up
        self.out: Tier = cluster.scale_out
        self.speed = speed
        wait = self.out.latency
        self.protocols = (
            Protocol(inner.quick_step, outer.quick_step + wait, (inner.quick_share, outer.quick_share)),
            Protocol(inner.step, outer.step + wait, None),
        )

    def inside(self, nbytes: float, share: float) -> float:
        """Time [s] of `nbytes` over one GPU's links in the domain."""
        return nbytes / (self.up.bandwidth * min(1.0, share * self.speed))

    def across(self, nbytes: float, share: float) -> float:
        """Time [s] of `nbytes` over one GPU's port to the network."""
        return nbytes / (self.out.bandwidth * min(1.0, share * self.out.payload * self.speed))
