"""Where the laws of sequence schemes are asked: one layer, of whose sequences every rank has a part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.lowering import Lowering
from simulator.mesh import Mesh
from simulator.models import Model
from simulator.models.blocks import Blocks
from simulator.ops import Link
from simulator.scheme import Scheme
from tests.contract.measure import make
from tests.contract.of_tensor import sent_per_layer


@dataclass(frozen=True)
class SequenceSetting:
    """A layer on cp ranks that share b sequences of s tokens; keys and values are kv_width of h wide each."""

    cp: int = 1
    b: int = 1
    s: int = 48
    h: int = 64
    kv_width: int = 64
    regather: bool = True

    def layer(self, use: str) -> tuple[Link, Mesh]:
        mesh = Mesh({"cp": self.cp})
        model = Model(layers=1, hidden=self.h, heads=8, kv_heads=8 * self.kv_width // self.h, vocab=64, seq=self.s)
        blocks = Blocks(model, self.b, self.s, 64)
        lowering = Lowering(mesh, [make(use, mesh, ("cp",))], self.regather)
        (link,) = lowering.run(blocks.stage(range(1), False, False)).links
        return link, mesh


def settings(kind: type[Scheme]) -> Iterator[SequenceSetting]:
    for cp in (1, 2, 3, 8):
        for b, s, h, kv_width in ((1, 48, 64, 64), (3, 24, 128, 32)):
            for regather in (False, True):
                yield SequenceSetting(cp, b, s, h, kv_width, regather)


MEASURES = {
    "sent_per_layer": sent_per_layer,
}
