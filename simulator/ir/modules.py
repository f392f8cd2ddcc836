"""The modules of a model: Stage > Unit (a layer, the embedding, the loss) > composite modules > operators.

An operator is an operation over named dims with global sizes (``simulator.ir.operators`` has all of them). It says
which work it does at the local sizes of a rank, and which tensors its backward pass needs. Which axis shards which dim
is said by the schemes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.ir.layout import Layout, Tensor, output_layout, required_layout
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import BYTES, Collective, Param, Work


@dataclass(frozen=True)
class LocalShapes:
    """Local shapes of an operator's tensors on a rank.

    divide: which dim each axis shards at the operator.
    mesh: the axes with their sizes.
    """

    divide: Mapping[str, str]
    mesh: Mesh

    @remembered
    def dims(self, tensor: Tensor) -> dict[str, Any]:
        """Returns the local size of every dim."""
        return tensor.local_dims(self.layout(tensor), self.mesh)

    def size(self, *tensors: Tensor) -> int:
        """Counts the local elements of all `tensors`."""
        return sum(int(math.prod(self.dims(tensor).values())) for tensor in tensors)

    def bytes(self, *tensors: Tensor) -> int:
        """Counts the local bytes of all `tensors`."""
        return sum(int(self.size(tensor) * BYTES[tensor.dtype]) for tensor in tensors)

    @remembered
    def layout(self, tensor: Tensor) -> Layout:
        """Returns the layout in which the operator needs `tensor`."""
        return required_layout(tensor, self.divide)

    def axes_of(self, dim: str) -> list[str]:
        """Returns the axes larger than 1 that shard `dim` at the operator, in the order of the mesh."""
        return [axis for axis in self.mesh.axes if self.divide.get(axis) == dim and self.mesh.size(axis) > 1]


@dataclass(frozen=True, eq=False)
class Module:
    """A module of the model, composite or a single operator.

    name: its name in ops and reports.
    label: the word by which options of schemes select it (``core_attn``, ``attention``, ``mlp``).
    marks: notes of the model (`LOWEST`) and of schemes about it.

    A subclass without further fields is no `@dataclass`: its methods would be compiled again, at every start.
    """

    name: str
    marks: frozenset[Hashable] = field(default=frozenset(), kw_only=True)
    label: ClassVar[str] = ""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Tensors that the module reads and does not produce itself; the optimizer update has none."""
        return ()

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors that the module produces."""
        return ()


# --------------------------------------------------------------------------------------- composite modules


@dataclass(frozen=True, eq=False)
class CompositeModule(Module):
    """A module of several modules in execution order; a tensor produced by any is read by name in others."""

    children: tuple[Module, ...]

    @cached_property
    def inputs(self) -> Sequence[Tensor]:  # type: ignore[override]
        produced = {tensor.name for child in self.children for tensor in child.outputs}
        seen = {t.name: t for child in self.children for t in child.inputs if t.name not in produced}
        return tuple(seen.values())

    @cached_property
    def outputs(self) -> Sequence[Tensor]:  # type: ignore[override]
        """All tensors produced inside; the enclosing module decides which of them are read later."""
        return tuple(tensor for child in self.children for tensor in child.outputs)

    def operators(self) -> list[Operator]:
        """Returns all operators inside, in execution order."""
        operators: list[Operator] = []
        for child in self.children:
            if isinstance(child, CompositeModule):
                operators += child.operators()
            elif isinstance(child, Operator):
                operators.append(child)
        return operators


@dataclass(frozen=True, eq=False)
class Unit(CompositeModule):
    """A part of a stage with only the residual stream at its two ends, in the layout of a `Boundary`.

    residual_in: the residual stream that enters; None at the start of the model.
    residual_out: the residual stream that leaves; None at the end of the model.
    count: number of equal units in a row.
    lowering_key: equal for units that lower to the same ops under the same schemes, in any plan; None: for no other.
    context: another tensor that the unit and all units behind it read, and that stages pass on beside the residual
        stream: the output of an encoder, which the layers of a decoder attend to; None: none.
    receives: whether the context comes to the device with this unit, from another stage.
    """

    residual_in: Tensor | None = None
    residual_out: Tensor | None = None
    count: int = 1
    lowering_key: Hashable = None
    context: Tensor | None = None
    receives: bool = False


@dataclass(frozen=True, eq=False)
class BatchLossUnit(Unit):
    """A loss that couples the samples of a whole batch, and its gradient, on a stage whose outputs it reads.

    stage_outputs: those of the stage, as the loss reads them. What it reads from another stage is `residual_in`.
    """

    stage_outputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class LayersFrom:
    """The mark of the operators of layers, where schemes shard some layers otherwise than others.

    first: number of the first layer of the model that they shard as this layer.
    """

    first: int


@dataclass(frozen=True)
class AttendsAlong:
    """The mark of the operators of attention where tokens have several axes of positions.

    dim: the dim of positions along which it runs.
    """

    dim: str


LOWEST = "lowest"
"""The mark of a unit below which nothing is trained: the gradient of its input is not computed."""


class Layer(Unit):
    """One transformer layer: the default unit of parameter sharding and of recomputation."""


class SelfAttention(CompositeModule):
    label = "attention"


class CrossAttention(CompositeModule):
    """Attention of a decoder's tokens to the output of an encoder."""

    label = "attention"


