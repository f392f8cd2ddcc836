"""What a model asks for: a nest of sites, Step > Stage > Unit (Layer and the ends) > leaves.

A leaf is one operation over named dims with global sizes: samples ``b``, positions ``s``, key positions ``t``, hidden
``h``, head width ``a``, feed-forward width ``f``, vocabulary ``v``. A leaf says which work it does at the local sizes
that the plan leaves it, and which tensors its backward pass reads; who divides what is the schemes' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from simulator.layout import Layout, Tensor, leaving, needed
from simulator.mesh import Mesh
from simulator.ops import BYTES, Attention, Collective, Gemm, Memory, Param, Work


@dataclass(frozen=True)
class Local:
    """A leaf's tensors as one rank sees them."""

    divide: Mapping[str, str]
    mesh: Mesh

    def dims(self, tensor: Tensor) -> dict[str, int]:
        return tensor.local_dims(self.layout(tensor), self.mesh)

    def size(self, *tensors: Tensor) -> int:
        """Local elements of all `tensors`."""
        return sum(math.prod(self.dims(tensor).values()) for tensor in tensors)

    def bytes(self, *tensors: Tensor) -> int:
        """Local bytes of all `tensors`."""
        return sum(self.size(tensor) * BYTES[tensor.dtype] for tensor in tensors)

    def layout(self, tensor: Tensor) -> Layout:
        return needed(tensor, self.divide)

    def axes_of(self, dim: str) -> list[str]:
        """Axes larger than one that divide `dim` here."""
        return [axis for axis, cut in self.divide.items() if cut == dim and self.mesh.size(axis) > 1]


@dataclass(frozen=True, eq=False)
class Site:
    """A place in the model. `module` is the word by which options name it (``core_attn``, ``attention``, ``mlp``)."""

    name: str
    module: ClassVar[str] = ""

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
class Nest(Site):
    """A site made of sites, in execution order; tensors of equal name join them."""

    children: tuple[Site, ...]

    @cached_property
    def inputs(self) -> Sequence[Tensor]:  # type: ignore[override]
        made = {tensor.name for child in self.children for tensor in child.outputs}
        seen = {t.name: t for child in self.children for t in child.inputs if t.name not in made}
        return tuple(seen.values())

    @cached_property
    def outputs(self) -> Sequence[Tensor]:  # type: ignore[override]
        """Everything made inside: what is read further on is up to the nest around."""
        return tuple(tensor for child in self.children for tensor in child.outputs)

    def leaves(self) -> list[Leaf]:
        return [leaf for c in self.children for leaf in (c.leaves() if isinstance(c, Nest) else [c])]  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Unit(Nest):
    """A part of a stage between two places where only the residual stream passes, in the layout of a `Boundary`.

    takes, gives: that stream, as it comes in and goes out; None at the ends of the model. count: how often the unit
    stands in a row. marks: what schemes have noted about these copies. alike: equal for units whose ops are the same
    under the same schemes, whatever else the plans are; None: for no other.
    """

    takes: Tensor | None = None
    gives: Tensor | None = None
    count: int = 1
    marks: frozenset[str] = frozenset()
    alike: Hashable = None


@dataclass(frozen=True, eq=False)
class Layer(Unit):
    """One transformer layer: the default unit of sharding and recompute."""


@dataclass(frozen=True, eq=False)
class SelfAttention(Nest):
    module = "attention"


@dataclass(frozen=True, eq=False)
class MLP(Nest):
    module = "mlp"


@dataclass(frozen=True, eq=False)
class Stage(Site):
    """The units that one virtual pipeline stage holds, with embedding or loss at the ends."""

    units: tuple[Unit, ...]


@dataclass(frozen=True, eq=False)
class Update(Site):
    """The optimizer's turn at the end of the step, over all parameters of one device.

    params: each with the number of its copies. grad_bytes: of one gradient element. read, write: bytes that the
    optimizer moves per element of a shard. copies: elements of a weight that the two `ends` of the pipeline axis hold
    both (a tied embedding), whose gradients are summed.
    """

    params: tuple[tuple[Param, int], ...]
    grad_bytes: int
    read: int
    write: int
    copies: int = 0
    axis: str = "pp"
    ends: tuple[int, int] = (0, 0)


# ------------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True, eq=False)
class Leaf(Site):
    """One operation: `ins` to `outs`, with `weights`.

    Its three works are asked at local sizes; `reads` are the tensors that the backward pass reads again,
    `reads_for_weights` those that only the weight gradient reads.
    """

    ins: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()

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

    def leaving(self, tensor: Tensor, divide: Mapping[str, str]) -> Layout:
        """How an output leaves."""
        return leaving(tensor, divide)

    def forward(self, at: Local) -> list[Work]:
        return []

    def backward_inputs(self, at: Local) -> list[Work]:
        return []

    def backward_weights(self, at: Local) -> list[Work]:
        return []

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def reads_for_weights(self) -> tuple[Tensor, ...]:
        return ()

    def keeps(self, at: Local) -> list[tuple[str, int, str]]:
        """What is neither input nor output and lives until the backward pass: (name, bytes, category)."""
        return []

    def temporaries(self, at: Local, backward: bool) -> list[tuple[int, int, int]]:
        """What lives within one pass, from one of its kernels to another: (first, last, bytes)."""
        return []


