"""The operator of what a traced model has beside the parts that are described."""

from __future__ import annotations

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.ops import Gemm, Memory, Work


@dataclass(frozen=True, eq=False)
class Undescribed(Operator):
    """Work of unknown operators on the residual stream [b, s, h]: their matrix products as a single one, of as many
    FLOPs, and their other kernels as a single one, of as many bytes. The backward pass has twice the products, and
    moves twice the bytes. Ranks that shard tokens share the work; those that shard widths repeat it.

    flops: of the products of a token, forward.
    moved: bytes of a token that the other kernels read and write, forward.
    saved: bytes of a token that are kept for the backward pass.
    """

    flops: float = 0.0
    moved: float = 0.0
    saved: float = 0.0

    def _tokens(self, at: LocalShapes) -> int:
        dims = at.dims(self.ins[0])
        return at.size(self.ins[0]) // int(dims["h"])

    def _work(self, at: LocalShapes, layout: str) -> list[Work]:
        tokens, width = self._tokens(at), int(at.dims(self.ins[0])["h"])
        half = round(self.moved * tokens / 2)
        kernels: list[Work] = [Memory("add", half, half)] if half and layout != "nt" else []
        columns = max(1, round(self.flops / (2 * width)))
        products: list[Work] = [Gemm(tokens, columns, width, 1, self.ins[0].dtype, layout, what="other")]
        return [*(products if self.flops else []), *kernels]

    def forward(self, at: LocalShapes) -> list[Work]:
        return self._work(at, "tn")

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        works = self._work(at, "nn")
        return [*works, *(work for work in works if isinstance(work, Memory))]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        return self._work(at, "nt") if self.weights else []

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        size = round(self.saved * self._tokens(at))
        return [("other", size, "workspace")] if size else []
