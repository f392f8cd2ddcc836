"""What the passes of a unit do at least: the works of its operators, and the collectives between their layouts.

Nothing is lowered: there are no tensors in memory, no parameters and no ops of schemes. What lowering adds to these
steps, such as kernels that add up gradients, only makes a pass longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from meshcast.simulator.ir.layout import Layout, Tensor, collectives_between, required_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator, Unit
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.lowering.resharding import gradient_layout, required_gradient_layout
from meshcast.simulator.lowering.scope import NOWHERE, OpPlace, Scope


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


def list_steps(scope: Scope, unit: Unit) -> tuple[list[Step], list[Step]]:
    """Returns the steps of the forward and of the backward pass of a unit, in the order in which they are issued.

    scope: of a lowering, which enters the unit.
    """
    scope.enter(unit)
    operators = unit.operators()
    number_of = {tensor.name: number for number, operator in enumerate(operators) for tensor in operator.outs}
    forward = [_step_forward(scope, operator, number_of) for operator in operators]
    readers: dict[str, list[tuple[int, Operator, Tensor]]] = defaultdict(list)
    backward: list[Step] = []
    for operator in reversed(operators):
        waits = [wait for tensor in operator.outs for wait in _wait_for_gradients(scope, tensor, readers[tensor.name])]
        at, moving = LocalShapes(scope.division(operator), scope.mesh), scope.inputs_with_gradient(operator)
        for tensor in moving:
            readers[tensor.name].append((len(backward), operator, tensor))
        inputs = operator.backward_inputs(at) if moving else []
        weights = [] if operator.frozen else operator.backward_weights(at)
        for phase, works in (("B", inputs), ("W", weights)):
            backward.append(_make_step(scope, operator, phase, waits, works))
    return forward, backward


def _step_forward(scope: Scope, operator: Operator, number_of: dict[str, int]) -> Step:
    division, waits = scope.division(operator), []
    for tensor in operator.ins:
        if tensor.name in number_of:
            wanted = required_layout(tensor, division)
            steps = collectives_between(tensor, scope.produced_layout(tensor), wanted, scope.mesh)
            place = scope.transfer_place(tensor, operator) if steps else NOWHERE
            waits.append(Wait(number_of[tensor.name], scope.key(tensor, wanted), _place(scope, steps, "F", place)))
    works = operator.forward(LocalShapes(division, scope.mesh))
    return _make_step(scope, operator, "F", waits, works)


def _make_step(scope: Scope, operator: Operator, phase: str, waits: Sequence[Wait], works: Sequence[Work]) -> Step:
    return Step(phase, waits, _place(scope, works, phase, scope.place(operator), operator.launches))


def _wait_for_gradients(
    scope: Scope, tensor: Tensor, readers: Sequence[tuple[int, Operator, Tensor]]
) -> Iterator[Wait]:
    """Yields what the gradient of an output of an operator waits for.

    readers: the numbers of the steps that make gradients of it, their operators, and the tensor as these name it.
    """
    wanted: Layout | None = None
    for number, reader, read in readers:
        layout = gradient_layout(scope, reader, read)
        wanted = required_gradient_layout(scope, tensor.name) if wanted is None else wanted
        steps = collectives_between(tensor.gradient, layout, wanted, scope.mesh)
        place = scope.transfer_place(tensor) if steps else NOWHERE
        yield Wait(number, (tensor.name, *sorted(layout.items())), _place(scope, steps, "B", place))


def _place(
    scope: Scope, works: Sequence[Work], phase: str, place: OpPlace, launches: float = 1.0
) -> list[PlacedWork]:
    ops = (scope.op("", work, (), phase, place) for work in works)
    return [PlacedWork(op.stream, work, op.launches * launches) for op, work in zip(ops, works, strict=True)]
