"""Collectives: a latency per step plus bytes over the narrowest link, by the fastest of the library's protocols.

Symbols: n members in k domains, g in the domain that holds the fewest (its ports are the
narrowest); S bytes (the largest buffer on one rank). Bytes over each member's
links in its domain, in multiples of S (`own`: what handling its own part costs, as a part of a step):

    all-reduce       (2 (n - 1) + own / 2) / n by a ring; 1 + 1/g where the switch adds up
    all-gather, reduce-scatter (n - 1 + own) / n
    all-to-all       (g - 1 + own / 2) / n
    broadcast        1

and over each member's port to the network (the g members have g ports of the domain; its other GPUs are siblings'):

    all-reduce       2 (n - 1) / (n g): rings through every member of every domain, or trees, equally wide;
                     1 / g between two domains whose switches add up: they exchange their sums
    all-gather, reduce-scatter (n - 1) / (n g)
    all-to-all       (n - g) / n, which crosses the upper levels of the fabric
    broadcast        1 / g

Both kinds of links work at the same time, so the slower one counts. Steps in the domains and between
them are 2 (g - 1) and 2 log2 k for an all-reduce (a tree), n - k and k - 1 (of the shorter kind of a ring) for an
all-gather and a reduce-scatter, n - 1 and 1 for an all-to-all, g - 1 and log2 k for a broadcast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hardware.topology import Reach
from simulator.costs.collectives.links import Links
from simulator.costs.estimate import NOTHING, Estimate
from simulator.ops import Collective


class Amounts(NamedTuple):
    """What an operation asks of the links: steps, multiples of S, and the shares of the links' rate it reaches."""

    inner_steps: float
    outer_steps: float
    inner: float
    outer: float
    inner_share: float
    outer_share: float


def price(work: Collective, reach: Reach, links: Links) -> Estimate:
    """A collective of a group that spreads like `reach`."""
    n, k, g = reach.members, reach.domains, reach.fewest
    if n == 1 or not work.nbytes:
        return NOTHING
    seconds = _library(work.nbytes, k, AMOUNTS[work.operation](n, k, g, links), links)
    if work.operation == "all_reduce" and links.inner.in_switch and n > k:
        seconds = min(seconds, _library(work.nbytes, k, _in_switch(n, k, g, links), links, links.inner.in_switch_begin))
    return Estimate(seconds, links.inner.spread if k == 1 else math.hypot(links.inner.spread, links.outer.spread))


def _library(nbytes: float, k: int, ask: Amounts, links: Links, begin: float = 0.0) -> float:
    """Time [s] by the faster protocol."""
    best = math.inf
    for protocol in links.protocols:
        inner, outer = protocol.share or (1.0, 1.0)
        time = links.inside(nbytes * ask.inner, min(inner, ask.inner_share))
        if k > 1:
            time = max(time, links.across(nbytes * ask.outer, min(outer, ask.outer_share)))
        time += protocol.inner * ask.inner_steps + protocol.outer * ask.outer_steps
        best = min(best, time)
    return best + links.inner.begin + begin


def _all_reduce(n: int, k: int, g: int, links: Links) -> Amounts:
    law = links.inner
    inner = (2 * (n - 1) + law.own / 2) / n if g > 1 else 0.0
    ring = 2 * (n - 1) / (n * g)
    return Amounts(2 * (g - 1), 2 * math.ceil(math.log2(k)), inner, ring, law.all_reduce, links.outer.ring)


def _in_switch(n: int, k: int, g: int, links: Links) -> Amounts:
    plain = _all_reduce(n, k, g, links)
    outer = 1 / g if k == 2 else plain.outer
    return plain._replace(inner=1 + 1 / g, outer=outer, inner_share=links.inner.in_switch)


def _gather(n: int, k: int, g: int, links: Links) -> Amounts:
    law = links.inner
    inner = (n - 1 + law.own) / n if g > 1 else 0.0
    steps = (k - 1) * links.outer.ring_step
    return Amounts(n - k, steps, inner, (n - 1) / (n * g), law.gather, links.outer.ring)


def _all_to_all(n: int, k: int, g: int, links: Links) -> Amounts:
    law = links.inner
    inner = (g - 1 + law.own / 2) / n if g > 1 else 0.0
    outer = (n - g) / n * links.out.oversubscription
    return Amounts(n - 1, float(k > 1), inner, outer, law.all_to_all, links.outer.all_to_all)


def _broadcast(n: int, k: int, g: int, links: Links) -> Amounts:
    law = links.inner
    return Amounts(g - 1, math.ceil(math.log2(k)), float(g > 1), 1 / g, law.gather, links.outer.ring)


AMOUNTS = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
