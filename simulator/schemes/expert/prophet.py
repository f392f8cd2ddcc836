"""Prophet: popular experts are shadowed on some ranks, planned by the last loads, and sent beside other computation.

The tokens of a step are spread much like those of the step before. So before a step, not when its tokens are known as
in FasterMoE, a planner chooses the experts whose weights are sent to other ranks (*Trans*), which process their
tokens with them; their gradients come back to the owner (*Agg*). Ranks with few tokens of an expert may be skipped. As
the choice is known early, Trans runs while earlier layers compute, and Agg beside the rest of the backward pass.

    weights   Trans 1   Trans 2   Trans 3                 Agg 3     Agg 2     Agg 1
    kernels   layer 0   layer 1   layer 2   layer 3  ...  layer 2   layer 1   layer 0

The planner takes the largest unshadowed expert of the most loaded rank as long as its estimate of a layer falls: with
t_c and t_x seconds of the experts' kernels and of all-to-alls under even loads, t_n of the linear layers before them
forward, L the largest load over the mean, and b and r seconds to broadcast and to reduce each of s shadows,

    T = (t_c + t_x) L + max(0, s b - t_c / 3 - t_n) + max(0, s r - 2 (t_c / 3 + t_n)).

An expert of W weights of D bytes goes to P - 1 - n ranks if n are skipped, and its gradients come back from them. Even
loads have no shadow: what is left is the exchange of the token counts.

Not modelled: transfers are not cut to fit under single kernels; weights are sent once a step, also for several
micro-batches.

References: Wang et al. 2023, Prophet, IEEE CLUSTER 2023; Wang et al. 2024, Pro-Prophet, arXiv 2411.10003: planner and
scheduler.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.routing import Placement, Routing
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.schemes.expert.shared.load_balancing import BalancedScheme, LayerTimes


class Prophet(BalancedScheme):
    paper = Paper(
        "arXiv:2411.10003",
        "Pro-Prophet: A Systematic Load Balancing Method for Efficient Parallel Training of Large-scale MoE Models",
        2024,
    )

    class Options(BalancedScheme.Options):
        skip: int = Field(default=0, ge=0, strict=True)
        """Ranks without a shadow of an expert: those with the fewest tokens of it."""
        interval: int = Field(default=1, ge=1, strict=True)
        """Steps from a plan to the next."""

    @staticmethod
    def decide(options: Any, held: Placement, past: Sequence[Routing], times: LayerTimes) -> Placement:
        if (len(past) - 1) % options.interval:
            return held
        last, hosts = past[-1], list(Placement.in_order(times.ranks, times.experts).hosts)
        shares = np.broadcast_to(last.shares(times.experts), (times.ranks, times.experts))

        def seconds(placement: Placement) -> float:
            shadows = sum(len(ranks) > 1 for ranks in placement.hosts)
            hiding = times.compute / 3 + times.others
            trans = max(0.0, shadows * times.broadcast - hiding)
            return times.of_load(last, placement) + trans + max(0.0, shadows * times.reduce - 2 * hiding)

        now = Placement(tuple(hosts), stays=True)
        while True:
            most = int(np.argmax(last.load(times.ranks, times.experts, placement=now).rank_loads))
            unshadowed = [expert for expert, ranks in enumerate(hosts) if ranks == (most,)]
            if not unshadowed:
                return now
            largest = max(unshadowed, key=lambda expert: float(shares[:, expert].sum()))
            hosts[largest] = _hosts_of_shadow(shares[:, largest], most, options.skip)
            candidate = Placement(tuple(hosts), stays=True)
            if seconds(candidate) >= seconds(now):
                return now
            now = candidate


def _hosts_of_shadow(tokens: np.ndarray, owner: int, skip: int) -> tuple[int, ...]:
    """Returns the owner of an expert and the other ranks, without the `skip` ones with the fewest tokens of it."""
    others = [rank for rank in np.argsort(-tokens, kind="stable").tolist() if rank != owner]
    return (owner, *sorted(others[: len(others) - skip] if skip else others))
