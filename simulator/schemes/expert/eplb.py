"""EPLB: all experts and copies of the popular ones are placed anew from time to time, so that ranks have equal loads.

A rank has slots for its E/P experts and for `replicas` more. Every `interval` steps the mean loads of that many steps
decide: each further copy goes to the expert with most tokens a copy, until all slots are taken; then copies in
descending order of their tokens go to the rank with the least load that has a slot left. The tokens of an expert are
spread evenly over its copies, whose gradients are summed in every step. Weights and optimizer states of copies that a
rank did not have are sent to it while the layers before compute.

    loads  9 4 2 1, 2 ranks with 3 slots: copies 2 2 1 1 -> 4.5 4.5 | 2 2 | 2 | 1 -> ranks {4.5, 2, 2}, {4.5, 2, 1}

A slot takes weights, gradients and optimizer states of an expert, used or not. DeepSeek-V3 has one redundant expert a
GPU; EPLB leaves the interval to its user. Even loads pay for the slots and for the exchange of token counts.

Not modelled: groups of experts that are kept on a node (`num_groups`); copies of an expert on the same rank, which EPLB
does not exclude.

References: https://github.com/deepseek-ai/EPLB, eplb.py (`replicate_experts`, `balanced_packing`); DeepSeek-AI 2024
(DeepSeek-V3), arXiv 2412.19437, section 3.4.
"""

from collections.abc import Sequence

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.routing import Placement, Routing
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.schemes.expert.shared.load_balancing import BalancedScheme, LayerTimes


class Eplb(BalancedScheme):
    paper = Paper("https://github.com/deepseek-ai/EPLB", "Expert Parallelism Load Balancer", 2025)

    class Options(BalancedScheme.Options):
        replicas: int = Field(default=1, ge=1, strict=True)
        """Slots of a rank for copies, beside those of its experts."""
        interval: int = Field(default=10, ge=1, strict=True)
        """Steps from a placement to the next, and steps whose loads it is chosen by."""

    @property
    def reserved_replicas(self) -> int:
        return int(self.options.replicas)

    def _foreign(self, placement: Placement) -> int:
        return self.reserved_replicas  # a rank has no further slots, whichever of its experts it owns

    @staticmethod
    def decide(options: "Eplb.Options", held: Placement, past: Sequence[Routing], times: LayerTimes) -> Placement:
        if len(past) % options.interval:
            return held
        recent = np.mean([routing.shares(times.experts) for routing in past[-options.interval :]], axis=0)
        return place_copies(recent.mean(axis=0), times.ranks, options.replicas)


def place_copies(loads: np.ndarray, ranks: int, replicas: int) -> Placement:
    """Places the experts and their copies.

    loads: of every expert, a number for each that the ranks divide; replicas: slots of a rank beside those of its share
        of the experts.
    """
    copies = np.ones(len(loads), int)
    for _ in range(ranks * replicas):
        open_to = np.where(copies < ranks, loads / copies, -1.0)
        if open_to.max() >= 0:
            copies[int(np.argmax(open_to))] += 1
    per_rank = len(loads) // ranks + replicas
    hosts: list[list[int]] = [[] for _ in loads]
    taken, filled = np.zeros(ranks), np.zeros(ranks, int)
    by_tokens = sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert))
    for expert in by_tokens:
        for _ in range(copies[expert]):
            with_room = [rank for rank in range(ranks) if filled[rank] < per_rank and rank not in hosts[expert]]
            if not with_room:  # what is left has this expert already
                break
            rank = min(with_room, key=lambda rank: (taken[rank], rank))
            hosts[expert].append(rank)
            taken[rank] += loads[expert] / copies[expert]
            filled[rank] += 1
    return Placement(tuple(map(tuple, _place_owners(hosts, ranks))))


def _place_owners(hosts: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Returns the hosts of every expert with its owner first: of those with fewest hosts first, the host that owns
    least."""
    owned, ordered = np.zeros(ranks, int), [list(each) for each in hosts]
    for expert in sorted(range(len(hosts)), key=lambda expert: (len(hosts[expert]), expert)):
        owner = min(hosts[expert], key=lambda rank: (owned[rank], rank))
        owned[owner] += 1
        ordered[expert] = [owner, *(rank for rank in hosts[expert] if rank != owner)]
    return ordered
