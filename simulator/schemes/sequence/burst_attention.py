"""BurstAttention: ring attention whose backward pass sends queries and their gradients round the ring, not keys.

Forward, keys and values travel as in ring attention: outputs of flash kernels on local blocks are merged by their row
sums. Backward, keys, values and their gradients stay on their ranks. Queries travel, with the gradient of the output
and two fp32 values a row and head in place of the output itself, and the gradients of queries a step behind them.

    forward   rank 1  q1 x kv1   q1 x kv0   q1 x kv2      backward   q1 x kv1   q0 x kv1   q2 x kv1

With b sequences of s tokens on p ranks, h and k the widths of queries and keys, a heads and e bytes an element, a rank
sends 2 (p-1)/p b s k elements forward and (1 + 2 (p-1)/p) b s h + 2 (p-1)/p b s a 4/e backward, where ring attention
sends 4 (p-1)/p b s k: about 3 against 4 with multi-head attention, but more with k < 3/4 h. `balance` orders positions
as in sequence/ring. Two of them over two axes, the outer first, form the double ring: inner steps merge in the
local memory of near ranks while the next outer shard is on its way.

Not modelled: the public code's default of sending the output in place of its row sums (optimize_bwd_comm: false);
sparse masks.

References: Sun et al. 2024, arXiv 2403.09347, section 3.2; https://github.com/MayDomine/Burst-Attention.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, SchemeOptions
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.attention_steps import mask_blocks
from meshcast.simulator.schemes.sequence.shared.query_ring import ring_of_queries
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme


class BurstAttention(RingScheme):
    kernels, kernels_reason = "flash", "computes the scores of queries from other ranks again, as flash kernels do"
    paper = Paper(
        "arXiv:2403.09347",
        "BurstAttention: An Efficient Distributed Attention Framework for Extremely Long Sequences",
        2024,
    )

    class Options(SchemeOptions):
        balance: Literal["contiguous", "striped", "zigzag"] = "zigzag"
        """Which positions a rank holds."""

    @property
    def token_order(self) -> str:
        return str(self.options.balance)

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        blocks = mask_blocks(self.token_order, self.ranks, operator.bidirectional)
        return ring_of_queries(operator, inner, self.ring_axes, blocks)

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n = setting.cp, setting.b * setting.s
        hops = (p - 1) / p * n
        yield ClosedForm("sent_forward", 2 * hops * setting.kv_width * 2, "section 3.2: keys and values, p-1 hops")
        rows = 2 * hops * setting.heads * 4
        queries = (2 * hops + (n if p > 1 else 0)) * setting.h * 2
        yield ClosedForm(
            "sent_backward",
            queries + rows,
            "section 3.2: queries and gradients of outputs p-1 hops, of queries p hops, and two values a row",
        )
        efficiency = {"contiguous": p / (2 * p - 1), "striped": setting.s / (setting.s + p - 1), "zigzag": 1.0}
        yield ClosedForm(
            "attention_efficiency",
            efficiency[self.token_order],
            "attention of all ranks over that of the slowest rank of each step",
        )
