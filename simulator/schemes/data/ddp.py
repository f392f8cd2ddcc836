"""Distributed data parallelism: full copies, gradients summed in buckets behind the backward pass.

Every rank holds the whole model and its own samples. Gradients are all-reduced once a step, in buckets that leave
as soon as the last micro-batch's backward pass has filled them: 2 (N-1)/N g bytes sent per rank, g the bytes of
the gradients, whatever the number of micro-batches. States stay whole: 18 bytes a parameter with bf16 weights,
fp32 gradients and Adam.

    backward   layer 4 | layer 3 | layer 2 | layer 1 |
                         sum 4     sum 3     sum 2     sum 1

Of b equal buckets that take tb to make and tr to sum, max(tr, b tr - (b-1) tb) stays visible: the last always does.

References: Li et al. 2020, arXiv 2006.15704, section 3.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting


class DDP(DataScheme):
    paper = Paper("arXiv:2006.15704", "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020)

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        yield ClosedForm(
            "sent_per_step", 2 * (n - 1) / n * setting.grad_bytes, "section 2.2: one ring all-reduce of all gradients"
        )
        if n > 1:
            b, made, summed = setting.buckets, setting.bucket_backward_s, setting.bucket_reduce_s
            visible = max(summed, b * summed - (b - 1) * made)
            yield ClosedForm("exposed", visible, "section 3.2.3: of equal buckets, the last one at least")
        yield ClosedForm(
            "state_bytes_per_parameter", 2 + 4 + 12, "bf16 weights, fp32 gradients, fp32 master weights and two moments"
        )
