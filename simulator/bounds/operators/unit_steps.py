"""What the passes of a unit do at least: the works of its operators, and the collectives between their layouts.

Nothing is lowered: there are no tensors in memory, no parameters and no ops of schemes. What lowering adds to these
steps, such as kernels that add up gradients, only makes a pass longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshcast.simulator.ir.layout import Tensor, collectives_between, required_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator, Unit
from meshcast.simulator.ir.ops import Collective, Work
from meshcast.simulator.lowering.resharding import gradient_layout, required_gradient_layout
from meshcast.simulator.lowering.scope import NOWHERE, OpPlace, Scope


class PlacedWork(NamedTuple):
    """A piece of work with its stream, and the time of the host to launch it, over that of an op of the framework."""

    stream: str
    work: Work
    launches: float


OperatorWorks = tuple[Sequence[PlacedWork], ...]
"""The works of an operator: of its forward pass, and for gradients of its inputs and of its weights."""


class Wait(NamedTuple):
    """An earlier step whose result a step waits for.

    step: its number in the pass.
    key: equal for steps that wait for one and the same collectives.
    collectives: between both, in turn.
    """

    step: int
    key: Hashable
    collectives: Sequence[PlacedWork]


class OperatorStep(NamedTuple):
    """The works of an operator in a pass, in turn.

    phase: F forward, B gradient of inputs, W gradient of weights.
    """

    phase: str
    waits: Sequence[Wait]
    works: Sequence[PlacedWork]


class UnitSteps:
    """Lists the steps of units.

    scope: of a lowering, which enters the units.
    known: kernels of operators outside of views of the mesh, of this plan and others; new ones are added.
    degrees: what the layouts of such operators follow from, but for the names of axes.
    """

    def __init__(self, scope: Scope, known: dict[Hashable, OperatorWorks], degrees: Hashable) -> None:
        self.scope, self._known, self._degrees = scope, known, degrees

    def list_steps(self, unit: Unit) -> tuple[list[OperatorStep], list[OperatorStep]]:
        """Returns the steps of the forward and of the backward pass of a unit, in the order of their issue."""
        scope, operators = self.scope, unit.operators()
        scope.enter(unit)
        number_of = {tensor.name: number for number, operator in enumerate(operators) for tensor in operator.outs}
        forward: list[OperatorStep] = []
        works = [self._find_works(operator, bool(scope.inputs_with_gradient(operator))) for operator in operators]
        for operator, (ahead, *_) in zip(operators, works, strict=True):
            inputs = [tensor for tensor in operator.ins if tensor.name in number_of]
            forward.append(OperatorStep("F", [self._wait(number_of[t.name], operator, t) for t in inputs], ahead))
        readers: dict[str, list[tuple[int, Operator, Tensor]]] = defaultdict(list)
        backward: list[OperatorStep] = []
        for operator, (_, *behind) in zip(reversed(operators), reversed(works), strict=True):
            waits = [self._wait_for_gradient(t, *reader) for t in operator.outs for reader in readers[t.name]]
            for tensor in scope.inputs_with_gradient(operator):
                readers[tensor.name].append((len(backward), operator, tensor))
            backward += [OperatorStep(phase, waits, placed) for phase, placed in zip("BW", behind, strict=True)]
        return forward, backward

    def _find_works(self, operator: Operator, moving: bool) -> OperatorWorks:
        """Returns the works of an operator. moving: whether its inputs have gradients."""
        key = self._degrees, operator, moving
        if key in self._known:
            return self._known[key]
        works = self._list_works(operator, moving)
        # The axes of collectives have other names at other degrees of experts.
        if not operator.view and not any(isinstance(placed.work, Collective) for some in works for placed in some):
            self._known[key] = works
        return works

    def _list_works(self, operator: Operator, moving: bool) -> OperatorWorks:
        scope = self.scope
        at, place = LocalShapes(scope.division(operator), scope.mesh), scope.place(operator)
        inputs = operator.backward_inputs(at) if moving else []
        weights = [] if operator.frozen else operator.backward_weights(at)
        ahead, *behind = (
            _place(scope, works, phase, place, operator.launches)
            for phase, works in zip("FBW", (operator.forward(at), inputs, weights), strict=True)
        )
        return ahead, *behind

    def _wait(self, number: int, operator: Operator, tensor: Tensor) -> Wait:
        """Returns what an input of an operator waits for. number: of the step that makes it."""
        scope = self.scope
        wanted = required_layout(tensor, scope.division(operator))
        steps = collectives_between(tensor, scope.produced_layout(tensor), wanted, scope.mesh)
        place = scope.transfer_place(tensor, operator) if steps else NOWHERE
        return Wait(number, (tensor.name, *sorted(wanted.items())), _place(scope, steps, "F", place))

    def _wait_for_gradient(self, tensor: Tensor, number: int, reader: Operator, read: Tensor) -> Wait:
        """Returns what the gradient of an output of an operator waits for.

        number: of the step in which an operator makes a gradient of it. read: the tensor as this operator names it.
        """
        scope = self.scope
        layout, wanted = gradient_layout(scope, reader, read), required_gradient_layout(scope, tensor.name)
        steps = collectives_between(tensor.gradient, layout, wanted, scope.mesh)
        place = scope.transfer_place(tensor) if steps else NOWHERE
        return Wait(number, (tensor.name, *sorted(layout.items())), _place(scope, steps, "B", place))


def _place(scope: Scope, works: Sequence[Work], phase: str, place: OpPlace, launches: float = 1.0) -> list[PlacedWork]:
    ops = (scope.op("", work, (), phase, place) for work in works)
    return [PlacedWork(op.stream, work, op.launches * launches) for op, work in zip(ops, works, strict=True)]
