"""The table of a model's operators at the prices of the forecast: what `tensor/annotated` executes, factor by factor.

A variable is an operator of a layer or of the ends of the model, and ``stream``, the residual stream between units; all
layers share their variables, also layers of several kinds. Its options are the legal layouts: for every axis of the
mesh a dim, or none (all ranks along it do the same). Operators of experts have a single option, without axes: what the
expert scheme of the plan gives them, in their view of the mesh. A factor is

* an operator: its kernels, saved buffers, weights, sums of weight gradients over ranks, and their share of the update;
* a tensor with its producer and all its readers: collectives between their layouts, each once for all readers of a
  layout, sums of gradients, and the copies that are saved for the backward pass.

A collective of a gradient runs beside the weight gradients of the operator that makes it, an all-gather that is done
again in the backward pass beside the gradients of inputs: what is left of it counts. Where the framework issues
collectives in order, nothing hides them. The sum of all factors leaves out what overlaps otherwise, so it is no bound:
plans that it chooses are forecast again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.problem import Allowed, Dims, allow_all
from meshcast.experiments.planning.table import Factor, Kept, PendingFactor, PendingTable
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered_by
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.resident_memory import DeviceParams, resident_bytes
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.layout import Layout, Tensor, collectives_between, output_layout, required_layout
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Operator, Unit
from meshcast.simulator.ir.operators import Boundary, CoreAttention, Embedding, Head, Linear
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Memory, Op, Param
from meshcast.simulator.lowering.operator import lower_operator
from meshcast.simulator.plan.plan import Plan

STREAM = "stream"
"""The variable of the residual stream."""


def legal_layouts(
    operator: Operator, axes: Sequence[str], mesh: Mesh, tried: Iterable[Dims] | None = None
) -> list[Dims]:
    """Returns every layout of an operator in which all dims divide by the axes that shard them.

    tried: layouts that are looked at; None: all.
    """
    tensors = (*operator.ins, *operator.outs, *operator.weights)

    def divides(layout: Mapping[str, str]) -> bool:
        for dim in {*layout.values()} - {""}:
            ranks = mesh.size([axis for axis in layout if layout[axis] == dim])
            if not all(tensor.dims[dim].is_divisible_by(ranks) for tensor in tensors if tensor.has(dim)):
                return False
        return True

    if tried is None:
        choices = product(("", *operator.divisible_dims), repeat=len(axes))
        tried = (tuple(zip(axes, dims, strict=True)) for dims in choices)
    return [layout for layout in tried if divides(dict(layout))]


@dataclass(eq=False)
class OperatorCost:
    """What an operator costs in a layout.

    divide: the layout.
    forward, inputs, weights: seconds of the forward pass, and of gradients of inputs and weights.
    once: seconds of a step for its parameters of all units [s].
    nbytes: of its states and saved buffers [bytes].
    saved: bytes of tensors that its backward pass reads, by memory key.
    """

    divide: Layout
    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    once: float = 0.0
    nbytes: float = 0.0
    saved: dict[str, float] = field(default_factory=dict)


class TensorRead(NamedTuple):
    """How an operator in a layout reads a tensor.

    tensor: as it reads it.
    needed: the layout that it needs.
    key: of the copy in memory in that layout.
    gradient: the layout of the gradient that it makes, in dims of the producer; empty where it makes none.
    saved: bytes of the tensor that its backward pass reads, by memory key.
    """

    tensor: Tensor
    needed: Layout
    key: str
    gradient: tuple[tuple[str, str], ...] | None
    saved: dict[str, float]


class UnitTable:
    """Factors of the operators and tensors of a unit.

    plan: whose framework, costs and mesh are used.
    unit: the unit.
    axes: that shard.
    count: of equal units.
    choices: the options of all variables so far; those of this unit are added.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        unit: Unit,
        axes: Sequence[str],
        count: int,
        choices: dict[str, tuple[Dims, ...]],
        allowed: Allowed,
    ) -> None:
        self.plan, self.costs, self.unit, self.count, self.choices = plan, costs, unit, count, choices
        self.framework = plan.job.framework
        lowering = make_lowering(plan)
        self.scope, self.mesh = lowering.scope, lowering.scope.mesh
        self.scope.enter(unit)
        self.scope.embeds = True  # the stage has both ends: a tied output layer reads the table of the embedding
        self.operators = unit.operators()
        self.costs_of: dict[Operator, list[OperatorCost]] = {}
        self._moves: dict[Any, tuple[list[Collective], float]] = {}
        self._shapes: dict[tuple[Tensor, bool], int] = {}
        self._kinds: dict[Any, int] = {}
        for operator in self.operators:
            name = self.variable(operator)
            layouts: tuple[Dims, ...] = ((),)
            if not operator.view:
                candidates = getattr(allowed, "candidates", None)
                tried = candidates(name, ("", *operator.divisible_dims), axes) if candidates else None
                legal = legal_layouts(operator, axes, self.mesh, tried)
                layouts = tuple(layout for layout in legal if allowed(name, layout))
            if name in choices and choices[name] != layouts:
                layouts = tuple(layout for layout in choices[name] if layout in layouts)
            if not layouts:
                rule = f"a planner's restrictions leave {name} no layout over {dict(self.mesh.axes)}"
                raise PlanError("model", rule, "Choose fewer ranks, or a planner with fewer restrictions", name)
            choices[name] = layouts
        for operator in self.operators:
            self.costs_of[operator] = [self._price(operator, layout) for layout in choices[self.variable(operator)]]

    def variable(self, operator: Operator) -> str:
        """Returns the name of the variable that decides the layout of an operator."""
        return STREAM if isinstance(operator, Boundary) else operator.name

    def division(self, operator: Operator, layout: Dims) -> Layout:
        """Returns the dim that every part of the mesh shards, in a layout; of experts, what their scheme says."""
        if operator.view:
            return self.scope.division(operator)
        return {part: dim for axis, dim in layout if dim for part in self.mesh.parts(axis)}

    # --------------------------------------------------------------------------------------- operators

    def seconds(self, ops: Sequence[Op] | Sequence[Collective | Memory]) -> float:
        """Returns the seconds of ops, or of pieces of work, in sequence."""
        works = (op.work if isinstance(op, Op) else op for op in ops)
        estimates = (self.costs.estimate(work) for work in works if work is not None)
        return sum(estimate.seconds + estimate.latency for estimate in estimates)

    def _price(self, operator: Operator, layout: Dims) -> OperatorCost:
        check_time()
        divide = self.division(operator, layout)
        if isinstance(operator, Boundary):
            return OperatorCost(divide)
        if not operator.view:
            self.scope.fix_division(operator, divide)
        fragment = lower_operator(self.scope, operator, self.framework.fused_gradients, self.framework.gradients)
        phases = [[op for op in fragment.backward if (op.phase == "W") == weights] for weights in (False, True)]
        inputs, weights = map(self.seconds, phases)
        operator_cost = OperatorCost(divide, self.seconds(fragment.forward), inputs, weights)
        operator_cost.once = sum(self._update_seconds(param) for param in fragment.params if param.trained)
        params = DeviceParams((param, 1) for param in fragment.params)
        operator_cost.nbytes = sum(resident_bytes(self.plan, params).values())
        tensors = {tensor.name for tensor in (*operator.ins, *operator.outs)}
        for key, nbytes in self._saved_buffers(fragment).items():
            if key.partition("@")[0] in tensors:
                operator_cost.saved[key] = nbytes
            else:
                operator_cost.nbytes += nbytes
        return operator_cost

    def _update_seconds(self, param: Param) -> float:
        """Returns the seconds of the update of a parameter of all units: sums over ranks, norm, optimizer, zeroing."""
        framework = self.framework
        size = self.count * param.size
        width, main = BYTES[framework.gradients], framework.main_copy_bytes
        moments = framework.update.states.element_bytes(framework.moments)
        written = BYTES[framework.weights] + main + moments
        works = [
            Memory("grad-norm", round(size * width), 0),
            Memory("adam", round(size * (width + main + moments)), round(size * written)),
            Memory("zero-grad", 0, round(size * width)),
        ]
        reduced = self.seconds([Collective("all_reduce", round(size * width), param.partial)]) if param.partial else 0.0
        # Parameters share these kernels: their launches count once a step, not once a parameter.
        launch = self.seconds([Memory(work.what, 0, 0) for work in works])
        return reduced + max(0.0, self.seconds(works) - launch)

    def _saved_buffers(self, fragment: Fragment) -> dict[str, float]:
        """Buffers that live from the forward to the backward pass of an operator, or that its backward pass reads."""
        backward, forward = set(fragment.backward), set(fragment.forward)
        before = {use.key for use in fragment.tensor_uses if use.op in forward}
        return {
            use.key: float(use.nbytes)
            for use in fragment.tensor_uses
            if use.op in backward and use.key in before and not use.key.startswith("d:")
        }

    def operator_factors(self) -> Iterator[Factor]:
        for operator, costs in self.costs_of.items():
            if isinstance(operator, Boundary):
                continue
            seconds = np.array([cost.forward + cost.inputs + cost.weights for cost in costs])
            once, nbytes = (np.array([getattr(cost, name) for cost in costs]) for name in ("once", "nbytes"))
            yield Factor((self.variable(operator),), self.count * seconds, once, self.count * nbytes)

    # ----------------------------------------------------------------------------------------- tensors

    def tensor_factors(self) -> Iterator[PendingFactor]:
        """Yields a factor for every tensor that other operators read than its producer, which is not priced yet."""
        for name, readers in self.scope.readers.items():
            if name in self.scope.producer and self.scope.producer[name][1] not in readers:
                tensor, producer = self.scope.producer[name]
                operators = [producer, *dict.fromkeys(readers)]
                scope = tuple(dict.fromkeys(self.variable(operator) for operator in operators))
                yield PendingFactor(scope, partial(self._tensor_factor, tensor, operators, scope))

    def _tensor_factor(
        self, tensor: Tensor, operators: Sequence[Operator], scope: tuple[str, ...], kept: Kept
    ) -> Factor:
        """Returns the conversions and saved copies of a tensor: only what its layouts tell apart is priced.

        operators: its producer, and its readers. kept: numbers of the options of the variables of `scope`.
        """
        costs = [[self._costs(operator)[number] for number in kept[self.variable(operator)]] for operator in operators]
        keys = [
            [self._traits(tensor, operator, cost, operator is operators[0]) for cost in operator_costs]
            for operator, operator_costs in zip(operators, costs, strict=True)
        ]
        # Of every variable: the classes of its options that the price tells apart, and the class of every option.
        positions = [[i for i, operator in enumerate(operators) if self.variable(operator) == name] for name in scope]
        first: list[list[int]] = []
        of_option: list[np.ndarray] = []
        for places in positions:
            traits = [*zip(*(keys[i] for i in places), strict=True)]
            classes = {key: place for place, key in reversed([*enumerate(traits)])}
            numbers = {key: number for number, key in enumerate(classes)}
            first.append([*classes.values()])
            of_option.append(np.array([numbers[key] for key in traits]))
        seconds, nbytes = (np.zeros([len(classes) for classes in first]) for _ in range(2))
        at = [scope.index(self.variable(operator)) for operator in operators]
        for cell in np.ndindex(*seconds.shape):
            check_time()
            chosen = [costs[i][first[place][cell[place]]] for i, place in enumerate(at)]
            seconds[cell], nbytes[cell] = self._price_tensor(tensor, operators, chosen)
        seconds, nbytes = (array[np.ix_(*of_option)] for array in (seconds, nbytes))
        return Factor(scope, self.count * seconds, np.zeros(seconds.shape), self.count * nbytes)

    def _costs(self, operator: Operator) -> list[OperatorCost]:
        if operator in self.costs_of:
            return self.costs_of[operator]
        # The border of the unit: the stream that enters it.
        return [OperatorCost(self.division(operator, layout)) for layout in self.choices[STREAM]]

    def _traits(self, tensor: Tensor, operator: Operator, cost: OperatorCost, makes: bool) -> tuple[object, ...]:
        """Returns all of a layout that the price of a tensor depends on."""
        role = tensor if makes else self._as_read(operator, tensor)
        layout = operator.output_layout(role, cost.divide) if makes else required_layout(role, cost.divide)
        needed = required_layout(role, cost.divide) if makes else output_layout(role, cost.divide)
        beside = (0.0, 0.0) if makes else (cost.weights, cost.inputs)
        saved = tuple(_saved_of(tensor, cost).items())
        return tuple(sorted(layout.items())), tuple(sorted(needed.items())), beside, saved

    def _as_read(self, operator: Operator, tensor: Tensor) -> Tensor:
        return next(read for read in operator.ins if read.name == tensor.name)

    def _price_tensor(
        self, tensor: Tensor, operators: Sequence[Operator], costs: Sequence[OperatorCost]
    ) -> tuple[float, float]:
        """Returns the seconds of a micro-batch, and bytes, of a tensor by the costs of its producer and readers."""
        producer, producer_cost = operators[0], costs[0]
        output, wanted = (
            producer.output_layout(tensor, producer_cost.divide),
            required_layout(tensor, producer_cost.divide),
        )
        moved: set[str] = set()
        saved = _saved_of(tensor, producer_cost)
        seconds, gradients = 0.0, defaultdict[tuple[tuple[str, str], ...], list[float]](list)
        for operator, cost in zip(operators[1:], costs[1:], strict=True):
            read = self._read(operator, tensor, cost)
            arrives, kept = read.tensor.layout_of_producer(output), read.saved
            steps, duration = self._move(read.tensor, arrives, read.needed)
            if steps and read.key not in moved:
                moved.add(read.key)
                seconds += duration
            if (
                steps
                and all(step.operation == "all_gather" for step in steps)
                and self._gathers_again(operator, tensor)
            ):
                seconds += max(0.0, duration - cost.inputs) if isinstance(operator, Linear) else duration
                whole = read.tensor
                kept = {self.scope.key(whole, arrives): float(whole.nbytes(arrives, self.mesh))} if kept else {}
            saved |= kept
            if read.gradient is not None:
                gradients[read.gradient].append(cost.weights)
        return seconds + self._gradient_seconds(tensor, wanted, gradients), sum(saved.values())

    @remembered_by(lambda pricer, operator, tensor, cost: (operator, tensor.name, cost))
    def _read(self, operator: Operator, tensor: Tensor, cost: OperatorCost) -> TensorRead:
        read = self._as_read(operator, tensor)
        needed, gradient = required_layout(read, cost.divide), None
        if read in self.scope.inputs_with_gradient(operator):
            back = {new: old for old, new in read.renamed.items()}
            layout = {axis: back.get(dim, dim) for axis, dim in output_layout(read, cost.divide).items()}
            gradient = tuple(sorted(layout.items()))
        return TensorRead(read, needed, self.scope.key(read, needed), gradient, _saved_of(tensor, cost))

    def _move(
        self, tensor: Tensor, source: Layout, target: Layout, gradient: bool = False
    ) -> tuple[list[Collective], float]:
        """Returns the collectives between two layouts of a tensor, or of its gradient, and their seconds."""
        moved = tensor.gradient if gradient else tensor
        # Tensors of equal dims take the same collectives; dims hash slowly.
        if (tensor, gradient) not in self._shapes:
            self._shapes[tensor, gradient] = self._kinds.setdefault(
                (*moved.dims.items(), moved.dtype), len(self._kinds)
            )
        key = self._shapes[tensor, gradient], tuple(source.items()), tuple(target.items())
        if key not in self._moves:
            steps = collectives_between(moved, source, target, self.mesh)
            self._moves[key] = steps, self.seconds(steps)
        return self._moves[key]

    def _gathers_again(self, operator: Operator, tensor: Tensor) -> bool:
        """Returns whether an all-gathered input is not kept, but gathered again in the backward pass."""
        later = {later_tensor.name for later_tensor in operator.read_by_later_slices}
        kinds = isinstance(operator, Linear | CoreAttention) and tensor.name not in later
        return self.scope.regather and kinds and not operator.view

    def _gradient_seconds(
        self, tensor: Tensor, wanted: Layout, gradients: Mapping[tuple[tuple[str, str], ...], Sequence[float]]
    ) -> float:
        """Returns the seconds of sums and conversions of gradients of a tensor; `gradients` has what runs meanwhile."""
        seconds, ordered = 0.0, self.scope.keeps_issue_order(self.scope.transfer_place(tensor).view)
        for layout, beside in gradients.items():
            seconds += self._sum_seconds(tensor, dict(layout), len(beside))
            _, duration = self._move(tensor, dict(layout), wanted, gradient=True)
            seconds += max(0.0, duration - (0.0 if ordered else beside[0] if len(beside) == 1 else 0.0))
        return seconds + self._sum_seconds(tensor, wanted, len(gradients))

    def _sum_seconds(self, tensor: Tensor, layout: Layout, members: int) -> float:
        """Returns the seconds of the sum of several gradients of equal layout."""
        if members < 2:
            return 0.0
        nbytes = tensor.gradient.nbytes({a: d for a, d in layout.items() if d != "+"}, self.mesh)
        return self.seconds([Memory("add", members * nbytes, nbytes)])


