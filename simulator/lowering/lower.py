"""From sites to ops: every scheme is asked for its rule, local sizes and movements follow, `lower` calls are folded.

``Lowering.lower(site)`` hands the site to the outermost scheme, whose ``inner`` is the next one, and so on;
inside all of them stands the default: a leaf becomes its kernels at local sizes, a nest joins its children by the
collectives that their layouts imply. Who produces a tensor and who reads it is known from the tree before any op
is made. Units of a stage meet only in the residual stream, so each is lowered by itself, and equal ones once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from simulator.ir.layout import PARTIAL, Layout, Tensor, leaving, needed
from simulator.ir.mesh import Mesh
from simulator.ir.modules import LOWEST, CompositeModule, LocalShapes, Module, Operator, Stage, Unit, Update, walk
from simulator.ir.operators import Boundary, Cast, Embedding, Residual, Sum
from simulator.ir.ops import COMPUTE, Collective, Fragment, Memory, Op, Param, StageOps, TensorUse, UnitRun, Work
from simulator.ir.scheme import Inner, Rule, Scheme
from simulator.lowering.grad_accumulation import accumulate_separately
from simulator.lowering.resharding import Resharding
from simulator.lowering.sharded_weights import gather_weights

TOKENS = ("b", "s")
"""The dims that count tokens."""

Known = dict[Hashable, UnitRun]
"""Lowered units by what they depend on."""


class Lowering:
    """Lowers the sites of one stage, or the update of one device, under the `schemes` of a plan (outermost first).

    regather: inputs of linears that arrived by an all-gather are kept as shards and gathered again for the weight
    gradient, and weights that rest cut are gathered again for the gradient of the input. known: units that were lowered
    before, for this plan or another; new ones are added. fused: weight gradients are added to those that persist where
    they are made.
    """

    def __init__(
        self,
        mesh: Mesh,
        schemes: Sequence[Scheme],
        regather: bool = False,
        known: Known | None = None,
        fused: bool = True,
    ) -> None:
        self.mesh, self.schemes, self.regather, self.fused = mesh, tuple(schemes), regather, fused
        self._known: Known = known if known is not None else {}
        turns = tuple(self.in_turn(view) for view in ("", *mesh.views))
        self._lowering_key = (
            regather,
            fused,
            tuple(mesh.axes),
            tuple(mesh.views),
            turns,
            *(scheme.lowering_key for scheme in schemes),
        )
        self.producer: dict[str, tuple[Tensor, Operator]] = {}
        self.readers: dict[str, list[Operator]] = defaultdict(list)
        self._divisions: dict[Operator, dict[str, str]] = {}
        self._cuts: dict[Operator, dict[str, str]] = {}
        self._families: dict[str, str] = {part: one.family for one in self.schemes if not one.view for part in one.over}
        self._embeds = False
        self._same: dict[str, Tensor] = {}
        self._passed_on: dict[str, Tensor] = {}
        self._fixed: set[str] = set()
        self.arriving = ""
        """The key of the gradient that comes into the unit."""

    def run(self, stage: Stage, embeds: bool = False) -> StageOps:
        """Lowers a whole stage; `embeds`: its device holds the embedding, in this stage or another."""
        self._embeds = embeds or any(
            isinstance(operator, Embedding) and not operator.tied
            for unit in stage.units
            for operator in unit.operators()
        )
        return self._around(stage, 0)

    def lower(self, module: Module) -> Fragment:
        """Lowers `module` through all schemes."""
        return self._fold(module, 0)

    def division(self, operator: Operator) -> dict[str, str]:
        """Which dim each axis divides at `operator`, over all schemes; axes of size one divide nothing.

        In a view its own schemes have the last word. Along the axes of a view that no scheme claims ranks hold copies
        of the weights, and along those that cut them at rest alone they use copies: so only tokens are divided there.
        """
        if operator not in self._divisions:
            divide: dict[str, str] = {}
            cuts: dict[str, str] = {}
            inside = operator.view if operator.view in self.mesh.views else ""
            for scheme in sorted(self.schemes, key=lambda one: one.view != ""):
                if scheme.view not in ("", inside):
                    continue
                rule = scheme.layouts(operator)
                if isinstance(rule, str):
                    rule = Rule(dict.fromkeys(scheme.over, rule))
                if rule is not None:
                    divide |= {axis: dim for axis, dim in rule.divide.items() if self.mesh.size(axis) > 1}
                    cuts |= {axis: dim for axis, dim in rule.rest.items() if self.mesh.size(axis) > 1}
            claimed = {part for scheme in self.schemes if scheme.view == inside for part in scheme.over}
            for part in self.mesh.parts(self.mesh.views.get(inside, ())):
                if (part not in claimed or part in cuts) and divide.get(part, "").split("|")[0] not in TOKENS:
                    divide[part] = "s"
            self._divisions[operator], self._cuts[operator] = divide, cuts
        return self._divisions[operator]

    def at_rest(self, operator: Operator, weight: Tensor) -> Layout:
        """How a weight of `operator` lies while nobody uses it."""
        used = needed(weight, self.division(operator))
        cuts = self._cuts[operator].items()
        return {axis: dim for axis, dim in cuts if weight.has(dim) and axis not in used} | dict(used)

    # --------------------------------------------------------------------------------------- inside

    def _around(self, stage: Stage, depth: int) -> StageOps:
        if depth < len(self.schemes):
            return self.schemes[depth].lower_stage(stage, lambda part: self._around(part, depth + 1))
        return StageOps([self._link(unit) for unit in stage.units])

    def _link(self, unit: Unit) -> UnitRun:
        tied = any(getattr(operator, "tied", False) for operator in unit.operators()) and self._embeds
        key = (unit.lowering_key, unit.marks, tied, self._lowering_key) if unit.lowering_key is not None else unit
        if key not in self._known:
            self._known[key] = self._lowered(unit)
        return replace(self._known[key], count=unit.count, marks=unit.marks)

    def _lowered(self, unit: Unit) -> UnitRun:
        for notes in (self.producer, self.readers, self._same, self._passed_on):
            notes.clear()
        # Ids, and what only frozen leaves have made of them.
        self._fixed = {unit.takes.name} if unit.takes and LOWEST in unit.marks else set()
        walk(unit, self._note)
        ends: list[str | None] = []
        nbytes = 0
        for tensor in (unit.takes, unit.gives):
            if tensor is not None:
                border = Boundary("border", (tensor,), (tensor,))
                self.producer.setdefault(tensor.name, (tensor, border))
                layout = border.leaving(tensor, self.division(border))
                nbytes = tensor.nbytes(layout, self.mesh)
            ends.append(self.key(tensor, layout) if tensor is not None else None)
        self.arriving = f"d:{ends[1]}"
        takes, gives = (tensor.name if tensor is not None else None for tensor in (unit.takes, unit.gives))
        names = [operator.name for operator in unit.operators()]
        found, left = (tuple(f"d:{name}.{what}" for name in names) for what in ("found", "left"))
        return UnitRun(unit.name, self.lower(unit), 1, takes, gives, (ends[0], ends[1]), nbytes, found, left)

    def _note(self, operator: Operator) -> None:
        if isinstance(operator, Residual):
            # Only what is read nowhere else: a gradient that is summed is a new tensor.
            alone = operator.ins if len(operator.ins) == 1 else operator.ins[1:]
            self._same |= {t.name: operator.outs[0] for t in operator.passing if t in alone}
        if isinstance(operator, Sum):
            self._same |= {t.name: out for t, out in operator.passing}
        if isinstance(operator, Cast):
            self._same[operator.ins[0].name] = operator.outs[0]
        if isinstance(operator, Boundary):
            self._passed_on[operator.outs[0].name] = operator.ins[0]
        for tensor in operator.outs:
            self.producer[tensor.name] = (tensor, operator)
        for tensor in operator.ins:
            self.readers[tensor.name].append(operator)
        if operator.frozen and not self._moving(operator):
            self._fixed |= {tensor.name for tensor in operator.outs}

    def _moving(self, operator: Operator) -> list[Tensor]:
        """The inputs that something trained has made, so that their gradients are wanted."""
        return [t for t in operator.ins if t.dtype != "int64" and t.name not in self._fixed]

    def _fold(self, module: Module, depth: int) -> Fragment:
        if depth < len(self.schemes):
            inner: Inner = lambda part: self._fold(part, depth + 1)  # noqa: E731
            return self.schemes[depth].lower(module, inner)
        if isinstance(module, CompositeModule):
            return Resharding(self, module).fragment
        if isinstance(module, Update):
            return self._update(module)
        assert isinstance(module, Operator)
        return self._leaf(module)

    def op(self, name: str, work: Work, after: Iterable[Op], phase: str, view: str = "") -> Op:
        """`view`: the one in which a collective takes place, or to which it leads."""
        stream = COMPUTE
        if isinstance(work, Collective):
            inside = (s.family for s in self.schemes if s.view and s.view == view and work.axes[0] in s.over)
            stream = next(inside, self._families.get(work.axes[0], COMPUTE))
        return Op(name, stream, work, list(after), phase)

    def serial_ops(self, name: str, works: Iterable[Work], after: list[Op], phase: str, view: str = "") -> list[Op]:
        """Ops of one leaf, each waiting for the one before (they may lie on different streams)."""
        ops: list[Op] = []
        for work in works:
            ops.append(self.op(name, work, [*after, *ops[-1:]], phase, view))
        return ops

    def key(self, tensor: Tensor, layout: Layout) -> str:
        """The name of a tensor in one layout, in its producer's dims; a partial sum is reduced in place."""
        tensor = self._passed_on.get(tensor.name, tensor)
        back = {new: old for old, new in tensor.renamed.items()}
        cuts = (f"{a}:{back.get(d, d)}" for a, d in sorted(layout.items()) if d != PARTIAL and self.mesh.size(a) > 1)
        return f"{tensor.name}@{','.join(cuts)}"

    def tensor_use(self, tensor: Tensor, layout: Layout, op: Op, made: bool = False, prefix: str = "") -> TensorUse:
        whole = {axis: dim for axis, dim in layout.items() if dim != PARTIAL}
        if prefix:
            while tensor.name in self._same:
                tensor = self._same[tensor.name]
            tensor = tensor.gradient
        category = "logits" if tensor.has("v") else "workspace"
        return TensorUse(prefix + self.key(tensor, layout), tensor.nbytes(whole, self.mesh), op, made, category)

    def produced(self, tensor: Tensor) -> Layout:
        """How a tensor leaves its producer, in the dims of this reader."""
        made, operator = self.producer[tensor.name]
        return tensor.arriving(operator.leaving(made, self.division(operator)))

    def meeting(self, tensor: Tensor, *readers: Operator) -> str:
        """The view in which the maker of a tensor or one of its readers lies."""
        maker = self.producer.get(tensor.name)
        operators = (*((maker[1],) if maker else ()), *(readers or self.readers[tensor.name]))
        return next((operator.view for operator in operators if operator.view), "")

    def in_turn(self, view: str) -> bool:
        """Whether gradients of activations of a view wait for all that was issued before them."""
        framework = [one.framework.overlap for one in self.schemes if one.view == view and one.framework]
        return not all(overlap.ep if view else overlap.gradients for overlap in framework)

    def _leaf(self, operator: Operator) -> Fragment:
        divide = self.division(operator)
        at = LocalShapes(divide, self.mesh)
        frag = Fragment(entry={t.name: Op(f"{t.name} in") for t in operator.ins})
        frag.grad_entry = {t.name: Op(f"d{t.name} in", phase="B") for t in operator.outs}
        start, grads = list(frag.entry.values()), list(frag.grad_entry.values())

        frag.forward = self.serial_ops(operator.name, operator.forward(at), start, "F")
        end = frag.forward[-1] if frag.forward else Op(operator.name, after=start)
        frag.exit = {t.name: end for t in operator.outs}

        moving = self._moving(operator)
        inputs = self.serial_ops(f"d{operator.name}", operator.backward_inputs(at) if moving else [], grads, "B")
        weights = self.serial_ops(
            f"w{operator.name}", [] if operator.frozen else operator.backward_weights(at), grads, "W"
        )
        frag.backward = [*inputs, *weights]
        given = inputs[-1] if inputs else Op(f"d{operator.name}", after=grads, phase="B")
        frag.grad_exit = {t.name: given for t in moving}
        ready = (weights or inputs or [Op(f"w{operator.name}", after=grads, phase="W")])[-1]
        params = []
        for weight in operator.weights:
            # Over a dim that the outputs lack the weight's gradient is no sum: all see the whole gradient of these.
            summed = (axis for axis, dims in divide.items() if any(t.first(dims) for t in operator.outs))
            rested = self.at_rest(operator, weight)
            partial = tuple(axis for axis in summed if axis not in rested)
            size = weight.local(rested, self.mesh)
            total = weight.local({}, self.mesh)
            tied = getattr(operator, "tied", False)
            view = operator.view if operator.view in self.mesh.views else ""
            copies, trained = self._copies(weight, at), not operator.frozen
            params.append(Param(weight.name, size, total, partial, ready, end, tied, copies, view, trained))
        # A tied output layer beside its embedding has no table of its own.
        borrows = getattr(operator, "tied", False) and self._embeds
        frag.params = [] if borrows else params
        frag.borrowed = [param.name for param in params] if borrows else []
        frag.tensor_uses = list(self._touches(operator, at, frag, inputs, weights))
        if not self.fused and params and not operator.frozen:
            uncut = {weight.name for weight in operator.weights if self.at_rest(operator, weight) == at.layout(weight)}
            kept = (param for param in params if self.mesh.size(shards_at_rest(self.schemes, "gradients", param)) == 1)
            accumulate_separately(
                frag, operator, at, weights, ready, sum(param.size for param in kept if param.name in uncut)
            )
        gather_weights(self, operator, at, frag, inputs, weights)
        return frag

    def _copies(self, weight: Tensor, at: LocalShapes) -> tuple[tuple[str, ...], int] | None:
        """The axes along which neighbours hold the same part of a weight, though they cut it, and their number."""
        layout = at.layout(weight)
        for name, dim in weight.dims.items():
            axes = [axis for axis in self.mesh.inner_first(layout)[::-1] if layout[axis] == name]
            if (holders := dim.holders(self.mesh.size(axes))) > 1:
                return tuple(axes), holders
        return None

    def _touches(
        self, operator: Operator, at: LocalShapes, frag: Fragment, inputs: list[Op], weights: list[Op]
    ) -> Iterable[TensorUse]:
        if frag.forward:
            first, last = frag.forward[0], frag.forward[-1]
            yield from (self.tensor_use(t, at.layout(t), op) for t in operator.ins for op in (first, last))
            yield from (self.tensor_use(t, operator.leaving(t, at.divide), last, made=True) for t in operator.outs)
        yield from self._temporaries(operator, at, frag.forward, backward=False)
        backward = [*inputs, *weights]
        if not backward:
            return
        for op in (backward[0], backward[-1]):
            yield from (self.tensor_use(t, at.layout(t), op, prefix="d:") for t in operator.outs)
        if inputs:
            moving = self._moving(operator)
            yield from (self.tensor_use(t, leaving(t, at.divide), inputs[-1], made=True, prefix="d:") for t in moving)
            yield from (replace(self.tensor_use(t, at.layout(t), inputs[-1]), stays=True) for t in operator.lent)
            for what, nbytes in zip(("found", "left"), operator.handed(at), strict=True):
                ends = (inputs[0], inputs[-1]) if nbytes else ()
                key, made = f"d:{operator.name}.{what}", what == "left"
                yield from (TensorUse(key, nbytes, op, made, "activations") for op in ends)
        # What both gradients read goes after the weight gradient; what only one reads goes with it.
        for t in operator.reads if operator.frozen else (*operator.reads, *operator.reads_for_weights):
            op = (weights or inputs)[-1] if t in operator.reads_for_weights else (inputs or weights)[-1]
            yield self.tensor_use(t, at.layout(t) if t in operator.ins else operator.leaving(t, at.divide), op)
        yield from self._temporaries(operator, at, inputs, backward=True)
        if frag.forward:
            for what, nbytes, category in operator.keeps(at):
                yield TensorUse(f"{operator.name}.{what}", nbytes, frag.forward[-1], True, category)
                yield TensorUse(f"{operator.name}.{what}", nbytes, (inputs or weights)[-1], False, category)

    def _temporaries(self, operator: Operator, at: LocalShapes, ops: list[Op], backward: bool) -> Iterable[TensorUse]:
        for i, (start, stop, nbytes) in enumerate(operator.temporaries(at, backward) if ops else ()):
            key = f"{'d:' * backward}{operator.name}.{i}"
            yield from (TensorUse(key, nbytes, ops[place], made=place == start) for place in (start, stop))

    def _update(self, module: Update) -> Fragment:
        """Sums what no data scheme summed, then clipping's norm, then the optimizer over the local shards."""
        rest: dict[tuple[str, ...], int] = defaultdict(int)
        copied: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
        elements = shard = 0.0
        for param, count in module.params:
            if param.copies:
                cut = self.mesh.size(shards_at_rest(self.schemes, "gradients", param))
                copied[param.copies] += count * param.size // cut
        for param, size in by_axes(module.params):
            summed = {axis for scheme in self.schemes for axis in (*scheme.reduces(param), *scheme.unsynchronised)}
            held = size / self.mesh.size(shards_at_rest(self.schemes, "gradients", param))
            if axes := tuple(axis for axis in param.partial if axis not in summed):
                rest[axes] += round(held)
            elements += held
            shard += size / self.mesh.size(axis for scheme in self.schemes for axis in scheme.update_shards(param))
        sums = [Collective("all_reduce", n * module.grad_bytes, axes) for axes, n in sorted(rest.items())]
        for (axes, holders), n in sorted(copied.items()):
            sums.append(Collective("all_reduce", n * module.grad_bytes, axes, tuple(range(holders))))
        sums += [
            Collective("all_reduce", n * module.grad_bytes, (module.axis,), members) for members, n in module.shared
        ]
        ops = [self.op("reduce", work, [], "U") for work in sums]
        if module.clipped:
            ops.append(self.op("grad-norm", Memory("grad-norm", round(shard * module.grad_bytes), 0), ops, "U"))
            apart = {axis for scheme in self.schemes for axis in scheme.unsynchronised}
            everyone = tuple(axis for axis in self.mesh.axes if self.mesh.size(axis) > 1 and axis not in apart)
            if everyone:
                ops.append(Op("grad-norm", "compute", Collective("all_reduce", 4, everyone), ops[-1:], "U"))
        behind = ops[-1:] if module.clipped else ops
        step = self.op("adam", Memory("adam", round(shard * module.read), round(shard * module.write)), behind, "U")
        # Zeroing the gradient buffer touches every gradient that rests here.
        zero = self.op("zero-grad", Memory("zero-grad", 0, round(elements * module.grad_bytes)), [step], "U")
        return Fragment(forward=[*ops, step, zero], exit={"parameters": step})


# -------------------------------------------------------------------------------------- for schemes


def by_axes(params: Iterable[tuple[Param, int]]) -> list[tuple[Param, int]]:
    """One parameter for all of a size whose gradients are partial sums over the same axes, and the elements of all."""
    found: dict[Hashable, tuple[Param, int]] = {}
    for param, count in params:
        key = param.partial, param.view, param.trained, param.size
        found[key] = param, found.get(key, (param, 0))[1] + count * param.size
    return list(found.values())


def shards_at_rest(schemes: Iterable[Scheme], state: str, param: Param) -> tuple[str, ...]:
    """All axes over which `state` of a parameter is cut while it rests."""
    return tuple(axis for scheme in schemes for axis in scheme.shards_at_rest(state, param))
