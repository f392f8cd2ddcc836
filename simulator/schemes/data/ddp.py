"""PyTorch DDP: every rank holds the whole model, and gradients are all-reduced in buckets during the backward pass.

Each of N ranks processes its samples. Gradients are all-reduced once a step, in buckets, each as soon as the last
micro-batch's backward pass has computed its gradients: a rank sends 2 (N-1)/N g bytes, g the bytes of the gradients,
whatever the number of micro-batches. States are not sharded: 18 bytes per parameter with bf16 weights, fp32 gradients
and Adam. PyTorch's buckets hold every gradient once more, unless gradients are views of them.

    backward     layer 4 | layer 3 | layer 2 | layer 1 |
    all-reduce             layer 4 | layer 3 | layer 2 | layer 1 |

With k equal buckets, each with x seconds of the backward pass and y seconds of all-reduce, max(y, k y - (k-1) x)
seconds of communication are exposed: at least the last bucket.

Not modelled: PyTorch's first bucket has 1 MiB, whatever the others (`_DEFAULT_FIRST_BUCKET_BYTES`), so that its
all-reduce begins early and the last bucket has another remainder; gradients are copied into buckets that they are no
views of, and buckets are formed anew after the first step, in the order in which gradients came.

References: Li et al. 2020, arXiv 2006.15704, section 3.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.capabilities import KeepsBuckets, UpdatesMatrices
from meshcast.simulator.ir.ops import Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme, DataSetting


class DDP(DataScheme, KeepsBuckets, UpdatesMatrices):
    paper = Paper("arXiv:2006.15704", "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020)

    def keeps_bucket(self, param: Param) -> bool:
        return self.framework.gradient_buckets and self.mesh.size(self.reduces(param)) > 1

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        yield ClosedForm(
            "sent_per_step", 2 * (n - 1) / n * setting.grad_bytes, "section 2.2: one ring all-reduce of all gradients"
        )
        if n > 1:
            b, filled, summed = setting.buckets, setting.bucket_backward_s, setting.bucket_reduce_s
            visible = max(summed, b * summed - (b - 1) * filled)
            yield ClosedForm("exposed", visible, "section 3.2.3: at least the last of equal buckets")
        yield ClosedForm(
            "state_bytes_per_parameter", 2 + 4 + 12, "bf16 weights, fp32 gradients, fp32 master weights and two moments"
        )
