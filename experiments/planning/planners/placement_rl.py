"""Device placement by reinforcement learning: a sequence-to-sequence policy, trained by REINFORCE.

The reward is - sqrt(time), less a moving average; placements that fail count as slow ones (Mirhoseini et al. 2017,
arXiv 1706.04972). Times are those of Tarnawski's graphs here, the load of the fullest device, where the paper ran each
placement.
"""

from meshcast.experiments.planning.cores.learned.placement_planner import LearnedPlacement
from meshcast.simulator.ir.scheme import Paper


class PlacementRL(LearnedPlacement):
    paper = Paper("arXiv:1706.04972", "Device Placement Optimization with Reinforcement Learning", 2017)
    restrictions = ("shard or replicate operators", "split a group of operators", "prove anything")
