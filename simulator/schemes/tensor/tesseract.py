"""Tesseract 2.5D tensor parallelism: several squares of ranks hold the same weights and multiply different samples.

The ranks are d squares of q x q. Each square multiplies its share of the samples by SUMMA, as 2D tensor parallelism
does, with blocks of weights that all d squares hold. Compared with a larger square, broadcasts of activations shrink
by d and reach fewer ranks; the price is memory (parameters shrink by q^2 only) and an all-reduce of the weight
gradients over the depth, once a step.

    depth 0    samples 0 .. b/d       [q x q ranks: SUMMA]  --+
    depth 1    samples b/d .. 2b/d    [q x q ranks: SUMMA]  --+-- all-reduce of gradients, at the update

`over: [depth, row, col]`, of d, q and q ranks. Per layer (GELU, f = 4h) and micro-batch (log2 q / q)(7bsh/d + 12h^2)
elements forward and twice that backward; per step an all-reduce of 12h^2/q^2 elements over d.

References: Wang et al. 2021, arXiv 2105.14500, section 3.
"""

import math
from collections.abc import Iterable

from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.scheme import ClosedForm, Paper, Rule
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.schemes.tensor.shared.summa import Summa


class Tesseract(Summa):
    paper = Paper("arXiv:2105.14500", "Tesseract: Parallelize the Tensor Parallelism Efficiently", 2021)
    least_axes = most_axes = 3
    names = ("depth", "row", "col")

    def layouts(self, operator: Operator) -> Rule:
        rule = super().layouts(operator)
        return Rule({**self.along(depth="b"), **rule.divide})

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        d, q, b, s, h, a = setting.d, setting.q, setting.b, setting.s, setting.h, setting.a
        once = math.ceil(math.log2(q)) / q * (7 * b * s * h / d + 12 * h * h) * 2
        sums = 4 * 2 * (q - 1) / q * 2 * b * s / (d * q) * 4
        yield ClosedForm("sent_by_products_forward", once, "section 3: q steps of broadcasts on each square")
        yield ClosedForm(
            "sent_by_products_backward", 2 * once, "section 3: two products, each with as many bytes as forward"
        )
        yield ClosedForm(
            "sent_per_layer", 3 * once + sums, "section 3, with two sums per token and norm, forward and backward"
        )
        yield ClosedForm("parameters_per_layer", 12 * h * h / q**2 + 13 * h / q, "section 3: replicated over the depth")
        yield ClosedForm(
            "activations_per_layer", s * b * h * (34 + 5 * a * s / h) / (d * q * q), "arXiv 2205.05198, equation 1"
        )
        yield ClosedForm("activations_per_layer_selective", 34 * s * b * h / (d * q * q), "arXiv 2205.05198, section 5")
        yield ClosedForm("activations_per_layer_full", 2 * s * b * h / (d * q * q), "arXiv 2205.05198, table 2")
