"""Measures the closed forms of sequence schemes on one layer of context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, HostCopy, Op, UnitRun
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.ir.settings import SequenceSetting
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import make, remembered, sent_bytes


@dataclass(frozen=True)
class SequenceLayer(SequenceSetting):
    """A layer at a setting; of a video, a pair of layers."""

    def layer(self, use: str) -> tuple[UnitRun, Mesh]:
        """The layer under the scheme `use`, and the mesh."""
        return _lower_layer(self, use)

    def lower_stages(self, mesh: Mesh, schemes: Sequence[Scheme], attention: str = "flash") -> UnitRun:
        """The layer under `schemes`."""
        fields = {"hidden": self.h, "heads": self.heads, "kv_heads": self.kv_heads, "vocab": 64, "seq": self.s}
        fields |= {"frames": self.frames, "layers": 2} if self.frames > 1 else {"layers": 1}
        model = Model.model_validate(fields)
        blocks = Architecture(model, self.b, self.s, 64, attention=attention)
        stage = blocks.stage(range(model.layers), False, False)
        first, *others = Lowering(mesh, schemes, self.regather).run(stage).unit_runs
        joined = first.fragment.copy()
        for other in others:
            joined.forward += other.fragment.forward
            joined.backward += other.fragment.backward
            joined.tensor_uses += other.fragment.tensor_uses
        return replace(first, fragment=joined)


@remembered
def _lower_layer(setting: SequenceLayer, use: str) -> tuple[UnitRun, Mesh]:
    mesh = Mesh({f"cp{i}": n for i, n in enumerate(setting.grid or (setting.cp,))})
    return setting.lower_stages(mesh, [make(use, mesh, tuple(mesh.axes), **dict(setting.options))]), mesh


def kernels_for(use: str) -> str:
    """The attention kernels that a job with this scheme must have."""
    return getattr(find_scheme(use), "kernels", "") or "flash"


def has_frames(kind: type[Scheme]) -> bool:
    """Whether a scheme is for models of videos."""
    return getattr(kind, "position_axes", 1) > 1


OPTION_VALUES = (
    *(("balance", order) for order in ("striped", "contiguous", "zigzag")),
    *(("comm", way) for way in ("all_gather", "a2a", "p2p")),
    ("merge", "eager"),
    ("merge", "scripted"),
    *(("chunks", number) for number in (2, 4)),
)
"""Values of options that appear in closed forms."""


def settings(kind: type[Scheme]) -> Iterator[SequenceLayer]:
    """Numbers of ranks that divide the heads, or are multiples of the key-value heads; grids where a scheme has several
    axes, of as many groups as ranks in a team; videos where it needs them."""
    if kind.least_axes > 1:
        for grid in ((1, 1, 1), (1, 4, 1), (2, 1, 2), (2, 2, 2), (2, 3, 2), (3, 1, 3), (3, 2, 3)):
            for b, s, h, kv_heads in ((1, 288, 192, 24), (3, 144, 384, 6)):
                yield SequenceLayer(prod(grid), b, s, kv_heads, h, grid=grid)
        return
    if has_frames(kind):
        for cp, frames, b, s, h in product((1, 2, 3, 4, 6), (12,), (1, 3), (144, 288), (192, 384)):
            yield SequenceLayer(cp, b, s, h=h, frames=frames)
        return
    for cp, kv_heads in ((1, 24), (2, 6), (3, 6), (4, 8), (6, 6), (8, 24), (12, 6)):
        for b, s, h in ((1, 48, 192), (3, 96, 384)):
            for regather in (False, True):
                yield SequenceLayer(cp, b, s, kv_heads, h, regather)
            for name, value in OPTION_VALUES:
                if name in kind.Options.model_fields and (value != "a2a" or kv_heads % cp == 0):
                    yield SequenceLayer(cp, b, s, kv_heads, h, regather=cp % 4 == 0, options=((name, value),))


def of_family(ops: Sequence[Op]) -> list[Op]:
    """The ops on the streams of sequence schemes."""
    return [op for op in ops if op.stream.partition("-")[0] == "sequence"]


def sent_forward(setting: SequenceLayer, use: str) -> float:
    unit_run, mesh = setting.layer(use)
    return sent_bytes(of_family(unit_run.fragment.forward), mesh)


def sent_backward(setting: SequenceLayer, use: str) -> float:
    unit_run, mesh = setting.layer(use)
    return sent_bytes(of_family(unit_run.fragment.backward), mesh)


def sent_per_layer(setting: SequenceLayer, use: str) -> float:
    return sent_forward(setting, use) + sent_backward(setting, use)


def efficiency(ops: Sequence[Op]) -> float:
    """Attention of all ranks, divided evenly, over that of the slowest rank of every step."""
    works = [op.work for op in ops if isinstance(op.work, Attention)]
    return sum(work.flops for work in works) / sum(slowest_rank(work).flops for work in works)


def attention_efficiency(setting: SequenceLayer, use: str) -> float:
    unit_run, _ = setting.layer(use)
    there, back = (efficiency(ops) for ops in (unit_run.fragment.forward, unit_run.fragment.backward))
    assert abs(there - back) < 1e-12
    return there


def ring_hops(setting: SequenceLayer, use: str) -> int:
    """Hops round the ring in the forward pass."""
    unit_run, _ = setting.layer(use)
    return sum(op.name.startswith("ring ") for op in unit_run.fragment.forward)


def scores_kept(setting: SequenceLayer, use: str) -> float:
    """Bytes of the results of the softmax that wait for the backward pass."""
    unit_run, _ = setting.layer(use)
    tensor_uses = unit_run.fragment.tensor_uses
    return max((use.nbytes for use in tensor_uses if use.key.endswith(".softmax")), default=0)


def copied_forward(setting: SequenceLayer, use: str, back: bool) -> float:
    """Bytes copied to or from the host in the forward pass."""
    unit_run, _ = setting.layer(use)
    works = [op.work for op in unit_run.fragment.forward]
    return sum(work.nbytes for work in works if isinstance(work, HostCopy) and work.back == back)


MEASURES = {
    "copied_out_forward": partial(copied_forward, back=False),
    "copied_back_forward": partial(copied_forward, back=True),
    "scores_kept": scores_kept,
    "ring_hops": ring_hops,
    "sent_per_layer": sent_per_layer,
    "sent_forward": sent_forward,
    "sent_backward": sent_backward,
    "attention_efficiency": attention_efficiency,
}
