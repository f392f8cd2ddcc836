"""What the passes of a unit do at least: the works of its operators, and the collectives between their layouts.

Nothing is lowered: there are no tensors in memory, no parameters and no ops of schemes. What lowering adds to these
steps, such as kernels that add up gradients, only makes a pass longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.layout import Tensor, collectives_between, required_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator, Unit
from meshcast.simulator.ir.operators import Cast
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.lowering.resharding import gradient_layout, required_gradient_layout
from meshcast.simulator.lowering.scope import NOWHERE, OpPlace, Scope

Result = TypeVar("Result")


class PlacedWork(NamedTuple):
    """A piece of work with its stream, and the time of the host to launch it, over that of an op of the framework."""

    stream: str
    work: Work
    launches: float


class Wait(NamedTuple):
    """An earlier step whose result a step waits for.

    step: its number in the pass.
    key: equal for steps that wait for one and the same collectives.
    collectives: between both, in turn.
    """

    step: int
    key: Hashable
    collectives: Sequence[PlacedWork]


class Step(NamedTuple):
    """The works of an operator in a pass, in turn.

    phase: F forward, B gradient of inputs, W gradient of weights.
    """

    phase: str
    waits: Sequence[Wait]
    works: Sequence[PlacedWork]


class UnitSteps:
    """Lists the steps of units.

    scope: of a lowering, which enters the units.
    known: steps between operators outside of views of the mesh, of this plan and others; new ones are added.
    degrees: what the layouts of such operators follow from.
    """

    def __init__(self, scope: Scope, known: dict[Hashable, Any], degrees: Hashable) -> None:
        self.scope, self._known, self._degrees = scope, known, degrees
        self._apart: set[str] = set()
        """Tensors of the unit whose layouts follow from those of operators in a view, or of other tensors."""

    def list_steps(self, unit: Unit) -> tuple[list[Step], list[Step]]:
        """Returns the steps of the forward and of the backward pass of a unit, in the order in which they are issued."""
        scope, operators = self.scope, unit.operators()
        scope.enter(unit)
        within = (operator for operator in operators if operator.view or isinstance(operator, Cast))
        self._apart = {tensor.name for operator in within for tensor in (*operator.ins, *operator.outs)}
        number_of = {tensor.name: number for number, operator in enumerate(operators) for tensor in operator.outs}
        forward = [self._step_forward(operator, number_of) for operator in operators]
        readers: dict[str, list[tuple[int, Operator, Tensor]]] = defaultdict(list)
        backward: list[Step] = []
        for operator in reversed(operators):
            waits = [self._wait_for_gradient(t, *reader) for t in operator.outs for reader in readers[t.name]]
            moving = scope.inputs_with_gradient(operator)
            for tensor in moving:
                readers[tensor.name].append((len(backward), operator, tensor))
            _, *works = self._works(operator, bool(moving))
            backward += [Step(phase, waits, placed) for phase, placed in zip("BW", works, strict=True)]
        return forward, backward

    def _remember(self, is_known: bool, key: Hashable, make: Callable[[], Result]) -> Result:
        return remember(self._known, (self._degrees, key), make) if is_known else make()

    def _works(self, operator: Operator, moving: bool) -> tuple[Sequence[PlacedWork], ...]:
        """Returns the works of an operator: of its forward pass, and for gradients of its inputs and of its weights.
        moving: whether its inputs have gradients."""
        scope = self.scope

        def make() -> tuple[Sequence[PlacedWork], ...]:
            at, place = LocalShapes(scope.division(operator), scope.mesh), scope.place(operator)
            inputs = operator.backward_inputs(at) if moving else []
            weights = [] if operator.frozen else operator.backward_weights(at)
            works = zip("FBW", (operator.forward(at), inputs, weights), strict=True)
            return tuple(_place(scope, some, phase, place, operator.launches) for phase, some in works)

        return self._remember(not operator.view, (operator, moving), make)

    def _step_forward(self, operator: Operator, number_of: Mapping[str, int]) -> Step:
        inputs = [tensor for tensor in operator.ins if tensor.name in number_of]
        waits = [self._wait_for_input(number_of[tensor.name], operator, tensor) for tensor in inputs]
        return Step("F", waits, self._works(operator, bool(self.scope.inputs_with_gradient(operator)))[0])

    def _wait_for_input(self, number: int, operator: Operator, tensor: Tensor) -> Wait:
        scope = self.scope

        def make() -> Wait:
            wanted = required_layout(tensor, scope.division(operator))
            steps = collectives_between(tensor, scope.produced_layout(tensor), wanted, scope.mesh)
            place = scope.transfer_place(tensor, operator) if steps else NOWHERE
            return Wait(number, (tensor.name, *sorted(wanted.items())), _place(scope, steps, "F", place))

        return self._remember(tensor.name not in self._apart, ("F", operator, tensor), make)

    def _wait_for_gradient(self, tensor: Tensor, number: int, reader: Operator, read: Tensor) -> Wait:
        """Returns what the gradient of an output of an operator waits for.

        number: of the step in which an operator makes a gradient of it. read: the tensor as this operator names it.
        """
        scope = self.scope

        def make() -> Wait:
            layout, wanted = gradient_layout(scope, reader, read), required_gradient_layout(scope, tensor.name)
            steps = collectives_between(tensor.gradient, layout, wanted, scope.mesh)
            place = scope.transfer_place(tensor) if steps else NOWHERE
            return Wait(number, (tensor.name, *sorted(layout.items())), _place(scope, steps, "B", place))

        return self._remember(tensor.name not in self._apart, ("B", reader, read), make)


def _place(scope: Scope, works: Sequence[Work], phase: str, place: OpPlace, launches: float = 1.0) -> list[PlacedWork]:
    ops = (scope.op("", work, (), phase, place) for work in works)
    return [PlacedWork(op.stream, work, op.launches * launches) for op, work in zip(ops, works, strict=True)]