def _saved_of(tensor: Tensor, cost: OperatorCost) -> dict[str, float]:
    """Returns the bytes of the copies of a tensor that the backward pass of an operator reads, by memory key."""
    return {key: size for key, size in cost.saved.items() if key.partition("@")[0] == tensor.name}


class UnitTables(NamedTuple):
    """The tables of all units of a model in a single stage.

    choices: the options of every variable.
    begin, layers, end: the tables of the embedding, of every kind of layer, and of the output layer.
    tied: whether embedding and output layer share a matrix.
    """

    choices: Mapping[str, tuple[Dims, ...]]
    begin: Sequence[UnitTable]
    layers: Sequence[UnitTable]
    end: Sequence[UnitTable]
    tied: bool

    @property
    def every(self) -> list[UnitTable]:
        return [*self.begin, *self.layers, *self.end]

    def tie(self) -> list[Factor]:
        """Returns the factor that ties embedding and output layer, if any does."""
        operators = [operator for table in self.every for operator in table.operators]
        return [_tie_layouts(self.choices, operators)] if self.tied else []


def list_units(plan: Plan, axes: Sequence[str], shared: SharedWork, allowed: Allowed = allow_all) -> UnitTables:
    """Returns the tables of all units of a model in a single stage; see `list_factors`."""
    architecture, model = plan.model_parts.architecture, plan.model_parts.model
    costs = shared.costs(plan)
    layers = [architecture.stage(range(layer, layer + 1), False, False) for layer in range(model.layers)]
    kinds: dict[Any, list[Any]] = defaultdict(list)
    for layer in layers:
        kinds[tuple(unit.lowering_key for unit in layer.units)].append(layer)
    ends = architecture.stage(range(0), True, False), architecture.stage(range(0), False, True)
    stages = [(ends[0], 1), *((same[0], len(same)) for same in kinds.values()), (ends[1], 1)]
    choices: dict[str, tuple[Dims, ...]] = {}

    def make_tables() -> list[list[UnitTable]]:
        return [
            [UnitTable(plan, costs, unit, axes, count, choices, allowed) for unit in stage.units]
            for stage, count in stages
        ]

    tables = make_tables()
    # A variable of several units keeps the layouts that are legal in all of them.
    if any(
        len(unit_table.costs_of[op]) != len(choices[unit_table.variable(op)])
        for unit_tables in tables
        for unit_table in unit_tables
        for op in unit_table.operators
    ):
        tables = make_tables()
    return UnitTables(choices, tables[0], [table for same in tables[1:-1] for table in same], tables[-1], model.tied)


