"""ZeRO stage 1: the optimizer states are sharded over the data-parallel ranks.

Gradients are reduce-scattered, every rank updates its own 1/N of the weights, and the updated weights are all-gathered:
bucket by bucket before their first use in the next step where the framework overlaps, otherwise at the end of the step.
As many bytes as DDP when gradients and weights have one type: (N-1)/N (g + w) sent per rank. 6 + 12/N bytes per
parameter with bf16 weights and fp32 gradients.

References: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Megatron-Core calls it the distributed optimizer.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting


class Zero1(DataScheme):
    paper = Paper("arXiv:1910.02054", "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)
    shards = ("optimizer",)

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        yield ClosedForm("sent_per_step", (n - 1) / n * (setting.grad_bytes + setting.weight_bytes), "section 7.2.1")
        yield ClosedForm("state_bytes_per_parameter", 2 + 4 + 12 / n, "section 5.1 with fp32 gradients")
