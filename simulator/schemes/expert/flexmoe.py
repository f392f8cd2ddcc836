"""FlexMoE: popular experts get replicas on ranks with little load, and lose them when they are popular no more.

A rank has slots (*vExperts*) for its E/P experts and for some replicas. The tokens of an expert are spread evenly over
its replicas, whose gradients are summed in each step. Before a step, if the loads of the last step were unbalanced, a
scheduler *expands* the hottest expert of the most loaded rank to the least loaded rank with a free slot, *shrinks* the
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

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.routing import Placement, Routing
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.schemes.expert.shared.load_balancing import BalancedScheme, LayerTimes


class FlexMoE(BalancedScheme):
    paper = Paper(
        "arXiv:2304.03946",
        "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device Placement",
        2023,
    )

    class Options(BalancedScheme.Options):
        replicas: int = Field(default=1, ge=0, strict=True)
        """Slots of a rank for replicas, beside those of its experts."""
        threshold: float = Field(default=1.0, ge=1)
        """Load of the most loaded rank over the mean above which replicas are adjusted."""

    @property
    def reserved_replicas(self) -> int:
        return int(self.options.replicas)

    @staticmethod
    def decide(options: Any, held: Placement, past: Sequence[Routing], times: LayerTimes) -> Placement:
        last, now = past[-1], held

        def seconds(placement: Placement) -> float:
            return times.of_load(last, placement) + times.all_reduce * sum(len(ranks) > 1 for ranks in placement.hosts)

        while last.load(times.ranks, times.experts, placement=now).most_loaded > options.threshold:
            best = min(_adjustments(now, last, times, options.replicas), key=seconds, default=now)
            if seconds(best) >= seconds(now):
                break
            now = best
        return now


def _adjustments(now: Placement, last: Routing, times: LayerTimes, replicas: int) -> Iterator[Placement]:
    """Placements after Expand of the hottest expert of the most loaded rank to the least loaded rank with a free slot,
    after Expand to a rank whose coldest replica is shrunk for it, and after Shrink of the coldest expert with
    replicas."""
    loads, hosts = last.load(times.ranks, times.experts, placement=now).rank_loads, now.hosts
    shares = last.shares(times.experts).mean(axis=0) / [len(ranks) for ranks in hosts]
    most = int(np.argmax(loads))
    hottest = max((i for i, ranks in enumerate(hosts) if most in ranks), key=lambda i: float(shares[i]))
    replicated = sorted((i for i, ranks in enumerate(hosts) if len(ranks) > 1), key=lambda i: float(shares[i]))
    others = sorted({*range(times.ranks)} - {*hosts[hottest]}, key=lambda rank: loads[rank])
    hosted = {rank: [expert for expert in replicated if rank in hosts[expert][1:]] for rank in others}
    if (rank := next((rank for rank in others if len(hosted[rank]) < replicas), None)) is not None:
        yield _with_hosts(now, hottest, (*hosts[hottest], rank))
    if (rank := next((rank for rank in others if hosted[rank]), None)) is not None:
        coldest = hosted[rank][0]
        shrunk = _with_hosts(now, coldest, tuple(host for host in hosts[coldest] if host != rank))
        yield _with_hosts(shrunk, hottest, (*hosts[hottest], rank))
    if replicated:
        yield _with_hosts(now, replicated[0], hosts[replicated[0]][:-1])


def _with_hosts(now: Placement, expert: int, hosts: tuple[int, ...]) -> Placement:
    return replace(now, hosts=(*now.hosts[:expert], hosts, *now.hosts[expert + 1 :]))
