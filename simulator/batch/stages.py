"""Stages by their number of layers: each kind of stage is lowered once, with two layers, for any number of them; with a
data scheme that shards weights or gradients, for each number of layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field, replace
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import RecentResults, remember
from meshcast.simulator.batch.plain import find_data_scheme, inner_schemes, is_plain_stage, keeps_layers_alike
from meshcast.simulator.batch.tables import StageKind
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import Fragment, SideOps, StageOps, UnitRun
from meshcast.simulator.lowering.scatter_gather import has_backward, scatter_gather
from meshcast.simulator.lowering.scope import traits_of
from meshcast.simulator.plan.plan import Plan

LAYERS = 2
"""Layers of the stage that is lowered for all with layers: its runs of equal units have this count."""


@dataclass(eq=False)
class StageForm:
    """A kind of stage, lowered for any number of layers, without the ops of its data scheme; or for a number of layers,
    with them.

    runs: its units, with a count of `LAYERS` where that is the number of layers.
    traits: number that stands for the traits of its parameters: equal for equal ones.
    message_nbytes: bytes that a rank sends on; and whether anything comes back.
    sides: what its data scheme adds; None of a stage for any number of layers.
    plain: whether loops play it.
    priced: its passes, and what these are made of.
    """

    runs: list[UnitRun]
    traits: int
    message_nbytes: int
    has_backward: bool
    sides: Sides | None = None
    plain: bool = True
    priced: dict[Hashable, Any] = field(default_factory=dict)

    def layers_of(self, run: UnitRun, layers: int) -> int:
        """Returns how often a run of its units is in a stage of so many layers."""
        return layers if self.sides is None and run.count == LAYERS else run.count

    def with_layers(self, layers: int) -> StageOps:
        """Returns the ops of a stage of so many layers."""
        return StageOps([replace(run, count=self.layers_of(run, layers)) for run in self.runs])


FORM_BYTES = 6
"""Of what is made of a stage for its own number of layers, over its fragments, roughly."""

MAX_BYTES = 12_000_000
"""Bytes of stages for their own number of layers that are kept, half of them of those that were used before."""


def _count_form(form: StageForm) -> float:
    """Counts the bytes of a stage for its own number of layers."""
    return FORM_BYTES * float(sum(run.fragment.count_bytes() for run in form.runs))


@dataclass(eq=False)
class Sides:
    """What a data scheme adds to a stage; see `StageOps`. priced: its arrays, by direction and prices."""

    ahead: list[SideOps]
    behind: list[SideOps]
    priced: dict[Hashable, Any] = field(default_factory=dict)


class StageForms:
    """Stages of plans as they were lowered before.

    Every lowering of units under equal schemes has a number: meshes that differ in replicas and pipeline devices alone
    have the same.
    """

    def __init__(self, shared: SharedWork) -> None:
        self.shared = shared
        self._numbers: dict[Hashable, int] = {}
        self._traits: dict[Hashable, int] = {}
        self._lowerings: dict[Hashable, int] = {}
        self._forms: dict[Hashable, StageForm] = {}
        self._sharded: RecentResults[Hashable, StageForm] = RecentResults(_count_form)
        self._sides: dict[Hashable, Sides | None] = {}
        self._kept: list[object] = []  # whose ids are in keys

    @property
    def count(self) -> int:
        """Number of passes and side ops that are kept at their prices, but for those of sharded stages."""
        forms = sum(len(form.priced) for form in self._forms.values())
        return forms + sum(len(sides.priced) for sides in self._sides.values() if sides)

    def number_of(self, plan: Plan) -> int:
        """Returns the number of the lowering of the units of a plan."""
        job = plan.job
        key = inner_schemes(plan), plan.mesh, id(job.framework), id(job.model), id(job.plan)

        def find() -> int:
            self._kept.append((job.framework, job.model, job.plan))
            lowering = make_lowering(plan, self.shared.units, keeps_modules=True)
            architecture = plan.model_parts.architecture
            whole = lowering.unit_key, architecture.model, architecture.vocab, job.framework
            return remember(self._numbers, whole, lambda: len(self._numbers))

        return remember(self._lowerings, key, find)

    def form(self, plan: Plan, number: int, kind: StageKind, layers: int) -> StageForm:
        """Returns the form of a kind of stage of a plan with so many layers. number: of its lowering."""
        batch, scheme = plan.job.batch, find_data_scheme(plan)
        key = number, kind, batch.micro, batch.sequence, batch.document
        if keeps_layers_alike(scheme):
            return remember(self._forms, key, lambda: self._lower(plan, kind))
        if self._sharded.nbytes > MAX_BYTES / 2:
            self._sharded.age()
        return remember(self._sharded, (*key, layers, scheme), lambda: self._lower_sharded(plan, kind, layers))

    def _lower(self, plan: Plan, kind: StageKind) -> StageForm:
        lowering = make_lowering(plan, self.shared.units, keeps_modules=True)
        stage = plan.model_parts.architecture.stage(range(LAYERS * kind.layers), kind.first, kind.last)
        within = plan.schemes.index(find_data_scheme(plan)) + 1
        lowered = lowering.run(stage, kind.embeds, within)
        ops = scatter_gather(lowering, stage, lowered, *kind.gathers)
        traits = tuple((run.count == LAYERS, *map(traits_of, run.fragment.params)) for run in ops.unit_runs)
        number = remember(self._traits, traits, lambda: len(self._traits))
        return StageForm(ops.unit_runs, number, ops.message_nbytes, has_backward(ops))

    def _lower_sharded(self, plan: Plan, kind: StageKind, layers: int) -> StageForm:
        lowering = make_lowering(plan, self.shared.units, keeps_modules=True)
        stage = plan.model_parts.architecture.stage(range(layers), kind.first, kind.last)
        ops = scatter_gather(lowering, stage, lowering.run(stage, kind.embeds), *kind.gathers)
        traits = tuple((run.count, *map(traits_of, run.fragment.params)) for run in ops.unit_runs)
        number = remember(self._traits, traits, lambda: len(self._traits))
        sides = Sides(ops.ahead, ops.behind)
        return StageForm(ops.unit_runs, number, ops.message_nbytes, has_backward(ops), sides, is_plain_stage(ops))

    def sides(self, plan: Plan, form: StageForm, layers: int) -> Sides | None:
        """Returns what the data scheme of a plan adds to a stage of so many layers; None if it changes its units, or
        adds what only the stage's passes tell."""
        if form.sides is not None:
            return form.sides if form.plain else None
        scheme = find_data_scheme(plan)

        def add() -> Sides | None:
            plain = form.with_layers(layers)
            fragments = [run.fragment for run in plain.unit_runs]
            stage = scheme.lower_stage(plan.model_parts.architecture.stage(range(0), False, False), lambda _: plain)
            changed = _differ(fragments, [run.fragment for run in stage.unit_runs])
            return None if changed or not is_plain_stage(stage) else Sides(stage.ahead, stage.behind)

        return remember(self._sides, (scheme, form.traits, layers), add)


def _differ(before: list[Fragment], behind: list[Fragment]) -> bool:
    return len(before) != len(behind) or any(a is not b for a, b in zip(before, behind, strict=True))
