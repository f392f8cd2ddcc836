"""Operators of a traced module as work: GEMMs, attention and memory-bound kernels of both passes, from shapes alone.

Names are those of ATen. A product of matrices costs 2 m n k FLOPs; its backward pass has one such product for every
operand that needs a gradient. A convolution is the GEMM of its unfolded input. Everything else moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshcast.simulator.ir.ops import Attention, Gemm, Memory, Work


class TensorShape(NamedTuple):
    """A tensor of an operator: its sizes, number format, bytes of an element, and whether it needs a gradient."""

    sizes: tuple[int, ...]
    dtype: str
    element: int
    needs_gradient: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.sizes) * self.element


class OperatorCall(NamedTuple):
    """A call of an operator.

    kind: its name in ATen, without overload and trailing underscore, for example ``linear``.
    inputs: its tensors, in the order of its schema, those of lists among them. outputs: its results.
    options: arguments by name that are no tensors.
    """

    kind: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    options: Mapping[str, Any]


class PassWorks(NamedTuple):
    """The kernels of the forward and of the backward pass of an operator."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]

    @property
    def flops(self) -> tuple[float, float]:
        """FLOPs of the forward and of the backward pass."""
        return sum(one.flops for one in self.forward), sum(one.flops for one in self.backward)  # type: ignore[attr-defined]


