"""Tables of layouts: for each operator the dim that each axis shards, and the dim along which its weights rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.schemas import BaseModel, BeforeValidator, ConfigDict, Field
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import LayersFrom, Operator
from meshcast.simulator.ir.operators import Boundary

ALL_OPERATORS = "all"
"""The entry of a table for every operator."""

Part = Literal["divide", "rest"]
PARTS: tuple[Part, ...] = get_args(Part)

ALL_AXES = ""
"""The key of dims that every axis of the scheme shards."""


def _as_list(dims: object) -> object:
    return () if dims is None else (dims,) if isinstance(dims, str) else dims


def _by_axis(entry: Any) -> Any:
    return entry if isinstance(entry, Mapping) else {ALL_AXES: entry}


Name = Annotated[str, Field(max_length=80)]
Dims = Annotated[tuple[Name, ...], BeforeValidator(_as_list, json_schema_input_type=str | tuple[str, ...] | None)]
"""Dims of which an axis shards the first that an operator has; none: every rank along the axis has the whole."""

AxisDims = Annotated[
    dict[Name, Dims], BeforeValidator(_by_axis, json_schema_input_type=dict[str, Dims] | str | tuple[str, ...] | None)
]
"""Dims by axis; without axes those of every axis of the scheme."""


Range = Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")]
Layers = Annotated[
    Range,
    BeforeValidator(lambda layers: str(layers) if type(layers) is int else layers, json_schema_input_type=int | Range),
]
"""The first and the last of several layers, or a single layer."""


class OperatorTable(BaseModel):
    """Layouts of operators by name; `all` stands for every operator that has the dim."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    layers: Layers | None = None
    """First and last layer that it is for (``0-17``), or a single layer. Default: all, and the ends."""
    divide: dict[Name, AxisDims] = {}
    """For each operator the dim that each axis shards."""
    rest: dict[Name, AxisDims] = {}
    """For each operator the dim along which each axis shards its weights between their uses."""

    def __repr__(self) -> str:
        return str(self.model_dump(exclude_defaults=True))

    @property
    def range(self) -> range | None:
        """The layers that it is for; None: everything."""
        if self.layers is None:
            return None
        first, _, last = self.layers.partition("-")
        return range(int(first), int(last or first) + 1)

    def covers(self, operator: Operator) -> bool:
        """Returns whether it is for the layers that the operator is in."""
        if self.range is None:
            return True
        return any(isinstance(mark, LayersFrom) and mark.first in self.range for mark in operator.marks)


class TableEntry(NamedTuple):
    """What the tables say about an axis at an operator.

    dim: the dim that the axis shards; empty: none.
    where: its place in the tables.
    """

    dim: str
    where: str