@dataclass(frozen=True, eq=False)
class Boundary(Leaf):
    """Where the residual stream enters or leaves a unit: no work, its input handed on, in the layout of a residual."""


@dataclass(frozen=True, eq=False)
class Embedding(Leaf):
    """Rows of a table [v, h] picked by ids [b, s]; where v is divided, a rank adds zeros for rows it lacks."""

    def forward(self, at: Local) -> list[Work]:
        return [Memory("embedding", at.bytes(*self.outs), at.bytes(*self.outs))]

    def backward_weights(self, at: Local) -> list[Work]:
        # Rows are added to an fp32 gradient: read the incoming gradient, read and write four bytes an element.
        return [Memory("embedding", at.bytes(*self.outs) + 4 * at.size(*self.outs), 4 * at.size(*self.outs))]

    @property
    def reads_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Residual(Leaf):
    """Bias, dropout and addition in one kernel: y = ins[0] + dropout(ins[1] + bias). The bias is of the linear before.

    With one input (positions, embedding dropout) the second operand is a weight or nothing.
    """

    dropout: bool = False

    @property
    def passing(self) -> list[Tensor]:
        """Inputs whose gradient from here is the gradient of the output itself, and takes no memory of its own."""
        return [t for i, t in enumerate(self.ins) if not self.dropout or (i == 0 and len(self.ins) > 1)]

    def forward(self, at: Local) -> list[Work]:
        mask = at.size(*self.outs) if self.dropout else 0
        return [Memory("residual", at.bytes(*self.ins), at.bytes(*self.outs) + mask)]

    def backward_inputs(self, at: Local) -> list[Work]:
        if not self.dropout:
            return []
        size = at.bytes(*self.outs)
        return [Memory("dropout", size + at.size(*self.outs), size)]

    def keeps(self, at: Local) -> list[tuple[str, int, str]]:
        return [("mask", at.size(*self.outs), "workspace")] if self.dropout else []