MEMORY_KINDS = {
    "norm": ("layer_norm", "native_layer_norm", "batch_norm", "group_norm", "instance_norm", "native_group_norm"),
    "rms-norm": ("rms_norm",),
    "gelu": ("gelu", "relu", "silu", "sigmoid", "tanh", "leaky_relu", "elu", "hardtanh", "relu6", "mish", "softplus"),
    "softmax": ("softmax", "_softmax", "log_softmax", "_log_softmax"),
    "embedding": ("embedding", "index_select", "gather", "index"),
    "cross-entropy": ("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
    "dropout": ("dropout", "feature_dropout", "native_dropout"),
    "concat": ("cat", "stack", "concat"),
    "cast": ("to", "_to_copy"),
}
"""Operators by the kind of kernel that moves their bytes; all others are priced as an elementwise ``add``."""

KERNEL_OF = {name: kind for kind, names in MEMORY_KINDS.items() for name in names}

NO_KERNEL = frozenset({"zeros", "ones", "full", "empty", "arange", "scalar_tensor", "zeros_like", "ones_like"})
"""Operators that make constants: they are made once, or cost nothing beside the rest."""


def list_works(call: OperatorCall, dtype: str = "") -> PassWorks:
    """The kernels of one call. dtype: number format of products; empty: that of their operands."""
    if call.kind in NO_KERNEL:
        return PassWorks((), ())
    contract = CONTRACTIONS.get(call.kind)
    if contract is None:
        return _move_bytes(call)
    if dtype:
        call = call._replace(inputs=tuple(one._replace(dtype=dtype) for one in call.inputs))
    return contract(call)


def _move_bytes(call: OperatorCall) -> PassWorks:
    """A kernel that reads all inputs and writes all outputs; backward the other way, with what it reads again."""
    kind = KERNEL_OF.get(call.kind, "add")
    read, written = sum(one.nbytes for one in call.inputs), sum(one.nbytes for one in call.outputs)
    if kind == "embedding":  # only the rows that are taken
        read = written + sum(one.nbytes for one in call.inputs[1:])
    forward = Memory(kind, read, written)
    sources = [one for one in call.inputs if one.needs_gradient]
    if not sources:
        return PassWorks((forward,), ())
    gradients = written if kind == "embedding" else sum(one.nbytes for one in sources)
    again = 0 if kind in ("embedding", "concat", "cast") or call.kind in ("add", "sub") else read
    return PassWorks((forward,), (Memory(kind, written + again, gradients, backward=True),))


# ----------------------------------------------------------------------------------------- contractions


def _multiply(first: TensorShape, second: TensorShape, m: int, n: int, k: int, batch: int = 1) -> PassWorks:
    """``batch`` products of an (m x k) with a (k x n) matrix."""
    dtype = first.dtype
    forward = Gemm(m, n, k, batch, dtype=dtype, out_dtype=dtype)
    backward = []
    if first.needs_gradient:
        backward.append(Gemm(m, k, n, batch, dtype=dtype, out_dtype=dtype, layout="nn"))
    if second.needs_gradient:
        backward.append(Gemm(n, k, m, batch, dtype=dtype, out_dtype=dtype, layout="nt"))
    return PassWorks((forward,), tuple(backward))


def _linear(call: OperatorCall) -> PassWorks:
    rows, weight = call.inputs[:2]
    n, k = (1, weight.sizes[0]) if len(weight.sizes) == 1 else weight.sizes
    return _multiply(rows, weight, math.prod(rows.sizes) // k, n, k)


def _matmul(call: OperatorCall) -> PassWorks:
    first, second = call.inputs[-2:]  # addmm and baddbmm have what is added in front
    k = first.sizes[-1]
    m = first.sizes[-2] if len(first.sizes) > 1 else 1
    n = second.sizes[-1] if len(second.sizes) > 1 else 1
    if len(second.sizes) <= 2:  # one matrix for all batches
        return _multiply(first, second, math.prod(first.sizes) // k, n, k)
    batch = math.prod(call.outputs[0].sizes) // (m * n)
    return _multiply(first, second, m, n, k, batch)


def _einsum(call: OperatorCall) -> PassWorks:
    equation = str(call.options["equation"]).replace(" ", "")
    terms, _, result = equation.partition("->")
    letters = terms.split(",")
    if len(letters) != 2 or "." in equation:
        rule = f"einsum of {equation!r} has {len(letters)} operands or an ellipsis"
        raise ValueError(f"{rule}; FLOPs are counted of two operands with named dims. Write it as such products")
    sizes = {
        letter: size
        for term, one in zip(letters, call.inputs, strict=True)
        for letter, size in zip(term, one.sizes, strict=True)
    }
    result = result or "".join(sorted(one for one in sizes if terms.count(one) == 1))
    both = {one for one in sizes if all(one in term for term in letters)}
    batch, k = both & set(result), both - set(result)
    first, second = ({*term} - both for term in letters)
    m, n, contracted, batches = (math.prod(sizes[one] for one in names) for names in (first, second, k, batch))
    left, right = call.inputs
    return _multiply(left, right, m, n, contracted, batches)


def _convolve(call: OperatorCall) -> PassWorks:
    image, weight = call.inputs[:2]
    groups = int(call.options.get("groups", 1))
    transposed = call.kind.startswith("conv_transpose") or bool(call.options.get("transposed", False))
    window = math.prod(weight.sizes[2:])
    places = image if transposed else call.outputs[0]
    count = math.prod(places.sizes) // places.sizes[-len(weight.sizes) + 1]  # images times positions
    outer, inner = weight.sizes[0] // groups, weight.sizes[1]
    n, k = (inner * window, outer) if transposed else (outer, inner * window)
    return _multiply(image, weight, count, n, k, groups)


def _attend(call: OperatorCall) -> PassWorks:
    query, key, value = call.inputs[:3]
    *lead, heads, positions, width = query.sizes
    forward = Attention(
        batch=math.prod(lead),
        q=positions,
        kv=key.sizes[-2],
        heads=heads,
        kv_heads=key.sizes[-3],
        qk_dim=width,
        v_dim=value.sizes[-1],
        share=0.5 if call.options.get("is_causal", False) else 1.0,
        dtype=query.dtype,
    )
    return PassWorks((forward,), (replace(forward, backward=True),) if query.needs_gradient else ())


def _recur(call: OperatorCall) -> PassWorks:
    """Layers of a recurrent network: one product for the inputs of all steps, and one a step for the state."""
    sequence = call.inputs[0]
    tokens = math.prod(sequence.sizes[:-1])
    steps = sequence.sizes[1 if call.options.get("batch_first", False) else 0]
    parts = []
    for place, weight in enumerate(one for one in call.inputs[1:] if len(one.sizes) == 2):
        source = sequence._replace(needs_gradient=sequence.needs_gradient or place > 0)
        if place % 2 == 0:  # weights of inputs and of states take turns
            parts.append(_multiply(source, weight, tokens, *weight.sizes))
        else:
            parts += [_multiply(source, weight, tokens // steps, *weight.sizes)] * steps
    return join_works([*parts, _move_bytes(call)])


def join_works(parts: Sequence[PassWorks]) -> PassWorks:
    """The kernels of several operators, the backward pass in the opposite order."""
    forward = tuple(one for part in parts for one in part.forward)
    return PassWorks(forward, tuple(one for part in reversed(parts) for one in part.backward))


CONTRACTIONS: dict[str, Callable[[OperatorCall], PassWorks]] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm", "mv"), _matmul),
    "einsum": _einsum,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        _convolve,
    ),
    "scaled_dot_product_attention": _attend,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recur),
}
"""Operators whose FLOPs count."""
