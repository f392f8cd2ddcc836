"""Where the laws of expert schemes are asked: one layer of experts that are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.expert_leaves import EXPERTS
from simulator.lowering import Lowering
from simulator.mesh import Mesh
from simulator.models import Model
from simulator.models.blocks import Blocks
from simulator.ops import Link
from simulator.scheme import Scheme
from tests.contract.measure import make
from tests.contract.of_tensor import sent_per_layer


@dataclass(frozen=True)
class ExpertSetting:
    """A layer of `experts` experts over ep ranks, each of which has b sequences of s tokens (or of s of their tokens).

    A token takes top_k x capacity places. over: the axis whose ranks they are: dp, cp or tp (sequence parallel).
    """

    ep: int = 1
    b: int = 1
    s: int = 16
    h: int = 32
    experts: int = 8
    top_k: int = 2
    capacity: float | None = None
    over: str = "dp"

    @property
    def places(self) -> float:
        return self.top_k * (self.capacity or 1)

    @property
    def model(self) -> Model:
        moe = {"experts": self.experts, "top_k": self.top_k, "expert_ffn": 16, "capacity": self.capacity}
        seq = self.s * (1 if self.over == "dp" else self.ep)
        return Model(layers=1, hidden=self.h, heads=8, vocab=64, seq=seq, moe=moe)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's routed experts."""
        return self.experts * self.model.mlp_parameters(16)

    def layer(self, use: str) -> tuple[Link, Mesh]:
        mesh = Mesh({self.over: self.ep}, {EXPERTS: {"edp": 1, "ep": self.ep}}, [self.over])
        others = {"dp": "data/ddp", "cp": "sequence/all-gather", "tp": "tensor/megatron-sp"}
        schemes = [make(others[self.over], mesh, (self.over,)), make(use, mesh, ("ep",))]
        model = self.model
        blocks = Blocks(model, self.b, model.seq, 64, self.ep if self.over == "dp" else 1)
        (link,) = Lowering(mesh, schemes).run(blocks.stage(range(1), False, False)).links
        return link, mesh


def expert_parameters(setting: ExpertSetting, use: str) -> int:
    link, _ = setting.layer(use)
    return sum(param.size for param in link.fragment.params if param.name.startswith(("wexpert", "bexpert")))


def settings(kind: type[Scheme]) -> Iterator[ExpertSetting]:
    for ep in (1, 2, 4, 8):
        for b, s, h, top_k, capacity in ((1, 16, 32, 2, None), (2, 32, 64, 1, 1.25), (1, 8, 32, 6, 1.0)):
            for over in ("dp", "cp", "tp"):
                yield ExpertSetting(ep, b, s, h, 8, top_k, capacity, over)


MEASURES = {
    "sent_per_layer": sent_per_layer,
    "expert_parameters": expert_parameters,
}
