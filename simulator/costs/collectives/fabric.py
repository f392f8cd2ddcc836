"""Slowdown of a group by the network's upper levels, compared with ports that are never blocked.

A level passes 1 / o of the rate of the ports below it (o: its oversubscription), and all groups use it at the same
time. Of a group of n members, b sit in the block below the level that holds the fewest, g on the node that does.

    all-to-all     each member sends (n - b) / n of its data through the level, (n - g) / n through its port:
                   o (n - b) / (n - g)
    ring, tree     visits the b / g nodes of a block before it leaves it through a port of b / g: o g / b
    message        all GPUs of its block may be sending to another block: o

A link between blocks in place of switches (two data centres) is such a level too: what a block sends to others shares
the link, so o is the payload rate of the block's ports over that of the link, and for a message that of the ports that
do send at the time. Of several links of a block an all-to-all uses all; rings of groups on the same nodes leave it over
a single link, and so do the messages of a node. The link's latency is paid by each hop over it. A chunk that
goes round a ring passes every hop of it, but of the hops only r, a hop for each block, are such links; a tree that
spans r blocks has 1 + log2 r levels between them:

    ring           r of its k - 1 hops between nodes, twice in an all-reduce
    tree           1 + log2 r of its log2 k levels, up and down

Nothing is known of the leaf switches of the lowest level: only an all-to-all is certain to cross them; rings and
messages are assumed to stay between neighbours. NCCL sends between GPUs at the same place of their nodes (on one
*rail*) and forwards data within the node; where that is impossible, an all-to-all and a message climb a level more.
"""

from __future__ import annotations

import math

from meshcast.hardware.topology import Crossing, Reach


def ring(reach: Reach) -> float:
    """Returns the slowdown of rings and trees."""
    g = reach.nodes.fewest
    return max([1.0, *(level.oversubscription * g / level.fewest for level in _upper_levels(reach))])


def all_to_all(reach: Reach) -> float:
    """Returns the slowdown of an all-to-all."""
    n, g = reach.members, reach.nodes.fewest
    crossed = [level.oversubscription / level.link_ratio * ((n - level.fewest) / (n - g)) for level in reach.levels]
    return max([reach.rails, *crossed])


def message(reach: Reach) -> float:
    """Returns the slowdown of a message between two GPUs."""
    return max([reach.rails, *(level.oversubscription for level in _upper_levels(reach))])


def _upper_levels(reach: Reach) -> tuple[Crossing, ...]:
    """Returns the levels that neighbours pay for: those above the leaf switches, and links that join single nodes."""
    return reach.levels if reach.levels and reach.levels[0].blocks else reach.levels[1:]


def ring_delay(reach: Reach, rounds: int) -> float:
    """Returns the latency [s] of the links between blocks in a ring that data passes so many times."""
    return sum(level.latency * rounds * min(reach.nodes.number - 1, level.blocks) for level in reach.levels)


def tree_delay(reach: Reach, passes: int) -> float:
    """Returns the latency [s] of the links between blocks in a tree that data passes so many times, up or down."""
    levels = math.ceil(math.log2(reach.nodes.number))
    return sum(
        level.latency * passes * min(levels, 1 + math.ceil(math.log2(level.blocks)))
        for level in reach.levels
        if level.blocks
    )


def message_delay(reach: Reach) -> float:
    """Returns the latency [s] of the links between blocks for a message."""
    return sum(level.latency for level in reach.levels)
