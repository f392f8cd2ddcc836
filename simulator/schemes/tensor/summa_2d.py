"""Optimus 2D tensor parallelism: activations and weights lie in blocks on a square of ranks, multiplied by SUMMA.

The rows of ranks divide the samples and the columns divide the width, so no activation or matrix is replicated:
parameters and activations shrink by q^2. Every product takes q steps; in each, blocks of its operands are broadcast
along rows and columns of ranks. Gradients broadcast one operand and reduce the products along the other dimension.
Attention is local (b/q samples, a/q heads); norms all-reduce two sums per token along rows. The weights travel in every
micro-batch, so the scheme pays off with many tokens.

    step 0   broadcast A(i,0), B(0,j)   broadcast A(i,1), B(1,j)   ...
                                        C  = A(i,0) B(0,j)         C += A(i,1) B(1,j)   ...

`over: [row, col]`, q ranks each. Bytes on the critical path of tree broadcasts, per layer (GELU, f = 4h) and
micro-batch: (log2 q / q)(7bsh + 12h^2) elements forward, twice that backward. Biases and norm weights are replicated
along columns.

References: Xu et al. 2021, arXiv 2104.05343, section 3.
"""

import math
from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.ir.settings import LayerSetting
from simulator.schemes.tensor.shared.summa import Summa


class Summa2D(Summa):
    paper = Paper("arXiv:2104.05343", "An Efficient 2D Method for Training Super-Large Deep Learning Models", 2021)
    least_axes = most_axes = 2
    names = ("row", "col")

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        q, b, s, h, a = setting.q, setting.b, setting.s, setting.h, setting.a
        once = math.ceil(math.log2(q)) / q * (7 * b * s * h + 12 * h * h) * 2
        sums = 4 * 2 * (q - 1) / q * 2 * b * s / q * 4
        yield ClosedForm("sent_by_products_forward", once, "section 3: q steps of broadcasts of 1/q^2 of both operands")
        yield ClosedForm(
            "sent_by_products_backward", 2 * once, "section 3: two products, each with as many bytes as forward"
        )
        yield ClosedForm(
            "sent_per_layer", 3 * once + sums, "section 3, with two sums per token and norm, forward and backward"
        )
        yield ClosedForm("parameters_per_layer", 12 * h * h / q**2 + 13 * h / q, "section 3: blocks of all matrices")
        yield ClosedForm(
            "activations_per_layer", s * b * h * (34 + 5 * a * s / h) / q**2, "arXiv 2205.05198, equation 1"
        )
        yield ClosedForm("activations_per_layer_selective", 34 * s * b * h / q**2, "arXiv 2205.05198, section 5")
        yield ClosedForm("activations_per_layer_full", 2 * s * b * h / q**2, "arXiv 2205.05198, table 2")
