"""Llama 3 context parallelism: every rank holds 1/p of each sequence and all-gathers the keys and values of attention.

Every operator but attention works on a single position at a time and is sharded along the sequence. For attention every
rank all-gathers the keys and values of the whole sequence and computes the rows of its queries; backward, the gradients
of keys and values are reduce-scattered. With n tokens of the whole sequence and k the width of keys, a rank receives 2
(p-1)/p n k elements forward (few with grouped-query attention) and sends as many backward; they are all-gathered again
in the backward pass where the framework keeps only its shard. Each rank holds a block from the start of the
sequence and the matching block from its end, so that the causal mask leaves all ranks the same work.

Of packed documents `sharding: documents` divides every document so (Transformer Engine; WLB-LLM), and `sequence` the
sequence as a whole (Llama 3): ranks then have unequal pairs of tokens, and all wait for the rank with most, the `skew`
of a class of micro-batches.

    q, k, v (s/p) --all-gather k, v--> attention(q: s/p, k v: s) --> o (s/p)

References: Grattafiori et al. 2024 (Llama 3), arXiv 2407.21783, section 3.3.2; the balanced blocks: Megatron-Core and
arXiv 2310.03294; documents: Wang et al. 2025 (WLB-LLM), arXiv 2503.17924, section 5. Not modelled: kernels of short
parts of documents, which are slower.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.skewed_attention import SkewedAttention


class AllGather(SkewedAttention):
    paper = Paper("arXiv:2407.21783", "The Llama 3 Herd of Models", 2024)

    class Options(SchemeOptions):
        sharding: Literal["documents", "sequence"] = "documents"
        """What is divided among ranks: every document of a sequence, or the sequence as a whole."""

    def layouts(self, operator: Operator) -> str | None:
        return "s" if operator.has("s") else None

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n, kv = setting.cp, setting.b * setting.s, setting.kv_width
        volume = 3 if setting.regather else 2
        yield ClosedForm(
            "sent_per_layer",
            volume * 2 * (p - 1) / p * n * kv * 2,
            "keys and values all-gathered, their gradients reduce-scattered",
        )