class MLP(CompositeModule):
    label = "mlp"


class Projector(CompositeModule):
    """From the hidden size of a branch to that of the trunk."""

    label = "projector"


class SharedExperts(MLP):
    """Shared experts: an MLP that every token passes."""

    label = "shared_experts"


@dataclass(frozen=True, eq=False)
class MoE(CompositeModule):
    """A mixture-of-experts block: router, routed experts and shared experts.

    experts: number of routed experts.
    capacity: capacity factor, tokens of an expert over tokens x top_k / experts, dropped or padded to it; None:
        dropless.
    """

    experts: int = 1
    capacity: float | None = None
    label = "moe"


@dataclass(frozen=True, eq=False)
class Stage(Module):
    """The units of a virtual pipeline stage, with the embedding in the first and the loss in the last.

    microbatches: that every unit runs, in order, before the next unit does.
    """

    units: tuple[Unit, ...]
    microbatches: int = 1


class GradientSum(NamedTuple):
    """An all-reduce of gradients among pipeline devices.

    meeting: the name by which its devices meet.
    replicas: whether they are of heterogeneous replicas, so that it is data-parallel communication.
    """

    meeting: Hashable
    work: Collective
    replicas: bool = False


@dataclass(frozen=True)
class UpdateWorkspace:
    """What the optimizer update holds beside the states, in bytes for each element of what is named.

    flat: of gradients that are updated at once: the tensor into which they are copied, and then freed; 0: none.
    converted: of the same gradients in the format of the main weights.
    copies: of temporaries of the optimizer, for the same elements.
    norm: of the largest gradient, whose norm is taken.
    scan: of all gradients of sharded weights, in which infinities are looked for.
    apart: of whole weights' gradients that are updated: those of the last micro-batch, freed before the update.
    shared: whether the gradients of whole weights that are updated lie in a tensor with those of another group of
        parameters, which holds it until that group is updated behind.
    """

    flat: int = 0
    converted: int = 0
    copies: int = 0
    norm: int = 0
    scan: int = 0
    apart: int = 0
    shared: bool = False

    def most_sharded(self, elements: float, updated: float, largest: float) -> float:
        """Returns the most bytes that are held at once where weights are sharded, whose gradients stay.

        elements: of the gradients of a rank.
        updated: elements that are updated at once.
        largest: elements of the largest gradient.
        """
        at_once = self.converted + max(self.flat, self.copies)
        return max(updated * at_once, largest * self.norm, elements * self.scan)

    def most(self, updated: float, largest: float, others: float, freed: float) -> float:
        """Returns the most bytes that are held at once where weights are whole.

        updated: elements that are updated.
        largest: elements of the largest gradient.
        others: bytes of gradients that other ranks update, which are freed first where gradients are flattened.
        freed: bytes of the gradients that are updated, which are freed once they are flat, unless they are shared.
        """
        others, freed = (others, 0.0 if self.shared else freed) if self.flat else (0.0, 0.0)
        others += updated * self.apart
        flattening, updating = updated * (self.flat + self.converted), updated * (self.converted + self.copies) - freed
        return max(largest * self.norm, flattening - others, updating - others)


