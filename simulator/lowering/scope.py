"""The scope of lowering: facts about the unit that is being lowered, which the other modules of this room look up.

They are: the dim of each operator that each mesh axis shards, the operator that produces a tensor, the operators that
read it, the memory keys of tensors, and the stream of each op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from meshcast.simulator.ir.capabilities import HoldsUnequalShards, ShardsStates, schemes_with
from meshcast.simulator.ir.graph_parts import find_graphed
from meshcast.simulator.ir.host_calls import CallKind, PassCalls, name_kind
from meshcast.simulator.ir.layout import PARTIAL, Layout, Tensor, required_layout
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import LOWEST, BatchLossUnit, Layer, Operator, Unit, walk
from meshcast.simulator.ir.operators import Boundary, Cast, Residual, Sum
from meshcast.simulator.ir.ops import COMPUTE, Collective, Gemm, Memory, Op, Param, TensorUse, Work
from meshcast.simulator.ir.scheme import Rule, Scheme
from meshcast.simulator.ir.sparse_attention_operators import DetachedLinear

TOKENS = ("b", "s")
"""The dims that count tokens."""

EXPERT_LAUNCHES, PADDED_LAUNCHES = 0.5, 0.2
"""Time of the host for an expert of a grouped GEMM, over that of an op of the framework: where experts have different
numbers of tokens, whose rows it splits, pads and quantises expert by expert, and where all have the same number.

