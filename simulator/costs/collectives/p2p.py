"""Messages between two GPUs: the links are busy for bytes / rate, the receiver has the message a latency later."""

from __future__ import annotations

from simulator.costs.collectives.links import Links
from simulator.costs.estimate import NOTHING, Estimate


def price(nbytes: int, near: bool, links: Links) -> Estimate:
    """A message between two GPUs, of one domain (near) or of two."""
    if not nbytes:
        return NOTHING
    inner, outer = links.inner, links.outer
    if near:
        return Estimate(links.inside(nbytes, inner.send), inner.spread, inner.send_begin + links.up.latency)
    return Estimate(links.across(nbytes, outer.send), outer.spread, outer.send_begin + links.out.latency)