@dataclass(frozen=True)
class MatrixUpdate:
    """How the optimizer updates the matrices of linear layers, where other than other weights.

    method: ``newton-schulz`` (Muon), ``soap``, ``shampoo`` or ``dion``.
    owners: which replicas compute the update of a matrix, see `simulator.lowering.matrices`.
    tensor: how matrices are updated that tensor ranks share: ``duplicated``, ``distributed`` or ``blockwise``.
    steps: iterations.
    symmetric: whether a kernel computes half of a symmetric product.
    joined: whether gate and up projection are a matrix.
    batched: whether equal matrices are updated together, by kernels over all of them.
    together: layers whose matrices are exchanged together; 0: all.
    passes: bytes that kernels read and write per element of the shard of a rank, before the iterations and behind.
    inner: bytes per element of a matrix that is computed: norm, division, casts and scale.
    kernels: of a matrix in each of the two passes, and in the norm, division, casts and scale.
    temporaries: bytes per element of a matrix that is updated.
    width: bytes of an element that ranks exchange.
    nbytes: of an element of the momentum that tensor ranks gather.
    every: steps between decompositions of factors.
    largest: the largest side of a factor.
    rank: columns of a basis over the shorter side.
    """

    method: str
    owners: str
    tensor: str
    steps: int
    symmetric: bool
    joined: bool
    batched: bool
    together: int
    passes: tuple[tuple[float, float], tuple[float, float]]
    inner: tuple[float, float]
    kernels: tuple[int, int]
    temporaries: float
    width: int
    nbytes: int
    every: int = 1
    largest: int = 0
    rank: float = 1.0


@dataclass(frozen=True, eq=False)
class Update(Module):
    """The optimizer update at the end of the step, over all parameters of a pipeline device.

    params: each parameter with the number of its copies (equal layers).
    grad_bytes: bytes of a gradient element.
    read: bytes that the optimizer reads per element of its shard.
    write: bytes that the optimizer writes per element of its shard.
    shared: sums of gradients with other pipeline devices that hold the same weights.
    convert: bytes per element that separate kernels read and write to convert formats for the optimizer.
    workspace: what the optimizer holds meanwhile.
    sub_group: where weights are sharded, the most elements that it updates at once; 0: all of a rank.
    clipped: whether gradients are clipped by their global norm, which needs an all-reduce over all devices.
    everyone: all global ranks, where devices have separate meshes.
    matrices: how matrices of linear layers are updated; None: as all weights.
    """

    params: tuple[tuple[Param, int], ...]
    grad_bytes: int
    read: float
    write: float
    shared: tuple[GradientSum, ...] = ()
    convert: tuple[int, int] = (0, 0)
    workspace: UpdateWorkspace = UpdateWorkspace()
    sub_group: float = 0.0
    clipped: bool = True
    everyone: range | None = None
    matrices: MatrixUpdate | None = None


# ------------------------------------------------------------------------------------------------ operators


