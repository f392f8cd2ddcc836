"""Resharding: inserts the collectives between the children of a composite module that their layouts require."""

from __future__ import annotations

from collections import Counter, defaultdict

from meshcast.simulator.ir.layout import PARTIAL, Layout, Tensor, collectives_between, output_layout, required_layout
from meshcast.simulator.ir.modules import CompositeModule, Module, Operator
from meshcast.simulator.ir.operators import Cast, CoreAttention, Linear, Residual
from meshcast.simulator.ir.ops import Collective, Fragment, Memory, Op, TensorUse
from meshcast.simulator.lowering.scope import Scope

Contribution = tuple[Layout, Op]
"""A gradient of a tensor: its layout, and the op that makes it."""


class Resharding:
    """Joins the lowered children of a composite module, with the collectives that their layouts require, in `fragment`.

    scope: layouts, producers and readers of the unit.
    module: the composite module.
    fragments: its lowered children.
    """

    def __init__(self, scope: Scope, module: CompositeModule, fragments: list[Fragment]) -> None:
        self.scope, self.module, self.mesh = scope, module, scope.mesh
        self.fragment = Fragment()
        self.regathers: set[Op] = set()
        self._forward(fragments)
        self._backward(fragments)
        for frag in fragments:
            self.fragment.params += frag.params
            self.fragment.shared_weights += frag.shared_weights
            self.fragment.tensor_uses += frag.tensor_uses

    # ------------------------------------------------------------------------------------- forward

    def _forward(self, fragments: list[Fragment]) -> None:
        out = self.fragment
        out.entry = {t.name: Op(f"{t.name} in") for t in self.module.inputs}
        ready: dict[str, Op] = dict(out.entry)
        moved: dict[str, Op] = {}
        for child, frag in zip(self.module.children, fragments, strict=True):
            for tensor in child.inputs:
                source = ready[tensor.name]
                if isinstance(child, Operator) and tensor.name in self.scope.producer:
                    source = self._reshard_input(child, tensor, source, frag, moved)
                frag.entry[tensor.name].after.append(source)
            out.forward += frag.forward
            ready |= frag.exit
        out.exit = {name: op for name, op in ready.items() if name not in out.entry}

    def _reshard_input(
        self, operator: Operator, tensor: Tensor, source: Op, frag: Fragment, moved: dict[str, Op]
    ) -> Op:
        """Reshards an input to the layout that the operator needs, once for all its readers in this module."""
        scope = self.scope
        output, wanted = scope.produced_layout(tensor), required_layout(tensor, scope.division(operator))
        steps = collectives_between(tensor, output, wanted, self.mesh)
        key = scope.key(tensor, wanted)
        if steps and key not in moved:
            where = scope.transfer_place(tensor, operator)
            for work in steps:
                source = scope.op(f"{work.operation} {tensor.name}", work, [source], "F", where)
                self.fragment.forward.append(source)
            self.fragment.tensor_uses += [
                scope.tensor_use(tensor, output, source),
                scope.tensor_use(tensor, wanted, source, made=True),
            ]
            moved[key] = source
        gathered = bool(steps) and all(work.operation == "all_gather" for work in steps)
        # Not gathered again: tokens that experts have gathered, and tensors that later slices of a sequence read.
        again = (
            isinstance(operator, Linear | CoreAttention)
            and not operator.view
            and tensor not in operator.read_by_later_slices
        )
        if gathered and scope.regather and again:
            self._gather_again(operator, tensor, steps, output, wanted, frag)
        return moved.get(key, source)

    def _gather_again(
        self,
        operator: Operator,
        tensor: Tensor,
        steps: list[Collective],
        output: Layout,
        wanted: Layout,
        frag: Fragment,
    ) -> None:
        """Saves the shard in place of the all-gathered input, and all-gathers it again in the backward pass: once for
        its gradients, and once more before that where the operator is computed again."""
        scope, key = self.scope, self.scope.key(tensor, wanted)
        gradients, where = list(frag.grad_entry.values()), scope.transfer_place(tensor, operator)
        for phase in ("R", "W" if isinstance(operator, Linear) else "B"):
            readers = [op for op in frag.backward if op.phase == phase and op not in self.regathers]
            if not readers:
                continue
            gathers = scope.serial_ops(f"regather {tensor.name}", steps, gradients, phase, where)
            for op in readers:
                op.after.append(gathers[-1])
            gathered = f"{key}~{operator.name} {phase}"
            frag.tensor_uses = [
                TensorUse(gathered, t.nbytes, t.op) if t.key == key and t.op in readers else t for t in frag.tensor_uses
            ]
            frag.tensor_uses += [
                TensorUse(gathered, tensor.nbytes(wanted, self.mesh), gathers[-1], made=True),
                scope.tensor_use(tensor, output, gathers[0]),
            ]
            # What weight gradients read is gathered before the gradients of inputs are computed.
            others = (i for i, op in enumerate(frag.backward) if op not in self.regathers)
            place = next(i for i in others if phase == "R" or frag.backward[i].phase != "R")
            frag.backward[place:place] = gathers
            self.regathers.update(gathers)

    # ------------------------------------------------------------------------------------ backward

    def _backward(self, fragments: list[Fragment]) -> None:
        out, scope = self.fragment, self.scope
        inside = {*self.module.operators()}
        made_here = {t.name for child in self.module.children for t in child.outputs}
        waiting = Counter(t.name for child in self.module.children for t in child.inputs)
        contributions: dict[str, list[Contribution]] = defaultdict(list)
        for name in made_here:
            if any(operator not in inside for operator in scope.readers[name]) or not scope.readers[name]:
                out.grad_entry[name] = Op(f"d{name} in", phase="B")
                contributions[name].append((required_gradient_layout(self.scope, name), out.grad_entry[name]))

        for child, frag in zip(reversed(self.module.children), reversed(fragments), strict=True):
            for tensor in child.outputs:
                if tensor.name in frag.grad_entry:
                    frag.grad_entry[tensor.name].after += [op for _, op in contributions[tensor.name]]
            ops = list(frag.backward)
            for tensor in child.inputs:
                waiting[tensor.name] -= 1
                if tensor.name not in frag.grad_exit:
                    continue
                contributions[tensor.name].append((gradient_layout(scope, child, tensor), frag.grad_exit[tensor.name]))
                if waiting[tensor.name] == 0:
                    contributions[tensor.name] = [self._collect(tensor, contributions[tensor.name], ops)]
                    if tensor.name not in made_here:
                        out.grad_exit[tensor.name] = contributions[tensor.name][0][1]
            out.backward += ops

    def _collect(self, reader: Tensor, parts: list[Contribution], ops: list[Op]) -> Contribution:
        """Sums the gradients of a tensor: first those of equal layout, then, each resharded once, these sums."""
        scope = self.scope
        tensor = scope.producer[reader.name][0] if reader.name in scope.producer else reader
        wanted = required_gradient_layout(self.scope, tensor.name)
        groups: dict[tuple[tuple[str, str], ...], list[Op]] = defaultdict(list)
        for layout, op in parts:
            groups[tuple(sorted(layout.items()))].append(op)
        moved: list[Op] = []
        for items, members in groups.items():
            layout = dict(items)
            op = self._sum(tensor, layout, members, ops)
            # Issued right after its producer and before pending weight-gradient GEMMs, which hide it.
            place, where = ops.index(op) + 1 if op in ops else 0, scope.transfer_place(tensor)
            behind: list[Op] = []
            if op in ops and scope.keeps_issue_order(where.view):
                place, behind = len(ops), ops[-1:]
            for work in collectives_between(tensor.gradient, layout, wanted, self.mesh):
                source, op = op, scope.op(f"{work.operation} d{tensor.name}", work, [op, *behind], "B", where)
                ops.insert(place, op)
                place += 1
                self.fragment.tensor_uses.append(scope.tensor_use(tensor, wanted, op, made=True, prefix="d:"))
                arrived = scope.tensor_use(tensor, layout, op, prefix="d:")
                if source.work is not None or arrived.key == scope.incoming_gradient:
                    self.fragment.tensor_uses.append(arrived)
            moved.append(op)
        return wanted, self._sum(tensor, wanted, moved, ops)

    def _extend_residual_gradient(self, tensor: Tensor, total: Op) -> None:
        """Keeps the gradient of a residual sum in memory until `total`: the residual branch passes it on as it is."""
        for operator in self.scope.readers[tensor.name]:
            if isinstance(operator, Residual) and tensor.name in [t.name for t in operator.pass_through]:
                out = operator.outs[0]
                layout = required_layout(out, self.scope.division(operator))
                self.fragment.tensor_uses.append(self.scope.tensor_use(out, layout, total, prefix="d:"))

    def _sum(self, tensor: Tensor, layout: Layout, members: list[Op], ops: list[Op]) -> Op:
        """Returns the op after which the sum of `members` exists; adds an addition kernel if there are several."""
        if len(members) == 1:
            return members[0]
        size = tensor.gradient.nbytes({a: d for a, d in layout.items() if d != PARTIAL}, self.mesh)
        work, where = Memory("add", len(members) * size, size), self.scope.transfer_place(tensor)
        total = self.scope.op(f"add d{tensor.name}", work, members, "B", where)
        ops.append(total)
        self.fragment.tensor_uses.append(self.scope.tensor_use(tensor, layout, total, made=True, prefix="d:"))
        self._extend_residual_gradient(tensor, total)
        return total


def gradient_layout(scope: Scope, child: Module, tensor: Tensor) -> Layout:
    """Returns the layout in which a module makes the gradient of an input, in dims of the input's producer."""
    if not isinstance(child, Operator) or isinstance(child, Cast) or tensor.name not in scope.producer:
        return required_gradient_layout(scope, tensor.name)
    back = {new: old for old, new in tensor.renamed.items()}
    return {axis: back.get(dim, dim) for axis, dim in output_layout(tensor, scope.division(child)).items()}


def required_gradient_layout(scope: Scope, name: str) -> Layout:
    """Returns the layout in which the producer of a tensor needs its gradient, which casts pass on as it is; {} if it
    is outside the unit."""
    if name not in scope.producer:
        return {}
    tensor, operator = scope.producer[name]
    if isinstance(operator, Cast):
        return required_gradient_layout(scope, operator.ins[0].name)
    return required_layout(tensor, scope.division(operator))
