"""Measures the closed forms of tensor schemes on one layer of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Collective, Op, UnitRun
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.schemes.tensor.shared.tensor_grid import TensorGrid
from meshcast.validation.contract.measure import make, remembered, saved_bytes, sent_bytes


@dataclass(frozen=True)
class LoweredLayer(LayerSetting):
    """A layer at a setting.

    attention: attention kernel.
    more: further schemes, with options.
    """

    attention: str = "unfused"
    more: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = ()

    def layer(self, use: str | None) -> tuple[UnitRun, Mesh]:
        """The layers of a middle stage under the scheme `use`, and the mesh."""
        return _lower_layer(self, use)


@remembered
def _lower_layer(setting: LoweredLayer, use: str | None) -> tuple[UnitRun, Mesh]:
    mesh = Mesh({f"tp{i}": n for i, n in enumerate(setting.grid)} or {"tp": setting.t})
    model = Model(layers=8, hidden=setting.h, heads=setting.a, vocab=512, seq=setting.s, dropout=0.1)
    schemes = [make(name, mesh, (), **dict(options)) for name, options in setting.more]
    if use is not None:
        schemes.append(make(use, mesh, tuple(mesh.axes) if use.startswith("tensor/") else ()))
    blocks = Architecture(model, setting.b, setting.s, 512, attention=setting.attention)
    (unit_run,) = Lowering(mesh, schemes, setting.regather).run(blocks.stage(range(2), False, False)).unit_runs
    assert unit_run.count == 2
    return unit_run, mesh


def sent_per_layer(setting: Any, scheme: str) -> float:
    unit_run, mesh = setting.layer(scheme)
    family = scheme.partition("/")[0]
    ops = [op for op in unit_run.fragment.forward + unit_run.fragment.backward if op.stream.partition("-")[0] == family]
    return sent_bytes(ops, mesh)


def _bytes_of_products(ops: list[Op], mesh: Mesh) -> float:
    """Bytes sent of operands and results: all but the sums of norms."""
    works = [(op, op.work) for op in ops if op.stream != COMPUTE]
    return sent_bytes(
        [op for op, work in works if isinstance(work, Collective) and work.operation != "all_reduce"], mesh
    )


def sent_by_products_forward(setting: LoweredLayer, scheme: str) -> float:
    unit_run, mesh = setting.layer(scheme)
    return _bytes_of_products(unit_run.fragment.forward, mesh)


def sent_by_products_backward(setting: LoweredLayer, scheme: str) -> float:
    unit_run, mesh = setting.layer(scheme)
    return _bytes_of_products(unit_run.fragment.backward, mesh)


def parameters_per_layer(setting: LoweredLayer, scheme: str) -> float:
    return sum(param.size for param in setting.layer(scheme)[0].fragment.params)


def activations_per_layer(setting: LoweredLayer, scheme: str) -> float:
    return saved_bytes(setting.layer(scheme)[0], statistics=False)


def _with_scheme(setting: LoweredLayer, name: str) -> LoweredLayer:
    return LoweredLayer(**{**setting.__dict__, "more": ((name, ()),)})


def activations_per_layer_selective(setting: LoweredLayer, scheme: str) -> float:
    return activations_per_layer(_with_scheme(setting, "memory/recompute-selective"), scheme)


def activations_per_layer_full(setting: LoweredLayer, scheme: str) -> float:
    return activations_per_layer(_with_scheme(setting, "memory/recompute-full"), scheme)


SIDES = (1, 2, 3, 4)
"""Ranks along an axis of a square or a cube."""


def grids(kind: type[TensorGrid]) -> Iterator[tuple[int, ...]]:
    """Ranks along the axes of a scheme, at most 27 in all."""
    for sides in product(SIDES, repeat=len(kind.names)):
        if len({n for n, name in zip(sides, kind.names, strict=True) if name in kind.square}) == 1:
            if prod(sides) <= 27:
                yield sides


def settings(kind: type[Scheme]) -> Iterator[LoweredLayer]:
    if issubclass(kind, TensorGrid):
        for grid in grids(kind):
            for b, s, h, a in ((144, 1, 144, 12), (36 * grid[0], 2, 72, 36)):
                for regather in (False, True):
                    yield LoweredLayer(prod(grid), b, s, h, a, regather, grid=grid)
        return
    for t in (1, 2, 4, 8):
        for b, s, h, a in ((1, 64, 128, 8), (3, 32, 64, 16), (2, 16, 192, 8)):
            for regather in (False, True):
                yield LoweredLayer(t, b, s, h, a, regather)


MEASURES = {
    "sent_per_layer": sent_per_layer,
    "sent_by_products_forward": sent_by_products_forward,
    "sent_by_products_backward": sent_by_products_backward,
    "parameters_per_layer": parameters_per_layer,
    "activations_per_layer": activations_per_layer,
    "activations_per_layer_selective": activations_per_layer_selective,
    "activations_per_layer_full": activations_per_layer_full,
}
