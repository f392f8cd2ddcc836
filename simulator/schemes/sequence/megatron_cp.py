"""Megatron context parallelism: one layout of tokens, and three algorithms for attention.

Every sequence is split into 2p parts; rank r holds parts r and 2p-1-r, so that the causal mask leaves all ranks the
same work. Weights are replicated. `comm` is the framework's ``cp_comm_type``:

    p2p         keys and values go round a ring during the computation (sequence/ring, zigzag)
    all_gather  keys and values are all-gathered, their gradients reduce-scattered (sequence/all-gather)
    a2a         all-to-alls turn sharded positions into sharded heads and back (sequence/ulysses)

Scans (Mamba-2 and linear attention) take all-to-alls with every `comm` (megatron/core/ssm/mamba_context_parallel.py).
``a2a+p2p`` is two of them: a2a over an inner axis and p2p over an outer axis. With n tokens and k the width of keys,
p2p and all_gather send 2 (p-1)/p n k elements forward and twice that backward (all_gather where keys are gathered
again); only p2p overlaps them. Tensor parallelism divides k. p2p supports no sliding windows or chunks.

With ``--hybrid-context-parallel`` every sample gets as many ranks as it needs: `batch.samples.join: hybrid-cp`.

References: Megatron-Core and Transformer Engine, https://github.com/NVIDIA/TransformerEngine, context_parallel.py; the
ring: Liu et al. 2023, arXiv 2310.01889.
"""

from collections.abc import Iterable
from typing import Any, Literal

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.mamba_operators import Scan
from meshcast.simulator.ir.modules import Module, Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Attention, Fragment
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Rule, SchemeOptions
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme

TENSORS = 4
"""Tensors that attention takes and gives in a pass: queries, keys, values and outputs, or their gradients."""

PART_LAUNCHES = 0.6
"""Time of the host to put a part of a document in its place, over that of an op of the framework: two numbers are read
from the GPU, and an arange and 5 to 8 kernels on single numbers launched, some 75 of 120 us (counted in the code).

With a2a the host goes through the parts of packed documents singly, two for each rank, in all releases that take
documents: Transformer Engine v2.10 to v2.17 (reorder_seq_chunks_after_a2a_before_attn_thd). v2.9 refuses them; v2.18 of
2026-08-04 has no loop, and neither Megatron-Core nor Megatron-Bridge v0.6.0 (2026-08-19) builds on it."""


class MegatronCP(RingScheme):
    paper = Paper("https://github.com/NVIDIA/TransformerEngine", "Context parallelism of Transformer Engine", 2024)

    class Options(SchemeOptions):
        comm: Literal["p2p", "all_gather", "a2a"] = "p2p"
        """How queries and keys come together."""

    @property
    def token_order(self) -> str:
        return "zigzag"

    @property
    def passes_keys(self) -> bool:
        return bool(self.options.comm == "p2p")

    def layouts(self, operator: Operator) -> str | Rule | None:
        if isinstance(operator, Scan):
            return "a"
        if isinstance(operator, CoreAttention) and not self.passes_keys and operator.along == "s":
            return "a" if self.options.comm == "a2a" else "s"
        return super().layouts(operator)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = super().lower(module, inner)
        if not isinstance(module, CoreAttention) or module.document is None or self.ranks == 1:
            return fragment
        if self.options.comm == "a2a":
            for op in (*fragment.forward, *fragment.backward):
                if isinstance(op.work, Attention):  # of which every document is a sequence
                    op.launches += PART_LAUNCHES * TENSORS * 2 * self.ranks * op.work.batch
        return fragment

    def check_job(self, job: Any) -> None:
        super().check_job(job)
        kinds = [(entry, find_scheme(entry.use)) for entry in job.plan.schemes]
        parts = self.ranks * self.mesh.size(axis for e, kind in kinds if kind.family == "tensor" for axis in e.over)
        if self.options.comm == "a2a" and self.ranks > 1 and job.model.kv_heads % parts:
            rule = f"with comm a2a key and value heads are divided by {parts} ranks, and never copied"
            raise PlanError("model.kv_heads", rule, "Use sequence/ulysses, or comm: p2p", job.model.kv_heads)

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p = setting.cp
        hops = (p - 1) / p * setting.b * setting.s * setting.kv_width * 2
        if self.options.comm == "a2a":
            switched = (p - 1) / p**2 * setting.b * setting.s * (2 * setting.h + 2 * setting.kv_width) * 2
            yield ClosedForm("sent_forward", switched, "a2a: queries, keys, values and outputs")
            yield ClosedForm("sent_backward", switched, "a2a: their gradients")
        else:
            yield ClosedForm("sent_forward", 2 * hops, "p2p, all_gather: keys and values")
            yield ClosedForm(
                "sent_backward", (4 if self.passes_keys or setting.regather else 2) * hops, "and gradients"
            )
        yield ClosedForm("attention_efficiency", 1.0, "two parts per rank: the same work on all ranks")
