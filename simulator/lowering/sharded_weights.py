"""Weights stored sharded finer than the operator needs: all-gathered before use, gradients reduce-scattered after.

The gathered weights are kept for the gradient of the input, or all-gathered again for it. Their gradient, a partial sum
over ranks, is written to a temporary and reduce-scattered during the kernels that follow; the reduction adds it to the
accumulated gradient.
"""

from __future__ import annotations

from collections import defaultdict

from meshcast.simulator.ir.layout import collectives_between
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.ops import Collective, Fragment, Op, TensorUse
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
    nbytes = at.bytes(*finer)
    gathers = [Collective("all_gather", n, axes) for axes, n in elements.items()]
    scatters = [Collective("reduce_scatter", n, axes) for axes, n in reversed(elements.items())]
    came, grads = list(frag.entry.values()), list(frag.grad_entry.values())

    def lives(key: str, begin: Op, end: Op, category: str = "parameters") -> None:
        frag.tensor_uses += [
            TensorUse(key, nbytes, begin, True, category),
            TensorUse(key, nbytes, end, False, category),
        ]

    ahead = scope.serial_ops(f"gather w{operator.name}", gathers, came, "F", operator.view)
    frag.forward[0].after.append(ahead[-1])
    frag.forward[:0] = ahead
    kept = bool(inputs) and not scope.regather
    lives(f"whole w{operator.name}", ahead[0], inputs[-1] if kept else frag.forward[-1])
    if inputs and not kept:
        again = scope.serial_ops(f"regather w{operator.name}", gathers, grads, "B", operator.view)
        inputs[0].after.append(again[-1])
        frag.backward[:0] = again
        lives(f"whole w{operator.name} again", again[0], inputs[-1])
    names = {weight.name for weight in finer}
    for param in frag.params:
        param.used = ahead[0] if param.name in names else param.used
    if weights:
        write_out_of_place(weights, finer[0].dtype)
        place = frag.backward.index(weights[0])
        zeroed = scope.serial_ops(f"make {operator.name}", operator.temporary_gradient_work(at), grads, "W")
        frag.backward[place:place] = zeroed
        for op in weights:
            op.after += zeroed
        behind = scope.serial_ops(f"scatter w{operator.name}", scatters, weights[-1:], "W", operator.view)
        frag.backward += behind
        lives(f"d:whole w{operator.name}", (zeroed or weights)[0], behind[-1], "workspace")
        for param in frag.params:
            param.ready = behind[-1] if param.name in names else param.ready
