"""Spotlight: device placement as a Markov decision process, trained by proximal policy optimisation.

A step places a group of operators. Each batch of placements is used for several gradient steps, kept near the policy
that drew it (Gao et al. 2018, ICML, pages 1676-1684). Space, network and prices are those of `placement-rl`.
"""

from meshcast.experiments.planning.cores.learned.placement_planner import LearnedPlacement
from meshcast.simulator.ir.scheme import Paper


class Spotlight(LearnedPlacement):
    paper = Paper(
        "https://mlanthology.org/icml/2018/gao2018icml-spotlight",
        "Spotlight: Optimizing Device Placement for Training Deep Neural Networks",
        2018,
    )
    restrictions = ("shard or replicate operators", "split a group of operators", "prove anything")
    training = {"passes": 4, "penalty": 0.1}
