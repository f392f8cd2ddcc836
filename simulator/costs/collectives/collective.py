"""Collectives: latency and bytes over the slowest tier, by the algorithm and protocol that NCCL chooses.

The time of an algorithm with a protocol for S bytes (the largest buffer of a rank) is

    launch + L + D + c S + 2 p sqrt(L c S)

L: its steps [s]; D: latency of links between blocks of nodes (`fabric`) [s]; c: seconds of a byte over the slowest
tier; p: data moves in chunks, and with chunks of the best size filling the channels and draining them take sqrt(L c S)
each (the optimum of a pipeline of steps); p is the share of that which is exposed. The tuner limits the sizes that each
algorithm is used for (`tuner`); of those in use the fastest
counts, so more bytes are never faster. Between nodes all algorithms compete.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.coefficients import estimate_sigma
from meshcast.simulator.costs.collectives import processes, tuner
from meshcast.simulator.costs.collectives.algorithms import ALGORITHMS, Algorithm
from meshcast.simulator.costs.collectives.links import Links, crosses_host
from meshcast.simulator.costs.estimate import ALONE, NOTHING, Estimate, Use
from meshcast.simulator.ir.ops import Collective


class Group(NamedTuple):
    """An operation of a group, independent of the bytes.

    Attributes:
        launch: of the call, and synchronisation of the members [s].
        algorithms: that may be used.
        overhead: the part of the time that moves no bytes [s].
        model: the cost model that states its `sigma`.
    """

    launch: float
    algorithms: tuple[Algorithm, ...]
    overhead: float
    model: Any


def price(work: Collective, reach: Reach, links: Links) -> Estimate:
    """Estimates the time of a collective in a group placed as `reach` says."""
    if reach.members == 1 or not work.nbytes:
        return NOTHING
    group = find_group(work.operation, reach, links)
    time, _ = choose_algorithm(work.nbytes, group)
    sigma = estimate_sigma(group.model, time, group.overhead)
    return Estimate(time, math.hypot(sigma, links.place_sigma(reach)))


def seconds(work: Collective, reach: Reach, links: Links) -> tuple[Any, Any]:
    """Computes the time [s] and the part of it that moves no bytes; arrays where `work.nbytes` is an array."""
    group = find_group(work.operation, reach, links)
    size = np.asarray(work.nbytes, float)
    best = np.full(size.shape, math.inf)
    for algorithm in group.algorithms:
        moving = algorithm.byte * size
        time = (
            algorithm.latency
            + algorithm.delay
            + moving
            + 2 * algorithm.exposed_fill * np.sqrt(algorithm.latency * moving)
        )
        np.minimum(best, time, out=best, where=size <= algorithm.max_bytes)
    return best + group.launch, np.full(size.shape, group.overhead)


def lower_bound(work: Collective, reach: Reach, links: Links) -> Any:
    """Returns the time [s] that no algorithm can beat: that of bytes which must leave a member and a node."""
    n, (k, g), (_, d) = reach.members, reach.nodes, reach.domains
    nvls = links.scale_up.switched and bool(tuner.generation(links.scale_up.kind).nvls_channel)
    inner, host, outer = {
        "all_reduce": (
            1.0 if nvls and not crosses_host(reach) else 2 * (d - 1) / d,
            2 * (n - d) / n / d,
            (1 if links.sharp else 2 - 2 / k) / g,
        ),
        "all_to_all": ((d - 1) / n, (n - d) / n, (n - g) / n),
        "broadcast": (1.0, 1 / d, 1 / g),
        "reduce": (1.0, 1 / d, 1 / g),
        "push_pull": (float(k == 1), float(k == 1 and crosses_host(reach)), 1.0),
    }.get(work.operation, ((n - 1) / n, (n - d) / n / d, (n - g) / n / g))
    return work.nbytes * max(
        inner / (links.scale_up.bandwidth * reach.links) if d > 1 else 0.0,
        host / links.host.bandwidth if crosses_host(reach) else 0.0,
        outer / links.port_rate(reach) if k > 1 else 0.0,
    )


def use(work: Collective, reach: Reach, links: Links) -> Use:
    """Returns what a collective occupies: links for as long as bytes move, multiprocessors for all of its time."""
    if reach.members == 1 or not work.nbytes:
        return ALONE
    _, algorithm = choose_algorithm(work.nbytes, find_group(work.operation, reach, links))
    share = algorithm.multiprocessors / links.cluster.gpu.multiprocessors
    return Use(algorithm.byte * work.nbytes, algorithm.busy, share)


def choose_algorithm(nbytes: float, group: Group) -> tuple[float, Algorithm]:
    """Returns the time [s] of a collective, and its algorithm: the fastest of those in use for this size."""
    best, chosen = math.inf, group.algorithms[-1]
    for algorithm in group.algorithms:
        if nbytes <= algorithm.max_bytes:
            moving = algorithm.byte * nbytes
            time = (
                algorithm.latency
                + algorithm.delay
                + moving
                + 2 * algorithm.exposed_fill * math.sqrt(algorithm.latency * moving)
            )
            if time < best:
                best, chosen = time, algorithm
    return best + group.launch, chosen


def find_group(operation: str, reach: Reach, links: Links) -> Group:
    """Returns the algorithms of an operation, computed once for each reach."""
    group = links.groups.get((operation, reach))
    if group is None:
        models = links.models_within_node(reach)
        model = models.all_to_all if operation == "all_to_all" else models.ring
        if isinstance(model, processes.ProcessCostModel):
            algorithm = processes.algorithm(operation, reach, links)
            group = links.groups[operation, reach] = Group(
                model.launch, (algorithm,), model.launch + algorithm.latency, model
            )
            return group
        algorithms, launch = ALGORITHMS[operation](reach, links), model.launch + model.call_overhead
        overhead = launch + min(algorithm.latency + algorithm.delay for algorithm in algorithms)
        of_sigma = links.models.network if reach.nodes.number > 1 else model
        group = links.groups[operation, reach] = Group(launch, algorithms, overhead, of_sigma)
    return group
