"""ZeRO stage 1: the optimizer states are sharded over the data-parallel ranks.

Gradients are reduce-scattered, every rank updates its own 1/N of the weights, and the updated weights are all-gathered:
bucket by bucket before their first use in the next step where the framework overlaps, otherwise at the end of the step.
As many bytes as DDP when gradients and weights have one type: (N-1)/N (g + w) sent per rank. 6 + 12/N bytes per
parameter with bf16 weights and fp32 gradients.

With a second axis in `replicate`, the states are sharded in groups of F ranks, and R groups hold copies of them
(`num_distributed_optimizer_instances` of Megatron-Core): the shards of a bucket are all-reduced among the groups after
its reduce-scatter, and weights are all-gathered within a group. (F-1)/F (g + w) + 2 (R-1)/R g/F bytes per rank, and
6 + 12/F per parameter.

References: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Megatron-Core calls it the distributed optimizer:
docs/user-guide/features/dist_optimizer.md, megatron/core/distributed/param_and_grad_buffer.py.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting


class Zero1(DataScheme):
    paper = Paper("arXiv:1910.02054", "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)
    shards = ("optimizer",)
    names_axes = ("replicate",)

    class Options(SchemeOptions):
        replicate: str | None = None
        """The axis along which groups hold copies of the optimizer states."""

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        f, r = setting.n, setting.replicas
        sharded = (f - 1) / f * (setting.grad_bytes + setting.weight_bytes)
        among = 2 * (r - 1) / r * setting.grad_bytes / f
        yield ClosedForm("sent_per_step", sharded + among, "section 7.2.1, and an all-reduce of shards among groups")
        yield ClosedForm("state_bytes_per_parameter", 2 + 4 + 12 / f, "section 5.1 with fp32 gradients")
