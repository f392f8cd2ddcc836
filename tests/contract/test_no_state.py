"""Schemes keep no state: one scheme object may lower several stages at a time, in any order."""

from __future__ import annotations

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module, Stage
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.ops import Fragment, StageOps
from meshcast.simulator.ir.scheme import LowerModule, MemoryScheme, Scheme
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.composed import axes_for, complete_schemes
from meshcast.validation.contract.laws import MIXED
from meshcast.validation.contract.measure import catalog_model, make
from tests.draws import drawn

OPTIONS: dict[str, dict[str, object]] = {
    "expert": {"routing": {"zipf": 1.0}},
    "memory/recompute-selective": {"modules": ("core_attn", "moe_act", "layernorm")},
}
"""Options of a family or a scheme under which modules are marked."""


def several(use: str) -> tuple[Mesh, Scheme]:
    """A scheme on two ranks along each of its axes."""
    options = OPTIONS.get(use, OPTIONS.get(use.partition("/")[0], {}))
    if use.startswith("expert/"):
        mesh = Mesh({"dp": 2}, {EXPERTS: {"edp": 1, "ep": 2}}, ["dp"])
        return mesh, make(use, mesh, ("ep",), **options)
    axes = axes_for(use, "x")
    mesh = Mesh(dict.fromkeys(axes or ["x"], 2))
    return mesh, make(use, mesh, axes, **options)


def stage(layers: range) -> Stage:
    model = Model(layers=4, hidden=64, heads=8, vocab=64, seq=16, dropout=0.1, tied=False, moe=MIXED)
    return Architecture(model, 4, 16, 64, replicas=2).stage(layers, 0 in layers, 3 in layers)


def lowered(scheme: Scheme, mesh: Mesh, layers: range) -> StageOps:
    return Lowering(mesh, [scheme], True).run(stage(layers))


@pytest.mark.parametrize("use", complete_schemes())
def test_lowering_assigns_nothing_to_a_scheme(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, scheme = several(use)
    before = dict(vars(scheme))

    def refuse(self: Scheme, name: str, value: object) -> None:
        raise AssertionError(f"{self.use} assigns {name} while it lowers")

    monkeypatch.setattr(Scheme, "__setattr__", refuse)
    lowered(scheme, mesh, range(4))
    assert {name: value for name, value in vars(scheme).items() if name in before} == before


@pytest.mark.parametrize(
    "use", drawn([use for use in complete_schemes() if use.startswith(("expert/", "memory/", "data/"))], keep=3)
)
def test_interleaved_lowerings_with_one_scheme_are_independent(use: str) -> None:
    mesh, scheme = several(use)
    alone = lowered(scheme, mesh, range(2)), lowered(scheme, mesh, range(2, 4))
    found: list[StageOps] = []

    class Nested(MemoryScheme):
        """Lowers another stage with the same scheme object in the middle of this one."""

        name = "nested"

        def lower(self, module: Module, inner: LowerModule) -> Fragment:
            if module.label == "moe" and not found:
                found.append(lowered(scheme, mesh, range(2, 4)))
            return inner(module)

    outer = Lowering(mesh, [scheme, Nested((), mesh=mesh)], True).run(stage(range(2)))
    assert [catalog_model(outer), catalog_model(*found)] == [catalog_model(one) for one in alone]


def test_the_options_of_these_tests_make_a_difference() -> None:
    """Uneven routing and recomputed modules are lowered otherwise than the defaults."""
    for use in ("expert/all-to-all", "memory/recompute-selective"):
        mesh, scheme = several(use)
        plain = make(use, mesh, scheme.axes)
        assert catalog_model(lowered(scheme, mesh, range(4))) != catalog_model(lowered(plain, mesh, range(4)))