@dataclass(frozen=True, eq=False)
class Norm(Leaf):
    """Layer or RMS norm over h; the weight gradients come out of the same backward kernel."""

    def forward(self, at: Local) -> list[Work]:
        return [Memory("norm", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: Local) -> list[Work]:
        return [Memory("norm", 2 * at.bytes(*self.ins), at.bytes(*self.ins))]

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Linear(Leaf):
    """outs[i] = ins[0] @ weights[i], all in one GEMM; further weights are biases.

    accumulate: weight gradients are added to a gradient buffer of `grad_dtype` inside the GEMM.
    """

    grad_dtype: str = "fp32"

    def _sizes(self, at: Local) -> tuple[int, int, int]:
        """Rows (what input and outputs share), columns of all outputs, and the contracted size."""
        given, first = at.dims(self.ins[0]), self.outs[0]
        rows = math.prod(n for dim, n in given.items() if first.has(dim))
        inner = math.prod(n for dim, n in given.items() if not first.has(dim))
        columns = sum(math.prod(n for dim, n in at.dims(out).items() if dim not in given) for out in self.outs)
        return rows, columns, inner

    def forward(self, at: Local) -> list[Work]:
        rows, columns, inner = self._sizes(at)
        return [Gemm(rows, columns, inner, dtype=self.ins[0].dtype, layout="tn", what="linear")]

    def backward_inputs(self, at: Local) -> list[Work]:
        rows, columns, inner = self._sizes(at)
        return [Gemm(rows, inner, columns, dtype=self.ins[0].dtype, layout="nn", what="linear")]

    def backward_weights(self, at: Local) -> list[Work]:
        rows, columns, inner = self._sizes(at)
        dtype = self.ins[0].dtype
        return [Gemm(columns, inner, rows, 1, dtype, "nt", True, self.grad_dtype, "linear")]

    @property
    def reads_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Head(Linear):
    """The output layer, h to v. A tied one reads the embedding's table."""

    tied: bool = False


@dataclass(frozen=True, eq=False)
class Rope(Leaf):
    """Rotary positions on queries and keys: each element read and written once per direction."""

    def forward(self, at: Local) -> list[Work]:
        return [Memory("rope", at.bytes(*self.ins), at.bytes(*self.outs))]

    backward_inputs = forward


@dataclass(frozen=True, eq=False)
class CoreAttention(Leaf):
    """Softmax(Q K^T) V for queries [b, s, a] over keys and values [b, t, a].

    kernel ``flash``: one fused kernel a direction, that keeps the row sums (4 bytes a row and head). ``unfused``:
    two batched GEMMs around softmax and dropout kernels over all scores (no causal saving), which keep the
    softmax, and under dropout a mask and the result (2 + 1 + 2 bytes a score; arXiv 2205.05198, section 4.1).
    """

    head_dim: int = 128
    kernel: str = "flash"
    dropout: bool = False
    module = "core_attn"

    def _shape(self, at: Local) -> tuple[int, int, int, int, int]:
        """Samples, query positions, key positions, heads, key heads."""
        queries, keys = at.dims(self.ins[0]), at.dims(self.ins[1])
        return queries["b"], queries["s"], keys["t"], queries["a"] // self.head_dim, keys["a"] // self.head_dim

    def _fused(self, at: Local, backward: bool) -> list[Work]:
        b, q, t, heads, kv_heads = self._shape(at)
        return [Attention(b, q, t, heads, kv_heads, self.head_dim, self.head_dim, 0.5, backward, self.ins[0].dtype)]

    def _scores(self, at: Local) -> int:
        b, q, t, heads, _ = self._shape(at)
        return b * heads * q * t

    def forward(self, at: Local) -> list[Work]:
        if self.kernel == "flash":
            return self._fused(at, backward=False)
        b, q, t, heads, _ = self._shape(at)
        d, dtype, scores = self.head_dim, self.ins[0].dtype, self._scores(at)
        works: list[Work] = [Gemm(q, t, d, b * heads, dtype, what="scores"), Memory("softmax", 2 * scores, 2 * scores)]
        if self.dropout:
            works.append(Memory("dropout", 2 * scores, 3 * scores))
        return [*works, Gemm(q, d, t, b * heads, dtype, what="scores")]

    def backward_inputs(self, at: Local) -> list[Work]:
        if self.kernel == "flash":
            return self._fused(at, backward=True)
        b, q, t, heads, _ = self._shape(at)
        d, n, dtype, scores = self.head_dim, b * heads, self.ins[0].dtype, self._scores(at)
        from_output: list[Work] = [
            Gemm(q, t, d, n, dtype, "nn", what="scores"),
            Gemm(t, d, q, n, dtype, "nt", what="scores"),
        ]
        to_inputs: list[Work] = [
            Gemm(q, d, t, n, dtype, "nn", what="scores"),
            Gemm(t, d, q, n, dtype, "nt", what="scores"),
        ]
        drop: list[Work] = [Memory("dropout", 3 * scores, 2 * scores)] if self.dropout else []
        return [*from_output, *drop, Memory("softmax", 4 * scores, 2 * scores), *to_inputs]

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs) if self.kernel == "flash" else self.ins

    def keeps(self, at: Local) -> list[tuple[str, int, str]]:
        b, q, _, heads, _ = self._shape(at)
        if self.kernel == "flash":
            return [("lse", 4 * b * heads * q, "workspace")]
        scores = self._scores(at)
        dropped = [("dropped", 2 * scores, "workspace"), ("mask", scores, "workspace")] if self.dropout else []
        return [("softmax", 2 * scores, "workspace"), *dropped]

    def temporaries(self, at: Local, backward: bool) -> list[tuple[int, int, int]]:
        if self.kernel == "flash":
            return []
        scores, softmax = 2 * self._scores(at), 2 + self.dropout
        # Forward the scores on their way to the softmax; backward the gradients behind it and in front of it.
        return [(0, softmax, scores), (softmax, softmax + 2, scores)] if backward else [(0, 1, scores)]


@dataclass(frozen=True, eq=False)
class Activation(Leaf):
    """GELU of one input, or the gated product of two."""

    def forward(self, at: Local) -> list[Work]:
        return [Memory("activation", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: Local) -> list[Work]:
        return [Memory("activation", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins))]

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Loss(Leaf):
    """Cross-entropy over v. Where v is divided, three all-reduces of one fp32 value a token join the parts: the
    maximum, the logit of the target, the sum of exponentials (arXiv 1909.08053, section 3).

    traffic: bytes moved per logit, forward and backward; kept: bytes kept per logit for the backward pass.
    """

    traffic: tuple[int, int] = (14, 6)
    kept: int = 4

    def leaving(self, tensor: Tensor, divide: Mapping[str, str]) -> Layout:
        return needed(tensor, divide)

    def forward(self, at: Local) -> list[Work]:
        logits = at.size(self.ins[0])
        joins = [Collective("all_reduce", at.bytes(*self.outs), (axis,)) for axis in at.axes_of("v") for _ in range(3)]
        # The backward pass reads what the last kernel writes with the joined sums, so it needs no wait of its own.
        first = self.traffic[0] // 2
        kernels = [Memory("cross-entropy", part * logits, 0) for part in (first, self.traffic[0] - first)]
        return [kernels[0], *joins, kernels[1]]

    def backward_inputs(self, at: Local) -> list[Work]:
        return [Memory("cross-entropy", self.traffic[1] * at.size(self.ins[0]), 0)]

    def keeps(self, at: Local) -> list[tuple[str, int, str]]:
        return [("softmax", self.kept * at.size(self.ins[0]), "logits")]


def walk(site: Site, visit: Callable[[Leaf], None]) -> None:
    """Calls `visit` on every leaf under `site`, in execution order."""
    for leaf in site.leaves() if isinstance(site, Nest) else [site]:
        if isinstance(leaf, Leaf):
            visit(leaf)
