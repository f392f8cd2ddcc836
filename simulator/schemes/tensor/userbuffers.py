"""Transformer Engine userbuffers: `tp_comm_overlap` of Megatron-Core, NeMo and Megatron-Bridge.

Collectives of Megatron sequence parallelism are split and overlap the GEMM before or after them, in buffers that all
ranks of a scale-up domain can write to. All-gather and GEMM (forward QKV and MLP up-projection, input gradients of the
output and down-projections) are a ring exchange: copy engines bring the rows of the other ranks singly, each during
the GEMM on the rows before. Forward GEMM and reduce-scatter are pipelined: the GEMM is split into `splits` parts of its
columns, and a kernel on `sms` multiprocessors sums the rows of each part during the next.

    own rows | GEMM 0 | GEMM 1 | GEMM 2 | GEMM 3           columns | GEMM 0 | GEMM 1 | GEMM 2 | GEMM 3 |
             | pull 1 | pull 2 | pull 3 |                                   | sum 0  | sum 1  | sum 2  | sum 3 |

The reduce-scatter of input gradients is not split (`bulk` overlap): it runs during the GEMM of the weight gradient, and
the all-gather for that GEMM during that of the input gradient, as without userbuffers where the framework has
`overlap.gradients`. With p ranks, e seconds of a GEMM on 1/p of the rows and c seconds of a shard's transfer, the ring
exchange takes (p-1) max(c, e) + e seconds. The pipeline of n parts, with E seconds of the GEMM and C of the
reduce-scatter, takes (E + C + (n-1) max(E, C)) / n. The bytes sent are those of the collectives. One shard of an
all-gather is added as a buffer; not counted is that the library keeps a buffer of all rows for each GEMM all the time.

References: https://github.com/NVIDIA/TransformerEngine, in transformer_engine/: `split_overlap_ag`, `split_overlap_rs`,
`bulk_overlap` of common/comm_gemm_overlap/comm_gemm_overlap.cpp; the method of each GEMM, its splits and
multiprocessors: `initialize_ub` of pytorch/module/base.py; the loop: Wang et al. 2023, doi 10.1145/3567955.3567959.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.ops import Gemm
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.lowering.rewrite import Rewrite, split_work
from meshcast.simulator.schemes.tensor.shared.pulled_shards import PulledShards, loop_seconds
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import GemmCollective, OverlapSetting, make_part


class Userbuffers(PulledShards):
    paper = Paper("https://github.com/NVIDIA/TransformerEngine", "Userbuffers of Transformer Engine", 2023)

    class Options(SchemeOptions):
        splits: int = Field(default=4, ge=1, strict=True)
        """Parts of a GEMM whose reduce-scatter is pipelined (`num_splits`)."""
        sms: int = Field(default=16, ge=1, strict=True)
        """Multiprocessors of the kernel that sums the rows of a part (`num_sm`)."""

    def replace_scatter(self, rewrite: Rewrite, pair: GemmCollective) -> None:
        (product,), op, n = pair.products, pair.collective, self.options.splits
        assert isinstance(product.work, Gemm)
        if op.phase == "B" or product.work.n % n:
            return
        columns = replace(product.work, n=product.work.n // n)
        parts = [make_part(product, i, n, columns, product.after) for i in range(n)]
        shares = (replace(work, sms=self.options.sms) for work in split_work(pair.work, n))
        sums = [make_part(op, i, n, work, [part]) for i, (part, work) in enumerate(zip(parts, shares, strict=True))]
        rewrite.swap(product, parts)
        rewrite.swap(op, sums, sums)

    def closed_forms(self, setting: OverlapSetting) -> Iterable[ClosedForm]:
        p, n, e = setting.p, self.options.splits, setting.gemm_s / setting.p
        whole, sent = setting.gemm_s, (p - 1) / p * setting.output_s
        yield ClosedForm(
            "gather_seconds", loop_seconds(e, setting.input_s / p, [1] * (p - 1)), "the loop of Wang et al."
        )
        yield ClosedForm(
            "scatter_seconds", (whole + sent + (n - 1) * max(whole, sent)) / n, "split_overlap_rs: a pipeline of parts"
        )
        yield ClosedForm("sent_per_layer", setting.sent, "arXiv 2405.07719, table 2: overlap changes no bytes")
