"""What a model asks for: a nest of sites, Step > Stage > Unit (Layer and the ends) > leaves.

A leaf is one operation over named dims with global sizes (``simulator.ir.operators`` has them all). It says which work
it does at the local sizes that the plan leaves it, and which tensors its backward pass reads; who divides what is the
schemes' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from simulator.ir.layout import Layout, Tensor, output_layout, required_layout
from simulator.ir.mesh import Mesh
from simulator.ir.ops import BYTES, Param, Work


@dataclass(frozen=True)
class LocalShapes:
    """A leaf's tensors as one rank sees them."""

    divide: Mapping[str, str]
    mesh: Mesh

    def dims(self, tensor: Tensor) -> dict[str, Any]:
        return tensor.local_dims(self.layout(tensor), self.mesh)

    def size(self, *tensors: Tensor) -> int:
        """Local elements of all `tensors`."""
        return sum(int(math.prod(self.dims(tensor).values())) for tensor in tensors)

    def bytes(self, *tensors: Tensor) -> int:
        """Local bytes of all `tensors`."""
        return sum(int(self.size(tensor) * BYTES[tensor.dtype]) for tensor in tensors)

    def layout(self, tensor: Tensor) -> Layout:
        return required_layout(tensor, self.divide)

    def axes_of(self, dim: str) -> list[str]:
        """Axes larger than one that divide `dim` here, in the order of the mesh."""
        return [axis for axis in self.mesh.axes if self.divide.get(axis) == dim and self.mesh.size(axis) > 1]


@dataclass(frozen=True, eq=False)
class Module:
    """A place in the model.

    label: the word by which options name it (``core_attn``, ``attention``, ``mlp``).
    marks: what the model (`LOWEST`) and schemes have noted about it.
    """

    name: str
    marks: frozenset[Hashable] = field(default=frozenset(), kw_only=True)
    label: ClassVar[str] = ""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Tensors that come in; the update has none."""
        return ()

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors made here."""
        return ()


# ------------------------------------------------------------------------------------------------- nests


@dataclass(frozen=True, eq=False)
class CompositeModule(Module):
    """A site made of sites, in execution order; tensors of equal name join them."""

    children: tuple[Module, ...]

    @cached_property
    def inputs(self) -> Sequence[Tensor]:  # type: ignore[override]
        made = {tensor.name for child in self.children for tensor in child.outputs}
        seen = {t.name: t for child in self.children for t in child.inputs if t.name not in made}
        return tuple(seen.values())

    @cached_property
    def outputs(self) -> Sequence[Tensor]:  # type: ignore[override]
        """Everything made inside: what is read further on is up to the nest around."""
        return tuple(tensor for child in self.children for tensor in child.outputs)

    def operators(self) -> list[Operator]:
        found: list[Operator] = []
        for child in self.children:
            if isinstance(child, CompositeModule):
                found += child.operators()
            elif isinstance(child, Operator):
                found.append(child)
        return found


@dataclass(frozen=True, eq=False)
class Unit(CompositeModule):
    """A part of a stage between two places where only the residual stream passes, in the layout of a `Boundary`.

    takes, gives: that stream, as it comes in and goes out; None at the ends of the model. count: how often the unit
    stands in a row. lowering_key: equal for units whose ops are the same under the same schemes, whatever else the
    plans are; None: for no other.
    """

    residual_in: Tensor | None = None
    residual_out: Tensor | None = None
    count: int = 1
    lowering_key: Hashable = None


LOWEST = "lowest"
"""The mark of a unit below which nothing is trained: it gives no gradient on."""


@dataclass(frozen=True, eq=False)
class Layer(Unit):
    """One transformer layer: the default unit of sharding and recompute."""


@dataclass(frozen=True, eq=False)
class SelfAttention(CompositeModule):
    label = "attention"


@dataclass(frozen=True, eq=False)
class MLP(CompositeModule):
    label = "mlp"


@dataclass(frozen=True, eq=False)
class SharedExperts(MLP):
    """Experts that all tokens pass."""

    label = "shared_experts"


@dataclass(frozen=True, eq=False)
class MoE(CompositeModule):
    """Experts and what routes tokens to them.

    experts: how many tokens are routed to. capacity: places of each, in tokens x top_k / experts, filled or not; None:
    as many as tokens come.
    """

    experts: int = 1
    capacity: float | None = None
    label = "moe"


