"""By how much the network's upper levels slow a group, against ports that are never held up.

A level passes 1 / o of the rate of the ports below it (o: its oversubscription), and everyone uses it at the same time.
Of a group of n members, b sit in the block below the level that holds the fewest, g on the island that does.

    all-to-all     each member sends (n - b) / n of its data through the level, of (n - g) / n through its port:
                   o (n - b) / (n - g)
    ring, tree     goes round the b / g islands of a block before it leaves it by one port of b / g: o g / b
    one message    its whole block may be sending to another one: o

The lowest level tells nothing of its leaf switches: only an all-to-all is sure to cross them, rings and messages are
taken to stay between neighbours. Libraries send between GPUs at the same place of their nodes (on one *rail*) and hand
data over inside the node; where that is not possible, an all-to-all and a message climb one level more.
"""

from __future__ import annotations

from hardware.topology import Reach


def ring(reach: Reach) -> float:
    """Of rings and trees."""
    g = reach.islands.fewest
    return max([1.0, *(level.oversubscription * g / level.fewest for level in reach.levels[1:])])


def all_to_all(reach: Reach) -> float:
    """Of an all-to-all."""
    n, g = reach.members, reach.islands.fewest
    return max([reach.rails, *(level.oversubscription * ((n - level.fewest) / (n - g)) for level in reach.levels)])


def message(reach: Reach) -> float:
    """Of a message between two GPUs."""
    return max([reach.rails, *(level.oversubscription for level in reach.levels[1:])])
