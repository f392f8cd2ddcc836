"""Fair shares: the rates of flows that use the same links.

A flow has a share of the capacity of each of its links that it takes at full rate. Every link is shared evenly, in its
units: no flow gets less than another unless it asks for less, because another link or its rate holds it back.
So each slowed flow has a bottleneck: a full link of which no other flow takes more. On a single link, or where flows
    take
equal shares of all theirs, this is the max-min fair allocation; in general it is the *bottleneck max fairness* of
Bonald and Roberts, arXiv 1410.0782, which links reach that serve their flows in turn.

    rate of flow i   = min(1, min over its links l of level_l / share_il)
    level of link l: the sum over its flows of min(demand, level_l) is its capacity, 1
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)

EXACT = 1e-13
"""Relative change of a level below which it stands."""

ROUNDS = 1000
"""Most rounds in which levels are sought. Where links hold up each other's flows in a circle they close in step by
step, elsewhere a few rounds find them."""


def fair_rates(flows: Sequence[Mapping[Place, float]]) -> list[float]:
    """Returns the rate of each flow, above 0 and at most 1. Shares are above 0."""
    users: dict[Place, list[Mapping[Place, float]]] = {}
    for flow in flows:
        for link in flow:
            users.setdefault(link, []).append(flow)
    levels = dict.fromkeys(users, math.inf)
    for _ in range(ROUNDS):
        moved = False
        for link, sharing in users.items():
            asked = [flow[link] * _rate(flow, levels, link) for flow in sharing]
            now = _level(asked)
            moved |= not math.isclose(now, levels[link], rel_tol=EXACT)
            levels[link] = now
        if not moved:
            break
    return [_rate(flow, levels) for flow in flows]


def fair_rates_by_priority(flows: Sequence[Mapping[Place, float]], priorities: Sequence[int]) -> list[float]:
    """Returns the rate of each flow, at least 0, where flows of lower priority share what those of higher ones
    leave."""
    rates, left = [0.0] * len(flows), dict.fromkeys((link for flow in flows for link in flow), 1.0)
    for priority in sorted({*priorities}, reverse=True):
        mine = [
            i for i, level in enumerate(priorities) if level == priority and min(left[link] for link in flows[i]) > 0
        ]
        # A link with less room is a link of which a flow takes more.
        shares = [{link: share / left[link] for link, share in flows[i].items()} for i in mine]
        for i, rate in zip(mine, fair_rates(shares), strict=True):
            rates[i] = rate
        for i in mine:
            for link, share in flows[i].items():
                left[link] = max(0.0, left[link] - share * rates[i])
        left = {link: room if room > EXACT else 0.0 for link, room in left.items()}
    return rates


def _rate(flow: Mapping[Place, float], levels: Mapping[Place, float], but: Place | None = None) -> float:
    """Returns the rate that the links of a flow allow, `but` left out."""
    return min([1.0, *(levels[link] / share for link, share in flow.items() if link != but)])


def _level(asked: Sequence[float]) -> float:
    """Returns the most that a flow gets of a link at the demands of the others; infinite while all demands are met."""
    left, waiting = 1.0, len(asked)
    for demand in sorted(asked):
        if demand * waiting > left * (1 + EXACT):
            return left / waiting
        left, waiting = left - demand, waiting - 1
    return math.inf
