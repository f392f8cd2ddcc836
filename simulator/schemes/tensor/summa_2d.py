"""Optimus 2D tensor parallelism: activations and weights in blocks on a q x q grid of ranks, multiplied by SUMMA.

Activations are sharded by samples over the rows and by width over the columns of the grid, and no activation or weight
matrix is replicated: both shrink by q^2. Every GEMM takes q steps, in each of which blocks of its operands are
broadcast along rows and columns. The two gradient GEMMs broadcast an operand and reduce the partial products along the
other dimension of the grid. Attention is local (b/q samples, a/q heads); norms all-reduce two sums per token along
rows. The weights are communicated for every micro-batch, so the scheme pays off with many tokens per micro-batch.

    step 0   broadcast A(i,0), B(0,j)   broadcast A(i,1), B(1,j)   ...
                                        C  = A(i,0) B(0,j)         C += A(i,1) B(1,j)   ...

`over: [row, col]`, q ranks each. Elements on the critical path of tree broadcasts, per layer (GELU MLP, f = 4h) and
micro-batch: (log2 q / q)(7bsh + 12h^2) forward, twice that backward. The ranks of a column hold the same biases and
norm weights.

References: Xu et al. 2021, arXiv 2104.05343, section 3.
"""

import math
from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.schemes.tensor.shared.summa import Summa


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
