"""Messages between two GPUs: the links are busy for bytes / rate, the receiver has the message a latency later.

bytes c + 2 p sqrt(b c bytes): c seconds of a byte, b the latency, p as of collectives (`collective`).
"""

from __future__ import annotations

from typing import Any

from hardware.topology import Reach
from simulator.costs.coefficients import spread
from simulator.costs.collectives import fabric
from simulator.costs.collectives.links import Links, hosted
from simulator.costs.collectives.processes import ProcessLaw
from simulator.costs.estimate import ALONE, NOTHING, Estimate, Use


def price(nbytes: int, reach: Reach, links: Links) -> Estimate:
    """A message between two GPUs that are as far apart as `reach` says."""
    if not nbytes:
        return NOTHING
    law = links.laws.outer if reach.islands.number > 1 else links.law(reach).message
    busy, latency = seconds(nbytes, reach, links)
    return Estimate(busy, spread(law, busy + latency, latency), latency)


def seconds(nbytes: Any, reach: Reach, links: Links) -> tuple[Any, float]:
    """How long the links are busy, a number or an array, and how much later the message is there."""
    if reach.islands.number > 1:
        return _fill(nbytes, reach, links), links.laws.outer.send_begin + links.wait(reach)
    law, over = links.law(reach).message, hosted(reach)
    fill = _fill(nbytes, reach, links)
    if isinstance(law, ProcessLaw):
        return fill, law.send
    # As of collectives: chunks fill the channels and drain them.
    busy = fill + 2 * law.pipe * (law.begin * fill) ** 0.5
    return busy, law.begin + (links.middle.latency if over else links.up.latency)


def _fill(nbytes: Any, reach: Reach, links: Links) -> Any:
    """How long the bytes take to move."""
    if reach.islands.number > 1:
        return nbytes * (fabric.message(reach) * links.across(links.laws.outer.send))
    law = links.law(reach).message
    if isinstance(law, ProcessLaw):
        return nbytes * links.over_host(law.message)
    return nbytes * (links.over_host(law.share) if hosted(reach) else links.inside(law.share, reach.links))


def use(nbytes: int, reach: Reach, links: Links) -> Use:
    """What a message occupies while its bytes move. How many multiprocessors it takes no calibration tells: none."""
    if not nbytes:
        return ALONE
    far, over = reach.islands.number > 1, hosted(reach)
    busy = (0.0, 0.0, 1.0) if far else (0.0, 1.0, 0.0) if over else (reach.links, 0.0, 0.0)
    return Use(_fill(nbytes, reach, links), busy)


def least(nbytes: Any, reach: Reach, links: Links) -> Any:
    """What nothing beats [s]: the bytes at the nominal rate of the links between the two."""
    if reach.islands.number > 1:
        return nbytes / links.out.bandwidth
    return nbytes / (links.middle.bandwidth if hosted(reach) else links.up.bandwidth * reach.links)
