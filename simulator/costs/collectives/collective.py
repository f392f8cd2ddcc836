"""Collectives: a latency per step plus bytes over the narrowest link, by the fastest of the library's protocols.

Symbols: n members in k islands, g on the one that holds the fewest (its ports are the narrowest); S bytes (the largest
buffer on one rank). Bytes over each member's links in its domain, in multiples of S (`own`: what handling its own part
costs, as a part of a step):

    all-reduce       (2 (n - 1) + own / 2) / n by a ring; 1 + 1/g where the switch adds up
    all-gather, reduce-scatter (n - 1 + own) / n
    all-to-all       (g - 1 + own / 2) / n
    broadcast        1

and over each member's port to the network (the g members have g ports of the island; its other GPUs are siblings'):

    all-reduce       2 (n - 1) / (n g): rings through every member of every island, or trees, equally wide;
                     1 / g between two islands whose switches add up: they exchange their sums
    all-gather, reduce-scatter (n - 1) / (n g)
    all-to-all       (n - g) / n
    broadcast        1 / g

An island of several domains joins these over the host: their members' links to it carry what ports to a network
would, with the members g of a domain in place of those of an island. Without a switch a group has only the links
between its members. All kinds of links work at the same time, so the slowest one counts; what the levels of the fabric
add is said in `fabric`. Steps in the islands and between
them are 2 (g - 1) and 2 log2 k for an all-reduce (a tree), n - k and k - 1 (of the shorter kind of a ring) for an
all-gather and a reduce-scatter, n - 1 and 1 for an all-to-all, g - 1 and log2 k for a broadcast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hardware.topology import Reach
from simulator.costs.collectives import fabric
from simulator.costs.collectives.links import LinkLaw, Links, NetworkLaw, hosted
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
    n, (k, g), law = reach.members, reach.islands, links.law(reach)
    if n == 1 or not work.nbytes:
        return NOTHING
    ask = AMOUNTS[work.operation]
    domain = ask(n, *reach.domains, links.inner, links.outer)
    island = ask(n, k, g, law, links.outer)
    narrower = (fabric.all_to_all if work.operation == "all_to_all" else fabric.ring)(reach) if k > 1 else 1.0
    seconds = _library(work.nbytes, domain, island._replace(outer=island.outer * narrower), reach, links)
    if work.operation == "all_reduce" and law.in_switch and n > k:
        domain = domain._replace(inner=1 + 1 / g, inner_share=law.in_switch)
        island = island._replace(outer=(1 / g if k == 2 else island.outer) * narrower)
        seconds = min(seconds, _library(work.nbytes, domain, island, reach, links) + law.in_switch_begin)
    return Estimate(seconds, law.spread if k == 1 else math.hypot(law.spread, links.outer.spread))


def _library(nbytes: float, domain: Amounts, island: Amounts, reach: Reach, links: Links) -> float:
    """Time [s] by the faster protocol. domain, island: what the group asks of the links in and out of both."""
    best, wait = math.inf, links.wait(reach)
    for protocol in links.protocols(reach):
        inner, outer = protocol.share or (1.0, 1.0)
        time = links.inside(nbytes * domain.inner, min(inner, domain.inner_share), reach.links)
        if hosted(reach):
            time = max(time, links.over_host(nbytes * domain.outer, min(inner, island.inner_share)))
        if reach.islands.number > 1:
            time = max(time, links.across(nbytes * island.outer, min(outer, island.outer_share)))
        time += protocol.inner * island.inner_steps + (protocol.outer + wait) * island.outer_steps
        best = min(best, time)
    return best + links.law(reach).begin


def _all_reduce(n: int, k: int, g: int, law: LinkLaw, outer: NetworkLaw) -> Amounts:
    inner = (2 * (n - 1) + law.own / 2) / n if g > 1 else 0.0
    ring = 2 * (n - 1) / (n * g)
    return Amounts(2 * (g - 1), 2 * math.ceil(math.log2(k)), inner, ring, law.all_reduce, outer.ring)


def _gather(n: int, k: int, g: int, law: LinkLaw, outer: NetworkLaw) -> Amounts:
    inner = (n - 1 + law.own) / n if g > 1 else 0.0
    return Amounts(n - k, (k - 1) * outer.ring_step, inner, (n - 1) / (n * g), law.gather, outer.ring)


def _all_to_all(n: int, k: int, g: int, law: LinkLaw, outer: NetworkLaw) -> Amounts:
    inner = (g - 1 + law.own / 2) / n if g > 1 else 0.0
    return Amounts(n - 1, float(k > 1), inner, (n - g) / n, law.all_to_all, outer.all_to_all)


def _broadcast(n: int, k: int, g: int, law: LinkLaw, outer: NetworkLaw) -> Amounts:
    return Amounts(g - 1, math.ceil(math.log2(k)), float(g > 1), 1 / g, law.gather, outer.ring)


AMOUNTS = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
