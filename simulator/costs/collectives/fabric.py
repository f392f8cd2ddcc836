"""Slowdown of a group by the network's upper levels, compared with ports that are never blocked.

A level passes 1 / o of the rate of the ports below it (o: its oversubscription), and all groups use it at the same
time. Of a group of n members, b sit in the block below the level that holds the fewest, g on the node that does.

    all-to-all     each member sends (n - b) / n of its data through the level, (n - g) / n through its port:
                   o (n - b) / (n - g)
    ring, tree     visits the b / g nodes of a block before it leaves it through one port of b / g: o g / b
    one message    all GPUs of its block may be sending to another block: o

Nothing is known of the leaf switches of the lowest level: only an all-to-all is certain to cross them; rings and
messages are assumed to stay between neighbours. NCCL sends between GPUs at the same place of their nodes (on one
*rail*) and forwards data within the node; where that is impossible, an all-to-all and a message climb one level more.
"""

from __future__ import annotations

from hardware.topology import Reach


def ring(reach: Reach) -> float:
    """Slowdown of rings and trees."""
    g = reach.nodes.fewest
    return max([1.0, *(level.oversubscription * g / level.fewest for level in reach.levels[1:])])


def all_to_all(reach: Reach) -> float:
    """Slowdown of an all-to-all."""
    n, g = reach.members, reach.nodes.fewest
    return max([reach.rails, *(level.oversubscription * ((n - level.fewest) / (n - g)) for level in reach.levels)])


def message(reach: Reach) -> float:
    """Slowdown of a message between two GPUs."""
    return max([reach.rails, *(level.oversubscription for level in reach.levels[1:])])
