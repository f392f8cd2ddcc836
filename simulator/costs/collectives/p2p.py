"""Messages between two GPUs: the links are busy for bytes / rate, the receiver has the message a latency later."""

from __future__ import annotations

from hardware.topology import Reach
from simulator.costs.collectives import fabric
from simulator.costs.collectives.links import Links, hosted
from simulator.costs.estimate import NOTHING, Estimate


def price(nbytes: int, reach: Reach, links: Links) -> Estimate:
    """A message between two GPUs that are as far apart as `reach` says."""
    if not nbytes:
        return NOTHING
    outer, law = links.outer, links.law(reach)
    if reach.islands.number > 1:
        seconds = links.across(nbytes * fabric.message(reach), outer.send)
        return Estimate(seconds, outer.spread, outer.send_begin + links.wait(reach))
    if hosted(reach):
        return Estimate(links.over_host(nbytes, law.send), law.spread, law.send_begin + links.middle.latency)
    return Estimate(links.inside(nbytes, law.send, reach.links), law.spread, law.send_begin + links.up.latency)
