"""DistFlashAttn: ranks that the causal mask would leave idle compute blocks for later ranks.

Every rank holds one contiguous 1/p of the positions. In step t rank r attends to the keys and values of rank r-t, which
it fetches directly. The first t ranks have no such rank: they fetch queries of the last ranks instead, attend with
their own keys, and return the partial outputs one step later. So floor(p/2) steps after the diagonal one do the work of
p-1, and no masked block is sent. What the next step needs is fetched during the current one.

    p = 4   step 0      step 1      step 2 (no rank left to help)
    rank 0  q0 x kv0    q3 x kv0    .
    rank 1  q1 x kv1    q1 x kv0    .
    rank 2  q2 x kv2    q2 x kv1    q2 x kv0
    rank 3  q3 x kv3    q3 x kv2    q3 x kv1

A rank computes 1/2 + floor(p/2) blocks where p/2 would be ideal: nothing is lost for odd p, 1/(p+1) for even p. With n
tokens and k, h the widths of keys and queries, step t sends 2 k (p-t)/p + 2 h t/p of n/p elements per rank on average
(the second term where a rank helps, 2t < p) forward, without the row sums: (p-1)/p n h in all for MHA and odd p.
Backward, with the output, its gradient and the results, it is twice that.

References: Li et al. 2023, arXiv 2310.03294, sections 3.1 and 3.2.
"""

from collections.abc import Iterable
from fractions import Fraction

from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.attention_helpers import HelperAttention
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme


class DistFlashAttn(RingScheme):
    role = "schedule of helpers"
    kernels, kernels_reason = "flash", "skips masked blocks, which only flash kernels do"
    only_causal = True
    paper = Paper(
        "arXiv:2310.03294", "DISTFLASHATTN: Distributed Memory-efficient Attention for Long-context LLMs Training", 2023
    )

    @property
    def token_order(self) -> str:
        return "with helpers"

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        return HelperAttention(operator, inner, self.ring_axes, self.ranks).fragment

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, kv, h = setting.cp, setting.kv_width, setting.h
        n = setting.b * setting.s / p * 2
        forward = backward = Fraction(0)
        for t in range(1, p // 2 + 1):
            helpers = t if 2 * t < p else 0
            forward += Fraction((p - t) * 2 * kv + helpers * 2 * h, p)
            backward += Fraction((p - t) * 4 * kv + helpers * 4 * h, p)
        yield ClosedForm("sent_forward", float(forward * n), "section 3.1, summed over the steps")
        yield ClosedForm("sent_backward", float(backward * n), "section 3.1, summed over the steps")
        if p > 1:
            efficiency = 1.0 if p % 2 else p / (p + 1)
            yield ClosedForm("attention_efficiency", efficiency, "section 3.1: idle 1/(2p) of p^2 for even p")
