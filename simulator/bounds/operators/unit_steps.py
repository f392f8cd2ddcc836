"""What the passes of a unit do at least: the works of its operators, and the collectives between their layouts.

Nothing is lowered: there are no tensors in memory, no parameters and no ops of schemes. What lowering adds to these
steps, such as kernels that add up gradients, only makes a pass longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshcast.simulator.ir.layout import Layout, Tensor, collectives_between, required_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator, Unit
from meshcast.simulator.ir.ops import Collective, Work
from meshcast.simulator.ir.saved import saved_by
from meshcast.simulator.lowering.resharding import gradient_layout, required_gradient_layout
from meshcast.simulator.lowering.scope import NOWHERE, OpPlace, Scope


class PlacedWork(NamedTuple):
    """A piece of work with its stream, and the time of the host to launch it, over that of an op of the framework."""

    stream: str
    work: Work
    launches: float


ATTENTION = "core_attn"
"""The label of the cores of attention, which selective recompute computes again."""

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
    enters: whether it waits for the input of the pass.
    """

    phase: str
    waits: Sequence[Wait]
    works: Sequence[PlacedWork]
    enters: bool


class PassSteps(NamedTuple):
    """The steps of a pass, in the order of their issue.

    results: the numbers of those that make its result; empty where it has none.
    """

    steps: list[OperatorStep]
    results: Sequence[int]


class UnitWork(NamedTuple):
    """What a unit does, and keeps.

    passes: its forward and its backward pass.
    saved: what the forward pass leaves for the other, with nothing and with attention recomputed, but for tensors at
        the ends of the unit [bytes].
    ends: its input and its output [bytes].
    """

    passes: tuple[PassSteps, PassSteps]
    saved: tuple[int, int]
    ends: tuple[int, int]


class UnitSteps:
    """Lists the steps of units.

    scope: of a lowering, which enters the units.
    known: kernels of operators outside of views of the mesh, of this plan and others; new ones are added.
    degrees: what the layouts of such operators follow from, but for the names of axes.
    """

    def __init__(self, scope: Scope, known: dict[Hashable, OperatorWorks], degrees: Hashable) -> None:
        self.scope, self._known, self._degrees = scope, known, degrees

    def list_work(self, unit: Unit) -> UnitWork:
        """Returns what a unit does, and keeps."""
        _, ends = self.scope.enter(unit)
        operators = unit.operators()
        works = [self._find_works(operator, bool(self.scope.inputs_with_gradient(operator))) for operator in operators]
        keeping = [
            operator for operator, (ahead, *behind) in zip(operators, works, strict=True) if ahead and any(behind)
        ]
        return UnitWork(self._list_steps(unit, works), self._count_saved(unit, keeping), ends)

    def _list_steps(self, unit: Unit, works: Sequence[OperatorWorks]) -> tuple[PassSteps, PassSteps]:
        """Returns the forward and the backward pass of a unit. works: of its operators."""
        scope, operators = self.scope, unit.operators()
        entry, end = (tensor.name if tensor else "" for tensor in (unit.residual_in, unit.residual_out))
        number_of = {tensor.name: number for number, operator in enumerate(operators) for tensor in operator.outs}
        forward: list[OperatorStep] = []
        for operator, (ahead, *_) in zip(operators, works, strict=True):
            inputs = [tensor for tensor in operator.ins if tensor.name in number_of]
            waits = [self._wait(number_of[t.name], operator, t) for t in inputs]
            forward.append(OperatorStep("F", waits, ahead, _has(operator.ins, entry)))
        readers: dict[str, list[tuple[int, Operator, Tensor]]] = defaultdict(list)
        backward: list[OperatorStep] = []
        for operator, (_, *behind) in zip(reversed(operators), reversed(works), strict=True):
            waits = [self._wait_for_gradient(t, *reader) for t in operator.outs for reader in readers[t.name]]
            for tensor in scope.inputs_with_gradient(operator):
                readers[tensor.name].append((len(backward), operator, tensor))
            enters = _has(operator.outs, end)
            backward += [OperatorStep(phase, waits, placed, enters) for phase, placed in zip("BW", behind, strict=True)]
        returned = [number for number, *_ in readers[entry]]
        return PassSteps(forward, [number_of[end]] if end in number_of else []), PassSteps(backward, returned)

    def _count_saved(self, unit: Unit, keeping: Sequence[Operator]) -> tuple[int, int]:
        """Returns `UnitWork.saved` of a unit: inputs and outputs of operators, each in the least of the layouts in
        which it may stay, and buffers.

        keeping: its operators that have a forward pass and, in the backward pass, work.
        """
        outer = (tensor for tensor in (unit.residual_in, unit.residual_out, unit.context) if tensor)
        ends = {self._name_in_memory(tensor, {}) for tensor in outer}
        inside = {tensor.name for operator in unit.operators() for tensor in operator.outs}
        whole, others = dict[str, int](), dict[str, int]()
        """With nothing and with attention recomputed, whose inputs stay."""
        for operator in keeping:
            at, again = self._shapes(operator), operator.label == ATTENTION
            saved = saved_by(operator, at)
            tensors = saved.tensors if operator.frozen else (*saved.tensors, *operator.saved_for_weights)
            for tensor in (tensor for tensor in tensors if tensor.name in inside):
                name, least = self._least_bytes(tensor, operator, at)
                for nbytes in (whole, *(() if again and tensor in operator.outs else (others,))):
                    nbytes[name] = 0 if name in ends else min(nbytes.get(name, least), least)
            buffers = {f"{operator.name}.{what}": size for what, size, _ in saved.buffers}
            whole |= buffers
            others |= buffers if not again else {}
        return sum(whole.values()), sum(others.values())

    def _shapes(self, operator: Operator) -> LocalShapes:
        return LocalShapes(self.scope.division(operator), self.scope.mesh)

    def _least_bytes(self, tensor: Tensor, operator: Operator, at: LocalShapes) -> tuple[str, int]:
        """Returns the name under which a tensor is in memory, and its bytes as it is made or as an operator has it,
        whichever is less."""
        scope = self.scope
        layout = at.layout(tensor) if tensor in operator.ins else operator.output_layout(tensor, at.divide)
        layouts = layout, scope.produced_layout(tensor)
        least = min(tensor.held_bytes(each, scope.mesh) for each in layouts)
        return self._name_in_memory(tensor, layout), least

    def _name_in_memory(self, tensor: Tensor, layout: Layout) -> str:
        return self.scope.key(tensor, layout).partition("@")[0]

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
        at, place = self._shapes(operator), scope.place(operator)
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


def _has(tensors: Sequence[Tensor], name: str) -> bool:
    """Returns whether a tensor is among some, by its name."""
    return any(tensor.name == name for tensor in tensors)


def _place(scope: Scope, works: Sequence[Work], phase: str, place: OpPlace, launches: float = 1.0) -> list[PlacedWork]:
    ops = (scope.op("", work, (), phase, place) for work in works)
    return [PlacedWork(op.stream, work, op.launches * launches) for op, work in zip(ops, works, strict=True)]
