"""ZeRO stage 3: weights are sharded, too; units are gathered ahead of their passes up to a limit of elements in flight.

Before the forward pass of a unit, and again before its backward pass, its weights are all-gathered; afterwards they are
freed, and its gradients are reduce-scattered in every micro-batch. While a unit computes, further units are gathered
until `prefetch_bucket` elements are in flight, but none while `max_live` elements are whole. Parameters of fewer than
`persistence` elements stay whole: their updated shards are all-gathered once a step.

    forward    gather 1 | gather 2   gather 3   ...         backward   ... gather 2    gather 1
               ........ | compute 1  compute 2  ...                    ... compute 3   compute 2   compute 1
                                                                              reduce-scatter 3   reduce-scatter 2 ...

A rank sends 3 a (N-1)/N M bytes per step of a micro-batches, for M bytes of weights and of gradients. 16/N bytes per
parameter with 16-bit gradients, as shards of the weights are stored in the compute format and in that of the optimizer;
18/N with fp32 gradients.

Not modelled: all-gathers of parts of a unit, weights that are kept because they are needed again soon
(`max_reuse_distance`), gradient buckets across units.

References: Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.3 and 7.2.2; defaults: DeepSpeed zero/config.py.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from pydantic import Field

from simulator.ir.ops import Param
from simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from simulator.schemes.data.shared.data_parallel import DataSetting
from simulator.schemes.data.shared.fully_sharded import ShardedScheme


class Zero3(ShardedScheme):
    paper = Paper("arXiv:1910.02054", "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)
    updates_weights = False

    class Options(SchemeOptions):
        prefetch_bucket: int = Field(default=50_000_000, ge=0)
        """Elements that are gathered ahead: no further unit is started once that many are in flight."""
        max_live: int = Field(default=1_000_000_000, ge=0)
        """Elements from which on nothing is gathered ahead."""
        persistence: int = Field(default=100_000, ge=0)
        """Parameters with fewer elements are not sharded."""

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        if state == "parameters" and param.size < self.options.persistence:
            return ()
        return super().shards_at_rest(state, param)

    def prefetch_depth(self, forward: bool, sizes: Sequence[int]) -> int:
        if not self.framework.overlap.dp:
            return 0
        most = min(self.options.prefetch_bucket, self.options.max_live - sizes[0])
        # A unit is started while fewer than `most` elements are in flight.
        return sum(gathered - size < most for gathered, size in zip(accumulate(sizes[1:]), sizes[1:], strict=True))

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, a = setting.n, setting.batches
        small = setting.small(self.options.persistence)
        sharded_bytes = setting.weight_bytes - 2 * small
        moved = a * (2 * sharded_bytes + setting.grad_bytes) + 2 * small
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "section 7.2.2; small parameters once a step")
        if n > 1:
            whole = 2 * small / (setting.grad_bytes / 4)
            wanted = (18 - whole) / n + whole
            yield ClosedForm(
                "state_bytes_per_parameter", wanted, "section 5.3 with fp32 gradients; small weights are whole"
            )
