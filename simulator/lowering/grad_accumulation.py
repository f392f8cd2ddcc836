"""Without fused gradient accumulation each weight gradient is written to a temporary and added by a separate kernel.

Plain autograd writes the gradient of a weight to a new tensor and adds it to the accumulated one: the memory of a
second gradient until then, and the traffic of an addition. Sharded gradients are not added whole: they are
reduce-scattered. Where gradients are accumulated in a wider format, another kernel converts the temporary first:
`hp_grad.add_(lp.grad.to(float32))` in BF16_Optimizer.update_hp_grads of DeepSpeed's runtime/bf16_optimizer.py
(microsoft/DeepSpeed @50893458d), 18 bytes a parameter and micro-batch against 6 in one 16-bit format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.ops import BYTES, Fragment, Gemm, Memory, Op, TensorUse


def write_out_of_place(weights: Iterable[Op], dtype: str) -> None:
    """Makes GEMMs write a tensor of `dtype` instead of accumulating in place."""
    for op in weights:
        if isinstance(op.work, Gemm):
            op.work = replace(op.work, accumulate=False, out_dtype=dtype)


def accumulate_separately(
    frag: Fragment, operator: Operator, at: LocalShapes, weights: list[Op], ready: Op, whole: int, accumulated: str
) -> None:
    """Changes the backward pass of an operator to write its weight gradients to a temporary and add them by a kernel.

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