The first was chosen with `launch_s` of Megatron-Core on 69 published runs of Megatron-Bridge whose hosts launch
experts: mean error 11.9 % at 0.5 and 120 us, 12.4 to 16.3 % at 0.3 to 0.8 and 90 to 150 us. The second was chosen on
the three of ten runs that drop tokens whose hosts launch experts, all on B200: mean error 17 % at 0.1, 8 % at 0.2, 10 %
at 0.3."""


class HostLaunches(NamedTuple):
    """How the host launches ops.

    graphed: modules of layers whose ops CUDA graphs launch.
    waits: operations at which the host waits for the GPU, so that its launches are ops.
    calls: time of the host for each kind of ops, over that of an op of the framework; empty: all take as long.
    kernels: operations that are several kernels, with the time of the host to launch these, forward and backward, over
        that of an op.
    """

    graphed: tuple[str, ...] = ()
    waits: frozenset[str] = frozenset()
    calls: tuple[tuple[CallKind, PassCalls], ...] = ()
    kernels: tuple[tuple[str, tuple[float, float]], ...] = ()


ONE_BY_ONE = HostLaunches()
"""The host launches every op, and waits for nothing."""


class OpPlace(NamedTuple):
    """Where an op belongs.

    view: view of the mesh of its operator, which determines the stream of a collective.
    graph: part of a layer whose CUDA graph launches it; empty: the host does.
    """

    view: str = ""
    graph: str = ""


NOWHERE = OpPlace()
"""The place of an op of no operator."""


class Scope:
    """Sharded dims, producers and readers of a unit under the `schemes` of a plan (outermost first).

    regather: inputs that arrived by an all-gather, and sharded weights, are all-gathered again in the backward pass.
    sharding: those of the schemes that may shard states.
    incoming_gradient: the memory key of the gradient that enters the unit.
    embeds: the device holds the embedding, in this stage or another, so that a tied output layer needs no table.
    copies_table: the stage has a copy of its table, for the tokens of a decoder, which a tied output layer reads too.
    in_layer: the unit is a layer.
    host: how the host launches ops.
    """

    def __init__(
        self,
        mesh: Mesh,
        schemes: Sequence[Scheme],
        regather: bool = False,
        host: HostLaunches = ONE_BY_ONE,
    ) -> None:
        self.mesh, self.schemes, self.regather = mesh, tuple(schemes), regather
        self.host, self._calls, self._launches = host, dict(host.calls), dict(host.kernels)
        self.incoming_gradient = ""
        self.embeds = self.copies_table = self.in_layer = False
        self.producer: dict[str, tuple[Tensor, Operator]] = {}
        self.readers: dict[str, list[Operator]] = defaultdict(list)
        self._divisions: dict[Operator, dict[str, str]] = {}
        self._rest_divisions: dict[Operator, dict[str, str]] = {}
        self._views_last = sorted(self.schemes, key=lambda scheme: scheme.view != "")
        self.sharding = schemes_with(schemes, ShardsStates)
        self._gathered = {axis for scheme in self.sharding for axis in scheme.gathered_axes}
        self._families = {axis: scheme.family for scheme in self.schemes if not scheme.view for axis in scheme.over}
        self._same_gradient: dict[str, Tensor] = {}
        self._renamed_from: dict[str, Tensor] = {}
        self._buffers: dict[tuple[Tensor, str, tuple[tuple[str, str], ...]], tuple[str, int, str]] = {}
        """Keys, bytes and categories of tensors of the unit, and of their gradients, by their layouts."""
        self._without_gradient: set[str] = set()
        self._graphed: Mapping[str, str] = {}

    # --------------------------------------------------------------------------------------------- layouts

    def division(self, operator: Operator) -> dict[str, str]:
        """Returns the dim of `operator` that each axis shards, over all schemes; axes of size 1 shard nothing.

        At operators in a view, the schemes of the view override the others. Along two kinds of axes of a view tokens
        are sharded, since ranks hold whole weights: axes that no scheme uses, and axes along which a scheme shards
        weights only between their uses and gathers them for each.

        Weights that a scheme stores sharded along an axis over which a data scheme shards all weights are sharded and
        gathered by the latter.
        """
        if operator not in self._divisions:
            inside = operator.view if operator.view in self.mesh.views else ""
            divide, at_rest = self._apply_rules(operator, inside)
            divide = {axis: dim for axis, dim in divide.items() if dim}
            owned = {axis for scheme in self.schemes if scheme.view == inside for axis in scheme.over}
            for axis in self.mesh.parts(self.mesh.views.get(inside, ())):
                if (axis not in owned or axis in at_rest) and divide.get(axis, "").split("|")[0] not in TOKENS:
                    divide[axis] = "s"
            self._divisions[operator], self._rest_divisions[operator] = divide, at_rest
        return self._divisions[operator]

    def _apply_rules(self, operator: Operator, view: str) -> tuple[dict[str, str], dict[str, str]]:
        """Returns what the schemes say: the dim that each axis shards at an operator, and the dim of its weights at
        rest."""
        divide: dict[str, str] = {}
        at_rest: dict[str, str] = {}
        for scheme in self._views_last:
            rule = scheme.layouts(operator) if scheme.view in ("", view) else None
            if isinstance(rule, str):
                rule = Rule(dict.fromkeys(scheme.over, rule))
            if rule is not None:
                divide |= {axis: dim for axis, dim in rule.divide.items() if self.mesh.size(axis) > 1}
                kept = (axis for axis in rule.at_rest if scheme.view or axis not in self._gathered)
                at_rest |= {axis: rule.at_rest[axis] for axis in kept if self.mesh.size(axis) > 1}
        return divide, at_rest

    def fix_division(self, operator: Operator, divide: Mapping[str, str]) -> None:
        """Sets the dim of `operator` that each axis shards, in place of what the schemes say; its weights are stored as
        it needs them. For tables of the costs of all layouts."""
        self._divisions[operator] = {axis: dim for axis, dim in divide.items() if dim and self.mesh.size(axis) > 1}
        self._rest_divisions[operator] = {}

    def at_rest(self, operator: Operator, weight: Tensor) -> Layout:
        """Returns the layout in which a weight is stored between the passes of `operator`."""
        used = required_layout(weight, self.division(operator))
        stored = self._rest_divisions[operator].items()
        return {axis: dim for axis, dim in stored if weight.has(dim) and axis not in used} | dict(used)

    def sharded_dims(self, operator: Operator) -> Iterator[tuple[Tensor, str, list[str]]]:
        """Yields every dim of a tensor of `operator` that axes shard, with these axes; of weights as they are
        stored."""
        divide = self.division(operator)
        for tensor in (*operator.ins, *operator.outs, *operator.weights):
            parts: dict[str, list[str]] = defaultdict(list)
            layout = self.at_rest(operator, tensor) if tensor in operator.weights else required_layout(tensor, divide)
            for axis, dim in layout.items():
                parts[dim].append(axis)
            yield from ((tensor, dim, sharding) for dim, sharding in parts.items())

    def produced_layout(self, tensor: Tensor) -> Layout:
        """Returns the layout in which the producer of a tensor makes it, in the dim names of `tensor`."""
        output, operator = self.producer[tensor.name]
        return tensor.layout_of_producer(operator.output_layout(output, self.division(operator)))

    def place(self, operator: Operator) -> OpPlace:
        """Returns the place of the ops of an operator."""
        return OpPlace(operator.view, self._graphed.get(operator.name, ""))

    def transfer_place(self, tensor: Tensor, *readers: Operator) -> OpPlace:
        """Returns the place in which a tensor is resharded, or its gradients are added: in the view of its producer,
        else of a reader; in the graph of its producer if that has a reader, too, or of readers that are all in graphs
        where the tensor enters the unit."""
        maker, reading = self.producer.get(tensor.name), readers or self.readers[tensor.name]
        operators = (*((maker[1],) if maker else ()), *reading)
        view = next((operator.view for operator in operators if operator.view), "")
        graphs = [self.place(operator).graph for operator in reading]
        if maker is None or isinstance(maker[1], Boundary):
            return OpPlace(view, graphs[0] if graphs and all(graphs) else "")
        return OpPlace(view, self.place(maker[1]).graph if any(graphs) else "")

    def keeps_issue_order(self, view: str) -> bool:
        """Says whether collectives of activation gradients wait for all that was issued before them."""
        overlaps = [scheme.framework.overlap for scheme in self.schemes if scheme.view == view and scheme.framework]
        return not all(overlap.ep if view else overlap.gradients for overlap in overlaps)

    # ------------------------------------------------------------------------------------------------- ops

    def op(self, name: str, work: Work, after: Iterable[Op], phase: str, place: OpPlace = NOWHERE) -> Op:
        """Makes an op on the stream of its work."""
        stream = COMPUTE
        if isinstance(work, Collective):
            view = place.view
            inside = (s.family for s in self.schemes if s.view and s.view == view and work.axes[0] in s.over)
            stream = next(inside, self._families.get(work.axes[0], COMPUTE))
        launches = 0.0 if place.graph else self._count_launches(work, phase)
        return Op(name, stream, work, list(after), phase, launches=launches, graph=place.graph)

    def _count_launches(self, work: Work, phase: str) -> float:
        """Counts the launches of an op of the framework that take the host as long as those of `work`."""
        if isinstance(work, Memory) and work.what in self._launches:
            return self._launches[work.what][work.backward]
        if self._calls:
            return self._calls[name_kind(work)].of_phase(phase)
        each = work.batch if isinstance(work, Gemm) and work.groups else 0
        # Where the host waits for routers, experts have different numbers of tokens.
        return 1.0 + (EXPERT_LAUNCHES if "router" in self.host.waits else PADDED_LAUNCHES) * each

    def count_vectors(self, operator: Operator, backward: Sequence[Op]) -> None:
        """Adds the launches for the gradients of an operator's vectors of weights to the last op of its backward pass;
        the biases of a product are one."""
        vectors = sum(len(weight.dims) == 1 for weight in operator.weights)
        if vectors and backward and self._calls and not operator.frozen and not backward[-1].graph:
            number = vectors if vectors == len(operator.weights) else 1
            backward[-1].launches += number * self._calls["vector"].weights

    def serial_ops(
        self, name: str, works: Iterable[Work], after: list[Op], phase: str, place: OpPlace = NOWHERE
    ) -> list[Op]:
        """Makes the ops of an operator, each waiting for the op before, since they may be on different streams."""
        ops: list[Op] = []
        for work in works:
            ops.append(self.op(name, work, [*after, *ops[-1:]], phase, place))
        return ops

    # ---------------------------------------------------------------------------------------------- memory

    def key(self, tensor: Tensor, layout: Layout) -> str:
        """Makes the memory key of a tensor in a layout, in its producer's dims; partial sums are reduced in place."""
        tensor = self._renamed_from.get(tensor.name, tensor)
        back = {new: old for old, new in tensor.renamed.items()}
        size = self.mesh.size
        shards = [f"{a}:{back.get(d, d)}" for a, d in sorted(layout.items()) if d != PARTIAL and size(a) > 1]
        return f"{tensor.name}@{','.join(shards)}"

    def tensor_use(self, tensor: Tensor, layout: Layout, op: Op, made: bool = False, prefix: str = "") -> TensorUse:
        """Makes the use of a tensor in a layout by `op`. prefix: ``d:`` for its gradient."""
        buffer = tensor, prefix, tuple(layout.items())
        if buffer not in self._buffers:
            if prefix:
                while tensor.name in self._same_gradient:
                    tensor = self._same_gradient[tensor.name]
                tensor = tensor.gradient
            category = "logits" if tensor.has("v") else "workspace"
            nbytes = tensor.held_bytes(layout, self.mesh)
            self._buffers[buffer] = prefix + self.key(tensor, layout), nbytes, category
        key, nbytes, category = self._buffers[buffer]
        return TensorUse(key, nbytes, op, made, category)

    # ------------------------------------------------------------------------------------------------ units

    def enter(self, unit: Unit) -> tuple[tuple[str | None, str | None], tuple[int, int]]:
        """Records producers and readers of a unit; returns the memory keys and the bytes of its input and output."""
        for notes in (self.producer, self.readers, self._same_gradient, self._renamed_from, self._buffers):
            notes.clear()
        # Inputs of the model, such as token ids, and tensors computed from them by frozen operators only.
        entering = unit.residual_in.name if unit.residual_in else ""
        context = unit.context.name if unit.context else ""
        constant = (t.name for t in unit.inputs if t.name not in (entering, context) or LOWEST in unit.marks)
        self._without_gradient = set() if isinstance(unit, BatchLossUnit) else set(constant)
        self.in_layer = isinstance(unit, Layer)
        self._graphed = find_graphed(unit, self.host.graphed) if isinstance(unit, Layer) and self.host.graphed else {}
        walk(unit, self._note)
        ends: list[str | None] = []
        nbytes = [0, 0]
        for i, tensor in enumerate((unit.residual_in, unit.residual_out)):
            if tensor is not None:
                border = Boundary("border", (tensor,), (tensor,))
                self.producer.setdefault(tensor.name, (tensor, border))
                layout = border.output_layout(tensor, self.division(border))
                nbytes[i] = tensor.nbytes(layout, self.mesh)
            ends.append(self.key(tensor, layout) if tensor is not None else None)
        if unit.context:
            self.producer[context] = unit.context, Boundary("border", (unit.context,), (unit.context,))
        self.incoming_gradient = f"d:{ends[1]}"
        return (ends[0], ends[1]), (nbytes[0], nbytes[1])

    def _note(self, operator: Operator) -> None:
        if isinstance(operator, Residual):
            # An input with other readers is left out: its gradient is a sum, and so a new tensor.
            once = operator.ins if len(operator.ins) == 1 else operator.ins[1:]
            self._same_gradient |= {t.name: operator.outs[0] for t in operator.pass_through if t in once}
        if isinstance(operator, Sum):
            self._same_gradient |= {t.name: out for t, out in operator.pass_through}
        if isinstance(operator, Cast):
            self._same_gradient[operator.ins[0].name] = operator.outs[0]
        if isinstance(operator, Boundary):
            self._renamed_from[operator.outs[0].name] = operator.ins[0]
        for tensor in operator.outs:
            self.producer[tensor.name] = (tensor, operator)
        for tensor in operator.ins:
            self.readers[tensor.name].append(operator)
        if operator.frozen and not self.inputs_with_gradient(operator):
            self._without_gradient |= {tensor.name for tensor in operator.outs}

    def inputs_with_gradient(self, operator: Operator) -> list[Tensor]:
        """Returns the inputs that depend on trained weights, of an operator that passes gradients on to them."""
        if isinstance(operator, DetachedLinear):
            return []
        return [t for t in operator.ins if t.dtype not in ("int64", "int32") and t.name not in self._without_gradient]


traits_of: Callable[[Param], Hashable] = attrgetter(
    *("name", "size", "total", "partial", "tied", "copies", "view", "trained", "matrix", "in_layer", "shape", "stored"),
    *("split", "recipe"),
)
"""Returns all of a parameter but its ops: what schemes, updates and states depend on."""


def shards_at_rest(schemes: Iterable[ShardsStates], state: str, param: Param) -> tuple[str, ...]:
    """Returns the axes over which `state` (parameters, gradients, optimizer) of a parameter is sharded between uses."""
    return tuple(axis for scheme in schemes for axis in scheme.shards_at_rest(state, param))


def count_shards(mesh: Mesh, schemes: Iterable[HoldsUnequalShards], axes: Sequence[str]) -> float:
    """Returns what a tensor that is sharded over `axes` divides by on these ranks: their number, where all shards are
    equal, fewer where theirs are larger, infinite where they hold none."""
    count: float = mesh.size(axes)
    for size in (scheme.shard_size(axes) for scheme in schemes):
        count = count if size == 1.0 else count / size if size else inf
    return count
