"""Ring attention: keys and values travel round a ring of ranks while each rank computes its queries against them.

Every rank holds 1/p of the positions of each sequence. At every step it attends to the keys and values at hand, sends
them to the next rank and receives those of the previous rank during the computation. Partial outputs are merged by
their row sums (online softmax), so no rank ever holds more than two shards of keys. Under a causal mask `balance` says
which positions a rank holds: contiguous shards leave the first rank a single block and the last rank all of them;
striped (every p-th position) and zigzag (a part from the start and a part from the end) balance the work. Kernels that
leave out whole tiles of a mask only (`tile`) gain less from balance, and nothing where a block is a single tile.

    p = 3   step 0        step 1        step 2
    rank 0  q0 x kv0      q0 x kv2      q0 x kv1
    rank 1  q1 x kv1      q1 x kv0      q1 x kv2
    rank 2  q2 x kv2      q2 x kv1      q2 x kv0

With n tokens and k the width of keys, 2 (p-1)/p n k elements are sent forward; backward their gradients travel too,
twice as many. A step takes max(block, transfer) and the merge of its output, by the kernels of `merge`. Where p/2
blocks per rank are ideal, the slowest rank takes the time of p - 1/2 with contiguous shards, p/2 (1 + (p-1)/s) striped,
and p/2 zigzag.

Eager PyTorch kernels merge o' into o by o - sigmoid(l' - l) (o - o'), in fp32, each operation a separate kernel: they
move 38 bytes per element of the output where a fused or scripted kernel moves 10. Running sums of gradients are fp32
too, and those of keys and values travel p times, in fp32.

Two rings over two axes, the outer first, form a double ring: while keys go round the inner ring of near ranks,
those of the next outer step are being sent. sequence/ulysses over an axis and a ring over another is USP.

References: Liu et al. 2023, arXiv 2310.01889, section 3; striped: Brandon et al. 2023, arXiv 2311.09431; zigzag and the
backward ring: Megatron-Core with Transformer Engine; double ring: Gu et al. 2024 (LoongTrain), arXiv 2406.18485.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.attention_mask import share_of_tiles
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.schemes.sequence.shared.attention_steps import MergeKernels
from meshcast.simulator.schemes.sequence.shared.ring_attention import RingScheme

TileSize = Annotated[int, Field(ge=1, strict=True)]


class Ring(RingScheme):
    paper = Paper("arXiv:2310.01889", "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023)

    class Options(SchemeOptions):
        balance: Literal["contiguous", "striped", "zigzag"] = "zigzag"
        """Which positions a rank holds."""

        merge: MergeKernels = "fused"
        """Kernels that merge the partial results of the steps: fused as in Transformer Engine; scripted, TorchScript's
        fuser on an fp32 output, as in zhuzilin/ring-flash-attention and USP; or eager PyTorch on fp32 copies as in
        torch. Beside an fp32 output gradients of keys and values travel in fp32.
        """

        tile: tuple[TileSize, TileSize] | None = None
        """Queries and keys of a tile of the attention kernel, where it leaves out only tiles that the mask hides whole;
        without it no pair that the mask hides is computed.
        """

    @property
    def kernel_tile(self) -> tuple[int, int] | None:
        tile: tuple[int, int] | None = self.options.tile
        return tile

    @property
    def token_order(self) -> str:
        return str(self.options.balance)

    @property
    def merge(self) -> MergeKernels:
        merge: MergeKernels = self.options.merge
        return merge

    def closed_forms(self, setting: SequenceSetting) -> Iterable[ClosedForm]:
        p, s = setting.cp, setting.s
        hops = (p - 1) / p * setting.b * s * setting.kv_width * 2
        yield ClosedForm("sent_forward", 2 * hops, "keys and values, p-1 hops")
        if self.merge != "fused" and p > 1:
            fp32 = 2 * setting.b * s * setting.kv_width * 4
            yield ClosedForm("sent_backward", 2 * hops + fp32, "keys and values p-1 hops, fp32 gradients p hops")
        else:
            yield ClosedForm("sent_backward", 4 * hops, "keys and values, and their gradients, p-1 hops each")
        efficiency = {"contiguous": p / (2 * p - 1), "striped": s / (s + p - 1), "zigzag": 1.0}
        if self.kernel_tile:
            diagonal = float(share_of_tiles(s // p, *self.kernel_tile))
            efficiency |= {"contiguous": (diagonal + (p - 1) / 2) / (diagonal + p - 1), "striped": 1.0}
        yield ClosedForm(
            "attention_efficiency",
            efficiency[self.token_order],
            "attention of all ranks over that of the slowest rank of each step",
        )