class OperatorTables:
    """The tables of a scheme. Of several entries the last counts, and an entry that names an operator before `all`.

    stream: dims of the residual stream between layers.
    axes: of the scheme.
    """

    def __init__(
        self, tables: Sequence[OperatorTable], stream: Mapping[str, tuple[str, ...]], axes: Sequence[str], mesh: Mesh
    ) -> None:
        self.tables, self.stream, self.axes, self.mesh = tuple(tables), stream, tuple(axes), mesh

    @property
    def borders(self) -> tuple[int, ...]:
        """Layers from which on other tables count; none if all tables are for all layers."""
        ranges = [table.range for table in self.tables if table.range is not None]
        return tuple(sorted({0, *(end for layers in ranges for end in (layers.start, layers.stop))})) if ranges else ()

    def divide(self, operator: Operator) -> dict[str, TableEntry]:
        """Returns what each axis shards at an operator."""
        return self._entries("divide", operator, operator.divisible_dims)

    def rest(self, operator: Operator) -> dict[str, TableEntry]:
        """Returns what each axis shards of the weights of an operator between their uses."""
        return self._entries("rest", operator, _dims_of_weights(operator))

    def _entries(self, part: Part, operator: Operator, legal: Iterable[str]) -> dict[str, TableEntry]:
        entries: dict[str, TableEntry] = {}
        for by_axis, where in self._tables_of(part, operator):
            for key, dims in by_axis.items():
                dim = next((dim for dim in dims if dim in legal), None) if dims else ""
                if dim is not None:
                    entry = TableEntry(dim, f"{where}.{key}" if key else where)
                    entries |= dict.fromkeys((key,) if key else self.axes, entry)
        return entries

    def _tables_of(self, part: Part, operator: Operator) -> Iterator[tuple[Mapping[str, tuple[str, ...]], str]]:
        """Yields the entries for an operator with their places, in ascending order of what counts."""
        if isinstance(operator, Boundary):
            if part == "divide":
                yield self.stream, "stream"
            return
        for name in (ALL_OPERATORS, operator.name):
            for number, table in enumerate(self.tables):
                entries: Mapping[str, Mapping[str, tuple[str, ...]]] = getattr(table, part)
                if name in entries and table.covers(operator):
                    yield entries[name], f"tables[{number}].{part}.{name}"

    # ------------------------------------------------------------------------------------------ legality

    def check(self, operators: Sequence[Operator], layers: int, where: str) -> None:
        """Raises PlanError for the first entry that does not fit the model.

        layers: of the model.
        where: place of the scheme in the job.
        """
        self._check_entry(
            [operator for operator in operators if isinstance(operator, Boundary)],
            "divide",
            self.stream,
            f"{where}.stream",
        )
        for number, table in enumerate(self.tables):
            place = f"{where}.tables[{number}]"
            if table.range is not None and not (table.range and table.range.stop <= layers):
                rule = "a range of layers goes from its first to its last, and the model has these"
                raise PlanError(f"{place}.layers", rule, f"Name some of 0-{layers - 1}", table.layers)
            covered = {
                operator.name: operator
                for operator in operators
                if table.covers(operator) and not isinstance(operator, Boundary)
            }
            for part in PARTS:
                for name, by_axis in getattr(table, part).items():
                    if name not in (ALL_OPERATORS, *covered):
                        remedy = nearest(name, [ALL_OPERATORS, *covered])
                        raise PlanError(f"{place}.{part}.{name}", "no such operator in these layers", remedy, name)
                    named = [covered[name]] if name in covered else list(covered.values())
                    self._check_entry(named, part, by_axis, f"{place}.{part}.{name}")
        for operator in operators:
            self._check_divided(operator, where)
            self._check_rest(operator, where)

    def _check_entry(
        self, operators: Sequence[Operator], part: Part, by_axis: Mapping[str, tuple[str, ...]], place: str
    ) -> None:
        """Checks that the axes exist and every operator has each of the dims; of several operators one has any of
        them."""
        legal = {
            dim
            for operator in operators
            for dim in (operator.divisible_dims if part == "divide" else _dims_of_weights(operator))
        }
        for axis, dims in by_axis.items():
            if axis and axis not in self.axes:
                raise PlanError(place, "no such axis in `over`", nearest(axis, self.axes), axis)
            wrong = [dim for dim in dims if dim not in legal]
            if wrong and (len(wrong) == len(dims) or len(operators) == 1):
                rule = "it cannot be divided along this dim" if part == "divide" else "no weight of it has this dim"
                remedy = f"Valid: {', '.join(sorted(legal)) or 'none'}"
                raise PlanError(f"{place}.{axis}" if axis else place, rule, remedy, wrong[0])

    def _check_divided(self, operator: Operator, where: str) -> None:
        """Checks that every dim divides by the axes that shard it."""
        divide, tensors = self.divide(operator), (*operator.ins, *operator.outs, *operator.weights)
        for axis, entry in divide.items():
            ranks = self.mesh.size([other for other in divide if divide[other].dim == entry.dim])
            if entry.dim and not _divides(tensors, entry.dim, ranks):
                raise self._indivisible(operator, axis, entry, ranks, operator.divisible_dims, tensors, where)

    def _check_rest(self, operator: Operator, where: str) -> None:
        """Checks that weights rest on axes that do not divide them in use, along dims that divide by these axes."""
        divide, rest = self.divide(operator), self.rest(operator)
        for axis, entry in rest.items():
            used = divide[axis].dim if axis in divide else ""
            weights = [weight for weight in operator.weights if not weight.has(used)]
            if entry.dim and not weights and f".{ALL_OPERATORS}" not in entry.where:
                rule = f"{axis} divides the weights of {operator.name} in use already, along {used}"
                raise PlanError(f"{where}.{entry.where}", rule, "Leave it out", entry.dim)
            sharding = [other for table in (divide, rest) for other in table if table[other].dim == entry.dim]
            ranks = self.mesh.size(dict.fromkeys(sharding))
            if entry.dim and not _divides(weights, entry.dim, ranks):
                raise self._indivisible(operator, axis, entry, ranks, _dims_of_weights(operator), weights, where)

    def _indivisible(
        self,
        operator: Operator,
        axis: str,
        entry: TableEntry,
        ranks: int,
        dims: Iterable[str],
        tensors: Sequence[Tensor],
        where: str,
    ) -> PlanError:
        units = sorted({_units(tensor.dims[entry.dim]) for tensor in tensors if tensor.has(entry.dim)})
        rule = (
            f"{operator.name} has {' and '.join(map(str, units))} along {entry.dim}, which {ranks} ranks do not divide"
        )
        legal = [dim for dim in dims if _divides(tensors, dim, self.mesh.size(axis))]
        remedy = f"Valid over {axis} = {self.mesh.size(axis)}: {', '.join(legal) or 'none'}"
        return PlanError(f"{where}.{entry.where}", rule, remedy, entry.dim)


def _dims_of_weights(operator: Operator) -> list[str]:
    return sorted({dim for weight in operator.weights for dim in weight.dims})


def _units(dim: Dim) -> int:
    return int(dim.size // dim.unit)


def _divides(tensors: Iterable[Tensor], dim: str, ranks: int) -> bool:
    return all(tensor.dims[dim].is_divisible_by(ranks) for tensor in tensors if tensor.has(dim))


def dims_by_part(entries: Mapping[str, TableEntry], mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Yields the dim of every part of the axes."""
    for axis, entry in entries.items():
        yield from ((part, entry.dim) for part in mesh.parts(axis))
