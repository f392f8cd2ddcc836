"""What collectives move over which links: the ways of an operation, and their shares of the buffer.

Symbols: n members in k islands, g on the one that holds the fewest (its ports are the narrowest). Bytes over each
member's links in its domain, in multiples of S (`own`: what handling its own part costs, as a part of a step):

    ring all-reduce  (2 (n - 1) + own) / n      steps 2 (n - 1), or 2 (g - 1) and 2 log2 k by trees
    sums in switches 1 + 1/g                    within an island
                     1 + 2/g                    2 log2 k between: what others sent is handed out once more
    all-gather, reduce-scatter (n - 1 + own) / n    n - k in islands and k - 1 between them
    all-to-all       (g - 1 + own) / n          one, and a little for each peer
    broadcast        1                          g - 1 and log2 k

and over each member's port to the network (the g members have g ports of the island; its other GPUs are siblings'):

    ring all-reduce  2 (n - 1) / (n g): rings through every port of every island
    trees            2 / g, for an inner node hears two children and its parent and is a leaf of the other tree;
                     1 / g between two islands
    sums in the network 1 / g
    all-gather, reduce-scatter (n - 1) / (n g)
    all-to-all       (n - g) / n
    broadcast        1 / g

An island of several domains joins these over the host: rings of cards, bridged in pairs or not, go over one link to
it (two bridged A100 or H100 and two more reach 0.77 of one link, as eight cards without bridges do); to an
all-to-all it is what ports are to a network. Without a switch a group has only the links between its members. All
kinds of links work at the same time, so the slowest one counts; what the levels of the fabric add is said in `fabric`.
Nothing is faster than these bytes at the links' nominal rates, for all shares are below 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hardware.topology import Reach
from simulator.costs.collectives import fabric, tuner
from simulator.costs.collectives.links import Links, RingLaw, hosted
from simulator.costs.collectives.tuner import LINE, QUICK, SWITCH, WHOLE

TREE = 0.92 * 0.85
"""Rate of trees inside islands against rings (NVIDIA/nccl @5067397, src/graph/tuning.cc)."""
PAT = 0.75
"""The same of the library's logarithmic gathers, for groups of one GPU per node."""
RING_STEP = 1 / 3
"""A step of a ring between islands against a level of a tree, whose chunks go up and down: 14 us by the source above,
of the 42 us that trees show."""
PORTS = 9
"""Most ports of a rack that rings and trees of one group use: between racks of 72 GPUs with a port of 50 GB/s each,
all-reduces move 430 GB/s (coreweave/nccl-tests, 2 and 20 racks), as if NCCL's search found no more channels."""
QUICK_MESSAGE = 16384
"""Largest message of an all-to-all that goes by the quick protocol (NCCL_P2P_LL_THRESHOLD)."""


Busy = tuple[float, float, float]
"""Shares of the links of each tier, in the order of `simulator.costs.estimate.TIERS`."""


class Way(NamedTuple):
    """An algorithm with a protocol.

    limit: largest size it is used for. multiprocessors: that it takes. busy: of a member's scale-up links, its link to
    the host and its port, what is busy while bytes move: all of the narrowest.
    """

    name: str
    limit: float
    latency: float
    per_byte: float
    pipe: float
    multiprocessors: int
    busy: Busy


def _narrowest(
    reach: Reach, links: Links, inner: float, host: float, outer: float, shares: tuple[float, float]
) -> tuple[float, Busy]:
    """Seconds of a byte of the buffer, and `Way.busy`.

    inner, host, outer: bytes over each link. shares: of the rate, in islands and between.
    """
    own = _share_of_links(reach, links)
    up = inner * links.inside(shares[0], own) if inner else 0.0
    middle = host * links.over_host(shares[0]) if hosted(reach) else 0.0
    out = outer * links.across(shares[1]) if reach.islands.number > 1 else 0.0
    most = max(up, middle, out)
    return most, (own * up / most, middle / most, out / most)


def _port(reach: Reach, links: Links) -> float:
    """Part of what rings and trees take out of an island that goes through one port."""
    if reach.islands.number == 1:
        return 0.0
    rack = links.cluster.node.domain > links.cluster.gpus_per_node
    return max(fabric.ring(reach) / reach.islands.fewest, 1 / PORTS if rack else 0.0)


