"""ZeRO stage 1: the optimizer states are sharded over the data-parallel ranks.

Gradients are reduce-scattered, every rank updates its 1/N of the weights, and the updated weights are all-gathered:
bucket by bucket before their first use in the next step where the framework overlaps, otherwise at the end of the step.
As many bytes as DDP when gradients and weights have the same type: (N-1)/N (g + w) sent per rank. 6 + 12/N bytes per
parameter with bf16 weights and fp32 gradients.

With a second axis in `replicate`, the states are sharded in groups of F ranks, and R groups hold copies of them
(`num_distributed_optimizer_instances` of Megatron-Core): the shards of a bucket are all-reduced among the groups after
its reduce-scatter, and weights are all-gathered within a group. (F-1)/F (g + w) + 2 (R-1)/R g/F bytes per rank, and
6 + 12/F per parameter.

Programs that give whole parameters to ranks have no equal shards to gather: after the update the owners broadcast
(`weights`), rank after rank its flat share (InternEvo), or parameter after parameter (ZeroRedundancyOptimizer
of PyTorch). N or P broadcasts take the sum of (latency + bytes / bandwidth), the latency N or P times. With whole
parameters the gradients are all-reduced, by DDP around ZeroRedundancyOptimizer or by DeepSpeed's first stage 1: 1.5
times the bytes of DDP.

References: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Megatron-Core calls it the distributed optimizer:
docs/user-guide/features/dist_optimizer.md, megatron/core/distributed/param_and_grad_buffer.py. Broadcasts: InternLM/
InternEvo, internlm/solver/optimizer/hybrid_zero_optim.py; torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from collections.abc import Iterable
from math import ceil, log2
from typing import Literal

from meshcast.simulator.ir.capabilities import KeepsBuckets, UpdatesMatrices
from meshcast.simulator.ir.ops import BYTES, Collective, Op, Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting, sum_by_axes


class Zero1(DataScheme, KeepsBuckets, UpdatesMatrices):
    paper = Paper("arXiv:1910.02054", "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)
    shards = ("optimizer",)
    names_axes = ("replicate",)

    class Options(SchemeOptions):
        replicate: str | None = None
        """The axis along which groups hold copies of the optimizer states."""
        weights: Literal["all-gather", "broadcast shards", "broadcast parameters"] = "all-gather"
        """How updated weights reach the other ranks; broadcasts follow the update and do not overlap."""

    def keeps_bucket(self, param: Param) -> bool:
        return self.framework.gradient_buckets and self.mesh.size(self.reduces(param)) > 1

    def reductions(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> list[Op]:
        if self.options.weights != "broadcast parameters":
            return super().reductions(axes, elements, phase, when)
        work = Collective("all_reduce", elements * BYTES[self.framework.gradients], axes)
        return [Op("reduce grads", "data", work, [], phase, when)]

    @property
    def gathers_ahead_of_use(self) -> bool:
        return super().gathers_ahead_of_use and self.options.weights == "all-gather"

    def gather_updated(self, params: Iterable[tuple[Param, int]]) -> Iterable[Op]:
        if self.options.weights == "all-gather":
            yield from super().gather_updated(params)
            return
        if self.options.weights == "broadcast parameters":
            sizes = [(*self._gather_group(param), count) for param, count in params]
        else:
            wholes = sum_by_axes(params, self._gather_group)
            ranks = {axes: self.mesh.size(axes) for axes, _ in wholes}
            sizes = [(axes, elements // ranks[axes], ranks[axes]) for axes, elements in wholes]
        for axes, elements, count in sizes:
            work = Collective("broadcast", elements * BYTES[self.framework.weights], axes)
            if axes:
                yield from (Op("broadcast params", "data", work, [], "U") for _ in range(count))

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        f, r = setting.n, setting.replicas
        weights = (f - 1) / f if self.options.weights == "all-gather" else ceil(log2(f))
        reduced = (f - 1) / f + 2 * (r - 1) / r / f
        if self.options.weights == "broadcast parameters":
            reduced = 2 * (f * r - 1) / (f * r)
        sent = reduced * setting.grad_bytes + weights * setting.weight_bytes
        yield ClosedForm("sent_per_step", sent, "section 7.2.1; along a tree of broadcasts log2 f times w")
        yield ClosedForm("state_bytes_per_parameter", 2 + 4 + 12 / f, "section 5.1 with fp32 gradients")
