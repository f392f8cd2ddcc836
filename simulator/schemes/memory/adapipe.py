"""AdaPipe: every stage recomputes as little as its memory asks for, and stages that recompute more have fewer layers.

In 1F1B the first stages hold activations of more micro-batches than the last. Recomputation that is the same on all of
them wastes the memory of the last; recomputation that differs makes their times unequal. So both are chosen together:
for every range of layers that a stage could have the fewest recomputed ones with which it fits, and by dynamic
programming the ranges of the shortest step: a micro-batch's way through all stages and m - 1 times the slowest.

    memory of stage i of n layers, r of them recomputed: fixed_i + n layer_i - r saved_i

The terms are read from forecasts of a few partitions, so layer_i and saved_i are those of the micro-batches that the
schedule holds on stage i (1F1B: p - i). Where all fits, nothing is recomputed and the partition balances times; where
memory is too small even for full recomputation, all is. A `partition` of the plan other than `even` stays, and only
recomputation adapts.

Parts of layers (units: norms, functions of activation, the attention core, attention, the MLP) may be stated for every
layer; the planner `adapipe` chooses them by the paper's knapsack, and adds up warm-up, steady state and end of 1F1B
stage by stage. Simplified where nothing is stated: whole layers are recomputed, the first ones of a stage, stages begin
and end with whole layers, and the length of a step is the formula above.

References: Sun et al. 2024 (ASPLOS), https://doi.org/10.1145/3620666.3651359.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, repeat
from math import inf
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import AdaptsRecompute
from meshcast.simulator.ir.modules import Layer, Module, Stage, Unit, add_marks
from meshcast.simulator.ir.ops import Fragment, StageOps
from meshcast.simulator.ir.scheme import (
    RECOMPUTES,
    ClosedForm,
    LowerModule,
    LowerStage,
    MemoryScheme,
    Paper,
    Scheme,
    SchemeOptions,
)
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.schemes.memory.shared.recompute import (
    ModuleName,
    mark_layers,
    recompute,
    recompute_marked,
    recompute_marks,
)


class AdaPipe(MemoryScheme, AdaptsRecompute):
    role = RECOMPUTES
    paper = Paper(
        "https://doi.org/10.1145/3620666.3651359",
        "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning",
        2024,
    )

    class Options(SchemeOptions):
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, that are recomputed; null: chosen for every stage."""
        units: tuple[tuple[ModuleName | Literal["layer"], ...], ...] | None = None
        """Parts that are recomputed of every layer of a stage, from the first on: modules as those of
        memory/recompute-selective, or layer; of further layers none. null: what `layers` says."""

    @property
    def adapts_recompute(self) -> bool:
        return self.options.layers is None and self.options.units is None

    def recompute_layers(self, count: int) -> Scheme:
        return self.with_options(layers=count)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        if self.options.units is not None:
            return inner(replace(stage, units=tuple(self._mark_units(stage, self.options.units))))
        return inner(mark_layers(stage, self.options.layers or 0, self.role))

    def _mark_units(self, stage: Stage, layers: Iterable[tuple[str, ...]]) -> Iterator[Unit]:
        """Yields the units of a stage with marks for what is recomputed of them; runs of layers alike stay together."""
        runs = chain(((parts, len([*same])) for parts, same in groupby(layers)), repeat(((), inf)))
        parts, left = next(runs)
        for unit in stage.units:
            count = unit.count if isinstance(unit, Layer) else 0
            if not count:
                yield unit
            while count:
                while not left:
                    parts, left = next(runs)
                some = int(min(count, left))
                count, left = count - some, left - some
                run = replace(unit, count=some)
                if "layer" in parts:
                    yield replace(run, marks=run.marks | {self.role})
                else:
                    yield add_marks(run, recompute_marks(run, set(parts)))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if isinstance(module, Unit) and self.role in module.marks:
            return recompute(module, inner)
        return recompute_marked(module, inner)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("recomputed_forward_share", 0.0, "nothing is recomputed before a stage is short of memory")
