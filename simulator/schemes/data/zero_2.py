"""ZeRO stage 2: gradients and optimizer states are sharded over the data-parallel ranks, weights are not.

After the backward pass of every unit its gradients are reduce-scattered, in every micro-batch, and a rank keeps only
its shard. Every rank updates its 1/N of the weights, and the updated ones are all-gathered once a step: bucket
by bucket before their first use where the framework overlaps, otherwise at the end of the step.

    backward   compute 3   compute 2   compute 1                            update   all-gather
                       reduce-scatter 3   reduce-scatter 2   reduce-scatter 1

A rank sends (N-1)/N (a g + w) bytes per step of a micro-batches, for g bytes of gradients and w of weights: as many as
DDP with a single micro-batch, more with several. 2 + 16/N bytes per parameter with bf16 weights and fp32 gradients, and
unsharded gradients of the unit that computes and of the unit before it.

Not modelled: DeepSpeed fills buckets of 5e8 elements across units; here a unit is reduced at once, beside the memory of
such buckets (`reduce_buckets`).

References: Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.2 and 7.2.1.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.capabilities import UpdatesMatrices
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme


class Zero2(ShardedScheme, UpdatesMatrices):
    paper = Paper("arXiv:1910.02054", "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)
    shards = ("optimizer", "gradients")

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        moved = setting.batches * setting.grad_bytes + setting.weight_bytes
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "section 7.2.1, a reduce-scatter in every micro-batch")
        yield ClosedForm("state_bytes_per_parameter", 2 + 16 / n, "section 5.2 with fp32 gradients")