def _share_of_links(reach: Reach, links: Links) -> float:
    """Of a member's links, those that rings use: where pairs lack links, rings go both ways, on two links of a GPU."""
    up = links.cluster.node.scale_up
    if up is None or not up.gaps or reach.members == 2:
        return reach.links
    count = up.link.links
    return max(1, round(reach.links * count) // 2 * 2) / count


def _level(reach: Reach, links: Links) -> float:
    """A level of a tree in whole chunks [s]: each member's chunk goes through the ports that are used."""
    net = links.laws.outer
    crowd = _port(reach, links) * reach.islands.fewest
    return net.step + (net.chunk * crowd / links.out.bandwidth if crowd else 0.0)


def _protocols(law: RingLaw, reach: Reach, links: Links) -> dict[str, tuple[float, float, float, float, float, float]]:
    """Base, step, step between islands, shares of the rate in and between them, pipe: of each protocol."""
    net, lat, whole = links.laws.outer, law.latency, _level(reach, links)
    line = math.sqrt(net.quick_step * whole)
    return {
        QUICK: (0.0, law.quick_step * lat, net.quick_step, law.quick_share * law.rate, 0.5 * net.share, law.quick_pipe),
        LINE: (0.0, law.line_step * lat, line, 0.92 * law.share * law.rate, 0.92 * net.share, 0.0),
        WHOLE: (law.base * lat, law.step * lat, whole, law.share * law.rate, net.share, 0.0),
    }


def _limits(reach: Reach, links: Links, steps: int, sums: bool) -> dict[str, float]:
    """Across islands all ways compete: what the tuner knows of a network is not told here."""
    if reach.islands.number > 1:
        return dict.fromkeys((QUICK, LINE, WHOLE, SWITCH), math.inf)
    tier = links.middle if hosted(reach) else links.up
    return tuner.limits(tier.kind, reach.links, reach.members, steps, hosted(reach), sums)


def _all_reduce(reach: Reach, links: Links) -> tuple[Way, ...]:
    n, (k, g), (_, d), law = reach.members, reach.islands, reach.domains, links.law(reach).ring
    up, net, wait = tuner.generation(links.up.kind), links.laws.outer, links.wait(reach)
    levels, port = 2 * math.ceil(math.log2(k)), _port(reach, links)
    sums = links.switch_sums and links.up.switched and bool(up.channel) and not hosted(reach) and g > 1
    limits = _limits(reach, links, 2 * (n - 1), sums)
    inner, ring = (2 * (n - 1) + law.own) / n if d > 1 else 0.0, 2 * (n - 1) / n
    tree = (1 if k == 2 else 2) * port
    ways = []
    for name, (base, step, hop, share, out, pipe) in _protocols(law, reach, links).items():
        per_byte, busy = _narrowest(reach, links, inner, ring, ring * port, (share, out))
        latency = base + 2 * (n - k) * step + 2 * (k - 1) * (RING_STEP * hop + wait)
        ways.append(Way(f"ring {name}", limits[name], latency, per_byte, pipe, up.channels, busy))
        if k > 1:
            inside = 2.0 if d > 1 else 0.0
            per_byte, busy = _narrowest(reach, links, inside, ring, tree, (TREE * share, out))
            latency = base + 2 * (g - 1) * step + levels * (hop + wait)
            ways.append(Way(f"tree {name}", math.inf, latency, per_byte, net.pipe, up.channels, busy))
    if sums:
        share, begin = law.switch_share * law.rate, law.switch_begin * g * law.latency
        summed = 1 + (1 if k == 1 else 2) / g
        per_byte, busy = _narrowest(reach, links, summed, 0.0, tree, (share, net.share))
        pipe = law.switch_pipe if k == 1 else net.pipe
        latency = begin + levels * (_level(reach, links) + wait)
        ways.append(Way("switch", limits[SWITCH], latency, per_byte, pipe, tuner.SWITCH_CHANNELS, busy))
        if links.network_sums and k > 1:
            per_byte, busy = _narrowest(reach, links, summed, 0.0, port, (share, net.share))
            latency = begin + 2 * (_level(reach, links) + wait)
            ways.append(Way("switch and network", math.inf, latency, per_byte, pipe, tuner.SWITCH_CHANNELS, busy))
    return tuple(way for way in ways if way.limit)


def _gather(reach: Reach, links: Links) -> tuple[Way, ...]:
    n, k, d, law = reach.members, reach.islands.number, reach.domains.fewest, links.law(reach).ring
    wait, channels = links.wait(reach), tuner.generation(links.up.kind).channels
    limits, port = _limits(reach, links, n - 1, False), _port(reach, links)
    inner, ring = (n - 1 + law.own) / n if d > 1 else 0.0, (n - 1) / n
    ways = []
    for name, (base, step, hop, share, out, pipe) in _protocols(law, reach, links).items():
        per_byte, busy = _narrowest(reach, links, inner, ring, ring * port, (share, out))
        latency = base + (n - k) * step + (k - 1) * (RING_STEP * hop + wait)
        ways.append(Way(f"ring {name}", limits[name], latency, per_byte, pipe, channels, busy))
        if name == WHOLE and n == k:
            latency = base + math.ceil(math.log2(k)) * (RING_STEP * hop + wait)
            ways.append(Way("logarithmic", math.inf, latency, per_byte / PAT, pipe, channels, busy))
    return tuple(way for way in ways if way.limit)


def _broadcast(reach: Reach, links: Links) -> tuple[Way, ...]:
    (k, g), (_, d), law = reach.islands, reach.domains, links.law(reach).ring
    wait, channels = links.wait(reach), tuner.generation(links.up.kind).channels
    port = _port(reach, links)
    ways = []
    for name, (base, step, hop, share, out, pipe) in _protocols(law, reach, links).items():
        per_byte, busy = _narrowest(reach, links, float(d > 1), 1.0, port, (share, out))
        latency = base + (g - 1) * step + math.ceil(math.log2(k)) * (hop + wait)
        ways.append(Way(f"ring {name}", math.inf, latency, per_byte, pipe, channels, busy))
    return tuple(ways)


def _all_to_all(reach: Reach, links: Links) -> tuple[Way, ...]:
    n, (k, g), (_, d), law = reach.members, reach.islands, reach.domains, links.law(reach).pair
    wait, channels = links.wait(reach), tuner.generation(links.up.kind).channels
    net, narrower = links.laws.outer, fabric.all_to_all(reach) if k > 1 else 1.0
    inner = (d - 1 + law.own) / n if d > 1 else 0.0
    ways = []
    for name, limit, base, hop, share, pipe in (
        (QUICK, QUICK_MESSAGE * n, 0.0, net.quick_step, law.quick_share, 0.0),
        (WHOLE, math.inf, law.base, _level(reach, links), law.share * law.rate, law.pipe),
    ):
        per_byte, busy = _narrowest(reach, links, inner, (n - d) / n, (n - g) / n * narrower, (share, net.all_to_all))
        latency = law.peer * (n - 1) + base + (RING_STEP * hop + wait if k > 1 else 0.0)
        ways.append(Way(f"pairs {name}", limit, latency, per_byte, pipe, channels, busy))
    return tuple(ways)


WAYS = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _broadcast,  # the same steps the other way
}