@dataclass(frozen=True, eq=False)
class Operator(Module):
    """One operation from `ins` to `outs`, with `weights`. Subclasses state its work at the local sizes of a rank.

    Customise by: forward, backward_inputs, backward_weights, saved_tensors, saved_for_weights. Seldom: saved_buffers,
    temporary_buffers, temporary_gradient_work, read_by_later_slices, slice_gradient_bytes, output_layout, sums,
    undivided, reuses_saved.

    ins: input activations.
    outs: output activations.
    weights: parameters that the operator holds.
    frozen: whether its weights are not trained, so their gradients are not computed.
    shared_weights: parameters that the operator reads and another operator holds.
    modules: words by which options select it together with operators outside of its composite module (``layernorm``,
        ``mla_up_proj``).
    launches: time of the host to launch a kernel of it, over that of a module of the framework.
    """

    ins: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    frozen: bool = field(default=False, kw_only=True)
    shared_weights: tuple[Tensor, ...] = field(default=(), kw_only=True)
    modules: tuple[str, ...] = field(default=(), kw_only=True)
    launches: float = field(default=1.0, kw_only=True)
    view: ClassVar[str] = ""
    """The view of the mesh whose axes shard the operator, where the mesh has that view."""
    sums: ClassVar[bool] = False
    """Whether the outputs are sums along the dims that they lack, so that ranks may compute partial sums."""
    undivided: ClassVar[tuple[str, ...]] = ()
    """Dims of the outputs along which the operator depends on all elements, so that ranks cannot divide them."""
    reuses_saved: ClassVar[bool] = False
    """Whether its saved buffers hold operands of the weight gradient later, so that they live until then."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        return self.ins

    @property
    def outputs(self) -> Sequence[Tensor]:
        return self.outs

    @cached_property
    def dims(self) -> frozenset[str]:
        """The dims of all its tensors."""
        return frozenset(dim for tensor in (*self.ins, *self.outs, *self.weights) for dim in tensor.dims)

    def has(self, dim: str) -> bool:
        """Returns whether any of its tensors has this dim."""
        return dim in self.dims

    @cached_property
    def divisible_dims(self) -> tuple[str, ...]:
        """Dims along which ranks can divide its work: those of all its outputs and those that it sums."""
        dims = self.dims if self.sums else {dim for dim in self.dims if all(out.has(dim) for out in self.outs)}
        return tuple(sorted(set(dims) - set(self.undivided)))

    def output_layout(self, tensor: Tensor, divide: Mapping[str, str]) -> Layout:
        """Returns the layout in which the operator produces an output, where each axis shards the dim that `divide`
        says."""
        return output_layout(tensor, divide)

    def forward(self, at: LocalShapes) -> list[Work]:
        """Returns the work of the forward pass."""
        return []

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        """Returns the work of the gradients of the inputs."""
        return []

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        """Returns the work of the gradients of the weights."""
        return []

    def temporary_gradient_work(self, at: LocalShapes) -> list[Work]:
        """Returns the additional work of weight gradients without fused gradient accumulation, where they are temporary
        tensors."""
        return []

    def cast_gradient_bytes(self, at: LocalShapes) -> int:
        """Bytes of the gradients of the outputs in the number format of the GEMMs, to which the first op of the
        backward pass casts them; 0 if none does."""
        return 0

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Inputs and outputs saved for the backward pass."""
        return ()

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        """Inputs and outputs saved for the weight gradients alone."""
        return ()

    @property
    def read_by_later_slices(self) -> tuple[Tensor, ...]:
        """Inputs that later slices of the sequence read too, forward and backward."""
        return ()

    def slice_gradient_bytes(self, at: LocalShapes) -> tuple[int, int]:
        """Returns the gradient bytes that the backward pass takes over from the next slice, and passes on to the
        previous slice."""
        return 0, 0

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        """Buffers other than inputs and outputs that live until the backward pass: (name, bytes, category)."""
        return []

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        """Returns the buffers that live within a pass: (index of the first kernel, index of the last kernel, bytes).
        Backward, kernels of the weight gradient follow those of the inputs."""
        return []


def walk(module: Module, visit: Callable[[Operator], None]) -> None:
    """Calls `visit` on every operator of `module`, in execution order."""
    for operator in module.operators() if isinstance(module, CompositeModule) else [module]:
        if isinstance(operator, Operator):
            visit(operator)


def every_module(module: Module) -> Iterator[Module]:
    """Yields `module` and all modules inside it, an enclosing module before those that it encloses."""
    yield module
    for child in _children(module):
        yield from every_module(child)


M = TypeVar("M", bound=Module)


def replace_children(module: M, change: Callable[[Module], Module]) -> M:
    """Returns a copy of `module` in which `change` has replaced modules inside it, enclosed ones first; those that it
    returns as they are stay the same objects."""
    children = _children(module)
    changed = tuple(change(replace_children(child, change)) for child in children)
    if all(child is new for child, new in zip(children, changed, strict=True)):
        return module
    inside: dict[str, Any] = {"units" if isinstance(module, Stage) else "children": changed}
    return replace(module, **inside)


def add_marks(module: M, marks: Mapping[Module, frozenset[Hashable]]) -> M:
    """Returns a copy of `module` with further `marks` on modules; modules without marked ones inside stay the same
    object."""
    children = _children(module)
    marked = tuple(add_marks(child, marks) for child in children)
    inside: dict[str, Any] = {"units" if isinstance(module, Stage) else "children": marked}
    changed = any(child is not new for child, new in zip(children, marked, strict=True))
    its_marks = marks.get(module)
    if not changed and not its_marks:
        return module
    return replace(module, marks=module.marks | (its_marks or frozenset()), **(inside if changed else {}))


def _children(module: Module) -> tuple[Module, ...]:
    if isinstance(module, Stage):
        return module.units
    return module.children if isinstance(module, CompositeModule) else ()
