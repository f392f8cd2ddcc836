"""Lowers an operator to a fragment: its kernels at the sizes of a rank's shards, forward and backward, its
parameters, and its tensors in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor, collectives_between, output_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import Embedding, Head, Linear
from meshcast.simulator.ir.ops import BYTES, Collective, Fragment, Gemm, Memory, Op, Param, TensorUse, Work
from meshcast.simulator.ir.saved import saved_by
from meshcast.simulator.lowering.scope import Scope


def lower_operator(scope: Scope, operator: Operator, fused_gradients: bool = True, accumulated: str = "") -> Fragment:
    """Returns the fragment of an operator at local sizes.

    fused_gradients: GEMMs add weight gradients to the accumulated ones; otherwise a separate kernel does.
    accumulated: format in which gradients are accumulated; empty: that of the weights.
    """
    at = LocalShapes(scope.division(operator), scope.mesh)
    frag = Fragment(entry={t.name: Op(f"{t.name} in") for t in operator.ins})
    frag.grad_entry = {t.name: Op(f"d{t.name} in", phase="B") for t in operator.outs}
    end = _lower_forward(scope, operator, at, frag)
    inputs, weights = _lower_backward(scope, operator, at, frag)
    for op in (*frag.forward, *frag.backward):
        op.launches *= operator.launches
    grads = list(frag.grad_entry.values())
    scope.count_vectors(operator, [*inputs, *weights])
    ready = (weights or inputs or [Op(f"w{operator.name}", after=grads, phase="W")])[-1]
    params = [_make_param(scope, operator, weight, at, ready, end) for weight in operator.weights]
    # A tied output layer on the device of the embedding has no table of its own.
    copied = scope.copies_table and isinstance(operator, Head)
    borrows = getattr(operator, "tied", False) and (scope.embeds or copied)
    shared = [len(weight.dims) > 1 and borrows for weight in operator.weights]  # the table, but not a bias
    frag.params = [param for param, is_shared in zip(params, shared, strict=True) if not is_shared]
    frag.shared_weights = [param.name for param, is_shared in zip(params, shared, strict=True) if is_shared]
    frag.tensor_uses = [
        *_forward_uses(scope, operator, at, frag),
        *(_backward_uses(scope, operator, at, frag, inputs, weights) if frag.backward else ()),
    ]
    if params and not operator.frozen:
        whole = _unsharded_elements(scope, operator, at, params)
        if fused_gradients:
            frag.tensor_uses += _whole_gradient_uses(operator, weights, whole)
        else:
            accumulate_separately(frag, operator, at, weights, ready, whole, accumulated)
    gather_weights(scope, operator, at, frag, inputs, weights)
    return frag


def _lower_forward(scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment) -> Op:
    """Lowers the forward pass and returns the op with which it ends."""
    start = list(frag.entry.values())
    frag.forward = scope.serial_ops(operator.name, operator.forward(at), start, "F", scope.place(operator))
    end = frag.forward[-1] if frag.forward else Op(operator.name, after=start)
    frag.exit = {t.name: end for t in operator.outs}
    return end


def _lower_backward(scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment) -> tuple[list[Op], list[Op]]:
    """Lowers the backward pass and returns its ops: for gradients of inputs, and of weights."""
    grads, moving = list(frag.grad_entry.values()), scope.inputs_with_gradient(operator)
    input_work = operator.backward_inputs(at) if moving else []
    weight_work = [] if operator.frozen else operator.backward_weights(at)
    inputs = scope.serial_ops(f"d{operator.name}", input_work, grads, "B", scope.place(operator))
    weights = scope.serial_ops(f"w{operator.name}", weight_work, grads, "W", scope.place(operator))
    frag.backward = [*inputs, *weights]
    exit_op = inputs[-1] if inputs else Op(f"d{operator.name}", after=grads, phase="B")
    frag.grad_exit = {t.name: exit_op for t in moving}
    return inputs, weights


def _make_param(scope: Scope, operator: Operator, weight: Tensor, at: LocalShapes, ready: Op, used: Op) -> Param:
    """Returns a parameter as a rank holds it; `ready` and `used` as in `Param`."""
    layout = scope.at_rest(operator, weight)
    # Where an axis shards a dim that no output has, every rank has whole output gradients: nothing is to be summed.
    summed = (axis for axis, dims in at.divide.items() if any(t.first_dim(dims) for t in operator.outs))
    size, local = weight.local(layout, scope.mesh), weight.local_dims(layout, scope.mesh)
    linear = isinstance(operator, Linear) and not isinstance(operator, Head) and len({*weight.dims} - {"e"}) == 2
    sides = {name: int(n) for name, n in local.items() if name != "e"}
    return Param(
        weight.name,
        size,
        weight.local({}, scope.mesh),
        partial=tuple(axis for axis in summed if axis not in layout),
        ready=ready,
        used=used,
        tied=getattr(operator, "tied", False) and len(weight.dims) > 1,
        copies=_copies(weight, at),
        view=operator.view if operator.view in scope.mesh.views else "",
        trained=not operator.frozen,
        matrix=size // local.get("e", 1) if linear else 0,
        in_layer=scope.in_layer,
        shape=tuple(sides.values()) if len(sides) == 2 else (),
        stored=operator.stored if isinstance(operator, Linear) and weight in operator.matrices else None,
        split=tuple((axis, [*sides].index(dim)) for axis, dim in layout.items() if dim in sides) if linear else (),
        recipe=operator.quantised if isinstance(operator, Linear) and linear else "",
    )


def _unsharded_elements(scope: Scope, operator: Operator, at: LocalShapes, params: list[Param]) -> int:
    """Returns the elements of gradients that are stored as the operator makes them."""
    uncut = {weight.name for weight in operator.weights if scope.at_rest(operator, weight) == at.layout(weight)}
    return sum(param.size for param in params if param.name in uncut and not _accumulates_shards(scope, param))


def _accumulates_shards(scope: Scope, param: Param) -> bool:
    """Returns whether micro-batches add to a gradient that is sharded."""
    return any(scope.mesh.size(scheme.accumulation_shards(param)) > 1 for scheme in scope.sharding)


def _copies(weight: Tensor, at: LocalShapes) -> tuple[tuple[str, ...], int] | None:
    """Returns the axes along which neighbouring ranks hold the same shard (with fewer key-value heads than ranks), and
    the number of these ranks; None if each shard is on a single rank."""
    layout = at.layout(weight)
    for name, dim in weight.dims.items():
        axes = [axis for axis in at.mesh.inner_first(layout)[::-1] if layout[axis] == name]
        if (holders := dim.ranks_per_part(at.mesh.size(axes))) > 1:
            return tuple(axes), holders
    return None


def _forward_uses(scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment) -> Iterable[TensorUse]:
    if frag.forward:
        last = frag.forward[-1]
        ends = dict.fromkeys((frag.forward[0], last))
        yield from (scope.tensor_use(t, at.layout(t), op) for t in operator.ins for op in ends)
        yield from (scope.tensor_use(t, operator.output_layout(t, at.divide), last, made=True) for t in operator.outs)
    yield from _temporaries(operator, at, frag.forward, backward=False)


def _backward_uses(
    scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment, inputs: list[Op], weights: list[Op]
) -> Iterable[TensorUse]:
    backward = [*inputs, *weights]
    # Gradients that are cast first are kept in the format of the GEMMs until the weight gradient, however late it is.
    nbytes = operator.cast_gradient_bytes(at) if inputs and weights else 0
    for op in dict.fromkeys((backward[0], backward[0] if nbytes else backward[-1])):
        yield from (scope.tensor_use(t, at.layout(t), op, prefix="d:") for t in operator.outs)
    if nbytes:
        yield TensorUse(f"d:{operator.name}.cast", nbytes, backward[0], made=True)
        yield TensorUse(f"d:{operator.name}.cast", nbytes, backward[-1])
    if inputs:
        yield from _input_gradient_uses(scope, operator, at, inputs)
    saved = saved_by(operator, at)
    yield from _saved_tensor_uses(scope, operator, at, saved.tensors, inputs, weights)
    yield from _temporaries(operator, at, backward if inputs else [], backward=True)
    readers = weights or inputs if operator.reuses_saved else inputs or weights
    for what, nbytes, category in saved.buffers if frag.forward else ():
        yield TensorUse(f"{operator.name}.{what}", nbytes, frag.forward[-1], True, category)
        yield TensorUse(f"{operator.name}.{what}", nbytes, readers[-1], False, category)


def _saved_tensor_uses(
    scope: Scope,
    operator: Operator,
    at: LocalShapes,
    saved: Sequence[Tensor],
    inputs: list[Op],
    weights: list[Op],
) -> Iterable[TensorUse]:
    """Returns the uses of tensors that the forward pass saves: what both gradients read is freed after the weight
    gradient, otherwise after the gradient that reads it."""
    for t in saved if operator.frozen else (*saved, *operator.saved_for_weights):
        op = (weights or inputs)[-1] if t in operator.saved_for_weights else (inputs or weights)[-1]
        yield scope.tensor_use(t, at.layout(t) if t in operator.ins else operator.output_layout(t, at.divide), op)


def _input_gradient_uses(scope: Scope, operator: Operator, at: LocalShapes, inputs: list[Op]) -> Iterable[TensorUse]:
    last = inputs[-1]
    for t in scope.inputs_with_gradient(operator):
        yield scope.tensor_use(t, output_layout(t, at.divide), last, made=True, prefix="d:")
    yield from (replace(scope.tensor_use(t, at.layout(t), last), stays=True) for t in operator.read_by_later_slices)
    for what, nbytes in zip(("found", "left"), operator.slice_gradient_bytes(at), strict=True):
        ends = (inputs[0], last) if nbytes else ()
        yield from (TensorUse(f"d:{operator.name}.{what}", nbytes, op, what == "left", "activations") for op in ends)


def _temporaries(operator: Operator, at: LocalShapes, ops: list[Op], backward: bool) -> Iterable[TensorUse]:
    for i, (start, stop, nbytes) in enumerate(operator.temporary_buffers(at, backward) if ops else ()):
        key = f"{'d:' * backward}{operator.name}.{i}"
        places = (start, min(stop, len(ops) - 1))
        yield from (TensorUse(key, nbytes, ops[place], made=place == start) for place in places)


# ---------------------------------------------------------------------------------------- weights and their gradients


def _whole_gradient_uses(operator: Operator, weights: list[Op], whole: int) -> Iterable[TensorUse]:
    """Yields uses of the gradient of an embedding: no GEMM accumulates it, autograd makes it whole and a hook adds it.

    weights: the ops that make it.
    whole: elements of the gradients that are stored unsharded.
    """
    ends = ((weights[0], True), (weights[-1], False)) if weights and isinstance(operator, Embedding) else ()
    nbytes = whole * BYTES[operator.weights[0].dtype]
    yield from (TensorUse(f"w:{operator.name}", nbytes, op, makes) for op, makes in ends)


def write_out_of_place(weights: Iterable[Op], dtype: str) -> None:
    """Makes GEMMs write a tensor of `dtype` instead of accumulating in place."""
    for op in weights:
        if isinstance(op.work, Gemm):
            op.work = replace(op.work, accumulate=False, out_dtype=dtype)


def accumulate_separately(
    frag: Fragment, operator: Operator, at: LocalShapes, weights: list[Op], ready: Op, whole: int, accumulated: str
) -> None:
    """Changes the backward pass of an operator to write its weight gradients to a temporary and add them by a kernel.

    Without fused gradient accumulation plain autograd writes the gradient of a weight to a new tensor and adds it to
    the accumulated gradient: the memory of a second gradient until then, and the traffic of an addition. Sharded
    gradients are not added whole: they are reduce-scattered. Where gradients are accumulated in a wider format, another
    kernel converts the temporary first: `hp_grad.add_(lp.grad.to(float32))` in BF16_Optimizer.update_hp_grads of
    DeepSpeed's runtime/bf16_optimizer.py (microsoft/DeepSpeed @50893458d), 18 bytes a parameter and micro-batch against
    6 in a 16-bit format.

    weights: the ops that make the weight gradients.
    ready: the last of them.
    whole: elements of the gradients that are stored unsharded.
    accumulated: format in which gradients are accumulated; empty: that of the weights.
    """
    dtype = operator.weights[0].dtype
    write_out_of_place(weights, dtype)
    if not whole:
        return
    accumulated = accumulated or dtype
    nbytes, total = whole * BYTES[dtype], whole * BYTES[accumulated]
    more = [Op(f"make {operator.name}", work=work, phase="W") for work in operator.temporary_gradient_work(at)]
    convert = [Op(f"convert w{operator.name}", work=Memory("cast", nbytes, total), after=[ready], phase="W")]
    if accumulated == dtype:
        convert = []
    add = Op(f"add w{operator.name}", work=Memory("add", 2 * total, total), after=convert or [ready], phase="W")
    for op in weights:
        op.after += more
    first = (more or weights or [add])[0]
    place = frag.backward.index(weights[0]) if weights else len(frag.backward)
    frag.backward[place:place] = more
    frag.backward += [*convert, add]
    for param in frag.params:
        param.ready = add
    frag.tensor_uses += [
        TensorUse(f"w:{operator.name}", nbytes, first, made=True),
        TensorUse(f"w:{operator.name}", nbytes, add),
    ]
    for op in convert:
        frag.tensor_uses += [
            TensorUse(f"w:{operator.name} in {accumulated}", total, op, made=True),
            TensorUse(f"w:{operator.name} in {accumulated}", total, add),
        ]


def gather_weights(
    scope: Scope, operator: Operator, at: LocalShapes, frag: Fragment, inputs: list[Op], weights: list[Op]
) -> None:
    """Changes the passes of an operator whose weights are stored sharded finer than it needs: they are all-gathered
    before use, all at once, and their gradients reduce-scattered after.

    The gathered weights are kept for the gradient of the input, or all-gathered again for it. Their gradient, a partial
    sum over ranks, is written to a temporary and reduce-scattered during the kernels that follow; the reduction adds it
    to the accumulated gradient.

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
    """The moves of the weights of an operator.

    nbytes: of the whole weights.
    names: of the weights that move.
    """

    scope: Scope
    operator: Operator
    nbytes: int
    frag: Fragment
    names: set[str]

    def gather(self, gathers: Sequence[Work], inputs: list[Op]) -> None:
        """Gathers weights before their use, again before the backward ops `inputs` if they are not kept."""
        frag, name, place = self.frag, self.operator.name, self.scope.place(self.operator)
        ahead = self.scope.serial_ops(f"gather w{name}", gathers, list(frag.entry.values()), "F", place)
        frag.forward[0].after.append(ahead[-1])
        frag.forward[:0] = ahead
        kept = bool(inputs) and not self.scope.regather
        self._keep(f"whole w{name}", ahead[0], inputs[-1] if kept else frag.forward[-1])
        if inputs and not kept:
            again = self.scope.serial_ops(f"regather w{name}", gathers, list(frag.grad_entry.values()), "B", place)
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
        behind = self.scope.serial_ops(f"scatter w{name}", scatters, weights[-1:], "W", self.scope.place(self.operator))
        frag.backward += behind
        self._keep(f"d:whole w{name}", (zeroed or weights)[0], behind[-1], "workspace")
        for param in frag.params:
            param.ready = behind[-1] if param.name in self.names else param.ready

    def _keep(self, key: str, begin: Op, end: Op, category: str = "parameters") -> None:
        ends = (begin, True), (end, False)
        self.frag.tensor_uses += [TensorUse(key, self.nbytes, op, written, category) for op, written in ends]
