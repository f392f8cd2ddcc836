"""Collectives: latency and bytes over the narrowest link, by the way that the library chooses.

A *way* is an algorithm with a protocol (`ways`). Its time for S bytes (the largest buffer on one rank) is

    begin + L + c S + 2 p sqrt(L c S)

L: its steps; c: seconds of a byte over the narrowest link; p: data goes in chunks, and the best chunk waits for
sqrt(L c S) twice, once to fill the channels and once to drain them (the optimum of a pipeline of steps); p is how much
of that is seen. The tuner says up to which size each way is used (`tuner`); of those the fastest counts, so that more
bytes are never faster. Across islands all ways compete.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hardware.topology import Reach
from simulator.costs.coefficients import spread
from simulator.costs.collectives import processes, tuner
from simulator.costs.collectives.algorithms import WAYS, Way
from simulator.costs.collectives.links import Links, hosted
from simulator.costs.estimate import ALONE, NOTHING, Estimate, Use
from simulator.ir.ops import Collective


class Group(NamedTuple):
    """What is known of an operation of a group."""

    begin: float
    ways: tuple[Way, ...]
    launch: float
    spread: Any


def price(work: Collective, reach: Reach, links: Links) -> Estimate:
    """A collective of a group that spreads like `reach`."""
    if reach.members == 1 or not work.nbytes:
        return NOTHING
    group = known(work.operation, reach, links)
    time, _ = fastest(work.nbytes, group)
    return Estimate(time, spread(group.spread, time, group.launch))


def seconds(work: Collective, reach: Reach, links: Links) -> tuple[Any, Any]:
    """Time, and the part of it that is no work; numbers or, where `work.nbytes` is one, arrays."""
    group = known(work.operation, reach, links)
    if not isinstance(work.nbytes, np.ndarray):
        return fastest(work.nbytes, group)[0], group.launch
    size = work.nbytes.astype(float)
    best = np.full(size.shape, math.inf)
    for way in group.ways:
        fill = way.per_byte * size
        time = way.latency + fill + 2 * way.pipe * np.sqrt(way.latency * fill)
        np.minimum(best, time, out=best, where=size <= way.limit)
    return best + group.begin, np.full(size.shape, group.launch)


def least(work: Collective, reach: Reach, links: Links) -> Any:
    """What nothing beats [s]: bytes that must leave a member, and the members of an island, at nominal rates."""
    n, (k, g), (_, d) = reach.members, reach.islands, reach.domains
    summed = links.up.switched and bool(tuner.generation(links.up.kind).channel) and not hosted(reach)
    inner, host, outer = {
        "all_reduce": (
            1.0 if summed else 2 * (d - 1) / d,
            2 * (n - d) / n / d,
            (1 if links.network_sums else 2 - 2 / k) / g,
        ),
        "all_to_all": ((d - 1) / n, (n - d) / n, (n - g) / n),
        "broadcast": (1.0, 1 / d, 1 / g),
        "reduce": (1.0, 1 / d, 1 / g),
    }.get(work.operation, ((n - 1) / n, (n - d) / n / d, (n - g) / n / g))
    return work.nbytes * max(
        inner / (links.up.bandwidth * reach.links) if d > 1 else 0.0,
        host / links.middle.bandwidth if hosted(reach) else 0.0,
        outer / links.out.bandwidth if k > 1 else 0.0,
    )


def multiprocessors(work: Collective, reach: Reach, links: Links) -> int:
    """Multiprocessors that a collective keeps from kernels while it runs."""
    if reach.members == 1 or not work.nbytes:
        return 0
    return fastest(work.nbytes, known(work.operation, reach, links))[1].multiprocessors


def use(work: Collective, reach: Reach, links: Links) -> Use:
    """What a collective occupies while it runs: links for as long as bytes move, multiprocessors all the time."""
    if reach.members == 1 or not work.nbytes:
        return ALONE
    _, way = fastest(work.nbytes, known(work.operation, reach, links))
    share = multiprocessors(work, reach, links) / links.cluster.gpu.multiprocessors
    return Use(way.per_byte * work.nbytes, way.busy, share)


def fastest(nbytes: float, group: Group) -> tuple[float, Way]:
    """Time of one collective, and the way it goes."""
    best, by = math.inf, group.ways[-1]
    for way in group.ways:
        if nbytes <= way.limit:
            fill = way.per_byte * nbytes
            time = way.latency + fill + 2 * way.pipe * math.sqrt(way.latency * fill)
            if time < best:
                best, by = time, way
    return best + group.begin, by


def known(operation: str, reach: Reach, links: Links) -> Group:
    """The ways of an operation, found once for each reach."""
    group = links.ways.get((operation, reach))
    if group is None:
        law = links.law(reach).pair if operation == "all_to_all" else links.law(reach).ring
        if isinstance(law, processes.ProcessLaw):
            way = processes.way(operation, reach, links)
            group = links.ways[operation, reach] = Group(law.begin, (way,), law.begin + way.latency, law)
            return group
        ways, begin = WAYS[operation](reach, links), law.begin + law.call
        if law.crowd and hosted(reach):
            crowded = (reach.members / 2) ** law.crowd
            ways = tuple(way._replace(per_byte=way.per_byte * crowded) for way in ways)
        launch = begin + min(way.latency for way in ways)
        wide = links.laws.outer if reach.islands.number > 1 else law
        group = links.ways[operation, reach] = Group(begin, ways, launch, wide)
    return group