@dataclass(frozen=True, eq=False)
class Stage(Module):
    """The units that one virtual pipeline stage holds, with embedding or loss at the ends."""

    units: tuple[Unit, ...]


@dataclass(frozen=True, eq=False)
class Update(Module):
    """The optimizer's turn at the end of the step, over all parameters of one device.

    params: each with the number of its copies. grad_bytes: of one gradient element. read, write: bytes that the
    optimizer moves per element of a shard. shared: devices of the pipeline axis that hold the same weights, of which
    they sum the gradients, and the elements. clipped: whether gradients are clipped by the norm of all, which devices
    must meet for.
    """

    params: tuple[tuple[Param, int], ...]
    grad_bytes: int
    read: int
    write: int
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    axis: str = "pp"
    clipped: bool = True


# ------------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True, eq=False)
class Operator(Module):
    """One operation: `ins` to `outs`, with `weights`.

    Its three works are asked at local sizes; `saved_tensors` are the tensors that the backward pass reads again,
    `saved_for_weights` those that only the weight gradient reads. frozen: its weights are not trained, so nobody wants
    their gradients. borrowed: weights that it reads and another site holds. modules: words by which options name it
    together with other leaves, where these make no nest (``layernorm``, ``mla_up_proj``).
    """

    ins: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    frozen: bool = field(default=False, kw_only=True)
    shared_weights: tuple[Tensor, ...] = field(default=(), kw_only=True)
    modules: tuple[str, ...] = field(default=(), kw_only=True)
    view: ClassVar[str] = ""
    """The view of the mesh that its ranks are read in, where the mesh has it."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        return self.ins

    @property
    def outputs(self) -> Sequence[Tensor]:
        return self.outs

    @cached_property
    def dims(self) -> frozenset[str]:
        return frozenset(dim for tensor in (*self.ins, *self.outs, *self.weights) for dim in tensor.dims)

    def has(self, dim: str) -> bool:
        return dim in self.dims

    def output_layout(self, tensor: Tensor, divide: Mapping[str, str]) -> Layout:
        """How an output leaves."""
        return output_layout(tensor, divide)

    def forward(self, at: LocalShapes) -> list[Work]:
        return []

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return []

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        return []

    def temporary_gradient_work(self, at: LocalShapes) -> list[Work]:
        """What weight gradients cost besides, where they are made in tensors of their own."""
        return []

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def read_by_later_slices(self) -> tuple[Tensor, ...]:
        """Inputs that later slices of the sequence read, too, forward and backward."""
        return ()

    def slice_gradient_bytes(self, at: LocalShapes) -> tuple[int, int]:
        """Bytes of gradients that the backward pass finds from the slice behind, and leaves to the one before."""
        return 0, 0

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        """What is neither input nor output and lives until the backward pass: (name, bytes, category)."""
        return []

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        """What lives within one pass, from one of its kernels to another: (first, last, bytes)."""
        return []


def walk(module: Module, visit: Callable[[Operator], None]) -> None:
    """Calls `visit` on every leaf under `module`, in execution order."""
    for operator in module.operators() if isinstance(module, CompositeModule) else [module]:
        if isinstance(operator, Operator):
            visit(operator)


def every_module(module: Module) -> Iterator[Module]:
    """`module` and all modules inside it, an enclosing one before those that it encloses."""
    yield module
    for child in _children(module):
        yield from every_module(child)


M = TypeVar("M", bound=Module)


def add_marks(module: M, marks: Mapping[Module, frozenset[Hashable]]) -> M:
    """A copy of `module` in which modules bear further `marks`; what has none of them inside stays the same object."""
    children = _children(module)
    marked = tuple(add_marks(child, marks) for child in children)
    inside: dict[str, Any] = {"units" if isinstance(module, Stage) else "children": marked}
    changed = any(one is not other for one, other in zip(children, marked, strict=True))
    own = marks.get(module)
    if not changed and not own:
        return module
    return replace(module, marks=module.marks | (own or frozenset()), **(inside if changed else {}))


def _children(module: Module) -> tuple[Module, ...]:
    if isinstance(module, Stage):
        return module.units
    return module.children if isinstance(module, CompositeModule) else ()
