"""GSPMD and Mesh-TensorFlow annotations: a table says which dim of each operator each axis of the mesh shards.

The collectives follow from the layouts, as in GSPMD, OneFlow (SBP) and Mesh-TensorFlow: an operator needs its inputs
sharded along the dim of its table, produces outputs that lack this dim as partial sums, and what its neighbour has in
another layout is resharded in between. The residual stream between layers has a layout, `stream`, in all layers: a
layer converts its output to it, so layers may have their tables.

    tables:
      - divide: {all: {x: b}, qkv: {y: a}, core: {y: a}, proj: {y: a}, up: {y: f}, act: {y: f}, down: {y: f}}
        rest: {up: {x: h}, down: {x: h}}
      - layers: 0-17
        divide: {core: {x: s}}

`divide` gives for an operator (`qkv`, `core`, `proj`, `up`, `down`, `norm1`, `residual1`, `embedding`, `head`, `loss`,
...; `all` for every operator that has the dim) and an axis a dim: samples b, positions s, hidden h, heads a,
feed-forward f, vocabulary v, experts e. Of a list an axis shards the first that the operator has; a dim without an axis
is for all axes of `over`; null means that ranks along the axis do the same. `rest` shards weights between their uses:
all-gathered by the operator, gradients reduce-scattered. Of several entries the last counts, and an entry for an
operator before `all`. Equal steps over several axes are a single collective, so that 2 x 4 ranks do what 8 do.

A data scheme further out may have the same axes. Samples `b` then count those of all its ranks; it reduces in buckets
the gradients that are partial sums along these axes; and if it shards weights (data/fsdp), it does so in place of
`rest`, and gathers them ahead of their use.

Not modelled: partial sums that pass through an operator (`P, B -> P` of OneFlow); the moves within a rank, or between
ranks, that restore the order of shards where an outer axis is gathered before an inner axis of the same dim.

References: Xu et al. 2021, arXiv 2105.04663, section 3; Shazeer et al. 2018, arXiv 1811.02084; Yuan et al. 2021, arXiv
2110.15032. The default is the table of arXiv 1909.08053, section 3.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

from meshcast.simulator.ir.capabilities import AnnotatesOperators, PadsVocabulary
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.scheme import ClosedForm, Paper, Rule, SchemeOptions, TensorScheme
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.schemes.tensor.shared.operator_tables import (
    ALL_AXES,
    ALL_OPERATORS,
    AxisDims,
    OperatorTable,
    OperatorTables,
    dims_by_part,
)

MEGATRON = OperatorTable(divide={ALL_OPERATORS: {ALL_AXES: ("a", "f", "v")}})
"""Heads, feed-forward columns and vocabulary over all axes."""


class Annotated(TensorScheme, AnnotatesOperators, PadsVocabulary):
    paper = Paper("arXiv:2105.04663", "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021)

    class Options(SchemeOptions):
        tables: tuple[OperatorTable, ...] = (MEGATRON,)
        """Dims by operator and axis, for all layers or for some. Default: those of tensor/megatron."""
        stream: AxisDims = {}
        """The dim that each axis shards of the residual stream between layers."""

    @cached_property
    def tables(self) -> OperatorTables:
        return OperatorTables(self.options.tables, self.options.stream, self.axes, self.mesh)

    def layouts(self, operator: Operator) -> Rule | None:
        divide, rest = self.tables.divide(operator), self.tables.rest(operator)
        if not divide and not rest:
            return None
        return Rule(dict(dims_by_part(divide, self.mesh)), dict(dims_by_part(rest, self.mesh)))

    def check_operators(self, operators: Sequence[Operator], layers: int, where: str) -> None:
        self.tables.check(operators, layers, where)

    @property
    def layer_borders(self) -> tuple[int, ...]:
        return self.tables.borders

    @cached_property
    def vocabulary_axes(self) -> tuple[str, ...]:
        divisions = [dims for table in self.options.tables for dims in table.divide.values()]
        named = {axis for division in divisions for axis, dims in division.items() if "v" in dims}
        return self.over if "" in named else self.mesh.parts(axis for axis in self.axes if axis in named)

    @property
    def lowering_key(self) -> Hashable:
        return self.use, self.over, tuple(self.mesh.size(axis) for axis in self.over), str(self.options)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        t, b, s, h, a = setting.t, setting.b, setting.s, setting.h, setting.a
        yield ClosedForm(
            "sent_per_layer", 8 * (t - 1) / t * b * s * h * 2, "arXiv 1909.08053, section 3: four all-reduces, inferred"
        )
        yield ClosedForm(
            "activations_per_layer", s * b * h * (10 + 24 / t + 5 * a * s / (h * t)), "arXiv 2205.05198, equation 2"
        )
