"""FlexMoE: popular experts get replicas on ranks with little load, and lose them when they are popular no more.

A rank has slots (*vExperts*) for its E/P experts and for some replicas. The tokens of an expert are spread evenly over
its replicas, whose gradients are summed in each step. Before a step, if the loads of the last one were unbalanced, a
scheduler *expands* the hottest expert of the most loaded rank to the least loaded one with a free slot, *shrinks* the
coldest replicated expert, or does both, as long as its estimate of a step falls; weights and optimizer states of new
replicas are sent while the layers before compute.

With L_r/L the load of rank r over the mean, t_c and t_x seconds of the experts' kernels and all-to-alls of a layer
under even loads, and a_e of the all-reduce of expert e's gradients, the estimate is

    T = max over r of (t_c + t_x) L_r/L + sum of a_e over the experts with replicas.

It acts while max L_r/L exceeds a threshold. Memory: a slot takes weights, gradients and optimizer states of an expert,
16 W bytes for W weights in mixed precision, used or not; even loads pay for that and for the exchange of token counts.

Not modelled: the transfers are not in the estimate, since they run beside the step; Migrate, which brings replicas
onto fewer nodes.

References: Nie et al. 2023, arXiv 2304.03946: vExperts, Expand, Shrink, the scheduler and its cost model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from simulator.ir.routing import Placement, Routing
from simulator.ir.scheme import Paper
from simulator.schemes.expert.shared.load_balancing import BalancedScheme, LayerTimes


class FlexMoE(BalancedScheme):
    paper = Paper(
        "arXiv:2304.03946",
        "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device Placement",
        2023,
    )

    class Options(BalancedScheme.Options):
        replicas: int = Field(default=1, ge=0, strict=True)
        """Slots of a rank for replicas, beside those of its own experts."""
        threshold: float = Field(default=1.0, ge=1)
        """Load of the most loaded rank over the mean above which replicas are adjusted."""

    @property
    def reserved_replicas(self) -> int:
        return int(self.options.replicas)

    @staticmethod
    def decide(options: Any, held: Placement, past: Sequence[Routing], times: LayerTimes) -> Placement:
        last, now = past[-1], held

        def seconds(placement: Placement) -> float:
            return times.of_load(last, placement) + times.all_reduce * sum(len(one) > 1 for one in placement.hosts)

        while last.load(times.ranks, times.experts, placement=now).most_loaded > options.threshold:
            best = min(_adjustments(now, last, times, options.replicas), key=seconds, default=now)
            if seconds(best) >= seconds(now):
                break
            now = best
        return now


def _adjustments(now: Placement, last: Routing, times: LayerTimes, replicas: int) -> Iterator[Placement]:
    """The placement after Expand, after Shrink, and after both."""
    shrunk = _shrink(now, last, times)
    for one in (now, shrunk):
        if one is not None and (expanded := _expand(one, last, times, replicas)) is not None:
            yield expanded
    if shrunk is not None:
        yield shrunk


def _share_of_a_host(now: Placement, last: Routing, times: LayerTimes) -> np.ndarray:
    return last.shares(times.experts).mean(axis=0) / [len(hosts) for hosts in now.hosts]


def _expand(now: Placement, last: Routing, times: LayerTimes, replicas: int) -> Placement | None:
    """The hottest expert of the most loaded rank gets a replica on the least loaded rank with a free slot."""
    loads, shares = last.load(times.ranks, times.experts, placement=now).rank_loads, _share_of_a_host(now, last, times)
    most = int(np.argmax(loads))
    hottest = max((i for i, hosts in enumerate(now.hosts) if most in hosts), key=lambda i: float(shares[i]))
    used = np.bincount([rank for hosts in now.hosts for rank in hosts[1:]], minlength=times.ranks)
    free = [rank for rank in range(times.ranks) if used[rank] < replicas and rank not in now.hosts[hottest]]
    if not free:
        return None
    return _with_hosts(now, hottest, (*now.hosts[hottest], min(free, key=lambda rank: loads[rank])))


def _shrink(now: Placement, last: Routing, times: LayerTimes) -> Placement | None:
    """The coldest expert with replicas loses its youngest."""
    shares = _share_of_a_host(now, last, times)
    coldest = min((i for i, hosts in enumerate(now.hosts) if len(hosts) > 1), key=lambda i: shares[i], default=None)
    return None if coldest is None else _with_hosts(now, coldest, now.hosts[coldest][:-1])


def _with_hosts(now: Placement, expert: int, hosts: tuple[int, ...]) -> Placement:
    return replace(now, hosts=(*now.hosts[:expert], hosts, *now.hosts[expert + 1 :]))
