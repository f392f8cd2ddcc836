"""SmartMoE: every few steps experts change ranks, so that the loads of the last steps would have been balanced.

A trained router has favourites, and all ranks wait for the rank that holds them; which experts these are changes
slowly. Every n steps the loads of the last n predict those of the next n. Experts in descending order of load go to the
rank with the least load that has room, and weights and optimizer states of those that change ranks are sent there.

    steps    0 1 ... n-1 | move experts | n n+1 ... 2n-1 | move experts | ...

They move only if the time that a layer gains in n steps exceeds that of the move: with T(L) seconds of a layer whose
busiest rank has L times the mean load, n (T(L before) - T(L after)) > x W D / b, for x experts that the busiest rank
sends or receives, of W weights of D bytes each (with main weights and two moments 14 in mixed precision), at b bytes/s.
Even loads gain nothing: what is left is the exchange of the token counts.

Not modelled: the pool of parallel plans that is searched before training (a plan is what the job says); states sharded
over several groups of expert-parallel ranks.

References: Zhai et al. 2023, USENIX ATC, https://www.usenix.org/conference/atc23/presentation/zhai.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.routing import Placement, Routing
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.schemes.expert.shared.load_balancing import BalancedScheme, LayerTimes


class SmartMoE(BalancedScheme):
    paper = Paper(
        "https://www.usenix.org/conference/atc23/presentation/zhai",
        "SmartMoE: Efficiently Training Sparsely-Activated Models through Combining Offline and Online Parallelization",
        2023,
    )

    class Options(BalancedScheme.Options):
        interval: int = Field(default=10, ge=1, strict=True)
        """Steps from a choice of a placement to the next, and steps whose loads it is chosen by."""

    @staticmethod
    def decide(options: Any, held: Placement, past: Sequence[Routing], times: LayerTimes) -> Placement:
        if len(past) % options.interval:
            return held
        recent = np.mean([routing.shares(times.experts) for routing in past[-options.interval :]], axis=0)
        predicted = Routing(counts=tuple(map(tuple, recent.tolist())))
        balanced = balance_ranks(recent.mean(axis=0), held, times.ranks)
        gain = times.of_load(predicted, held) - times.of_load(predicted, balanced)
        return balanced if options.interval * gain > times.of_moves(held, balanced) else held


def balance_ranks(loads: np.ndarray, held: Placement, ranks: int) -> Placement:
    """Places experts in descending order of load, each to the least loaded group with room; a group goes to the rank
    that already owns most of it."""
    per_rank, owners = len(loads) // ranks, [hosts[0] for hosts in held.hosts]
    groups: list[list[int]] = [[] for _ in range(ranks)]
    for expert in np.argsort(-loads, kind="stable").tolist():
        with_room = (group for group in groups if len(group) < per_rank)
        min(with_room, key=lambda group: sum(loads[group])).append(expert)
    owned = {
        (i, rank): sum(owners[expert] == rank for expert in groups[i]) for i in range(ranks) for rank in range(ranks)
    }
    hosts: dict[int, tuple[int]] = {}
    taken: set[int] = set()
    for i, rank in sorted(owned, key=lambda pair: -owned[pair]):
        if groups[i][0] not in hosts and rank not in taken:
            hosts |= dict.fromkeys(groups[i], (rank,))
            taken.add(rank)
    return Placement(tuple(hosts[expert] for expert in range(len(loads))))
