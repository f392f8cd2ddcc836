"""DeepSpeed's coordinator of parameters: sharded weights are all-gathered module by module, ahead of use.

When a module starts, its weights are gathered unless that has been asked for, and then those of the modules that
follow in the recorded order of the pass, until `prefetch_bucket` elements have been added or `max_live` elements are
whole. A module's weights are freed after its pass, unless it is soon needed again. A weight matrix that is larger than
the bucket is gathered ahead all the same, because the limit is read before each: matrices of 600 million elements
alternate with `max_live` at 1e9.

Gradients are reduced and sharded in buckets, in the order in which they are ready: those of a layer with more than
`reduce_bucket` elements in several, during its backward pass.

Where a layer is recomputed, its modules are needed twice in a backward pass. A module stays whole in between if other
modules use fewer than `max_reuse_distance` elements; of larger layers most modules are gathered a third time.

Not modelled: buckets with gradients of several layers; modules without weights, which ask for more, too; weights that
stay whole from the end of the forward pass on; the first step, in which the order is recorded.

Reference: DeepSpeed runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`), stage3.py
(`reduce_independent_p_g_buckets_and_remove_grads`), defaults of zero/config.py.
"""

from collections.abc import Sequence
from itertools import accumulate

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import Param
from meshcast.simulator.ir.scheme import SchemeOptions
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme
from meshcast.simulator.schemes.data.shared.reduce_buckets import fill_buckets


class CoordinatorOptions(SchemeOptions):
    prefetch_bucket: int = Field(default=50_000_000, ge=0)
    """Elements that a module asks for ahead, besides its weights: no further matrix is gathered once that many are."""
    max_live: int = Field(default=1_000_000_000, ge=0)
    """Elements from which on nothing is gathered ahead."""
    max_reuse_distance: int = Field(default=1_000_000_000, ge=0)
    """Elements from which on a module that is needed again is freed and gathered again."""
    reduce_bucket: int = Field(default=500_000_000, ge=0)
    """Elements of gradients that are reduced together; a larger matrix alone."""


class CoordinatedScheme(ShardedScheme):
    """Base of the stages of ZeRO that shard weights, as DeepSpeed runs them."""

    by_module = True

    @property
    def reuse(self) -> float:
        return float(self.options.max_reuse_distance)

    @property
    def bucket_elements(self) -> float:
        return float(self.options.reduce_bucket)

    def gradient_buckets(self, params: Sequence[Param]) -> list[list[Param]]:
        return fill_buckets(params, self.options.reduce_bucket)

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