def list_factors(
    plan: Plan, axes: Sequence[str], shared: SharedWork, microbatches: int, allowed: Allowed = allow_all
) -> PendingTable:
    """Returns the table of all operators of a model in a single stage, whose tensors are not priced yet.

    plan: a resolved plan of a single stage, on whose mesh `axes` shard.
    allowed: layouts that are priced at all.
    Raises PlanError for an operator without allowed layouts.
    """
    units = list_units(plan, axes, shared, allowed)
    factors = [factor for table in units.every for factor in table.operator_factors()] + units.tie()
    pending = [factor for table in units.every for factor in table.tensor_factors()]
    return PendingTable(units.choices, factors, pending, microbatches)


def _tie_layouts(choices: Mapping[str, Sequence[Dims]], operators: Sequence[Operator]) -> Factor:
    """Returns the factor that gives embedding and output layer equal shards of the matrix that they share."""
    embedding, head = (
        next(operator for operator in operators if isinstance(operator, kind)) for kind in (Embedding, Head)
    )
    table, other = embedding.weights[0], head.weights[0]
    layouts = [
        [required_layout(weight, {axis: dim for axis, dim in layout if dim}) for layout in choices[operator.name]]
        for operator, weight in ((embedding, table), (head, other))
    ]
    seconds = np.array([[0.0 if first == second else math.inf for second in layouts[1]] for first in layouts[0]])
    return Factor((embedding.name, head.name), seconds, np.zeros(seconds.shape), np.zeros(seconds.shape))
