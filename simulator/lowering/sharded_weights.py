"""Weights stored sharded finer than the operator needs: all-gathered before use, gradients reduce-scattered after.

The gathered weights are kept for the gradient of the input, or all-gathered again for it. Their gradient, a partial sum
over ranks, is written to a temporary and reduce-scattered during the kernels that follow; the reduction adds it to the
accumulated gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshcast.simulator.ir.layout import collectives_between
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.ops import Collective, Fragment, Op, TensorUse, Work
from meshcast.simulator.lowering.grad_accumulation import write_out_of_place
from meshcast.simulator.lowering.scope import Scope


def gather_weights(
    scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment, inputs: list[Op], weights: list[Op]
) -> None:
    """Changes the passes of an operator whose weights are stored sharded finer than it needs; all its weights move at
    once.

    inputs: its backward ops that make gradients of inputs.
    weights: its backward ops that make gradients of weights.
    """
    elements: dict[tuple[str, ...], int] = defaultdict(int)
    finer = []
    for weight in (*operator.weights, *operator.shared_weights):
        if steps := collectives_between(weight, scope.at_rest(operator, weight), at.layout(weight), at.mesh):
            finer.append(weight)
            for step in steps:
                elements[step.axes] += step.nbytes
    if not finer:
        return
    moves = _WeightMoves(scope, operator, at.bytes(*finer), frag, {weight.name for weight in finer})
    moves.gather([Collective("all_gather", n, axes) for axes, n in elements.items()], inputs)
    if weights:
        write_out_of_place(weights, finer[0].dtype)
        scatters = [Collective("reduce_scatter", n, axes) for axes, n in reversed(elements.items())]
        moves.scatter(scatters, weights, operator.temporary_gradient_work(at))


@dataclass
class _WeightMoves:
    """The moves of the weights of an operator. nbytes: of the whole weights. names: of the weights that move."""

    scope: Scope
    operator: Operator
    nbytes: int
    frag: Fragment
    names: set[str]

    def gather(self, gathers: Sequence[Work], inputs: list[Op]) -> None:
        """Gathers weights before their use, again before the backward ops `inputs` if they are not kept."""
        frag, name, view = self.frag, self.operator.name, self.operator.view
        ahead = self.scope.serial_ops(f"gather w{name}", gathers, list(frag.entry.values()), "F", view)
        frag.forward[0].after.append(ahead[-1])
        frag.forward[:0] = ahead
        kept = bool(inputs) and not self.scope.regather
        self._keep(f"whole w{name}", ahead[0], inputs[-1] if kept else frag.forward[-1])
        if inputs and not kept:
            again = self.scope.serial_ops(f"regather w{name}", gathers, list(frag.grad_entry.values()), "B", view)
            inputs[0].after.append(again[-1])
            frag.backward[:0] = again
            self._keep(f"whole w{name} again", again[0], inputs[-1])
        for param in frag.params:
            param.used = ahead[0] if param.name in self.names else param.used

    def scatter(self, scatters: Sequence[Work], weights: list[Op], zeroing: Sequence[Work]) -> None:
        """Scatters the gradients that the ops `weights` write to a temporary. zeroing: kernels that make it."""
        frag, name = self.frag, self.operator.name
        place = frag.backward.index(weights[0])
        zeroed = self.scope.serial_ops(f"make {name}", zeroing, list(frag.grad_entry.values()), "W")
        frag.backward[place:place] = zeroed
        for op in weights:
            op.after += zeroed
        behind = self.scope.serial_ops(f"scatter w{name}", scatters, weights[-1:], "W", self.operator.view)
        frag.backward += behind
        self._keep(f"d:whole w{name}", (zeroed or weights)[0], behind[-1], "workspace")
        for param in frag.params:
            param.ready = behind[-1] if param.name in self.names else param.ready

    def _keep(self, key: str, begin: Op, end: Op, category: str = "parameters") -> None:
        ends = (begin, True), (end, False)
        self.frag.tensor_uses += [TensorUse(key, self.nbytes, op, made, category) for op, made in ends]
