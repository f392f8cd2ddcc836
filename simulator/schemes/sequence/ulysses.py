"""DeepSpeed-Ulysses: all-to-alls turn sharded sequences into sharded heads around attention.

Every operator but attention works on a single position at a time, so every rank holds 1/p of the positions of each
sequence. For attention an all-to-all gives each rank all positions of its heads: any mask is balanced, and attention
kernels see whole sequences. There is an all-to-all each for queries, keys, values and the output, and another for each
of their gradients. Where there are fewer key/value heads than ranks, ranks receive copies. Scans of Mamba-2 blocks and
of linear attention are sharded in the same way, by heads and groups. Attention across the frames of a video, whose
places are sharded, stays as it is.

    q, k, v (s/p, all heads) --all-to-all--> attention (s, heads/p) --all-to-all--> o (s/p, all heads)

With n tokens, h and k the widths of queries and keys (with the copies), each rank sends (2h + 2k) n/p (p-1)/p elements
forward and as many backward: the more ranks, the fewer per rank.

References: Jacobs et al. 2023, arXiv 2309.14509, section 3; copies of key and value heads: Gu et al. 2024 (LoongTrain),
arXiv 2406.18485, section 4. Over an axis, with sequence/ring over another, it is USP (Fang and Zhao 2024, arXiv
2405.07719) and LoongTrain's 2D-attention.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.mamba_operators import Scan
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import CoreAttention
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SequenceScheme
from meshcast.simulator.ir.settings import SequenceSetting


class Ulysses(SequenceScheme):
    paper = Paper(
        "arXiv:2309.14509",
        "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models",
        2023,
    )

    def layouts(self, operator: Operator) -> str | None:
        if isinstance(operator, Scan) or (isinstance(operator, CoreAttention) and operator.along == "s"):
            return "a"
        return "s" if operator.has("s") else None

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, n, kv = setting.cp, setting.b * setting.s, setting.kv_width
        copied = max(kv, kv * p // setting.kv_heads)
        volume = (2 * setting.h + 2 * copied) * n / p * (p - 1) / p * 2
        yield ClosedForm("sent_forward", volume, "section 3.2: queries, keys, values and the output")
        yield ClosedForm("sent_backward", volume, "section 3.2: their gradients")
        yield ClosedForm("attention_efficiency", 1.0, "every rank has whole sequences")
