"""Where the laws of tensor schemes are asked: one layer on tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simulator.lowering import Lowering
from simulator.mesh import Mesh
from simulator.models import Model
from simulator.models.blocks import Blocks
from simulator.ops import Link
from simulator.scheme import Scheme
from tests.contract.measure import make, saved, sent


@dataclass(frozen=True)
class LayerSetting:
    """A GPT layer (MHA, f = 4h, GELU, dropout, unfused attention) on t tensor ranks; b sequences of s tokens."""

    t: int = 1
    b: int = 1
    s: int = 64
    h: int = 128
    a: int = 8
    regather: bool = True
    attention: str = "unfused"
    more: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = field(default=())
    """Further schemes, with options."""

    def layer(self, use: str | None) -> tuple[Link, Mesh]:
        """The layers of a middle stage under the scheme `use`, and the mesh."""
        mesh = Mesh({"tp": self.t})
        model = Model(layers=8, hidden=self.h, heads=self.a, vocab=512, seq=self.s, dropout=0.1)
        schemes = [make(name, mesh, (), **dict(options)) for name, options in self.more]
        if use is not None:
            schemes.append(make(use, mesh, ("tp",) if use.startswith("tensor/") else ()))
        blocks = Blocks(model, self.b, self.s, 512, attention=self.attention)
        (link,) = Lowering(mesh, schemes, self.regather).run(blocks.stage(range(2), False, False)).links
        assert link.count == 2
        return link, mesh


def sent_per_layer(setting: Any, scheme: str) -> float:
    link, mesh = setting.layer(scheme)
    family = scheme.partition("/")[0]
    ops = [op for op in link.fragment.forward + link.fragment.backward if op.stream == family]
    return sent(ops, mesh)


def activations_per_layer(setting: LayerSetting, scheme: str) -> float:
    return saved(setting.layer(scheme)[0])


def _with(setting: LayerSetting, name: str) -> LayerSetting:
    return LayerSetting(**{**setting.__dict__, "more": ((name, ()),)})


def activations_per_layer_selective(setting: LayerSetting, scheme: str) -> float:
    return activations_per_layer(_with(setting, "memory/recompute-selective"), scheme)


def activations_per_layer_full(setting: LayerSetting, scheme: str) -> float:
    return activations_per_layer(_with(setting, "memory/recompute-full"), scheme)


def settings(kind: type[Scheme]) -> Iterator[LayerSetting]:
    for t in (1, 2, 4, 8):
        for b, s, h, a in ((1, 64, 128, 8), (3, 32, 64, 16), (2, 16, 192, 8)):
            for regather in (False, True):
                yield LayerSetting(t, b, s, h, a, regather)


MEASURES = {
    "sent_per_layer": sent_per_layer,
    "activations_per_layer": activations_per_layer,
    "activations_per_layer_selective": activations_per_layer_selective,
    "activations_per_layer_full": activations_per_layer_full,
}
