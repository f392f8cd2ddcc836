"""Lowers one operator to a fragment: its kernels at the sizes of one rank's shards, forward and backward, its
parameters, and its tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshcast.simulator.ir.layout import Tensor, output_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import Head, Linear
from meshcast.simulator.ir.ops import Fragment, Op, Param, TensorUse
from meshcast.simulator.lowering.grad_accumulation import accumulate_separately
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.lowering.sharded_weights import gather_weights


def lower_operator(scope: Scope, operator: Operator, fused_gradients: bool = True, accumulated: str = "") -> Fragment:
    """Returns the fragment of one operator at local sizes.

    fused_gradients: GEMMs add weight gradients to the accumulated ones; otherwise a separate kernel does.
    accumulated: format in which gradients are accumulated; empty: that of the weights.
    """
    divide = scope.division(operator)
    at = LocalShapes(divide, scope.mesh)
    frag = Fragment(entry={t.name: Op(f"{t.name} in") for t in operator.ins})
    frag.grad_entry = {t.name: Op(f"d{t.name} in", phase="B") for t in operator.outs}
    start, grads = list(frag.entry.values()), list(frag.grad_entry.values())

    frag.forward = scope.serial_ops(operator.name, operator.forward(at), start, "F", operator.view)
    end = frag.forward[-1] if frag.forward else Op(operator.name, after=start)
    frag.exit = {t.name: end for t in operator.outs}

    moving = scope.inputs_with_gradient(operator)
    inputs = scope.serial_ops(
        f"d{operator.name}", operator.backward_inputs(at) if moving else [], grads, "B", operator.view
    )
    weights = scope.serial_ops(
        f"w{operator.name}", [] if operator.frozen else operator.backward_weights(at), grads, "W", operator.view
    )
    frag.backward = [*inputs, *weights]
    for op in (*frag.forward, *frag.backward):
        op.launches *= operator.launches
    given = inputs[-1] if inputs else Op(f"d{operator.name}", after=grads, phase="B")
    frag.grad_exit = {t.name: given for t in moving}
    ready = (weights or inputs or [Op(f"w{operator.name}", after=grads, phase="W")])[-1]
    params = []
    for weight in operator.weights:
        # Where an axis shards a dim that no output has, every rank has whole output gradients: nothing is to be summed.
        summed = (axis for axis, dims in divide.items() if any(t.first_dim(dims) for t in operator.outs))
        rested = scope.at_rest(operator, weight)
        partial = tuple(axis for axis in summed if axis not in rested)
        size = weight.local(rested, scope.mesh)
        total = weight.local({}, scope.mesh)
        tied = getattr(operator, "tied", False)
        view = operator.view if operator.view in scope.mesh.views else ""
        copies, trained = _copies(weight, at), not operator.frozen
        linear = isinstance(operator, Linear) and not isinstance(operator, Head) and len({*weight.dims} - {"e"}) == 2
        local = weight.local_dims(rested, scope.mesh)
        matrix = size // local.get("e", 1) if linear else 0
        sides = tuple(int(n) for name, n in local.items() if name != "e")
        kind = tied, copies, view, trained, matrix, scope.in_layer, sides if len(sides) == 2 else ()
        params.append(Param(weight.name, size, total, partial, ready, end, *kind))
    # A tied output layer on the device of the embedding has no table of its own.
    copied = scope.copies_table and isinstance(operator, Head)
    borrows = getattr(operator, "tied", False) and (scope.embeds or copied)
    frag.params = [] if borrows else params
    frag.shared_weights = [param.name for param in params] if borrows else []
    frag.tensor_uses = list(_tensor_uses(scope, operator, at, frag, inputs, weights))
    if not fused_gradients and params and not operator.frozen:
        uncut = {weight.name for weight in operator.weights if scope.at_rest(operator, weight) == at.layout(weight)}
        whole = sum(param.size for param in params if param.name in uncut and not _accumulates_shards(scope, param))
        accumulate_separately(frag, operator, at, weights, ready, whole, accumulated)
    gather_weights(scope, operator, at, frag, inputs, weights)
    return frag


def _accumulates_shards(scope: Scope, param: Param) -> bool:
    """Returns whether micro-batches add to a gradient that is sharded."""
    return any(scope.mesh.size(scheme.accumulation_shards(param)) > 1 for scheme in scope.sharding)


def _copies(weight: Tensor, at: LocalShapes) -> tuple[tuple[str, ...], int] | None:
    """Returns the axes along which neighbouring ranks hold the same shard (with fewer key-value heads than ranks), and
    the number of these ranks; None if each shard is on one rank."""
    layout = at.layout(weight)
    for name, dim in weight.dims.items():
        axes = [axis for axis in at.mesh.inner_first(layout)[::-1] if layout[axis] == name]
        if (holders := dim.ranks_per_part(at.mesh.size(axes))) > 1:
            return tuple(axes), holders
    return None


def _tensor_uses(
    scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment, inputs: list[Op], weights: list[Op]
) -> Iterable[TensorUse]:
    if frag.forward:
        first, last = frag.forward[0], frag.forward[-1]
        yield from (scope.tensor_use(t, at.layout(t), op) for t in operator.ins for op in (first, last))
        yield from (scope.tensor_use(t, operator.output_layout(t, at.divide), last, made=True) for t in operator.outs)
    yield from _temporaries(operator, at, frag.forward, backward=False)
    backward = [*inputs, *weights]
    if not backward:
        return
    # Gradients that are cast first are kept in the format of the GEMMs until the weight gradient, however late it is.
    nbytes = operator.cast_gradient_bytes(at) if inputs and weights else 0
    for op in (backward[0], backward[0] if nbytes else backward[-1]):
        yield from (scope.tensor_use(t, at.layout(t), op, prefix="d:") for t in operator.outs)
    if nbytes:
        yield TensorUse(f"d:{operator.name}.cast", nbytes, backward[0], made=True)
        yield TensorUse(f"d:{operator.name}.cast", nbytes, backward[-1])
    if inputs:
        moving = scope.inputs_with_gradient(operator)
        yield from (
            scope.tensor_use(t, output_layout(t, at.divide), inputs[-1], made=True, prefix="d:") for t in moving
        )
        yield from (
            replace(scope.tensor_use(t, at.layout(t), inputs[-1]), stays=True) for t in operator.read_by_later_slices
        )
        for what, nbytes in zip(("found", "left"), operator.slice_gradient_bytes(at), strict=True):
            ends = (inputs[0], inputs[-1]) if nbytes else ()
            key, made = f"d:{operator.name}.{what}", what == "left"
            yield from (TensorUse(key, nbytes, op, made, "activations") for op in ends)
    # A tensor that both gradients read is freed after the weight gradient, otherwise after the one that reads it.
    for t in operator.saved_tensors if operator.frozen else (*operator.saved_tensors, *operator.saved_for_weights):
        op = (weights or inputs)[-1] if t in operator.saved_for_weights else (inputs or weights)[-1]
        yield scope.tensor_use(t, at.layout(t) if t in operator.ins else operator.output_layout(t, at.divide), op)
    yield from _temporaries(operator, at, backward if inputs else [], backward=True)
    if frag.forward:
        for what, nbytes, category in operator.saved_buffers(at):
            yield TensorUse(f"{operator.name}.{what}", nbytes, frag.forward[-1], True, category)
            readers = weights or inputs if operator.reuses_saved else inputs or weights
            yield TensorUse(f"{operator.name}.{what}", nbytes, readers[-1], False, category)


def _temporaries(operator: Operator, at: LocalShapes, ops: list[Op], backward: bool) -> Iterable[TensorUse]:
    for i, (start, stop, nbytes) in enumerate(operator.temporary_buffers(at, backward) if ops else ()):
        key = f"{'d:' * backward}{operator.name}.{i}"
        places = (start, min(stop, len(ops) - 1))
        yield from (TensorUse(key, nbytes, ops[place], made=place == start) for place in places)
