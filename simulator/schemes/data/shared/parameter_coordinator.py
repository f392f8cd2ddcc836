"""DeepSpeed's coordinator of parameters: sharded weights are all-gathered module by module, ahead of use.

When a module starts, its own weights are gathered unless that has been asked for, and then those of the modules that
follow in the recorded order of the pass, until `prefetch_bucket` elements have been added or `max_live` elements are
whole. A module's weights are freed after its pass. A weight matrix that is larger than the bucket is gathered ahead all
the same, because the limit is read before each: matrices of 600 million elements alternate with `max_live` at 1e9.

Not modelled: modules without weights, which ask for more, too; weights that stay whole because they are needed again
soon (`max_reuse_distance`); the first step, in which the order is recorded.

Reference: DeepSpeed runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`), defaults of zero/config.py.
"""

from collections.abc import Sequence
from itertools import accumulate

from pydantic import Field

from simulator.ir.scheme import SchemeOptions
from simulator.schemes.data.shared.fully_sharded import ShardedScheme


class CoordinatorOptions(SchemeOptions):
    prefetch_bucket: int = Field(default=50_000_000, ge=0)
    """Elements that a module asks for ahead, besides its own: no further matrix is gathered once that many are."""
    max_live: int = Field(default=1_000_000_000, ge=0)
    """Elements from which on nothing is gathered ahead."""


class CoordinatedScheme(ShardedScheme):
    """Base of the stages of ZeRO that shard weights, as DeepSpeed runs them."""

    by_module = True

    def reach(self, forward: bool, sizes: Sequence[int]) -> Sequence[int]:
        if not self.gathers_ahead:
            return range(1, len(sizes) + 1)
        until, reached = [], 0
        ends = [0, *accumulate(sizes)]
        for place in range(len(sizes)):
            reached = max(reached, place + 1)
            begin = ends[reached]
            room = min(self.options.prefetch_bucket, self.options.max_live - (begin - ends[place]))
            while reached < len(sizes) and ends[reached] - begin < room:
                reached += 1
            until.append(reached)
        return until
