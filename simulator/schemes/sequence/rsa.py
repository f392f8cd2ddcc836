"""Ring self-attention (RSA), of Colossal-AI: keys and values go round a ring one after the other; scores are kept.

Every rank holds 1/p of the positions of each sequence. Keys go round the ring once, until a rank has the scores of its
queries against all keys; after the softmax the values go round it for the output. So the softmax sees whole rows, with
unfused kernels, and the scores of s/p queries against s keys stay in memory. Backward, values and keys go round again,
and each rank's gradients of all keys and of all values are summed by an all-reduce.

    scores = q k0 | q k1 | ... (ring of k)   softmax   o = P0 v0 + P1 v1 + ... (ring of v)

With b sequences of s tokens, hidden size h (multi-head attention) and a heads, a rank sends 2 (p-1)/p b s h elements
forward and 6 (p-1)/p backward, 8 in all as in tensor parallelism, and keeps a b s^2/p scores. Kernels wait for every
message, as in the public code. Masked scores are computed too.

Of a model with `projected_keys` (Linformer) each rank projects its keys and values to k positions by its own rows of
the matrices; all-reduces sum them, and backward their gradients. No ring follows: a rank sends 4 (p-1)/p b k h elements
each way, whatever the length, and keeps a b s k/p scores and 2 s k/p weights, all linear in s/p.

References: Li et al. 2021, arXiv 2105.13120; https://github.com/hpcaitech/ColossalAI, legacy/nn/layer/
parallel_sequence/_operation.py; projection: Wang et al. 2020 (Linformer), arXiv 2006.04768.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.capabilities import TakesProjectedKeys
from meshcast.simulator.ir.modules import Module, Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.ops import Fragment
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, Rule
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme
from meshcast.simulator.schemes.sequence.shared.score_ring import attend_by_scores


class Rsa(RingScheme, TakesProjectedKeys):
    kernels, kernels_reason = "unfused", "keeps the scores, which flash kernels never write"
    role = "ring of scores"
    paper = Paper("arXiv:2105.13120", "Sequence Parallelism: Long Sequence Training from System Perspective", 2021)

    @property
    def token_order(self) -> str:
        return "with kept scores"

    def layouts(self, operator: Operator) -> str | Rule | None:
        # Every rank has the projected keys and values of all positions.
        return "s" if _has_projected_keys(operator) else super().layouts(operator)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        return inner(module) if _has_projected_keys(module) else super().lower(module, inner)

    def attend(self, operator: CoreAttention, inner: LowerModule) -> Fragment:
        return attend_by_scores(operator, inner, self.ring_axes, self.ranks)

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n = setting.cp, setting.b * setting.s
        hops = (p - 1) / p * n * setting.kv_width * 2
        yield ClosedForm("sent_forward", 2 * hops, "a ring of keys and a ring of values")
        yield ClosedForm(
            "sent_backward", 6 * hops, "two rings, and all-reduces of the gradients of all keys and values"
        )
        scores = setting.heads * setting.b * setting.s**2 / p
        if p > 1:
            yield ClosedForm("scores_kept", 2 * scores, "the rows of a rank's queries, in bf16")


def _has_projected_keys(module: Module) -> bool:
    """Whether it is attention to keys whose positions are not those of tokens."""
    return isinstance(module, CoreAttention) and not module.ins[1].renamed
