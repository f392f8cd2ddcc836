"""What operators save for their backward pass, as a single operation of autograd or composed of several.

A fused kernel saves what its backward kernel reads: `Operator.saved_tensors` and `Operator.saved_buffers`. A framework
may write the same operator as several operations of PyTorch (`ProcessMemory.composed`), each of which saves what its
derivative reads (tools/autograd/derivatives.yaml): a product both factors that the gradient of the other needs,
a root, a softmax, a tanh or a ReLU its result, a power or a SiLU its input, a sum or a conversion nothing. The counts
below follow from these rules, and are held to the byte against `torch.distributed._tools.mem_tracker` in
tests/validation/activations.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.decoder_operators import CappedAttention
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.moe_operators import Permute, TopK, Unpermute
from meshcast.simulator.ir.operators import Activation, CoreAttention, Norm
from meshcast.simulator.ir.ops import BYTES


@dataclass(frozen=True)
class Composition:
    """The mark of an operator that saves other tensors than as a single operation of autograd.

    written: how it is written, where as several operations; empty: as a single operation.
    products: the parts of products of which it reads some: a part that it saves keeps all of them in memory.
    """

    written: str = ""
    products: tuple[tuple[Tensor, ...], ...] = ()


class Saved(NamedTuple):
    """Inputs and outputs that an operator saves, and buffers beside them: name, bytes and category."""

    tensors: tuple[Tensor, ...]
    buffers: list[tuple[str, int, str]]


class FunctionSaves(NamedTuple):
    """What an activation function saves.

    input: whether its input.
    others: number of further tensors as large.
    result: whether the last of these is its result.
    """

    input: bool
    others: int = 0
    result: bool = False


FUNCTIONS = {
    "silu": FunctionSaves(True),
    "gelu": FunctionSaves(True),
    # 0.5 x (1 + tanh(c (x + k x^3))): x of the power, the tanh, and both factors of the last product.
    "gelu_new": FunctionSaves(True, 3),
    # 0.5 x (1 + tanh(c x (1 + k x x))): beside these both factors of the inner product, and those of k x x.
    "gelu_fast": FunctionSaves(True, 6),
    "quick_gelu": FunctionSaves(True, 1),  # x sigmoid(1.702 x)
    "relu": FunctionSaves(False, 1, True),
    "relu2": FunctionSaves(False, 1),
    # alpha x (x), and below zero the exponential and what alpha multiplies; the mask of a byte is left out.
    "xielu": FunctionSaves(True, 3),
}
"""What functions of `Model.activation` save, by the formulas of activations.py of Transformers 5.24.0."""


LESS_ONE = "weight - 1"
"""How an RMS norm is written whose weight is stored less 1."""

TURNED = "turned"
"""How fused attention is written whose queries have heads before positions in memory."""


def saved_by(operator: Operator, at: LocalShapes) -> Saved:
    """Returns what an operator saves for its backward pass, besides what weight gradients alone read."""
    composition = next((mark for mark in operator.marks if isinstance(mark, Composition)), None)
    if composition is None:
        return Saved(operator.saved_tensors, operator.saved_buffers(at))
    saved = count_saved(operator, composition.written, at)
    names = {tensor.name for tensor in saved.tensors}
    for product in composition.products:
        if any(part.name in names for part in product):
            more = tuple(part for part in product if part.name not in names)
            saved = saved._replace(tensors=(*saved.tensors, *more))
    return saved


@singledispatch
def count_saved(operator: Operator, written: str, at: LocalShapes) -> Saved:
    """Returns what an operator saves that is written in a certain way."""
    return Saved(operator.saved_tensors, operator.saved_buffers(at))


@count_saved.register
def _norm(norm: Norm, written: str, at: LocalShapes) -> Saved:
    """Returns x in fp32, the root of its mean square, and for the gradient of the weight the normalised x: in the
    format of x (`modeling_llama.py` of Transformers), or in fp32 with 1 + weight (`modeling_gemma.py`)."""
    if not written:
        return Saved(norm.saved_tensors, norm.saved_buffers(at))
    elements, buffers = at.size(*norm.ins), norm.saved_buffers(at)
    wide = norm.ins[0].dtype == "fp32"
    if not wide:
        buffers.append(("wide", 4 * elements, "workspace"))
    if norm.weights and not norm.frozen:
        nbytes = 4 * elements if written == LESS_ONE else at.bytes(*norm.ins)
        buffers.append(("normalised", nbytes, "workspace"))
    if written == LESS_ONE:
        buffers.append(("scale", 4 * at.size(*norm.weights), "workspace"))
    return Saved(norm.ins if wide else (), buffers)


@count_saved.register
def _activation(act: Activation, written: str, at: LocalShapes) -> Saved:
    """Returns what its function saves; with a gate also the other factors: the function's result and the second
    input."""
    if not written:
        return Saved(act.saved_tensors, act.saved_buffers(at))
    function, gated = FUNCTIONS[written], len(act.ins) > 1
    others = function.others + (gated and not function.result) - (function.result and not gated)
    kept = act.ins[:1] if function.input else ()
    kept += act.ins[1:] + (act.outs if function.result and not gated else ())
    return Saved(kept, [("factors", others * at.bytes(*act.outs), "workspace")] if others else [])


@count_saved.register
def _attention(core: CoreAttention, written: str, at: LocalShapes) -> Saved:
    """Returns, unfused, the softmax in fp32 and what it is converted to, or is left of that by dropout, and keys and
    values once for every query head. Fused: what the kernel saves, and where its queries have heads before positions in
    memory, so has its result, which is copied for the output layer."""
    if not written or core.kernel == "flash":
        turned = [("turned", at.bytes(*core.outs), "workspace")] if written == TURNED else []
        return Saved(core.saved_tensors, [*core.saved_buffers(at), *turned])
    scores, wide = core.scores(at), 4 * core.scores(at)
    sixteen = BYTES[core.ins[0].dtype] * scores
    kept = [("softmax", wide, "workspace"), ("shares", sixteen, "workspace")]
    if core.dropout:
        kept.append(("mask", scores, "workspace"))
    elif core.ins[0].dtype == "fp32":
        kept.pop()
    if isinstance(core, CappedAttention):
        kept.append(("capped", sixteen, "workspace"))
    group = core.heads_per_key(at)
    if group == 1:
        return Saved(core.ins, kept)
    return Saved(core.ins[:1], [*kept, ("repeated", group * at.bytes(*core.ins[1:]), "workspace")])


@count_saved.register
def _router(router: TopK, written: str, at: LocalShapes) -> Saved:
    """Returns the softmax over all experts in fp32; of the experts of a token their numbers, and their weights before
    the division by the sum, which is kept too; the ends of the rows of every expert."""
    (logits,), (chosen,) = router.ins, router.outs
    slots = at.size(chosen)
    tokens = slots // at.dims(chosen)["k"]
    nbytes = 4 * at.size(logits) + 8 * slots + 4 * slots + 4 * tokens + 4 * at.dims(logits)["r"]
    return Saved((), [("shares", nbytes, "workspace")])


@count_saved.register
def _permute(permute: Permute, written: str, at: LocalShapes) -> Saved:
    """Returns the order of the copies of tokens, and the tokens that they are of."""
    return Saved((), [("order", 2 * 8 * _count_slots(permute.outs[0], at), "workspace")])


@count_saved.register
def _unpermute(unpermute: Unpermute, written: str, at: LocalShapes) -> Saved:
    """Returns the places of the copies of tokens, and both factors of their weighing: results and weights."""
    results = unpermute.ins[0]
    nbytes = (8 + BYTES[results.dtype]) * _count_slots(results, at)
    return Saved((results,), [("places", nbytes, "workspace")])


def _count_slots(copies: Tensor, at: LocalShapes) -> int:
    """Returns the copies of tokens on a rank."""
    return math.prod(int(n) for name, n in at.dims(copies).items() if name not in ("h", "e"))
